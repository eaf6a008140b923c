"""Where a Python model's instances run: in processes of their own, or in the server's (docs/isolation.md)."""

from __future__ import annotations

from typing import Any

from neptrio.errors import InvalidArgument


def parameter(config: Any, key: str) -> str:
    """A configuration parameter's text, "" when it is not set."""
    return str(config.parameters[key].string_value) if key in config.parameters else ""


def environment_path(config: Any, settings: dict[str, str]) -> str:
    """EXECUTION_ENV_PATH of the model, or else that of its backend (`execution-env-path` in `settings`); "" for neither."""
    return parameter(config, "EXECUTION_ENV_PATH") or settings.get("execution-env-path", "")


def isolated(config: Any, settings: dict[str, str] | None = None) -> bool:
    """True when each instance of the model runs in a process of its own, which is the default. Raises InvalidArgument.

    `settings` are those of --backend-config=python: they decide for models whose own configuration does not.
    """
    own = parameter(config, "isolation")
    value = own or (settings or {}).get("isolation", "")
    if value not in ("", "none", "process"):
        where = "parameter 'isolation'" if own else "--backend-config=python,isolation"
        raise InvalidArgument(f"{where} must be 'none' or 'process', got '{value}'")
    if parameter(config, "EXECUTION_ENV_PATH"):
        if own == "none":
            raise InvalidArgument("EXECUTION_ENV_PATH needs isolation 'process', got 'none'")
        return True
    if own != "none" and environment_path(config, settings or {}):
        return True  # the backend's environment, which only a process can have
    if not value and sees_devices(config):
        return False  # the model wants device memory, which only the server's own process can address
    return value != "none"


def asks_for_process(config: Any, settings: dict[str, str]) -> bool:
    """True when each instance of a kernel or ONNX model is to run in a process of its own; it is not unless asked for.

    `settings` are those of --backend-config for the model's backend. Raises InvalidArgument.
    """
    own = parameter(config, "isolation")
    value = own or settings.get("isolation", "") or "none"
    if value not in ("none", "process"):
        where = "parameter 'isolation'" if own else f"--backend-config={config.backend},isolation"
        raise InvalidArgument(f"{where} must be 'none' or 'process', got '{value}'")
    return value == "process"


def sees_devices(config: Any) -> bool:
    """True when the model wants inputs that lie in GPU memory passed as they are, not copied to the host."""
    return parameter(config, "FORCE_CPU_ONLY_INPUT_TENSORS").lower() == "no"
