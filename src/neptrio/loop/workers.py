"""Threads for work on data: inflating, compressing, and whatever else takes milliseconds per megabyte.

The problem: such work must not stop the loop, and must not stand in the way of the control verbs either:
those wait for threads as well (a folder is listed, a model asked), and a few large bodies would take all
there are. The choice: data has threads of its own, few of them, and its work comes in steps. Between two
steps a thread serves whoever waited longest, so that a large body delays a small one by steps, not by its
whole length.

Rules:
 1. A step takes milliseconds and is called from one thread at a time; the loop awaits it.
 2. Whoever awaits may be cancelled: it goes on at once, the thread ends its step and nothing follows it.
 3. Nothing here holds up the end of the process.
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
    """What the threads do now."""

    threads: int
    busy: int
    waiting: int


class Workers:
    """A few threads, first come, first served."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` 0: as many as there are processors, from 2 to 4."""
        self.threads = threads or max(2, min(4, os.cpu_count() or 1))
        self._limiter = trio.CapacityLimiter(self.threads)

    async def run(self, step: Callable[[], T]) -> T:
        """`step()` on one of the threads. Raises what it raises."""
        return await trio.to_thread.run_sync(step, abandon_on_cancel=True, limiter=self._limiter)

    async def finish(self, step: Callable[[], bool], unless: Callable[[], bool] = lambda: False) -> bool:
        """Calls `step()` until it returns True; False when `unless()` came true before."""
        while not unless():
            if await self.run(step):
                return True
        return False

    def statistics(self) -> WorkersStatistics:
        """What is under way now."""
        found = self._limiter.statistics()
        return WorkersStatistics(self.threads, found.borrowed_tokens, found.tasks_waiting)
