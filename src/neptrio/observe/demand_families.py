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


def families(
    rows: Iterable[DemandRow], states: Mapping[str, int], memory: Iterable[tuple[int, int, int]]
) -> list[Family]:
    """The families. `rows`: of models that were asked for; `states`: how many models are in each state; `memory`: (GPU, or -1
    for the host, bytes that models hold there, budget)."""
    models = Family("neptrio_demand_models", "Models that are loaded on demand, by state", "gauge")
    waiting = Family(
        "neptrio_demand_waiting_requests", "Requests that wait for a model to be loaded", "gauge"
    )
    hits = Family("neptrio_demand_hits_total", "Requests that found their model loaded", "counter")
    misses = Family(
        "neptrio_demand_misses_total", "Requests that had to wait for a model to be loaded", "counter"
    )
    loads = Family(
        "neptrio_demand_loads_total", "Loads of models that are loaded on demand, by outcome", "counter"
    )
    put_away = Family("neptrio_demand_put_away_total", "How often models were put away", "counter")
    for row in rows:
        labels = [("model", row.name)]
        waiting.sample(pairs(labels), row.waiting)
        hits.sample(pairs(labels), row.hits)
        misses.sample(pairs(labels), row.misses)
        loads.sample(pairs([*labels, ("outcome", "loaded")]), row.loads)
        loads.sample(pairs([*labels, ("outcome", "failed")]), row.load_failures)
        put_away.sample(pairs(labels), row.put_away)
    for state, count in sorted(states.items()):
        models.sample(pairs([("state", state)]), count)
    resident = Family(
        "neptrio_demand_held_bytes", "Memory of the host that models hold or are loading into", "gauge"
    )
    budget = Family("neptrio_demand_budget_bytes", "Memory of the host that models may hold", "gauge")
    on_gpu = Family("neptrio_demand_gpu_held_bytes", "Memory of a GPU that models hold", "gauge")
    gpu_budget = Family("neptrio_demand_gpu_budget_bytes", "Memory of a GPU that models may hold", "gauge")
    for place, held, limit in memory:
        label = pairs([("gpu", str(place))]) if place >= 0 else ""
        (on_gpu if label else resident).sample(label, held)
        (gpu_budget if label else budget).sample(label, limit)
    return [resident, budget, on_gpu, gpu_budget, models, waiting, hits, misses, loads, put_away]
