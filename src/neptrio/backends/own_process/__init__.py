"""Kernel and ONNX models whose instances run in processes of their own (docs/isolation.md): what can be asked for."""

from __future__ import annotations

from neptrio.config.isolation import asks_for_process
from neptrio.config.time_limits import execute_seconds
from neptrio.execution.backend import LoadContext

GRACE_SECONDS = 5.0  # that a process has to notice by itself that its device hangs


def wanted(context: LoadContext) -> bool:
    """Whether the model's instances run in processes of their own. Raises InvalidArgument."""
    return asks_for_process(context.config, context.settings.backend_settings(context.config.backend))


def examine(context: LoadContext) -> None:
    """Checks the parameters of a model with processes of its own. Raises InvalidArgument."""
    execute_seconds(context.config, context.name)
    if wanted(context):
        from neptrio.backends.python.backend import initialize_seconds, resources

        initialize_seconds(context, context.config.backend)
        resources(context, context.config.backend)
