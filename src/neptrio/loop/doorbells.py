"""How the trio thread hears of models in processes of their own: one epoll over all their bells.

A bell is an eventfd that the server shares with one child, which writes to it when it has pushed
something and the server sleeps. The server never reads or writes it: its flags are shared too, so a hostile
child could make either block for ever. Instead the epoll reports edges, and the poller waits for the
epoll.

Rules:
 1. register() and unregister() may come from any thread; callbacks run on the trio thread only.
 2. A callback that returns True has more to do and is called again after other events had their turn.
 3. A callback that raises is logged and stays registered: the others go on.
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
    """Begins to wait for the bells, once the loop runs."""

    def __init__(self, bells: Doorbells) -> None:
        self._bells = bells

    def deliver(self) -> None:
        self._bells.start()


class Doorbells:
    """The bells of one server."""

    def __init__(self, poller: Poller, completions: CompletionQueue) -> None:
        self._poller = poller
        self._epoll = select.epoll()
        self._bells: dict[int, Callable[[], bool]] = {}
        self._again: set[int] = set()
        self._self = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # private: it may be read
        self._epoll.register(self._self, select.EPOLLIN)
        completions.post(_Start(self))

    def start(self) -> None:
        """On the trio thread: waits for the bells from now on."""
        trio.lowlevel.spawn_system_task(self._poller.read, self._epoll.fileno(), self._rung)

    def register(self, bell: int, callback: Callable[[], bool]) -> None:
        """`callback()` whenever `bell` is rung."""
        self._bells[bell] = callback
        self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)

    def unregister(self, bell: int) -> None:
        """Undoes register(); before the descriptor is closed."""
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
