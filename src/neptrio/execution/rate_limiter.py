"""The rate limiter: which instance may execute next, across all models (--rate-limit=execution_count).

The problem: instances of different models compete for things that the server cannot see (memory, a licence, a
bus). The configuration names such things as resources with counts, and gives every instance group a priority.
The choice: an instance that has work asks for a grant, and each execution needs one. The next grant goes to the
instance with the lowest product of grants so far and priority, so priority 2 gets half as many grants as
priority 1 (0 means 1). An execution holds its resources until it has finished.

Rules:
 1. While the resources of the first in that order are not free, nobody overtakes it on any of them, so that an
    instance which needs much is not starved by many that need little. The same holds for those behind it that have to
    wait. Whoever needs nothing of what they wait for does not wait for them: an execution that holds what the first
    needs may itself wait for such a one (a model that calls another).
 2. A grant that is not used is given back in the same loop pass: a model without requests holds neither
    resources nor a place in line.
 3. Freed resources are granted at the end of the loop pass. By then the instance that freed them has asked
    again if its model has more work. Granted at once, they would always go to another instance, and two
    models would alternate whatever their priorities are.
 4. Resources are counted per device unless they are global. The amount is that of --rate-limit-resource,
    or else the most that any one instance needs.
 5. No batch is prepared in advance for an instance under the rate limiter: it could only wait for a grant.
 6. Instances of which one at a time may execute on a device (BackendInstance.exclusive) need one more resource, which is the
    model's own. Without --rate-limit such a model has a limiter for itself, which knows of no other resource.
 7. What a grant costs depends on those in line, not on how many claims there are: there may be thousands.

Source: docs/protocol/features.md A5.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neptrio.errors import InvalidArgument
from neptrio.loop.loop_pass import LoopPass

GLOBAL = -1
Key = tuple[str, int]  # (resource, device or GLOBAL)


@dataclass(frozen=True)
class ResourceStatistics:
    """One resource: `device` is -1 when it is global."""

    name: str
    device: int
    count: int
    used: int


@dataclass(frozen=True)
class RateLimiterStatistics:
    """Resources in use, and how many instances wait for a grant."""

    resources: tuple[ResourceStatistics, ...]
    waiting: int


class Claim:
    """One instance's needs, its place in line and its grants so far."""

    def __init__(
        self, limiter: RateLimiter, demand: dict[Key, int], priority: int, on_grant: Callable[[], None]
    ) -> None:
        self.demand = demand
        self.weight = priority or 1
        self.on_grant = on_grant
        self.grants = 0
        self.granted = False  # it has a grant whose execution has not begun
        self.executing = False
        self.waits = False
        self.since = 0
        self.number = 0
        self._limiter = limiter

    @property
    def share(self) -> int:
        """The product of its grants so far and its priority."""
        return self.grants * self.weight

    @property
    def rank(self) -> tuple[int, int]:
        """The claim with the lowest rank is first in line."""
        return (self.grants * self.weight, self.since)

    def ask(self) -> None:
        """Gets in line. on_grant() is called when the grant is given, possibly before ask() returns."""
        if not self.waits and not self.granted:
            self.waits = True
            self.since = next(self._limiter.order)
            self._limiter.waiting.append(self)

    def begin(self) -> None:
        """Uses the grant: its execution starts."""
        self.granted = False
        self.executing = True
        self.grants += 1

    def end(self) -> None:
        """The execution has finished: frees its resources."""
        self.executing = False
        self._limiter.free(self)

    def leave(self) -> None:
        """Leaves the line; gives back a grant that was not used."""
        if self.waits:
            self.waits = False
            self._limiter.waiting.remove(self)
            self._limiter.later()
        if self.granted:
            self.granted = False
            self._limiter.free(self)


class RateLimiter:
    """Gives grants to the instances of all models. Trio thread only."""

    def __init__(
        self, loop_pass: LoopPass, explicit: dict[tuple[str, int | None], int] | None = None
    ) -> None:
        self._loop_pass = loop_pass
        self._explicit = explicit or {}
        self._claims: dict[int, Claim] = {}
        # of each resource: an amount -> how many claims need so much, and the largest amount
        self._needed: dict[Key, dict[int, int]] = {}
        self._most: dict[Key, int] = {}
        # a heap: number of each claim, and of some that are gone, behind its share as it was when it was put here; shares only grow
        self._shares: list[tuple[int, int]] = []
        self._used: dict[Key, int] = {}
        self._serving = False
        self.waiting: list[Claim] = []
        self.order = itertools.count()

    def register(self, group: Any, device: int, on_grant: Callable[[], None], own: str = "") -> Claim:
        """A claim for an instance of `group` (a ModelInstanceGroup) on `device`; `own` is one more resource of which it needs
        all that there is on the device.

        Raises InvalidArgument when an explicit resource count can never satisfy it.
        """
        demand: dict[Key, int] = {(own, device): 1} if own else {}
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
        made = Claim(self, demand, group.rate_limiter.priority, on_grant)
        # a new claim starts level with the others, or it would get every grant until it had caught up
        made.grants = self._least_share() // made.weight
        made.number = next(self.order)
        self._claims[made.number] = made
        heapq.heappush(self._shares, (made.share, made.number))
        for key, count in demand.items():
            amounts = self._needed.setdefault(key, {})
            amounts[count] = amounts.get(count, 0) + 1
            self._most[key] = max(self._most.get(key, 0), count)
        return made

    def _least_share(self) -> int:
        """The lowest share of all claims."""
        shares = self._shares
        if len(shares) > 2 * len(self._claims) + 16:
            shares[:] = [(claim.share, number) for number, claim in self._claims.items()]
            heapq.heapify(shares)
        while shares:
            share, number = shares[0]
            claim = self._claims.get(number)
            if claim is None:
                heapq.heappop(shares)
            elif share != claim.share:
                heapq.heapreplace(shares, (claim.share, number))
            else:
                return share
        return 0

    def unregister(self, claim: Claim) -> None:
        """Removes the claim of an instance that is gone. One whose execution hangs, and is left behind, would hold its
        resources for ever."""
        claim.leave()
        if claim.executing:
            claim.end()
        del self._claims[claim.number]
        for key, count in claim.demand.items():
            amounts = self._needed[key]
            amounts[count] -= 1
            if not amounts[count]:
                del amounts[count]
                self._most[key] = max(amounts, default=0)
            if not amounts:
                del self._needed[key], self._most[key]
        self.later()

    def _limit(self, key: Key) -> int | None:
        name, device = key
        for found in ((name, device), (name, None)):
            if found in self._explicit:
                return self._explicit[found]
        return None

    def total(self, key: Key) -> int:
        """How much of a resource there is in all."""
        limit = self._limit(key)
        if limit is not None:
            return limit
        return self._most.get(key, 0)

    def later(self) -> None:
        """Has grants given at the end of this loop pass, after instances that are free now could ask (rule 3)."""
        self._loop_pass.mark(self)

    def dispatch(self, now_ns: int) -> None:
        """Gives grants. Called at the end of the loop pass."""
        self.serve()

    def serve(self) -> None:
        """Gives grants to all whose resources are free, in order (rule 1)."""
        if self._serving:
            return
        self._serving = True
        try:
            while (claim := self._next()) is not None:
                self.waiting.remove(claim)
                claim.waits = False
                claim.granted = True
                for key, count in claim.demand.items():
                    self._used[key] = self._used.get(key, 0) + count
                claim.on_grant()  # which may change the line
        finally:
            self._serving = False

    def _next(self) -> Claim | None:
        """Who is to have a grant now, None when everybody in line has to wait."""
        waited_for: set[Key] = set()
        for claim in sorted(self.waiting, key=lambda t: t.rank):
            if waited_for.isdisjoint(claim.demand) and all(
                self._used.get(key, 0) + count <= self.total(key) for key, count in claim.demand.items()
            ):
                return claim
            waited_for.update(claim.demand)
        return None

    def free(self, claim: Claim) -> None:
        """Takes back the resources that a grant held."""
        for key, count in claim.demand.items():
            self._used[key] -= count
        self.later()

    def statistics(self) -> RateLimiterStatistics:
        """The current numbers."""
        rows = (
            ResourceStatistics(k[0], k[1], self.total(k), self._used.get(k, 0)) for k in sorted(self._needed)
        )
        return RateLimiterStatistics(tuple(rows), len(self.waiting))
