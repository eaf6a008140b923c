"""The turn: when decisions are taken and when bytes leave.

The problem: one event (a readable socket, a wake-up for completions) usually brings several
requests, and each would otherwise be dispatched and answered alone: a batch of one, a send per
answer. The choice: work is noted while events are handled and done once per turn of the loop.

A scheduler with something to decide calls mark(); a connection with something to send calls
want_flush(). Whoever handled the event then calls end(): schedulers dispatch (which may complete
requests in place and produce more output), then connections flush, one send each. Schedulers
that gain from waiting for the rest of the loop's current pass (batching models) use
mark_later(): a sleeping task is rescheduled and ends the turn after every other runnable task
had its say; that costs one task switch, not a timer. What every request passes through is in
cext/turn; the task is here.

Rules:
 1. Everything here runs on the trio thread and nothing blocks.
 2. dispatch() and flush() must not raise; what they raise is logged and ends there.
 3. When end() returns, nothing marked is left undone, including what dispatching marked.
 4. Dispatchers and connections are told apart by identity: they must not define __eq__.
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from neptrio._cext.turn import TurnCore


class Dispatcher(Protocol):
    """A scheduler, as the turn sees it."""

    def dispatch(self, now_ns: int) -> None: ...


class Flushable(Protocol):
    """A connection, as the turn sees it."""

    def flush(self) -> None: ...


class Turn(TurnCore):
    """The turn and the task that ends it when nobody else will."""

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._asleep = False
        self._held = False
        self.asked = False  # something was to be done soon, while the task was held

    def hold(self) -> None:
        """Until release(), the caller looks after what is to be done soon (transport/poller.py)."""
        self._held = True

    def take_asked(self) -> None:
        """Does what was to be done soon."""
        self.asked = False
        self.take_later()
        self.end()

    def release(self) -> None:
        """The task does what is to be done soon, and what was left of it."""
        self._held = False
        if self.asked:
            self.asked = False
            self.soon()

    def soon(self) -> None:
        """Has end() called by the turn's own task once the runnable tasks have run."""
        if self._held:
            self.asked = True
        elif self._asleep and self._task is not None:
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
                if not self.later:
                    self._asleep = True
                    await trio.lowlevel.wait_task_rescheduled(abort)
                self.take_later()
                self.end()
        finally:
            self._task = None
