"""Limits the memory of inflated request bodies, over REST and gRPC together, and decides who inflates next.

The problem: a kilobyte can inflate to a megabyte, so the size of what a client sends says nothing about its
cost. And when several bodies are inflated side by side, each may have half of what it needs when the memory is
used up. The choice: each step takes its bytes from a budget before it makes them. A body that finds none left
waits, without holding a thread, until requests that hold some are answered.

Rules:
 1. `held` counts content that was inflated and not released, and what the steps under way may make. It
    never exceeds the limit by more than one body.
 2. Whoever received a content must call release() with its length, once, when nothing refers to it any more.
 3. The oldest unfinished body may exceed the limit, but only while unfinished bodies hold all of the
    budget: nothing else could ever end the waiting.
 4. A few bodies are inflated at a time; the others wait in the order they came and hold nothing.
 5. After stop() nothing is inflated: every unfinished inflate() raises Unavailable.
"""

from __future__ import annotations

import trio

from neptrio.codec.inflate import STEP_BYTES, Inflater
from neptrio.errors import Unavailable
from neptrio.loop.workers import Workers

BUDGET_BYTES = 512 << 20
STOPPED = "the server is shutting down; the compressed request was not looked at"


class InflateBudget:
    """The budget and the queue in front of it. Trio thread only."""

    def __init__(self, workers: Workers, limit: int = BUDGET_BYTES) -> None:
        self.held = 0
        self._limit = limit
        self._workers = workers
        self._begun = trio.CapacityLimiter(2 * workers.threads)
        self._running: dict[Inflater, int] = {}  # unfinished bodies, oldest first, and the bytes of each
        self._changed = trio.Event()
        self._stopped = False

    async def inflate(self, inflater: Inflater, whose: object = None) -> memoryview:
        """Returns the whole content; the caller must release(len(content)) when it is gone.

        Raises Unavailable after stop(), and what Inflater.step() raises. May be cancelled at any time: the
        work ends with the step that is under way. `whose` is the connection that it is for (loop.workers).
        """
        async with self._begun:
            self._running[inflater] = 0
            try:
                while not inflater.done:
                    await self._grow(inflater)
                    await self._workers.run(inflater.step, whose)
                    self._set(inflater, inflater.made)
            except BaseException:
                self._set(inflater, 0)
                raise
            finally:
                del self._running[inflater]
                self._tell()
        return inflater.content

    async def _grow(self, inflater: Inflater) -> None:
        """Takes one step's bytes from the budget; waits until there are enough."""
        while True:
            if self._stopped:
                raise Unavailable(STOPPED)
            fits = self.held + STEP_BYTES <= self._limit
            first = next(iter(self._running)) is inflater
            if fits or (first and self.held == sum(self._running.values())):
                self._set(inflater, inflater.made + STEP_BYTES)
                return
            await self._changed.wait()

    def _set(self, inflater: Inflater, held: int) -> None:
        self.held += held - self._running[inflater]
        self._running[inflater] = held
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def release(self, size: int) -> None:
        """Gives the bytes of a content back: nothing refers to it any more."""
        self.held -= size
        self._tell()

    def stop(self) -> None:
        """The server ends: every unfinished or waiting body is refused."""
        self._stopped = True
        self._tell()
