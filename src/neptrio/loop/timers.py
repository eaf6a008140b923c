"""Timers: one task and one heap for every deadline of every scheduler.

A scheduler asks for a callback at a time of the monotonic clock; thousands of queue deadlines cost a heap entry
each, not a task. A cancelled entry stays in the heap until its time comes, or until cancelled entries are more
than half of the heap. Callbacks run on the trio thread and must not block; after them the loop pass is ended.
While the poller waits instead of trio (loop/poller.py), it watches the heap and the task sleeps.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable
from math import inf

import trio

from neptrio.loop.loop_pass import LoopPass
from neptrio.request.infer_request import monotonic_ns

log = logging.getLogger("neptrio.timers")


class Timer:
    """One pending callback; after cancel() it does not run."""

    __slots__ = ("_owner", "callback", "when_ns")

    def __init__(self, when_ns: int, callback: Callable[[], None], owner: Timers) -> None:
        self.when_ns = when_ns
        self.callback: Callable[[], None] | None = callback
        self._owner = owner

    def cancel(self) -> None:
        """Prevents the callback. Harmless when it has run or was cancelled already."""
        if self.callback is not None:
            self.callback = None
            self._owner._buried()


class Timers:
    """All pending callbacks, and the task that runs them."""

    def __init__(self, loop_pass: LoopPass) -> None:
        self._loop_pass = loop_pass
        self._heap: list[tuple[int, int, Timer]] = []
        self._order = itertools.count()
        self._dead = 0
        self._scope: trio.CancelScope | None = None
        self._hosted = False

    @property
    def next_ns(self) -> float:
        """When the next entry of the heap is due (it may be a cancelled one), infinity when there is none."""
        return self._heap[0][0] if self._heap else inf

    def host(self, hosted: bool) -> None:
        """True: the poller promises to call fire_due() in time, and the task sleeps. False: the task watches again."""
        self._hosted = hosted
        if self._scope is not None:
            self._scope.deadline = self._deadline()

    def at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        """Calls `callback` once at `when_ns` (monotonic nanoseconds) or soon after."""
        timer = Timer(when_ns, callback, self)
        heapq.heappush(self._heap, (when_ns, next(self._order), timer))
        if self._scope is not None and not self._hosted and self._heap[0][2] is timer:
            self._scope.deadline = self._deadline()
        return timer

    def _buried(self) -> None:
        self._dead += 1
        if self._dead > 1024 and self._dead > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._dead = 0

    def _deadline(self) -> float:
        if not self._heap or self._hosted:
            return inf
        return trio.current_time() + max(0, self._heap[0][0] - monotonic_ns()) / 1e9

    def fire_due(self, now_ns: int) -> int:
        """Runs what is due at `now_ns`; returns how many callbacks ran. Costs next to nothing when nothing is due."""
        heap = self._heap
        return self.fire(now_ns) if heap and heap[0][0] <= now_ns else 0

    def fire(self, now_ns: int) -> int:
        """Runs what is due at `now_ns`; returns how many callbacks ran."""
        fired = 0
        while self._heap and self._heap[0][0] <= now_ns:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._dead -= 1
                continue
            fired += 1
            try:
                callback()
            except Exception:
                log.exception("a timer failed")
        return fired

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sleeps until the next deadline and runs what is due, for ever."""
        task_status.started()
        while True:
            with trio.CancelScope(deadline=self._deadline()) as self._scope:
                await trio.sleep_forever()
            self._scope = None
            if self.fire(monotonic_ns()):
                self._loop_pass.end()
