"""What a model's parameters say about being loaded on demand (docs/on-demand.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neptrio.config.isolation import parameter
from neptrio.config.time_limits import seconds
from neptrio.errors import InvalidArgument

LOAD = "load"
KEEP = "keep_loaded"
IDLE = "idle_unload_seconds"
LEAST = "minimum_loaded_seconds"
LEAST_SECONDS = 0.5  # a model that was just loaded is not put away for another one


@dataclass(frozen=True)
class Residence:
    """How long a model stays loaded."""

    keep: bool = False  # it is never put away
    idle_seconds: float | None = None  # without a request, after which it is put away; None: only for room
    least_seconds: float = LEAST_SECONDS  # after its load


def on_demand(config: Any) -> bool:
    """Whether the model is to be loaded when it is asked for, in mode explicit. Raises InvalidArgument."""
    text = parameter(config, LOAD).lower()
    if text not in ("", "on-demand"):
        raise InvalidArgument(f"parameter '{LOAD}' must be 'on-demand', got '{text}'")
    return bool(text)


def residence(config: Any) -> Residence:
    """How long the model stays loaded. Raises InvalidArgument."""
    keep = parameter(config, KEEP).lower()
    if keep not in ("", "true", "false"):
        raise InvalidArgument(f"parameter '{KEEP}' must be 'true' or 'false', got '{keep}'")
    idle, least = parameter(config, IDLE), parameter(config, LEAST)
    return Residence(
        keep == "true",
        seconds(idle, f"parameter '{IDLE}'") if idle else None,
        seconds(least, f"parameter '{LEAST}'") if least else LEAST_SECONDS,
    )
