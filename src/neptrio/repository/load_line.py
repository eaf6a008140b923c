"""The line of loads that requests wait for: how many run at once, and which is next.

The problem: a burst of requests for many models begins as many loads at once, which slow each other and everything else, and
end in any order. The choice: short ones run on all cores but one, which serves, and when one ends the next is the one for which
the most important request waits, or the one that waits longest.

Rules:
 1. Who is next is decided when a place is free, not when a load comes: requests come and go meanwhile.
 2. Loads that take long may not have all places, so that others do not wait behind them: those that are expected to leave one,
    and beside those that turn out to a short one begins, as long as there are threads.
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
DEAR_SECONDS = 1.0  # a load that takes longer takes long

Aside = Callable[[], AbstractAsyncContextManager[None]]  # rule 3: a block that is left with a place again
Rank = tuple[int, int]  # priority (1 is the highest), since when its request waits


@dataclass(eq=False)
class Entry:
    """A load in line, or under way."""

    name: str
    dear: bool  # it is expected to take long
    came_ns: int
    turn: trio.Event = field(default_factory=trio.Event)
    began: float = 0.0  # of trio's clock
    late: bool = False  # it was not expected to take long, and does


@dataclass(frozen=True)
class Places:
    """How many loads run at once."""

    every: int
    short: int  # of these, loads that do not take long
    most: int  # a short one may begin beside so many that take long, where no other is short


def places(settings: Settings) -> Places:
    """How many loads run at once. Loads compute, so that more than there are cores delay each other and the requests to models
    that are loaded; but long ones must not hold up all others, nor must loads that wait for other models."""
    flag, most, cores = settings.loads_at_once, settings.model_load_thread_count, usable_cores()
    if flag:
        return Places(flag, flag, flag)
    every = min(most, max(cores, 2))
    return Places(every, min(most, max(cores - 1, 1)), max(most, every))


def next_of(
    waiting: Iterable[Entry], running: Iterable[Entry], places: Places, rank: Callable[[str], Rank]
) -> Entry | None:
    """Who begins now; None: nobody may."""
    under_way = list(running)
    dear = sum(entry.dear for entry in under_way)
    short = sum(not entry.dear and not entry.late for entry in under_way)
    full = len(under_way) >= places.every
    dear_may = not full and (places.every == 1 or dear < places.every - 1)
    short_may = short < places.short and (not full or (not short and len(under_way) < places.most))
    if not (dear_may or short_may):
        return None
    may = [entry for entry in waiting if (dear_may if entry.dear else short_may)]
    return min(may, key=lambda entry: (rank(entry.name), entry.came_ns), default=None)


class LoadLine:
    """Loads that wait for their turn. Trio thread only."""

    def __init__(self, places: Places, rank: Callable[[str], Rank]) -> None:
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
            await self._begins(entry)
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
        await self._begins(entry)

    async def _begins(self, entry: Entry) -> None:
        """Waits for a place."""
        self._advance()
        while not entry.turn.is_set():
            with trio.move_on_after(DEAR_SECONDS):
                await entry.turn.wait()
            if self._waiting and self._waiting[0] is entry:  # one for all of them
                self._advance()
        await trio.lowlevel.checkpoint()  # also where the place was free: who has left takes none

    def _advance(self) -> None:
        now = trio.current_time()
        for running in self._running:
            running.late = running.late or (not running.dear and now - running.began >= DEAR_SECONDS)
        while (entry := next_of(self._waiting, self._running, self._places, self._rank)) is not None:
            self._waiting.remove(entry)
            self._running.append(entry)
            entry.began, entry.late = now, False
            entry.turn.set()
