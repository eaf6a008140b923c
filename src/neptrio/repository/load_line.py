"""The line of loads that requests wait for: how many run at once, and which is next.

The problem: a burst of requests for many models begins as many loads at once, which slow each other and everything else, and
end in any order. The choice: so many run as there are cores, and when one ends the next is the one for which the
most important request waits, or the one that waits longest.

Rules:
 1. Who is next is decided when a place is free, not when a load comes: requests come and go meanwhile.
 2. Loads that take long may not have all places, so that others do not wait behind them.
 3. A load that waits for something else than a place, room in memory, has none meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import trio

from neptrio.cores import usable_cores
from neptrio.settings import Settings

NO_PRIORITY = 1 << 64  # of requests that have none
LAST = 1 << 65  # nobody waits for it any more

Aside = Callable[[], AbstractAsyncContextManager[None]]  # rule 3: a block that is left with a place again
Rank = tuple[int, int]  # priority (1 is the highest), since when its request waits


@dataclass(eq=False)
class Entry:
    """A load in line, or under way."""

    name: str
    dear: bool  # it takes long
    came_ns: int
    turn: trio.Event = field(default_factory=trio.Event)


def places(settings: Settings) -> int:
    """How many loads run at once. Loads compute, so that more than there are cores delay each other and the requests to models
    that are loaded; but a long one alone must not hold up all others."""
    return settings.loads_at_once or min(settings.model_load_thread_count, max(usable_cores(), 2))


def next_of(
    waiting: Iterable[Entry], running: Iterable[Entry], places: int, rank: Callable[[str], Rank]
) -> Entry | None:
    """Who begins now; None: nobody may."""
    under_way = list(running)
    if len(under_way) >= places:
        return None
    dear_ones = sum(entry.dear for entry in under_way)
    full = places > 1 and dear_ones >= places - 1
    may = [entry for entry in waiting if not (entry.dear and full)]
    return min(may, key=lambda entry: (rank(entry.name), entry.came_ns), default=None)


class LoadLine:
    """Loads that wait for their turn. Trio thread only."""

    def __init__(self, places: int, rank: Callable[[str], Rank]) -> None:
        self._places = places
        self._rank = rank
        self._waiting: list[Entry] = []
        self._running: list[Entry] = []

    @asynccontextmanager
    async def turn(self, name: str, dear: bool, now_ns: int) -> AsyncIterator[Aside]:
        """Waits for a place, which it gives up at the end of the block, and in blocks of what is given."""
        entry = Entry(name, dear, now_ns)
        self._waiting.append(entry)
        try:
            self._advance()
            await entry.turn.wait()
            yield lambda: self._aside(entry)
        finally:
            (self._running if entry in self._running else self._waiting).remove(entry)
            self._advance()

    @asynccontextmanager
    async def _aside(self, entry: Entry) -> AsyncIterator[None]:
        self._running.remove(entry)
        self._advance()
        try:
            yield
        finally:
            entry.turn = trio.Event()
            self._waiting.append(entry)
        self._advance()
        await entry.turn.wait()

    def _advance(self) -> None:
        while (entry := next_of(self._waiting, self._running, self._places, self._rank)) is not None:
            self._waiting.remove(entry)
            self._running.append(entry)
            entry.turn.set()
