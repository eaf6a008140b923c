"""Front ends (--frontends) in metrics and statistics: a row for each of these processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from neptrio.loop.loop_lag import BOUNDS_NS
from neptrio.observe.exposition import Family, pairs


@dataclass(frozen=True)
class FrontEndRow:
    """A front end now. What it tells itself (from `connections` to `shared_bytes`, and the lag) is a second old at most,
    and counted since its process began."""

    number: int
    pid: int
    restarts: int  # since the server began
    connections: int
    requests: int  # answered, of every kind
    under_way: int
    held_bytes: int  # of bodies and answers on their way
    shared_bytes: int  # of its part of the shared memory that are in use, by messages and by bodies
    wakes: int  # how often it was woken, because it slept
    resident_bytes: int
    cpu_seconds: float
    lag_cumulative: tuple[int, ...]  # passes of its loop that took at most BOUNDS_NS[i] ns
    lag_count: int
    lag_sum_ns: int


def document(rows: list[FrontEndRow]) -> list[dict[str, Any]]:
    """The rows as statistics have them."""
    found = []
    for row in rows:
        told = {name: value for name, value in asdict(row).items() if not name.startswith("lag_")}
        told["loop_lag"] = {
            "count": row.lag_count,
            "sum_ns": row.lag_sum_ns,
            "cumulative": [list(pair) for pair in zip(BOUNDS_NS, row.lag_cumulative, strict=True)],
        }
        found.append(told)
    return found


GAUGES = (
    ("process_id", "gauge", "Process id of a front end", "pid"),
    ("connections", "gauge", "Open connections of a front end", "connections"),
    ("requests_total", "counter", "Requests that a front end's process has answered", "requests"),
    ("open_requests", "gauge", "Requests of a front end that are not answered", "under_way"),
    ("held_bytes", "gauge", "Bytes of bodies and answers that a front end holds", "held_bytes"),
    ("shared_bytes", "gauge", "Bytes of requests in a front end's shared memory", "shared_bytes"),
    ("resident_bytes", "gauge", "Resident memory of a front end's process", "resident_bytes"),
    ("cpu_seconds_total", "counter", "Processor time of a front end's process", "cpu_seconds"),
    ("restarts_total", "counter", "How often another process took a front end's place", "restarts"),
)


def families(rows: list[FrontEndRow], full: bool) -> list[Family]:
    """The families of the metrics page, [] without front ends. `full`: histograms with all buckets."""
    if not rows:
        return []
    found = []
    for name, kind, text, field in GAUGES:
        family = Family(f"neptrio_front_end_{name}", text, kind)
        for row in rows:
            family.sample(pairs([("front_end", str(row.number))]), getattr(row, field))
        found.append(family)
    lag = Family(
        "neptrio_front_end_loop_lag_seconds",
        "Passes of a front end's event loop by how long nothing else was looked at",
        "histogram",
    )
    step = 1 if full else 2
    for row in rows:
        lag.histogram(
            pairs([("front_end", str(row.number))]),
            tuple(bound / 1e9 for bound in BOUNDS_NS[::step]),
            row.lag_cumulative[::step],
            row.lag_count,
            row.lag_sum_ns / 1e9,
        )
    return [*found, lag]
