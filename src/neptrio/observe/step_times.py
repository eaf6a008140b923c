"""How long each step of an ensemble takes, and how often it fails.

The problem: a step's model counts the requests of everybody, and two steps may have the same model, so its statistics do not
say where an ensemble's time goes. The choice: the ensemble notes what each of its steps' requests took, from their submission
to their last response, which is what the ensemble waits for.

Rules:
 1. A step's time is that of its whole request: the queue of its model is in it.
 2. What failed, or was not accepted, is counted apart and has no time. What was cancelled because another step had failed is
    counted nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neptrio.observe.histogram import Histogram
from neptrio.request.infer_request import InferRequest, Timestamp

START, END = int(Timestamp.REQUEST_START), int(Timestamp.REQUEST_END)


class StepTimes:
    """The times of one ensemble's steps since its load. Trio thread only."""

    def __init__(self, models: Iterable[str]) -> None:
        """`models`: the names of the steps' models, in the configuration's order."""
        self._models = tuple(models)
        self._times = [Histogram() for _ in self._models]
        self._failed = [0] * len(self._models)

    def answered(self, step: int, request: InferRequest) -> None:
        """The step's request had its last response."""
        self._times[step].record(request.timestamp(END) - request.timestamp(START))

    def failed(self, step: int) -> None:
        """The step's request was answered with an error, or was not accepted."""
        self._failed[step] += 1

    def rows(self) -> list[dict[str, Any]]:
        """One row for each step, in the configuration's order. Nanoseconds."""
        return [
            {
                "model_name": name,
                "count": times.count,
                "failed": failed,
                "sum_ns": times.sum,
                "max_ns": times.max,
                "histogram": times.buckets(),
            }
            for name, times, failed in zip(self._models, self._times, self._failed, strict=True)
        ]
