"""The loop pass: when decisions are taken and when bytes leave.

The problem: one event (a readable socket, a wake-up for completions) usually brings several
requests, and each would otherwise be dispatched and answered alone: a batch of one, a send per
answer. The choice: work is noted while events are handled and done once per pass of the loop.

A scheduler with something to decide calls mark(); a connection with something to send calls
want_flush(). Whoever handled the event then calls end(): schedulers dispatch (which may complete
requests in place and produce more output), then connections flush, one send each. Schedulers
that gain from waiting for the requests that are about to come (batching models) use mark_later():
the pass's own task is woken and ends the pass after every other task that can run has run. That
costs one task switch, not a timer. What every request passes through is in
cext/loop/loop_pass_core; the task is here.

Rules:
 1. Everything here runs on the trio thread and nothing blocks.
 2. dispatch() and flush() must not raise; what they raise is logged and ends there.
 3. When end() returns, nothing marked is left undone, including what dispatching marked.
 4. Dispatchers and connections are told apart by identity: they must not define __eq__.
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from neptrio.loop.loop_pass_core import LoopPassCore


class Dispatcher(Protocol):
    """A scheduler, as the pass sees it."""

    def dispatch(self, now_ns: int) -> None: ...


class Flushable(Protocol):
    """A connection, as the pass sees it."""

    def flush(self) -> None: ...


class LoopPass(LoopPassCore):
    """The pass and the task that ends it when nobody else will."""

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._asleep = False
        self._held = False
        self.asked = False  # soon() was called between hold() and release()

    def hold(self) -> None:
        """Until release() the task sleeps: the caller ends the passes that soon() asks for.

        The caller (loop/poller.py) looks at `asked` and calls take_asked().
        """
        self._held = True

    def take_asked(self) -> None:
        """Ends the pass that soon() asked for while the task was held."""
        self.asked = False
        self.take_later()
        self.end()

    def release(self) -> None:
        """The task ends passes again, beginning with one that was asked for and not ended."""
        self._held = False
        if self.asked:
            self.asked = False
            self.soon()

    def soon(self) -> None:
        """Has end() called by the pass's own task once the runnable tasks have run."""
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
