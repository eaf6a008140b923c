"""Memory of tensors: buffers that know their owner, and DLPack both ways.

The server works on tensors in host memory, so tensors on a GPU are refused with the remedy in the text. numpy makes
and reads the DLPack capsules. It has no bfloat16, which therefore crosses as 16-bit integers whose type code is
changed in the capsule.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from neptrio import datatypes
from neptrio.compat.tritonserver.enums import DataType, DLDeviceType, MemoryType
from neptrio.compat.tritonserver.errors import InvalidArgumentError, UnsupportedError

DeviceOrMemoryType = tuple[MemoryType, int] | MemoryType | tuple[DLDeviceType, int] | str

CAPSULE = b"dltensor"
CODE_AT = 20  # offset of the type code in DLTensor: after data (8), device (4 + 4) and ndim (4)
UINT_CODE, BFLOAT_CODE = 1, 4
_DEVICES = {
    DLDeviceType.kDLCPU: MemoryType.CPU,
    DLDeviceType.kDLCUDAHost: MemoryType.CPU_PINNED,
    DLDeviceType.kDLCUDA: MemoryType.GPU,
}
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


@dataclass
class MemoryBuffer:
    """A piece of memory that lives as long as its owner.

    `data_ptr`: its address; `memory_type`, `memory_type_id`: where it is; `size`: bytes; `owner`: what keeps it alive.
    """

    data_ptr: int
    memory_type: MemoryType
    memory_type_id: int
    size: int
    owner: Any

    @staticmethod
    def from_dlpack(owner: Any) -> MemoryBuffer:
        """The memory of an array that speaks DLPack. Raises InvalidArgumentError, UnsupportedError."""
        return buffer_of(imported(owner))


class MemoryAllocator(ABC):
    """Where a request's outputs are to lie: a program's own memory, into which each output is copied."""

    @abstractmethod
    def allocate(
        self, size: int, memory_type: MemoryType, memory_type_id: int, tensor_name: str
    ) -> MemoryBuffer:
        """Memory of the host for `size` bytes of an output. `memory_type` is where the output is.

        It is called on the server's thread and must return at once. What it raises fails the response.
        """


class _Window:
    """What numpy needs to see a buffer's memory; an array of it keeps the owner alive."""

    def __init__(self, buffer: MemoryBuffer) -> None:
        self._owner = buffer.owner
        self.__array_interface__ = {
            "data": (buffer.data_ptr, not _writable(buffer.owner)),
            "shape": (buffer.size,),
            "typestr": "|u1",
            "version": 3,
        }


def _writable(owner: Any) -> bool:
    if isinstance(owner, np.ndarray):
        return bool(owner.flags.writeable)
    try:
        return not memoryview(owner).readonly
    except TypeError:
        return True  # no buffer: whoever made it answers for it


def bytes_of(buffer: MemoryBuffer) -> np.ndarray:
    """The memory as an array of bytes, without a copy. Raises UnsupportedError for memory of a GPU."""
    if buffer.memory_type == MemoryType.GPU:
        raise UnsupportedError("the memory is on a GPU; copy the tensor to the host first")
    return np.asarray(_Window(buffer)) if buffer.size else np.empty(0, np.uint8)


def buffer_of(array: np.ndarray) -> MemoryBuffer:
    """The memory of a contiguous array."""
    return MemoryBuffer(int(array.ctypes.data), MemoryType.CPU, 0, array.nbytes, array)


class _Capsule:
    """A capsule that numpy can import: bfloat16 pretends to be UINT16."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device
        code = ctypes.c_uint8.from_address(_pointer_of(capsule, CAPSULE) + CODE_AT)
        self.bfloat16 = code.value == BFLOAT_CODE
        if self.bfloat16:
            code.value = UINT_CODE

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def imported(value: Any) -> np.ndarray:
    """A value that speaks DLPack as a contiguous array over its memory.

    Raises InvalidArgumentError for what is no such value, or not contiguous; UnsupportedError for memory of a GPU.
    """
    if isinstance(value, np.ndarray):
        array = value
    else:
        if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
            raise InvalidArgumentError(f"{type(value).__name__} does not support the DLPack protocol")
        device = tuple(int(part) for part in value.__dlpack_device__())
        if device[0] not in (DLDeviceType.kDLCPU, DLDeviceType.kDLCUDAHost):
            raise UnsupportedError(
                f"the memory is on DLPack device {device}, expected the host's; copy it to the host first"
            )
        try:
            capsule = _Capsule(value.__dlpack__(), (int(DLDeviceType.kDLCPU), 0))
            array = np.from_dlpack(capsule)
        except Exception as error:
            raise InvalidArgumentError(
                f"{type(value).__name__} cannot be imported by DLPack: {error}"
            ) from None
        if capsule.bfloat16:
            array = array.view(ml_dtypes.bfloat16)
    if not array.flags.c_contiguous:
        raise InvalidArgumentError("only contiguous memory is supported")
    return array


def exported(array: np.ndarray, stream: Any, **how: Any) -> Any:
    """A DLPack capsule of an array. Memory that must not change is copied for consumers that cannot be told so."""
    if stream not in (None, 0):
        raise UnsupportedError(f"memory of the host has no stream, got stream {stream!r}")
    if array.dtype == ml_dtypes.bfloat16:
        writable = array if array.flags.writeable else array.copy()
        capsule = writable.view(np.uint16).__dlpack__()
        ctypes.c_uint8.from_address(_pointer_of(capsule, CAPSULE) + CODE_AT).value = BFLOAT_CODE
        return capsule
    try:
        return array.__dlpack__(**how)
    except BufferError:
        if array.flags.writeable:
            raise
        return array.copy().__dlpack__(**how)


def device_of(memory_type: MemoryType) -> DLDeviceType:
    """DLPack's name for a memory type. Pinned memory is memory of the host to every consumer."""
    return DLDeviceType.kDLCUDA if memory_type == MemoryType.GPU else DLDeviceType.kDLCPU


def parsed(device: Any) -> tuple[MemoryType, int]:
    """What "gpu:1", MemoryType.GPU, (MemoryType.GPU, 1) or (DLDeviceType.kDLCUDA, 1) mean.

    Raises InvalidArgumentError.
    """
    if isinstance(device, MemoryType):
        return device, 0
    if isinstance(device, tuple) and len(device) == 2 and isinstance(device[1], int):
        if isinstance(device[0], MemoryType):
            return device[0], device[1]
        if isinstance(device[0], DLDeviceType):
            return _DEVICES[device[0]], device[1]
    if isinstance(device, str):
        name, colon, number = device.partition(":")
        if name.upper() in MemoryType.__members__ and (number.isdecimal() or not colon):
            return MemoryType[name.upper()], int(number or 0)
    raise InvalidArgumentError(
        f"{device!r} is no memory type, expected a MemoryType, 'cpu', 'cpu_pinned', 'gpu' or 'gpu:0', or a tuple of "
        "a MemoryType or DLDeviceType and a number"
    )


def numpy_type(data_type: DataType) -> np.dtype:
    """The numpy dtype of a datatype. Raises InvalidArgumentError for BYTES, which has no fixed size."""
    if data_type in (DataType.BYTES, DataType.INVALID):
        raise InvalidArgumentError(f"{data_type.name} tensors have no numpy view; use to_bytes_array()")
    return datatypes.NUMPY[data_type]
