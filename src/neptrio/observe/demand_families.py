"""What is told of models that are loaded on demand: as metrics, and as the statistics extension's JSON.

A hit is a request that found its model loaded, a miss one that had to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neptrio.observe.exposition import Family, pairs


@dataclass(frozen=True)
class DemandRow:
    """What one model has counted since the server's start."""

    name: str
    state: str
    reason: str  # why its last load has failed, or why it was put away
    waiting: int  # requests that wait for its load
    hits: int
    misses: int
    loads: int
    load_failures: int
    put_away: int


def document(row: DemandRow) -> dict[str, Any]:
    """The row in JSON; the reason only where there is one."""
    made: dict[str, Any] = {"name": row.name, "state": row.state}
    if row.reason:
        made["reason"] = row.reason
    for key in ("waiting", "hits", "misses", "loads", "load_failures", "put_away"):
        made[key] = getattr(row, key)
    return made


# (name, kind, what it is) of each family, in the order of the document
FAMILIES = (
    ("neptrio_demand_held_bytes", "gauge", "Memory of the host that models hold or are loading into"),
    ("neptrio_demand_budget_bytes", "gauge", "Memory of the host that models may hold"),
    (
        "neptrio_demand_server_bytes",
        "gauge",
        "Of the budget: memory that the server has grown by beside its models",
    ),
    ("neptrio_demand_gpu_held_bytes", "gauge", "Memory of a GPU that models hold"),
    ("neptrio_demand_gpu_budget_bytes", "gauge", "Memory of a GPU that models may hold"),
    ("neptrio_demand_models", "gauge", "Models that are loaded on demand, by state"),
    ("neptrio_demand_waiting_requests", "gauge", "Requests that wait for a model to be loaded"),
    ("neptrio_demand_hits_total", "counter", "Requests that found their model loaded"),
    ("neptrio_demand_misses_total", "counter", "Requests that had to wait for a model to be loaded"),
    ("neptrio_demand_loads_total", "counter", "Loads of models that are loaded on demand, by outcome"),
    ("neptrio_demand_put_away_total", "counter", "How often models were put away"),
)


class DemandFamilies:
    """The families of one document: call add() for each model that was asked for and count() once, then read `families`."""

    def __init__(self) -> None:
        self.families = [Family(name, text, kind) for name, kind, text in FAMILIES]
        held, budget, self._server, gpu_held, gpu_budget, self._models, *self._of_a_model = self.families
        self._memory = {True: (held, budget), False: (gpu_held, gpu_budget)}  # whether it is the host's

    def add(self, row: DemandRow) -> None:
        """Adds what one model has counted."""
        waiting, hits, misses, loads, put_away = self._of_a_model
        of_model = ("model", row.name)
        label = pairs([of_model])
        waiting.sample(label, row.waiting)
        hits.sample(label, row.hits)
        misses.sample(label, row.misses)
        loads.sample(pairs([of_model, ("outcome", "loaded")]), row.loads)
        loads.sample(pairs([of_model, ("outcome", "failed")]), row.load_failures)
        put_away.sample(label, row.put_away)

    def count(
        self, states: Mapping[str, int], memory: Iterable[tuple[int, int, int]], server_bytes: int
    ) -> None:
        """Adds what is of all models. `states`: how many are in each state; `memory`: (GPU, or -1 for the host, bytes that
        models hold there, budget); `server_bytes`: of the host's budget, those that models cannot have."""
        for state, count in sorted(states.items()):
            self._models.sample(pairs([("state", state)]), count)
        for place, size, limit in memory:
            label = pairs([("gpu", str(place))]) if place >= 0 else ""
            for family, value in zip(self._memory[not label], (size, limit), strict=True):
                family.sample(label, value)
            if place < 0:
                self._server.sample(label, server_bytes)
