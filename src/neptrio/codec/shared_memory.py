"""The bodies of the shared memory verbs over REST, and what decoders need of registered regions."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any, Protocol

from neptrio.codec.json_writer import dump
from neptrio.codec.text import bytes_text
from neptrio.errors import InvalidArgument
from neptrio.limits import shown
from neptrio.loop import threads
from neptrio.request.infer_request import Tensor

LARGE_BYTES = 1 << 20  # of parts of regions: copying more takes over a quarter of a millisecond
_ESCAPE = re.compile(rb"\\u00")
_INPUTS, _OUTPUTS = re.compile(rb'"inputs"\s*:'), re.compile(rb'"outputs"\s*:\s*\[')
_PART_SIZE = re.compile(rb'"shared_memory_byte_size"\s*:\s*([0-9]+)')


class SharedMemory(Protocol):
    """Regions that clients registered (service.shared_memory)."""

    def input_tensor(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Tensor:
        """An input that lies in a region. Raises TritonError."""

    def input_reader(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Callable[[], Tensor]:
        """input_tensor() in two parts: what it returns may be called by any thread. Both raise TritonError."""

    def output_region(self, region: str) -> Any:
        """The region of that name, for an output: whoever holds it keeps it open. Raises TritonError."""

    def output_place(self, region: Any, offset: int, size: int, needed: int, output: str) -> Any:
        """(address, owner) of the device memory for an output of `needed` bytes in what output_region() has returned, None
        when that is not on a GPU. Raises TritonError."""

    def write_output(self, tensor: Tensor, region: Any, offset: int, size: int) -> Tensor:
        """Puts an output into what output_region() has returned; returns the tensor that the response names. Raises
        TritonError."""

    def output_writer(self, tensor: Tensor, region: Any, offset: int, size: int) -> Callable[[], None]:
        """write_output() in two parts: what it returns may be called by any thread. Both raise TritonError."""


class WithSharedMemory(Protocol):
    """An object that knows the registered regions: service.Services, execution.model_host.ModelHost."""

    @property
    def shared_memory(self) -> SharedMemory: ...


class AskedFromThread:
    """Lets a worker thread use the shared memory service, which only the loop's thread may call.

    It stands for an object that knows the registered regions too.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    @property
    def shared_memory(self) -> SharedMemory:
        """Itself."""
        return self

    def input_tensor(self, *arguments: Any) -> Tensor:
        """Has the region looked up on the loop's thread, for which the worker waits, and reads the input on this one."""
        return threads.on_loop(self._memory.input_reader, *arguments)()

    def output_region(self, region: str) -> Any:
        """Calls the service's output_region() on the loop's thread; the worker waits for its result."""
        return threads.on_loop(self._memory.output_region, region)

    def output_place(self, *arguments: Any) -> Any:
        """As output_region()."""
        return threads.on_loop(self._memory.output_place, *arguments)

    def write_output(self, tensor: Tensor, region: Any, offset: int, size: int) -> Tensor:
        """Has the region's part checked on the loop's thread, and copies the output on this one."""
        self.output_writer(tensor, region, offset, size)()
        return Tensor(tensor.name, tensor.dtype, tensor.shape, b"")

    def input_reader(self, *arguments: Any) -> Callable[[], Tensor]:
        """As output_region()."""
        return threads.on_loop(self._memory.input_reader, *arguments)

    def output_writer(self, *arguments: Any) -> Callable[[], None]:
        """As output_region()."""
        return threads.on_loop(self._memory.output_writer, *arguments)


def names_large_inputs(text: Any) -> bool:
    """Whether the JSON of a request may name parts of regions as inputs that take together so long to read that a worker
    must do it. It is not parsed for that, so the answer may be yes for a request whose outputs come first."""
    if _ESCAPE.search(text):
        return True  # the key may be written in another way
    outputs = _OUTPUTS.search(text)
    end = outputs.start() if outputs and _INPUTS.search(text, 0, outputs.start()) else len(text)
    return sum(int(size[:20]) for size in _PART_SIZE.findall(text, 0, end)) > LARGE_BYTES


def system_registration(document: Any) -> tuple[str, int, int]:
    """(key, offset, size) of a registration's body. Raises InvalidArgument naming the field."""
    if not isinstance(document, dict):
        raise InvalidArgument("Shared memory register request must be a JSON object")
    key = document.get("key")
    if key is None:
        raise InvalidArgument("Shared memory register request has no 'key' field")
    if not isinstance(key, str):
        raise InvalidArgument("Unable to parse 'key': attempt to access JSON non-string as string")
    return key, _number({"offset": 0, **document}, "offset"), _number(document, "byte_size")


def _number(document: dict[str, Any], field: str) -> int:
    value = document.get(field)
    if value is None:
        raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise InvalidArgument(
            f"'{field}' of a shared memory register request must be an integer from 0 to {2**63 - 1}, got "
            f"{shown(bytes_text(dump(value)))}"
        )
    return value


def cuda_registration(document: Any) -> tuple[bytes, int, int]:
    """(raw handle, device, size) of a registration's body. Raises InvalidArgument naming the field."""
    if not isinstance(document, dict):
        raise InvalidArgument("Shared memory register request must be a JSON object")
    handle = document.get("raw_handle")
    if not isinstance(handle, dict) or "b64" not in handle:
        raise InvalidArgument("Shared memory register request has no 'raw_handle' field")
    try:
        raw = base64.b64decode(handle["b64"], validate=True)
    except (ValueError, TypeError):
        raise InvalidArgument("'raw_handle' of a shared memory register request must be base64") from None
    return raw, _number(document, "device_id"), _number(document, "byte_size")
