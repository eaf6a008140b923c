"""What loaded models hold of the memory, and what keeps each of them (repository.budget decides by that).

The problem: who looks for room asks what all models hold together, and why each stays; with a thousand models the one takes
0.2 ms and the other 20. The choice: the sum is made alone, and the whole list can be made in slices.

Loads under way count with what was reserved for them, until that is released. Models that leave count until the allocator has given
back what they held of this process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neptrio.loop.slices import Slices
from neptrio.repository.putting_away import HOST, Hold, Holder
from neptrio.repository.room_line import Sizes

if TYPE_CHECKING:
    from neptrio.repository.catalog import Catalog
    from neptrio.repository.demand import Demand
    from neptrio.repository.model import Model
    from neptrio.repository.records import Operation, Record
    from neptrio.repository.withdrawal import Withdrawal


@dataclass(frozen=True)
class _Use:
    """How a model was used, as of the last look."""

    accepted: int  # requests
    executed_ms: int  # the last execution
    seen_ms: int  # the last look that found requests without an execution


class Holdings:
    """Trio thread only."""

    def __init__(self, catalog: Catalog, demand: Demand, withdrawal: Withdrawal) -> None:
        self._catalog = catalog
        self._demand = demand
        self._withdrawal = withdrawal
        self._reserved: dict[Operation, Sizes] = {}
        self._uses: dict[str, _Use] = {}

    # ------------------------------------------------------------ loads under way

    @property
    def loading(self) -> bool:
        """Whether anything is reserved."""
        return bool(self._reserved)

    def reserve(self, operation: Operation, needs: Sizes) -> None:
        """What a load will take counts from now on."""
        self._reserved[operation] = needs

    def release(self, operation: Operation) -> bool:
        """Takes that back; False where there is nothing."""
        return self._reserved.pop(operation, None) is not None

    def forget(self, name: str) -> None:
        """A model is put away: how it was used before does not count for its next load."""
        self._uses.pop(name, None)

    # ------------------------------------------------------------ what is held

    def holders(self) -> list[Holder]:
        """The models that hold memory, and what keeps them."""
        now = now_ms()
        found = [one for record in self._catalog.records.values() for one in self._holders_of(record, now)]
        return found + self._reserved_holders(now)

    def _holders_of(self, record: Record, now: int) -> Iterator[Holder]:
        serving = list(record.serving.values())
        if serving:
            yield self.model(record, serving, now)
        leaving = held_by(retirement.model for retirement in record.retiring)
        if any(leaving.values()):
            yield _holder_of(leaving, record.name, now, Hold.LEAVING)

    def _reserved_holders(self, now: int) -> list[Holder]:
        """What loads under way will hold, and what the allocator has not given back yet of models that have ended."""
        returning = [
            _holder_of({HOST: size}, name, now, Hold.LEAVING) for name, size in self._withdrawal.returning
        ]
        return returning + [
            _holder_of(
                sizes,
                operation.record.name,
                now,
                Hold.GIVEN_UP if operation.done.is_set() else Hold.LOADING,
            )
            for operation, sizes in self._reserved.items()
        ]

    def total(self) -> tuple[Sizes, Sizes]:
        """What all of them hold together, and of that what leaves: what holders() says, at a hundredth of its cost."""
        found: Counter[int] = Counter()
        leaving: Counter[int] = Counter()
        host = 0
        for record in self._catalog.records.values():
            for row in record.rows.values():
                if row.model is not None:
                    host += row.model.host_bytes
                    if row.model.device_bytes:
                        found.update(row.model.device_bytes)
            if record.retiring:
                leaving.update(held_by(retirement.model for retirement in record.retiring))
        leaving[HOST] += sum(size for _, size in self._withdrawal.returning)
        found[HOST] += host
        for sizes in (leaving, *self._reserved.values()):
            found.update(sizes)
        return found, leaving

    def model(self, record: Record, serving: list[Model], now: int) -> Holder:
        """What a model of which versions serve holds."""
        name = record.name
        needed_by = tuple(
            user
            for user in sorted(self._catalog.users.get(name, ()))
            if (above := self._catalog.records.get(user)) is not None and (above.serving or above.operations)
        )
        return _holder_of(
            held_by(serving),
            name,
            self._used_ms(name, serving, now),
            self._hold(record, serving, now),
            needed_by,
            bool(record.children),
        )

    def _used_ms(self, name: str, serving: list[Model], now: int) -> int:
        """When a model was used last: by its executions. Where requests need none (ensembles, the response cache) it is the
        look at which there were more of them than at the one before."""
        accepted = sum(model.counters.accepted for model in serving)
        executed = max(model.counters.last_inference_ms for model in serving)
        loaded = max(model.loaded_at_ms for model in serving)
        before = self._uses.get(name)
        if before is None:
            self._uses[name] = before = _Use(accepted, executed, loaded)
        elif before.accepted != accepted:
            seen = now if before.executed_ms == executed else before.seen_ms
            self._uses[name] = before = _Use(accepted, executed, seen)
        return max(loaded, executed, before.seen_ms)

    def _hold(self, record: Record, serving: list[Model], now: int) -> Hold | None:
        known = self._demand.known.get(record.name)
        if known is None or record.override is not None or record.folder is not None:
            return Hold.BY_HAND
        if known.residence.keep:
            return Hold.KEPT
        if any(model.scheduler is not None and model.scheduler.live_sequences() for model in serving):
            return Hold.SEQUENCES
        if record.operations:
            return Hold.LOADING
        if self._demand.asked_for(record.name) or any(model.inflight for model in serving):
            return Hold.REQUESTS
        if now - max(model.loaded_at_ms for model in serving) < known.residence.least_seconds * 1000:
            return Hold.FRESH
        return None

    async def holders_in_slices(self) -> list[Holder]:
        """holders(), between whose rows others were served: what is put away has to be looked at once more."""
        found: list[Holder] = []
        slices = Slices()
        for record in list(self._catalog.records.values()):
            found += self._holders_of(record, now_ms())
            await slices.rest()
        return found + self._reserved_holders(now_ms())


def held_by(models: Iterable[Model]) -> Sizes:
    """What models hold together: place -> bytes."""
    found: Counter[int] = Counter()
    for model in models:
        found[HOST] += model.host_bytes
        found.update(model.device_bytes)
    return found


def _holder_of(
    sizes: Sizes,
    name: str,
    used_ms: int,
    hold: Hold | None,
    needed_by: tuple[str, ...] = (),
    steps: bool = False,
) -> Holder:
    return Holder(name, sizes.get(HOST, 0), used_ms, hold, needed_by, steps, sizes)


def now_ms() -> int:
    return int(time.time() * 1000)
