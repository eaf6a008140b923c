"""What compressed requests hold once they are inflated, over both fronts, and who inflates next.

The problem: a kilobyte can inflate to a megabyte, so that what a client has sent says nothing of what it
will cost; and bodies that are inflated side by side may each have got half of what they need when nothing
is left. The choice: every step's bytes are taken from a budget before they are made. A body that finds
none left waits, without a thread, until requests that hold some are answered.

Rules:
 1. `held` is what is inflated and not given back, and what the next steps may make. It is at most the
    limit and one body.
 2. Whoever was given a content owes release() of its length, once, when nothing refers to it any more.
 3. Only when nothing but unfinished bodies holds the budget may the first of these pass over the limit:
    nobody else could ever end the waiting.
 4. A few bodies are under way at a time, the others wait in the order they came, holding nothing.
 5. After stop() nothing is inflated: whoever waits or is under way gets Unavailable.
"""

from __future__ import annotations

import trio

from neptrio.codec.inflate import STEP_BYTES, Inflater
from neptrio.errors import Unavailable
from neptrio.loop.workers import Workers

BUDGET_BYTES = 512 << 20
STOPPED = "the server is shutting down; the compressed request was not looked at"


class InflateBudget:
    """The budget and the order; used on the trio thread."""

    def __init__(self, workers: Workers, limit: int = BUDGET_BYTES) -> None:
        self.held = 0
        self._limit = limit
        self._workers = workers
        self._begun = trio.CapacityLimiter(2 * workers.threads)
        self._running: dict[Inflater, int] = {}  # what each holds, the first one first
        self._changed = trio.Event()
        self._stopped = False

    async def inflate(self, inflater: Inflater) -> bytearray:
        """The whole content; the caller owes release(len(content)).

        Raises Unavailable after stop(), and what Inflater.step() raises. May be cancelled at any time: the
        work ends with the step that is under way.
        """
        async with self._begun:
            self._running[inflater] = 0
            try:
                while not inflater.done:
                    await self._grow(inflater)
                    await self._workers.run(inflater.step)
                    self._set(inflater, len(inflater.content))
            except BaseException:
                self._set(inflater, 0)
                raise
            finally:
                del self._running[inflater]
                self._tell()
        return inflater.content

    async def _grow(self, inflater: Inflater) -> None:
        """Takes a step's bytes from the budget."""
        while True:
            if self._stopped:
                raise Unavailable(STOPPED)
            fits = self.held + STEP_BYTES <= self._limit
            first = next(iter(self._running)) is inflater
            if fits or (first and self.held == sum(self._running.values())):
                self._set(inflater, len(inflater.content) + STEP_BYTES)
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
        """A content of that size is gone."""
        self.held -= size
        self._tell()

    def stop(self) -> None:
        """The server ends: what is not inflated by now will not be."""
        self._stopped = True
        self._tell()
