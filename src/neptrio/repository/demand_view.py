"""What is seen of models that are loaded on demand: by metrics, `neptrio top` and the console.

There may be thousands, of which few were ever asked for; only those have rows, the others are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from neptrio.observe.demand_families import DemandRow
from neptrio.repository.putting_away import HOST

if TYPE_CHECKING:
    from neptrio.repository.catalog import Catalog
    from neptrio.repository.demand import Demand
    from neptrio.repository.known_models import Known


class DemandView:
    """Reads what repository.demand knows. Trio thread only."""

    def __init__(self, catalog: Catalog, demand: Demand) -> None:
        self._catalog = catalog
        self._demand = demand

    @property
    def any(self) -> bool:
        """Whether there are models that are loaded on demand."""
        return bool(self._demand.known)

    def rows(self, name: str = "") -> Iterator[DemandRow]:
        """The models that were asked for, by name, or the one of that name; each is looked for when it is asked for."""
        known = self._demand.known
        looked_at = (known.get(name),) if name else known.values()
        # all at once: without a row nobody who cuts this into slices can rest, and thousands may have none
        asked = [m.name for m in looked_at if m is not None and (m.misses or m.loads or m.load_failures)]
        for one in sorted(asked):
            model = known.get(one)
            if model is not None:
                yield self._row(model)

    def _row(self, known: Known) -> DemandRow:
        record = self._catalog.records.get(known.name)
        answered = 0 if record is None else record.answered()
        # requests are counted when they are answered, those that have waited as soon as they go to the model
        known.hits = max(known.hits, answered - known.released)
        return DemandRow(
            known.name,
            known.standing.state.value,
            known.standing.why,
            0 if known.room is None else len(known.room),
            known.hits,
            known.misses,
            known.loads,
            known.load_failures,
            known.put_away,
        )

    def totals(self) -> dict[str, Any]:
        """How many models are in each state, and the host's memory: `held_bytes`, `server_bytes` and `budget_bytes`, which are 0
        without a budget."""
        held, limit = next(((held, limit) for place, held, limit in self.memory() if place == HOST), (0, 0))
        return {
            "states": self.states(),
            "held_bytes": held,
            "server_bytes": self.server_bytes(),
            "budget_bytes": limit,
        }

    def states(self) -> dict[str, int]:
        """How many models are in each state."""
        return dict(sorted((state.value, count) for state, count in self._demand.states.items() if count))

    def memory(self) -> list[tuple[int, int, int]]:
        """(GPU, or -1 for the host, bytes that models hold there, budget), nothing without a budget."""
        budget = self._catalog.budget
        return [] if budget is None else budget.rows()

    def server_bytes(self) -> int:
        """Bytes of the host's budget that models cannot have."""
        budget = self._catalog.budget
        return 0 if budget is None else budget.grown_at(HOST)
