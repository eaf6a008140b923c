"""Requests as data: what is said of a request before it is sent, and what the server gets of it."""

from __future__ import annotations

import asyncio
import queue
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from neptrio.compat.tritonserver.enums import MemoryType
from neptrio.compat.tritonserver.errors import InvalidArgumentError, UnsupportedError, converting
from neptrio.compat.tritonserver.memory import DeviceOrMemoryType, MemoryAllocator, parsed
from neptrio.compat.tritonserver.tensor import Tensor
from neptrio.embedded.options import InferOptions, new_request
from neptrio.foreign import type_name
from neptrio.request.infer_request import InferRequest

if TYPE_CHECKING:
    from neptrio.compat.tritonserver.model import Model

SEQUENCE_START = 1
SEQUENCE_END = 2
LATEST = -1


@dataclass
class InferenceRequest:
    """A request to a model.

    `flags`: 1 is the first request of a sequence, 2 the last one, 3 both; `correlation_id`: the sequence, a number or
    text; `priority`: 1 is the highest, 0 the model's default; `timeout`: microseconds that the request may wait in
    the queue, where the model's queue policy allows; `inputs`: name -> Tensor, numpy array, list of numbers, str or
    bytes, or an object that supports DLPack; `parameters`: str, int, bool or float; `output_memory_type`: "cpu" or
    nothing; `output_memory_allocator`: whose memory outputs are copied into; `response_queue`: gets each response too, a queue.SimpleQueue for infer(), an asyncio.Queue for
    async_infer().
    """

    model: Model
    request_id: str | None = None
    flags: int = 0
    correlation_id: int | str | None = None
    priority: int = 0
    timeout: int = 0
    inputs: dict[str, Tensor | Any] = field(default_factory=dict)
    parameters: dict[str, str | int | bool | float] = field(default_factory=dict)
    output_memory_type: DeviceOrMemoryType | None = None
    output_memory_allocator: MemoryAllocator | None = None
    response_queue: queue.SimpleQueue | asyncio.Queue | None = None

    def _core(self) -> InferRequest:
        """The server's request. Raises InvalidArgumentError, UnsupportedError."""
        self._check_memory()
        if not isinstance(self.flags, int) or self.flags & ~(SEQUENCE_START | SEQUENCE_END):
            raise InvalidArgumentError(
                f"flags must be 0, 1 (sequence start), 2 (sequence end) or 3, got {self.flags!r}"
            )
        for name, value in self.parameters.items():
            if type(value) not in (str, int, bool, float):
                raise InvalidArgumentError(
                    f"parameter '{name}' must be str, int, bool or float, got {type(value).__name__}"
                )
        options: InferOptions = {
            "request_id": self.request_id or "",
            "priority": self.priority,
            "queue_timeout_us": self.timeout,
            "parameters": self.parameters,
            "sequence_id": self.correlation_id or 0,
            "sequence_start": bool(self.flags & SEQUENCE_START),
            "sequence_end": bool(self.flags & SEQUENCE_END),
        }
        version = "" if self.model.version == LATEST else str(self.model.version)
        with converting():
            try:
                request = new_request(self.model.name, version, {}, {}, options)
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidArgumentError(f"the request cannot be made: {error}") from None
            request.inputs = [
                Tensor._from_object(value)._as_core(name) for name, value in self.inputs.items()
            ]
        return request

    def _check_memory(self) -> None:
        allocator = self.output_memory_allocator
        if allocator is not None and not isinstance(allocator, MemoryAllocator):
            raise InvalidArgumentError(
                f"output_memory_allocator must be a MemoryAllocator, got {type_name(allocator)}"
            )
        if self.output_memory_type is not None and parsed(self.output_memory_type)[0] == MemoryType.GPU:
            raise UnsupportedError(
                "outputs in GPU memory are not supported: take them on the host and move them with your GPU library"
            )
