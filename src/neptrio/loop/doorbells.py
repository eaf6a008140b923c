"""How models' processes wake the trio thread: a doorbell each, and one epoll over all of them.

A doorbell is an eventfd that the server shares with one child process. The child writes to it after it has pushed
a message while the server was waiting. The server itself never reads or writes it: the child shares the
eventfd's flags, so a hostile child could make either call block for ever. Instead the epoll reports edges (each
write once), and the poller waits for the epoll.

Rules:
 1. register() and unregister() may be called on any thread; callbacks run on the trio thread only.
 2. A callback that returns True has more to do. It is called again after other events were handled.
 3. When a callback raises, the error is logged, it stays registered, and the other callbacks still run.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable

import trio

from neptrio.loop.mailbox import CompletionQueue, WorkItem
from neptrio.loop.poller import Poller

log = logging.getLogger("neptrio.python")
AT_ONCE = 64


class _Start(WorkItem):
    """Starts waiting for the doorbells: delivered on the trio thread once the loop runs."""

    def __init__(self, bells: Doorbells) -> None:
        self._bells = bells

    def deliver(self) -> None:
        self._bells.start()


class Doorbells:
    """The doorbells of one server."""

    def __init__(self, poller: Poller, completions: CompletionQueue) -> None:
        self._poller = poller
        self._epoll = select.epoll()
        self._bells: dict[int, Callable[[], bool]] = {}
        self._again: set[int] = set()
        self._self = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # ours alone, so reading it is safe
        self._epoll.register(self._self, select.EPOLLIN)
        completions.post(_Start(self))

    def start(self) -> None:
        """Starts waiting for the doorbells. On the trio thread."""
        trio.lowlevel.spawn_system_task(self._poller.read, self._epoll.fileno(), self._rung)

    def register(self, bell: int, callback: Callable[[], bool]) -> None:
        """Has `callback()` called whenever the eventfd `bell` is written to."""
        self._bells[bell] = callback
        self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)

    def unregister(self, bell: int) -> None:
        """Undoes register(). Must be called before the descriptor is closed."""
        if self._bells.pop(bell, None) is not None:
            self._epoll.unregister(bell)

    def _rung(self) -> bool:
        again, self._again = self._again, set()
        for bell, _ in self._epoll.poll(0, AT_ONCE):
            if bell == self._self:
                os.eventfd_read(bell)
            else:
                again.add(bell)
        for bell in again:
            callback = self._bells.get(bell)
            try:
                if callback is not None and callback():
                    self._again.add(bell)
            except Exception:
                log.exception("what a model's process sent could not be used")
        if self._again:
            os.eventfd_write(self._self, 1)
        return True

    def __del__(self) -> None:
        os.close(self._self)
