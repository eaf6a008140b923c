"""What the statistics of several loads of one version add up to: activity since the server's start.

A version's counters begin at zero with each load, as on a Triton server. What those of earlier loads had counted is kept
here, as the values that the statistics extension shows, so an operator can still be told everything that happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def total(snapshots: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of $model_stat objects (ModelCounters.snapshot()), without the memory, which ended with each load."""
    made: dict[str, Any] = {
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {},
        "response_stats": {},
        "batch_stats": {},
    }
    for one in snapshots:
        made["last_inference"] = max(made["last_inference"], one["last_inference"])
        for count in ("inference_count", "execution_count"):
            made[count] += one[count]
        _add(made["inference_stats"], one["inference_stats"])
        for key, durations in one["response_stats"].items():
            _add(made["response_stats"].setdefault(key, {}), durations)
        for row in one["batch_stats"]:
            durations = {name: value for name, value in row.items() if name != "batch_size"}
            _add(made["batch_stats"].setdefault(row["batch_size"], {}), durations)
    made["batch_stats"] = [
        {"batch_size": size, **durations} for size, durations in sorted(made["batch_stats"].items())
    ]
    return made


def _add(into: dict[str, dict[str, int]], durations: dict[str, dict[str, int]]) -> None:
    for name, duration in durations.items():
        have = into.setdefault(name, {"count": 0, "ns": 0})
        have["count"] += duration["count"]
        have["ns"] += duration["ns"]
