"""The metrics of models that are loaded on demand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from neptrio.observe.exposition import Family, pairs


@dataclass(frozen=True)
class DemandRow:
    """What one model has counted since the server's start."""

    name: str
    state: str
    waiting: int  # requests that wait for its load
    misses: int  # requests that had to wait
    loads: int
    load_failures: int
    put_away: int


def families(rows: Iterable[DemandRow], held: int, limit: int) -> list[Family]:
    """The families; a model has samples of its own once it was asked for. `held`: bytes that models hold, of `limit`; 0: there
    is none."""
    models = Family("neptrio_demand_models", "Models that are loaded on demand, by state", "gauge")
    waiting = Family(
        "neptrio_demand_waiting_requests", "Requests that wait for a model to be loaded", "gauge"
    )
    misses = Family(
        "neptrio_demand_misses_total", "Requests that had to wait for a model to be loaded", "counter"
    )
    loads = Family(
        "neptrio_demand_loads_total", "Loads of models that are loaded on demand, by outcome", "counter"
    )
    put_away = Family("neptrio_demand_put_away_total", "How often models were put away", "counter")
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
        if not (row.misses or row.loads or row.load_failures):
            continue
        labels = [("model", row.name)]
        waiting.sample(pairs(labels), row.waiting)
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
    if limit:
        resident.sample("", held)
        budget.sample("", limit)
    return [resident, budget, models, waiting, misses, loads, put_away]
