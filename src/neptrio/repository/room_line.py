"""The line of loads that wait for room in memory (repository.budget).

The problem: a burst of requests may ask for hundreds of models more than fit. Where each of their loads looks for room all the
time, looking is all that the loop does; where one makes room after the other, each waits for the look of the one before. The
choice: the first few look, and have room made for all of them together; the others look rarely, for what is left over.

Rules:
 1. The first few (FIRST, more among many models) look every RETRY_SECONDS and whenever memory comes free. All others together look as often.
 2. What is free belongs to whoever finds it, until a load has waited for PATIENCE_SECONDS: then nothing that it needs goes to one
    that came later.
 3. What leaves already counts as room that is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

Sizes = Mapping[int, int]  # place (putting_away.HOST, or a GPU) -> bytes

FIRST = 4
MODELS_EACH = 50
PATIENCE_SECONDS = 0.5
RETRY_SECONDS = 0.02


@dataclass(eq=False)
class Waiter:
    """A load in line."""

    name: str
    needs: Sizes
    tell: Callable[[str], None]  # what it waits for
    since: float  # of trio's clock
    promised: bool = False  # rule 2
    hopeless: int | None = None  # the place in which waiting has no point
    wake: trio.Event = field(default_factory=trio.Event)


class RoomLine:
    """Loads that wait for room. Trio thread only."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._promised: Counter[int] = Counter()
        self._looking = FIRST

    @property
    def first(self) -> list[Waiter]:
        """Those that look."""
        return self._waiters[: self._looking]

    def loaded(self, count: int) -> None:
        """So many models hold memory: looking at them takes the longer, the more they are, and is the more seldom done."""
        self._looking = max(FIRST, count // MODELS_EACH)

    @contextmanager
    def waiting(self, name: str, needs: Sizes, tell: Callable[[str], None]) -> Iterator[Waiter]:
        """A load waits while the block runs."""
        waiter = Waiter(name, needs, tell, trio.current_time())
        self._waiters.append(waiter)
        try:
            yield waiter
        finally:
            self._waiters.remove(waiter)
            if waiter.promised:
                self._promised.subtract(waiter.needs)
            self.wake()

    def wake(self) -> None:
        """Memory has come free, or others are first now."""
        for waiter in self.first:
            waiter.wake.set()

    def promised_before(self, waiter: Waiter | None) -> Sizes:
        """What is promised to others than this one and those behind it; None: than one that comes now. Of one that is not among
        the first it is what is promised to all others."""
        if waiter is not None and waiter in self.first:
            found: Counter[int] = Counter()
            for other in self._waiters[: self._waiters.index(waiter)]:
                if other.promised:
                    found.update(other.needs)
            return found
        if waiter is None or not waiter.promised:
            return self._promised
        return {place: size - waiter.needs.get(place, 0) for place, size in self._promised.items()}

    def needed(self, count: int) -> Sizes:
        """What the first so many need together."""
        found: Counter[int] = Counter()
        for waiter in self._waiters[:count]:
            found.update(waiter.needs)
        return found

    async def pause(self, waiter: Waiter) -> None:
        """Until this one is to look again."""
        if not waiter.promised and trio.current_time() - waiter.since >= PATIENCE_SECONDS:
            waiter.promised = True
            self._promised.update(waiter.needs)
        seconds = (
            RETRY_SECONDS if waiter in self.first else RETRY_SECONDS * len(self._waiters) / self._looking
        )
        with trio.move_on_after(seconds):
            await waiter.wake.wait()
        if waiter.wake.is_set():
            waiter.wake = trio.Event()
