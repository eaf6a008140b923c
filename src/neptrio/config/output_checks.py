"""Which answers that differ from a model's configuration are errors (docs/python-models.md, backends/python/output_differences)."""

from __future__ import annotations

from typing import Any

from neptrio.config.isolation import parameter
from neptrio.errors import InvalidArgument

KEY = "check_outputs"  # the model's parameter
SETTING = "check-outputs"  # of --backend-config
NONE, NAMES, ALL = "none", "names", "all"


def mode(config: Any, settings: dict[str, str]) -> str:
    """NONE of them; NAMES: those that lack an output and have one that the configuration does not have; or ALL.

    `settings` are those of --backend-config for the model's backend. Raises InvalidArgument.
    """
    own = parameter(config, KEY)
    value = own or settings.get(SETTING, "") or NAMES
    if value not in (NONE, NAMES, ALL):
        where = f"parameter '{KEY}'" if own else f"--backend-config={config.backend},{SETTING}"
        raise InvalidArgument(f"{where} must be '{NONE}', '{NAMES}' or '{ALL}', got '{value}'")
    return value
