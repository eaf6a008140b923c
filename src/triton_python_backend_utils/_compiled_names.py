"""The names of c_python_backend_utils: on a Triton server the compiled half of this package, which models import, too."""

from __future__ import annotations

from typing import Any

from ._calls import ResponseIterator
from ._control import is_model_ready, load_model, unload_model
from ._errors import TritonError, TritonModelException
from ._logger import Logger
from ._metrics import Metric, MetricFamily, MetricKind
from ._request import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from ._sender import InferenceResponseSender
from ._tensor import Tensor

COUNTER, GAUGE, HISTOGRAM = MetricKind


class SharedMemory:
    """What a Triton server's backend keeps tensors in. There is no such pool here: each message has memory of its own."""

    def free_memory(self) -> int:
        """The bytes that are free in the pool: none."""
        return 0


shared_memory = SharedMemory()


def async_event_future_done_callback(py_future: Any) -> None:
    """What a Triton server calls when a model's coroutine has ended; raises what the coroutine has raised."""
    py_future.result()


__all__ = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "PreferredMemory",
    "ResponseIterator",
    "SharedMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "async_event_future_done_callback",
    "is_model_ready",
    "load_model",
    "shared_memory",
    "unload_model",
]
