"""Lets tasks wait until the readiness of some model may have changed; they then check for themselves.

With thousands of models they check those alone that have changed: the notifier remembers of which it was told last.

Rules:
 1. Read `notified`, then check, then wait(notified). A change in between is not missed.
 2. Looking at all models takes 2 ms for 1,000. So who gives the notifier a function has it called every OFTEN changes, and never
    has more than those to check.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import trio

REMEMBERED = 1024  # changes: who looks less often than that checks all models
OFTEN = 256


class Notifier:
    """A counter of changes that tasks can wait for. Trio thread only."""

    def __init__(self, often: Callable[[], object] | None = None) -> None:
        """`often` is called every OFTEN changes."""
        self.notified = 0
        self._often = often
        self._names: deque[str] = deque(maxlen=REMEMBERED)
        self._event: trio.Event | None = None  # exists only while somebody waits

    def notify(self, name: str = "") -> None:
        """Wakes all who wait. `name` is the model that has changed; without one it is none of them."""
        self.notified += 1
        self._names.append(name)
        if self._event is not None:
            self._event.set()
            self._event = None
        if self._often is not None and self.notified % OFTEN == 0:
            self._often()

    def names_since(self, seen: int) -> set[str] | None:
        """The models that have changed since `notified` was `seen`. None: all of them may have changed."""
        if self.notified - seen > len(self._names):
            return None
        return set(itertools.islice(reversed(self._names), self.notified - seen))

    async def wait(self, seen: int) -> None:
        """Returns when `notified` exceeds `seen`."""
        while self.notified == seen:
            if self._event is None:
                self._event = trio.Event()
            await self._event.wait()
