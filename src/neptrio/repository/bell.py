"""Lets tasks wait until the readiness of some model may have changed; they then check for themselves.

With thousands of models they check those alone that have changed: the bell remembers for which it rang last.

Rules:
 1. Read `rings`, then check, then wait(rings). A ring in between is not missed.
 2. Looking at all models takes 2 ms for 1,000. So who gives the bell a function has it called every OFTEN rings, and never
    has more than those to check.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import trio

REMEMBERED = 1024  # rings: who looks less often than that checks all models
OFTEN = 256


class Bell:
    """A counter of changes that tasks can wait for. Trio thread only."""

    def __init__(self, often: Callable[[], object] | None = None) -> None:
        """`often` is called every OFTEN rings."""
        self.rings = 0
        self._often = often
        self._names: deque[str] = deque(maxlen=REMEMBERED)
        self._event: trio.Event | None = None  # exists only while somebody waits

    def ring(self, name: str = "") -> None:
        """Wakes all who wait. `name` is the model that has changed; without one it is none of them."""
        self.rings += 1
        self._names.append(name)
        if self._event is not None:
            self._event.set()
            self._event = None
        if self._often is not None and self.rings % OFTEN == 0:
            self._often()

    def names_since(self, seen: int) -> set[str] | None:
        """The models for which it rang since `rings` was `seen`. None: all of them may have changed."""
        if self.rings - seen > len(self._names):
            return None
        return set(itertools.islice(reversed(self._names), self.rings - seen))

    async def wait(self, seen: int) -> None:
        """Returns when `rings` exceeds `seen`."""
        while self.rings == seen:
            if self._event is None:
                self._event = trio.Event()
            await self._event.wait()
