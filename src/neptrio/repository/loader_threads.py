"""The threads on which loads read files and run models' code (--model-load-thread-count).

The problem: a load may be given up while its thread is in a model's code, which nobody can end. The choice: the load goes on at
once and leaves the thread behind, which drops what it still makes.

Rules:
 1. A thread that is left behind counts as one of the loader threads until its work has ended, but there is always one that
    was not left behind: models that hang never block all others.
 2. Only work that has begun can be left behind. A load may be given up between the moment it may have a thread and the moment that
    thread runs: then the work must not begin, and its place is free at once. Work and loop decide this under one lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import trio

from neptrio.errors import raise_it
from neptrio.execution.backend import Abandonment
from neptrio.loop import threads
from neptrio.scheduling.base import LoopServices

log = logging.getLogger("neptrio.repository")


class LoaderThreads:
    """Runs work on at most `count` threads at once. Trio thread only."""

    def __init__(self, count: int, loop: LoopServices) -> None:
        self.left_behind = 0  # threads of cancelled loads that are still running
        self._count = count
        self._limiter = trio.CapacityLimiter(count)
        self._loop = loop

    async def run(
        self,
        work: Any,
        late: Any,
        abandonment: Abandonment | None = None,
        behind: Callable[[int], None] = lambda change: None,
    ) -> Any:
        """Returns work() of a loader thread. When the caller is cancelled meanwhile, `abandonment` is told, and
        late(result) is called when the thread is done; `behind` is called with 1 when a thread is left behind and with -1
        when that has ended."""
        token = trio.lowlevel.current_trio_token()
        lock, borrower = threading.Lock(), object()  # of the limiter, not run(), which would refer to itself
        outcome: list[Any] = []
        begun = given_up = left = False

        def run() -> Any:
            nonlocal begun
            with lock:
                if given_up:
                    return None
                begun = True
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:
                error = caught
            with lock:
                outcome.append(result)
                if not given_up:
                    try:
                        raise_it(error)
                    finally:
                        del error  # which refers to this frame
                    return result
            _drop(result, late)
            try:
                token.run_sync_soon(self._ended, borrower, behind)
            except trio.RunFinishedError:
                pass
            return None

        await self._limiter.acquire_on_behalf_of(borrower)
        try:
            with self._loop.poller.giving_way():
                return await threads.run(run, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True)
        except trio.Cancelled:
            with lock:
                given_up = True
                left = begun and not outcome
                if left:
                    self._count_behind(1)
                    behind(1)
            if outcome and not left:
                _drop(outcome[0], late)
            elif left and abandonment is not None:
                abandonment.now()
            raise
        finally:
            if not left:
                self._limiter.release_on_behalf_of(borrower)

    def _ended(self, borrower: object, behind: Callable[[int], None]) -> None:
        self._limiter.release_on_behalf_of(borrower)
        self._count_behind(-1)
        behind(-1)

    def _count_behind(self, change: int) -> None:
        self.left_behind += change
        self._limiter.total_tokens = max(self._count, self.left_behind + 1)


def _drop(result: Any, late: Any) -> None:
    if result is not None:
        try:
            late(result)
        except Exception:
            log.exception("dropping what an outdated load made failed")
