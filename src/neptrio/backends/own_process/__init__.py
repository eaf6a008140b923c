"""Kernel and ONNX models whose instances run in processes of their own (docs/isolation.md): what can be asked for."""

from __future__ import annotations

from neptrio.config.isolation import asks_for_process, parameter
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import LoadContext

GRACE_SECONDS = 5.0  # that a process has to notice by itself that its device hangs


def wanted(context: LoadContext) -> bool:
    """Whether the model's instances run in processes of their own. Raises InvalidArgument."""
    return asks_for_process(context.config, context.settings.backend_settings(context.config.backend))


def execute_seconds(context: LoadContext) -> float | None:
    """EXECUTE_TIMEOUT_SECONDS of the model, None where it has none. Raises InvalidArgument."""
    key = "EXECUTE_TIMEOUT_SECONDS"
    text = parameter(context.config, key)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise InvalidArgument(
            f"parameter '{key}' of model '{context.name}' must be a number of seconds > 0, got '{text}'"
        )
    return value


def examine(context: LoadContext) -> None:
    """Checks the parameters of a model with processes of its own. Raises InvalidArgument."""
    execute_seconds(context)
    if wanted(context):
        from neptrio.backends.python.backend import initialize_seconds, resources

        initialize_seconds(context, context.config.backend)
        resources(context, context.config.backend)
