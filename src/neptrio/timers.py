"""Timers: one task and one heap for every deadline of every scheduler.

A scheduler asks for a callback at a time on the monotonic clock; thousands of queue deadlines
cost a heap entry each, not a task. Cancelling leaves a dead entry that is dropped when it comes
up. Callbacks run on the trio thread, must not block, and are followed by the end of a turn.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable

import trio

from neptrio._cext.request import monotonic_ns
from neptrio.turn import Turn

log = logging.getLogger("neptrio.timers")


class Timer:
    """One pending callback; cancel() makes sure it does not run."""

    __slots__ = ("callback", "when_ns")

    def __init__(self, when_ns: int, callback: Callable[[], None]) -> None:
        self.when_ns = when_ns
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """The callback will not run. Cancelling twice or too late is harmless."""
        self.callback = None


class Timers:
    """The heap and the task that watches it."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._heap: list[tuple[int, int, Timer]] = []
        self._order = itertools.count()
        self._scope: trio.CancelScope | None = None

    def at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        """Calls `callback` once at `when_ns` (monotonic nanoseconds) or right after."""
        timer = Timer(when_ns, callback)
        heapq.heappush(self._heap, (when_ns, next(self._order), timer))
        if self._scope is not None and self._heap[0][2] is timer:
            self._scope.deadline = self._deadline()
        return timer

    def _deadline(self) -> float:
        if not self._heap:
            return float("inf")
        return trio.current_time() + max(0, self._heap[0][0] - monotonic_ns()) / 1e9

    def fire(self, now_ns: int) -> int:
        """Runs what is due at `now_ns`; returns how many callbacks ran."""
        fired = 0
        while self._heap and self._heap[0][0] <= now_ns:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                continue
            fired += 1
            try:
                callback()
            except Exception:
                log.exception("a timer failed")
        return fired

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sleeps until the next deadline, for ever."""
        task_status.started()
        while True:
            with trio.CancelScope(deadline=self._deadline()) as self._scope:
                await trio.sleep_forever()
            self._scope = None
            if self.fire(monotonic_ns()):
                self._turn.end()
