"""Autoscaling by what the engines' queues hold.

Ray counts a replica's ongoing requests, which includes those in its engine's queues, but a gRPC stream counts once
however many requests it carries, and what replicas pass on to each other is not counted. The engine counts exactly.
"""

from __future__ import annotations

from typing import Any

from neptrio.observe.live import live
from neptrio.server import Server

PENDING, EXECUTING, SEQUENCES = "neptrio_pending", "neptrio_executing", "neptrio_sequences"


async def depths(core: Server) -> dict[str, float]:
    """What an engine's models hold now; on its loop. The metrics that a replica reports to Ray."""
    found = [live(model) for model in core.repository.ready_models()]
    return {
        PENDING: float(sum(model.pending for model in found)),
        EXECUTING: float(sum(model.executing for model in found)),
        SEQUENCES: float(sum(model.sequences for model in found)),
    }


class QueueDepthPolicy:
    """A policy for `autoscaling_config`: as many replicas as hold their share of all accepted requests.

    autoscaling_config:
      policy:
        policy_function: neptrio.ray:QueueDepthPolicy
        policy_kwargs: {requests_per_replica: 16, sequences_per_replica: 1000}

    Ray applies the bounds, delays and factors of the configuration to what it says.
    """

    def __init__(self, requests_per_replica: float = 8.0, sequences_per_replica: float = 0.0) -> None:
        """`requests_per_replica`: queued and executing; `sequences_per_replica`: live ones, 0: they do not count."""
        if requests_per_replica <= 0 or sequences_per_replica < 0:
            raise ValueError("requests_per_replica must be above 0, sequences_per_replica not below it")
        self._requests = requests_per_replica
        self._sequences = sequences_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas wanted (a fraction is rounded up by Ray), and the policy's state: none."""
        metrics = context.aggregated_metrics or {}
        requests = sum(sum((metrics.get(name) or {}).values()) for name in (PENDING, EXECUTING))
        wanted = (requests + context.total_queued_requests) / self._requests
        if self._sequences:
            wanted = max(wanted, sum((metrics.get(SEQUENCES) or {}).values()) / self._sequences)
        return wanted, {}
