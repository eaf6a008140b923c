"""The parts of the server that models' code calls back into."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from neptrio.codec.shared_memory import SharedMemory
from neptrio.errors import Unsupported
from neptrio.execution.admission import Admission
from neptrio.execution.foreign_inputs import ForeignInputs
from neptrio.execution.log_levels import LogLevels
from neptrio.loop.doorbells import Doorbells
from neptrio.loop.mailbox import CompletionQueue
from neptrio.loop.timers import Timers
from neptrio.observe.custom_metrics import CustomMetrics
from neptrio.observe.span_options import SpanOptions


class ModelControl(Protocol):
    """Loading and unloading models from a model's code (service.repository)."""

    async def load(self, name: str, parameters: dict[str, Any]) -> None:
        """Loads or reloads a model. Raises the load's TritonError."""

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Takes a model out of service: new requests for it are refused."""


async def _undescribed(subject: str, name: str, version: str) -> str:
    raise Unsupported("nothing is known of the server here")


@dataclass(frozen=True)
class ModelHost:
    """Passed to every backend with the model that it loads."""

    admission: Admission  # for requests to other models
    completions: CompletionQueue  # how a model's threads reach the trio thread
    shared_memory: SharedMemory
    repository: ModelControl
    timers: Timers  # deadlines on the trio thread
    doorbells: Doorbells  # how models' processes wake the trio thread
    foreign_inputs: ForeignInputs  # how requests to other models go to admission
    spans: SpanOptions | None = None  # with trace mode opentelemetry: where models' spans are exported
    custom_metrics: CustomMetrics = field(default_factory=CustomMetrics)
    log_levels: LogLevels = field(default_factory=LogLevels)
    # what the server says of itself or of a model, as JSON (service.described); raises TritonError
    describe: Callable[[str, str, str], Awaitable[str]] = field(default=_undescribed)
    # a GPU cannot be used any more, with the reason; called once for each, on the trio thread
    device_failed: Callable[[str], None] = field(default=lambda why: None)
