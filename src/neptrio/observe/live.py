"""What a model holds at this moment, counted exactly.

Invariant (tested): accepted requests = queued + prepared + executing. The exception are decoupled models, which may
still send responses for requests whose batch is back: these are accepted, but in none of the three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Live:
    """One model version now. Numbers of requests, except `inflight_bytes` (bytes) and `sequences`."""

    accepted: int
    queued: int  # held by the scheduler
    prepared: int  # in a batch that waits for its instance
    executing: int  # in a batch that an instance has begun
    inflight_bytes: int  # input tensors of the accepted requests
    sequences: int  # live sequences

    @property
    def pending(self) -> int:
        """Requests whose execution has not begun."""
        return self.queued + self.prepared


def live(model: Any) -> Live:
    """Counts what `model` (a Model) holds. Trio thread only."""
    instances = [instance.statistics() for instance in model.pool.all]
    scheduler = model.scheduler.statistics()
    return Live(
        accepted=model.inflight - scheduler.null_requests_open,
        queued=scheduler.queued,
        prepared=sum(i.prepared_requests for i in instances),
        # an ensemble has no instances: its scheduler counts the requests on their way through the graph
        executing=sum(i.executing_requests for i in instances) if instances else scheduler.executing,
        inflight_bytes=model.counters.inflight_bytes,
        sequences=scheduler.sequences,
    )
