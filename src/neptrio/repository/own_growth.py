"""What the server's process has come to hold beside its models, for the budget of the host's memory.

The problem: a server that has loaded a thousand models, one after the other, holds tens of MiB more than at its start: what it
knows of each, and what the allocator cannot give back between blocks that are in use. No model holds that, so that models
within the budget and this together were above it. The choice: what the process has grown by counts, in a measure; and what
requests have freed is given back to the system.

Rules:
 1. What counts is the least growth of the last looks: what requests and loads need for a moment does not. Nor do the first
    MiB, of modules that are imported when they are needed.
 2. It is at most a tenth of the budget, whatever the process holds: models are not put away for requests that are large, or for
    the response cache.
 3. In a program that embeds a server nothing counts: there the growth may be the program's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from neptrio.loop import allocator, threads

if TYPE_CHECKING:
    from neptrio.repository.catalog import Catalog
    from neptrio.repository.model import Model
    from neptrio.repository.withdrawal import Withdrawal

LOOKS = 20  # rule 1
IMPORTED = 8 << 20  # bytes, rule 1
MOST = 10  # rule 2: one of so many parts
LONGEST_PAUSE = 60.0  # between tries to return free memory where there is none
KEPT_FREE = 4 << 20  # bytes by which the process may grow without models before free memory is given back


class OwnGrowth:
    """Trio thread only."""

    def __init__(self, catalog: Catalog, withdrawal: Withdrawal, look_seconds: float) -> None:
        """`look_seconds`: between looks."""
        self._catalog = catalog
        self._withdrawal = withdrawal
        self._look_seconds = look_seconds
        self._first: int | None = None  # what the process held beside its models at the first look
        self._least = 0  # the least since then
        self._seen: deque[int] = deque(maxlen=LOOKS)
        self._pause = look_seconds  # to the next try to return free memory, at most
        self._again = 0.0  # when that is

    def counted(self, limit: int) -> int:
        """The bytes of a budget that models cannot have."""
        if self._first is None or len(self._seen) < LOOKS or not allocator.is_set_up():
            return 0
        return min(max(min(self._seen) - self._first - IMPORTED, 0), limit // MOST)

    async def look(self, loading: bool) -> None:
        """Measures it, and returns memory that requests have freed: a model's run may have needed much, which the allocator
        keeps. What is in use at that moment comes back later, so it is tried again, more and more rarely. While models are
        `loading` it is not: what loads take for a moment comes back when they are done."""
        beside = self._beside_models()
        now = trio.current_time()
        if self._first is None:
            self._first = self._least = beside
        elif not loading and now >= self._again:
            if beside > self._least + KEPT_FREE:
                with suppress(threads.NoThread):
                    await threads.run(allocator.give_back, abandon_on_cancel=True)
                left = self._beside_models()
                came_back = left < beside - KEPT_FREE
                self._pause = self._look_seconds if came_back else min(self._pause * 2, LONGEST_PAUSE)
                self._again = now + self._pause
                beside = left
            self._least = min(self._least, beside)
        self._seen.append(beside)

    def _beside_models(self) -> int:
        """Bytes of this process that no model of it holds."""
        held = sum(model.cpu_bytes for model in self._models())
        returning = sum(size for _, size in self._withdrawal.returning)
        return allocator.anonymous_resident_bytes() - held - returning

    def _models(self) -> Iterator[Model]:
        for record in self._catalog.records.values():
            for row in record.rows.values():
                if row.model is not None:
                    yield row.model
            for retirement in record.retiring:
                yield retirement.model
