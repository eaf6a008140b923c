"""Picks the scheduler that a model's configuration asks for."""

from __future__ import annotations

from typing import Any

from neptrio.scheduling.base import LoopServices, Scheduler
from neptrio.scheduling.default import DefaultScheduler


def make_scheduler(model: Any, pool: Any, loop: LoopServices) -> Scheduler:
    """The scheduler for `model`'s scheduling_choice."""
    return DefaultScheduler(pool, loop)
