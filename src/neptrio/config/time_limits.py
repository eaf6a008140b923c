"""Time limits in a model's parameters and the backends' settings, in seconds."""

from __future__ import annotations

from typing import Any

from neptrio.config.isolation import parameter
from neptrio.errors import InvalidArgument


def execute_seconds(config: Any, model: str) -> float | None:
    """EXECUTE_TIMEOUT_SECONDS: how long an execution may take; None where the configuration of `model` has no such limit.

    Raises InvalidArgument.
    """
    key = "EXECUTE_TIMEOUT_SECONDS"
    text = parameter(config, key)
    return seconds(text, f"parameter '{key}' of model '{model}'") if text else None


def seconds(text: str, what: str) -> float:
    """A number of seconds above 0. Raises InvalidArgument, which names it as `what`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise InvalidArgument(f"{what} must be a number of seconds > 0, got '{text}'")
    return value
