"""The rate limiter: which instance may execute next, across all models (--rate-limit=execution_count).

The problem: instances of different models compete for things the server cannot see (memory, a
licence, a bus). The configuration names them as resources with counts, and gives every instance
group a priority. The choice: an instance with work asks for a turn; turns are given in the order
of executions so far times priority, so priority 2 gets half the turns of priority 1 (0 means 1);
an execution holds its resources until it is back.

Rules:
 1. Only the first in that order is looked at. If its resources are not free, nobody overtakes it,
    so one that needs much is not starved by many that need little.
 2. A turn that is not used is given back in the same pass: a model with nothing to send holds
    neither resources nor a place in line.
 3. What comes back is handed out at the end of the loop's turn, when the model it came from has
    got in line again; else two models would alternate whatever their priorities are.
 4. Resources are per device unless they are global. How much there is: --rate-limit-resource, or
    else the most that any one instance asks for.
 5. Batches of a limited instance are not prepared ahead: they would wait without a turn.

Source: spec/features.md A5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neptrio.errors import InvalidArgument
from neptrio.turn import Turn

GLOBAL = -1
Key = tuple[str, int]  # resource, device or GLOBAL


@dataclass(frozen=True)
class ResourceStatistics:
    """One resource: `device` is -1 when it is global."""

    name: str
    device: int
    count: int
    used: int


@dataclass(frozen=True)
class RateLimiterStatistics:
    """What is handed out and how many instances wait for a turn."""

    resources: tuple[ResourceStatistics, ...]
    waiting: int


class Turnstile:
    """One instance's way to its turns."""

    def __init__(
        self, limiter: RateLimiter, demand: dict[Key, int], priority: int, on_turn: Callable[[], None]
    ) -> None:
        self.demand = demand
        self.weight = priority or 1
        self.on_turn = on_turn
        self.turns = 0
        self.granted = False  # a turn that has not begun
        self.waits = False
        self.since = 0
        self._limiter = limiter

    @property
    def rank(self) -> tuple[int, int]:
        """Who comes first: the lower."""
        return (self.turns * self.weight, self.since)

    def ask(self) -> None:
        """Gets in line. on_turn() is called when the turn is there, possibly before this returns."""
        if not self.waits and not self.granted:
            self.waits = True
            self.since = next(self._limiter.order)
            self._limiter.waiting.append(self)

    def begin(self) -> None:
        """The turn is used: an execution starts."""
        self.granted = False
        self.turns += 1

    def end(self) -> None:
        """The execution is back: its resources are free."""
        self._limiter.free(self)

    def leave(self) -> None:
        """No more interest: out of the line, an unused turn is given back."""
        if self.waits:
            self.waits = False
            self._limiter.waiting.remove(self)
            self._limiter.later()
        if self.granted:
            self.granted = False
            self._limiter.free(self)


class RateLimiter:
    """Turns and resources of every model's instances. Lives on the trio thread."""

    def __init__(self, turn: Turn, explicit: dict[tuple[str, int | None], int] | None = None) -> None:
        self._turn = turn
        self._explicit = explicit or {}
        self._turnstiles: list[Turnstile] = []
        self._used: dict[Key, int] = {}
        self._serving = False
        self.waiting: list[Turnstile] = []
        self.order = itertools.count()

    def register(self, group: Any, device: int, on_turn: Callable[[], None]) -> Turnstile:
        """A turnstile for an instance of `group` (a ModelInstanceGroup) on `device`.

        Raises InvalidArgument when an explicit resource count can never satisfy it.
        """
        demand: dict[Key, int] = {}
        for resource in group.rate_limiter.resources:
            key = (resource.name, GLOBAL if getattr(resource, "global") else device)
            demand[key] = demand.get(key, 0) + resource.count
        for key, count in demand.items():
            limit = self._limit(key)
            if limit is not None and limit < count:
                raise InvalidArgument(
                    f'Resource count for "{key[0]}" is limited to {limit} which will prevent scheduling of one '
                    f"or more model instances, the minimum required count is {count}"
                )
        made = Turnstile(self, demand, group.rate_limiter.priority, on_turn)
        # newcomers start level with the others, or they would have every turn until they caught up
        made.turns = min((t.turns * t.weight for t in self._turnstiles), default=0) // made.weight
        self._turnstiles.append(made)
        return made

    def unregister(self, turnstile: Turnstile) -> None:
        """The instance is gone."""
        turnstile.leave()
        self._turnstiles.remove(turnstile)
        self.later()

    def _limit(self, key: Key) -> int | None:
        name, device = key
        for found in ((name, device), (name, None)):
            if found in self._explicit:
                return self._explicit[found]
        return None

    def total(self, key: Key) -> int:
        """How much of a resource there is."""
        limit = self._limit(key)
        if limit is not None:
            return limit
        return max((t.demand.get(key, 0) for t in self._turnstiles), default=0)

    def later(self) -> None:
        """Has turns given within this turn of the loop, after those who are free now could ask."""
        self._turn.mark(self)

    def dispatch(self, now_ns: int) -> None:
        """Called by the turn."""
        self.serve()

    def serve(self) -> None:
        """Gives turns to the first in line while their resources are free."""
        if self._serving:
            return
        self._serving = True
        try:
            while self.waiting:
                first = min(self.waiting, key=lambda t: t.rank)
                if any(self._used.get(k, 0) + n > self.total(k) for k, n in first.demand.items()):
                    return
                self.waiting.remove(first)
                first.waits = False
                first.granted = True
                for key, count in first.demand.items():
                    self._used[key] = self._used.get(key, 0) + count
                first.on_turn()
        finally:
            self._serving = False

    def free(self, turnstile: Turnstile) -> None:
        """Takes back what a turn held."""
        for key, count in turnstile.demand.items():
            self._used[key] -= count
        self.later()

    def statistics(self) -> RateLimiterStatistics:
        """What is handed out now."""
        keys = sorted({key for t in self._turnstiles for key in t.demand})
        rows = (ResourceStatistics(k[0], k[1], self.total(k), self._used.get(k, 0)) for k in keys)
        return RateLimiterStatistics(tuple(rows), len(self.waiting))
