"""Threads for work on data: inflating, compressing, and whatever else takes milliseconds per megabyte.

The problem: such work must not stop the loop, nor delay the control verbs, which need threads too (to list a
folder, to ask a model): a few large bodies could occupy them all. The choice: data has a few threads of its own,
and its work is done in steps. Between two steps a thread serves whoever has waited longest, so a large body
delays a small one by a step, not by its whole length.

Rules:
 1. A step takes milliseconds and is called from one thread at a time; the loop awaits it.
 2. Whoever awaits a step may be cancelled and goes on at once; the thread finishes the step and no other follows.
 3. These threads do not delay the end of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

T = TypeVar("T")


@dataclass(frozen=True)
class WorkersStatistics:
    """Steps that run and that wait."""

    threads: int
    busy: int
    waiting: int


class Workers:
    """A few threads; whoever asks first is served first."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` 0: as many as there are processors, but at least 2 and at most 4."""
        self.threads = threads or max(2, min(4, os.cpu_count() or 1))
        self._limiter = trio.CapacityLimiter(self.threads)

    async def run(self, step: Callable[[], T]) -> T:
        """Runs `step()` on one of the threads and returns its result. Raises what it raises."""
        return await trio.to_thread.run_sync(step, abandon_on_cancel=True, limiter=self._limiter)

    async def finish(self, step: Callable[[], bool], unless: Callable[[], bool] = lambda: False) -> bool:
        """Calls `step()` until it returns True. Asks `unless()` before each step, and returns False once it is True."""
        while not unless():
            if await self.run(step):
                return True
        return False

    def statistics(self) -> WorkersStatistics:
        """The current numbers."""
        found = self._limiter.statistics()
        return WorkersStatistics(self.threads, found.borrowed_tokens, found.tasks_waiting)
