"""Threads for work on data: decoding, inflating, printing, and whatever else takes milliseconds per megabyte.

The problem: such work must not stop the loop, nor delay the control verbs, which need threads too (to list a
folder, to ask a model): a few large bodies could occupy them all. And clients that send large bodies without
pause must not delay one that sends them seldom. The choice: data has a few threads of its own, its work is done in
steps where it can be cut, and whoever has had least of the threads is served first: each connection has a clock that
its steps advance, and of those that wait the one with the earliest clock is next. A connection that comes new, or
again after a while, starts at the present and so passes all that are ahead of it.

Rules:
 1. A step is called from one thread at a time; the loop awaits it.
 2. Whoever awaits a step may be cancelled and goes on at once; the thread finishes the step and no other follows.
 3. These threads do not delay the end of the process.
Source: P. Goyal, H. Vin, H. Cheng, "Start-time fair queueing", 1996.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import trio

from neptrio.loop import threads

T = TypeVar("T")

EXPECTED_SECONDS = 0.001  # of a step that is not done yet
MOST_CLOCKS = 1024  # more are looked through for those that lie in the past


@dataclass(frozen=True)
class WorkersStatistics:
    """Steps that run, and that wait."""

    threads: int
    busy: int
    waiting: int


class _Turn:
    """One step's place among all others; what trio calls a limiter."""

    def __init__(self, workers: Workers, whose: int) -> None:
        self._workers = workers
        self._whose = whose
        self._begun = 0.0

    async def acquire_on_behalf_of(self, _borrower: Any) -> None:
        """Waits until a thread is free for this step."""
        await self._workers._take(self._whose)
        self._begun = trio.current_time()

    def release_on_behalf_of(self, _borrower: Any) -> None:
        """The step is done: its thread is free for another."""
        self._workers._free(self._whose, trio.current_time() - self._begun)


class Workers:
    """A few threads; who has had least of them is served first. Trio thread only."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` 0: as many as there are processors, but at least 2 and at most 4."""
        self.threads = threads or max(2, min(4, os.cpu_count() or 1))
        self._busy = 0
        self._now = 0.0  # the clock of the step that was begun last
        self._clocks: dict[int, float] = {}  # of those whose clock is ahead
        self._waiting: list[tuple[float, int, trio.Event]] = []  # a heap: clock, order of coming
        self._given_up: set[int] = set()
        self._order = itertools.count()

    async def run(self, step: Callable[[], T], whose: object = None) -> T:
        """Runs `step()` on one of the threads and returns its result. Raises what it raises.

        `whose` is the connection that the step is for; all steps without one share.
        """
        turn: Any = _Turn(self, id(whose))
        return await threads.run(step, abandon_on_cancel=True, limiter=turn)

    async def finish(
        self, step: Callable[[], bool], unless: Callable[[], bool] = lambda: False, whose: object = None
    ) -> bool:
        """Calls `step()` until it returns True. Asks `unless()` before each step, and returns False once it is True."""
        while not unless():
            if await self.run(step, whose):
                return True
        return False

    async def _take(self, whose: int) -> None:
        """Waits for a thread."""
        await trio.lowlevel.checkpoint()
        start = max(self._now, self._clocks.get(whose, 0.0))
        self._clocks[whose] = start + EXPECTED_SECONDS  # until it is known: so that its next step comes later
        if self._busy < self.threads:
            self._busy += 1
        else:
            number, turn = next(self._order), trio.Event()
            heapq.heappush(self._waiting, (start, number, turn))
            try:
                await turn.wait()
            except BaseException:
                if whose in self._clocks:
                    self._clocks[whose] -= EXPECTED_SECONDS
                if turn.is_set():
                    self._next()
                else:
                    self._given_up.add(number)
                raise
        self._now = max(self._now, start)

    def _free(self, whose: int, seconds: float) -> None:
        if whose in self._clocks:
            self._clocks[whose] += seconds - EXPECTED_SECONDS
        if len(self._clocks) > MOST_CLOCKS:
            self._clocks = {key: clock for key, clock in self._clocks.items() if clock > self._now}
        self._next()

    def _next(self) -> None:
        """Gives a thread that is free to the next who waits."""
        while self._waiting:
            _, number, turn = heapq.heappop(self._waiting)
            if number not in self._given_up:
                turn.set()
                return
            self._given_up.discard(number)
        self._busy -= 1

    def statistics(self) -> WorkersStatistics:
        """The current numbers."""
        waiting = len(self._waiting) - len(self._given_up)
        return WorkersStatistics(self.threads, self._busy, waiting)
