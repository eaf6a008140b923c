"""Whether a model's answers tell their times without being asked (docs/statistics.md, "Times in answers")."""

from __future__ import annotations

from typing import Any

from neptrio.config.isolation import parameter
from neptrio.errors import InvalidArgument

KEY = "neptrio_timing"


def tells_times(config: Any) -> bool:
    """What the model's parameter `neptrio_timing` says, False without one. Raises InvalidArgument."""
    text = parameter(config, KEY).lower()
    if text not in ("", "true", "false"):
        raise InvalidArgument(f"parameter '{KEY}' must be 'true' or 'false', got '{text}'")
    return text == "true"
