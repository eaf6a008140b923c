"""What a model holds at this moment, counted, not sampled.

Invariant (tested): accepted requests = queued + prepared + executing. A decoupled model may owe
responses to requests whose batch is back already: these are accepted and in none of the three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Live:
    """One model version now. Requests, except `inflight_bytes` (bytes) and `sequences`."""

    accepted: int
    queued: int  # with the scheduler
    prepared: int  # in a batch that waits for its instance
    executing: int  # in a batch that an instance has taken
    inflight_bytes: int  # input tensors of the accepted requests
    sequences: int  # open sequences

    @property
    def pending(self) -> int:
        """Requests whose execution has not begun."""
        return self.queued + self.prepared


def live(model: Any) -> Live:
    """Counts what `model` (a Model) holds. Call on the trio thread."""
    instances = [instance.statistics() for instance in model.pool.all]
    scheduler = model.scheduler.statistics()
    return Live(
        accepted=model.inflight - scheduler.null_requests_open,
        queued=scheduler.queued,
        prepared=sum(i.prepared_requests for i in instances),
        # an ensemble has no instances: its scheduler counts the requests that walk its steps
        executing=sum(i.executing_requests for i in instances) if instances else scheduler.executing,
        inflight_bytes=model.counters.inflight_bytes,
        sequences=scheduler.sequences,
    )
