"""The turn: when decisions are taken and when bytes leave.

The problem: one event (a readable socket, a wake-up for completions) usually brings several
requests, and each would otherwise be dispatched and answered alone: a batch of one, a send per
answer. The choice: work is noted while events are handled and done once per turn of the loop.

A scheduler with something to decide calls mark(); a connection with something to send calls
want_flush(). Whoever handled the event then calls end(): schedulers dispatch (which may complete
requests in place and produce more output), then connections flush, one send each. Schedulers
that gain from waiting for the rest of the loop's current pass (batching models) use
mark_later(): a sleeping task is rescheduled and ends the turn after every other runnable task
had its say; that costs one task switch, not a timer.

Rules:
 1. Everything here runs on the trio thread and nothing blocks.
 2. dispatch() and flush() must not raise; what they raise is logged and ends there.
 3. When end() returns, nothing marked is left undone, including what dispatching marked.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import trio

from neptrio._cext.request import monotonic_ns

log = logging.getLogger("neptrio.turn")


class Dispatcher(Protocol):
    """A scheduler, as the turn sees it."""

    def dispatch(self, now_ns: int) -> None: ...


class Flushable(Protocol):
    """A connection, as the turn sees it."""

    def flush(self) -> None: ...


class Turn:
    """Collects what is to be decided and sent, and does it."""

    def __init__(self) -> None:
        self._dispatchers: list[Dispatcher] = []
        self._marked: set[int] = set()
        self._connections: list[Flushable] = []
        self._flushing: set[int] = set()
        self._later: list[Dispatcher] = []
        self._task: trio.lowlevel.Task | None = None
        self._asleep = False
        self._ending = False

    def mark(self, dispatcher: Dispatcher) -> None:
        """`dispatcher.dispatch(now)` is called before this turn ends."""
        if id(dispatcher) not in self._marked:
            self._marked.add(id(dispatcher))
            self._dispatchers.append(dispatcher)

    def mark_later(self, dispatcher: Dispatcher) -> None:
        """Like mark(), after every task that is runnable now."""
        if id(dispatcher) not in self._marked:
            self._marked.add(id(dispatcher))
            self._later.append(dispatcher)
            self.soon()

    def want_flush(self, connection: Flushable) -> None:
        """`connection.flush()` is called before this turn ends."""
        if id(connection) not in self._flushing:
            self._flushing.add(id(connection))
            self._connections.append(connection)

    def end(self) -> None:
        """Takes every decision that is due and sends what came of it."""
        if self._ending:
            return
        self._ending = True
        try:
            while self._dispatchers or self._connections:
                if self._dispatchers:
                    dispatchers, self._dispatchers = self._dispatchers, []
                    now = monotonic_ns()
                    for dispatcher in dispatchers:
                        self._marked.discard(id(dispatcher))
                        try:
                            dispatcher.dispatch(now)
                        except Exception:
                            log.exception("a scheduler failed to dispatch")
                    continue
                connections, self._connections = self._connections, []
                for connection in connections:
                    self._flushing.discard(id(connection))
                    try:
                        connection.flush()
                    except Exception:
                        log.exception("a connection failed to flush")
        finally:
            self._ending = False

    def soon(self) -> None:
        """Has end() called by the turn's own task once the runnable tasks have run."""
        if self._asleep and self._task is not None:
            self._asleep = False
            trio.lowlevel.reschedule(self._task)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The task behind soon() and mark_later(); started by the server's nursery."""
        self._task = trio.lowlevel.current_task()
        task_status.started()

        def abort(_: Any) -> trio.lowlevel.Abort:
            self._asleep = False
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            while True:
                if not self._later:
                    self._asleep = True
                    await trio.lowlevel.wait_task_rescheduled(abort)
                self._dispatchers += self._later
                self._later = []
                self.end()
        finally:
            self._task = None
