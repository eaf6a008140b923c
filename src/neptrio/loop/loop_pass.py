"""The loop pass: collects work while events are handled, and does it once at the end.

The problem: one event (a readable socket, a wake-up for completions) usually brings several requests. Handled
one by one, each would be a batch of its own and each answer a send of its own. The choice: while events are
handled, it is only noted which schedulers have something to decide and which connections have something to
send. The pass then does all of it.

A scheduler with something to decide calls mark(), a connection with something to send calls want_flush().
Whoever handled the event then calls end(): schedulers dispatch, which may complete requests at once and produce
more output; then each connection sends once. Schedulers that gain by waiting for requests that are about to
arrive (batching models) call mark_later(): a task of the pass is woken, which ends the pass after every other
task that can run has run. That costs a task switch, but no timer. The code that every request passes through is
in cext/loop/loop_pass_core; the task is here.

Rules:
 1. Everything here runs on the trio thread, and nothing blocks.
 2. dispatch() and flush() must not raise. If they do, the error is logged and the others are still called.
 3. When end() returns, all marked schedulers and connections have been served, also those marked meanwhile.
 4. Schedulers and connections are compared by identity: they must not define __eq__.
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from neptrio.loop.loop_pass_core import LoopPassCore


class Dispatcher(Protocol):
    """A scheduler, as the loop pass sees it."""

    def dispatch(self, now_ns: int) -> None: ...


class LoopPass(LoopPassCore):
    """The collected work, and the task that ends a pass that soon() asked for."""

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._asleep = False
        self._held = False
        self.asked = False  # soon() was called since hold(), and nobody has ended that pass

    def hold(self) -> None:
        """Until release() the task sleeps, and the caller must end the passes that soon() asks for.

        The caller (loop/poller.py) checks `asked` and calls take_asked().
        """
        self._held = True

    def take_asked(self) -> None:
        """Ends the pass that soon() asked for since hold()."""
        self.asked = False
        self.take_later()
        self.end()

    def release(self) -> None:
        """Undoes hold(): the task ends passes again. If one was asked for and not ended, it does so next."""
        self._held = False
        if self.asked:
            self.asked = False
            self.soon()

    def soon(self) -> None:
        """Has the pass ended by its own task after the tasks that can run now have run."""
        if self._held:
            self.asked = True
        elif self._asleep and self._task is not None:
            self._asleep = False
            trio.lowlevel.reschedule(self._task)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The task behind soon() and mark_later(). Started by the server's nursery."""
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
