"""How models' processes wake the trio thread: a doorbell each, which the poller waits for like for sockets.

A doorbell is an eventfd that the server shares with one child process. The child writes to it after it has pushed
a message while the server was waiting. The server itself never reads or writes it: the child shares the
eventfd's flags, so a hostile child could make either call block for ever. Instead the poller's epoll reports edges
(each write once).

Rules:
 1. register() and unregister() may be called on any thread; callbacks run on the trio thread only.
 2. A callback that returns True has more to do. It is called again when other events were handled and answered.
 3. When a callback raises, the error is logged, it stays registered, and the other callbacks still run.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

from neptrio.loop.poller import Poller

log = logging.getLogger("neptrio.python")


class Doorbells:
    """The doorbells of one server."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._bells: dict[int, Callable[[], bool]] = {}
        self._again: set[int] = set()
        self._self = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # rung here for what has more to do
        poller.listen(self._self, self._ring_again, late=True)

    def register(self, bell: int, callback: Callable[[], bool]) -> None:
        """Has `callback()` called whenever the eventfd `bell` is written to."""
        self._bells[bell] = callback
        try:
            self._poller.listen(bell, functools.partial(self.ring, bell))
        except BaseException:
            self._bells.pop(bell, None)
            raise

    def unregister(self, bell: int) -> None:
        """Undoes register(). Must be called before the descriptor is closed."""
        if self._bells.pop(bell, None) is not None:
            self._poller.unlisten(bell)

    def ring(self, bell: int) -> bool:
        """Calls a bell's callback, as when it is written to. Trio thread only. Does nothing for one that is not registered."""
        callback = self._bells.get(bell)
        if callback is None:
            return True
        try:
            if callback():
                if not self._again:
                    os.eventfd_write(self._self, 1)
                self._again.add(bell)
        except Exception:
            log.exception("what a model's process sent could not be used")
        return True

    def _ring_again(self) -> bool:
        again, self._again = self._again, set()
        for bell in again:
            self.ring(bell)
        return True

    def __del__(self) -> None:
        os.close(self._self)
