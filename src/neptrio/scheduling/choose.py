"""Picks the scheduler that a model's configuration asks for."""

from __future__ import annotations

from typing import Any

from neptrio.scheduling.base import LoopServices, Scheduler
from neptrio.scheduling.default import DefaultScheduler
from neptrio.scheduling.dynamic import DynamicScheduler
from neptrio.scheduling.policy import batching_policy


def make_scheduler(model: Any, pool: Any, loop: LoopServices) -> Scheduler:
    """The scheduler for `model`'s scheduling_choice. Raises InvalidArgument."""
    if model.config.WhichOneof("scheduling_choice") == "dynamic_batching":
        return DynamicScheduler(model, pool, loop, batching_policy(model.config))
    return DefaultScheduler(pool, loop)
