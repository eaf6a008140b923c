"""Tensors: typed memory that numpy and every consumer of DLPack can look at without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.compat.tritonserver.enums import DataType, DLDeviceType, MemoryType
from neptrio.compat.tritonserver.errors import InvalidArgumentError, UnsupportedError, converting
from neptrio.compat.tritonserver.memory import (
    DeviceOrMemoryType,
    MemoryAllocator,
    MemoryBuffer,
    buffer_of,
    bytes_of,
    device_of,
    exported,
    imported,
    numpy_type,
    parsed,
)
from neptrio.foreign import type_name
from neptrio.request.infer_request import Tensor as CoreTensor
from neptrio.request.numpy_tensor import join_bytes, split_bytes


@dataclass
class Tensor:
    """A tensor: `data_type`, `shape`, and the memory where its elements lie in row-major order.

    Elements of BYTES tensors are each preceded by their length (4 bytes, little-endian).
    """

    data_type: DataType
    shape: Sequence[int]
    memory_buffer: MemoryBuffer

    @property
    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.memory_buffer.data_ptr

    @property
    def memory_type(self) -> MemoryType:
        """Where the elements are."""
        return self.memory_buffer.memory_type

    @property
    def memory_type_id(self) -> int:
        """The device's number."""
        return self.memory_buffer.memory_type_id

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return self.memory_buffer.size

    def __dlpack__(self, *, stream: Any = None, **how: Any) -> Any:
        """A DLPack capsule, for numpy.from_dlpack(tensor) and the like. Raises InvalidArgumentError for BYTES."""
        return exported(self._array(), stream, **how)

    def __dlpack_device__(self) -> tuple[DLDeviceType, int]:
        return device_of(self.memory_type), self.memory_type_id

    def _array(self) -> np.ndarray:
        """A view of the memory. Raises InvalidArgumentError for BYTES, or a shape that does not fit."""
        dtype = numpy_type(self.data_type)
        try:
            return bytes_of(self.memory_buffer).view(dtype).reshape(tuple(int(n) for n in self.shape))
        except ValueError as error:
            raise InvalidArgumentError(
                f"{self.size} bytes are no {self.data_type.name} tensor of shape {list(self.shape)}: {error}"
            ) from None

    def to_bytes_array(self) -> np.ndarray:
        """The elements of a BYTES tensor as an object array of bytes. Raises InvalidArgumentError."""
        if self.data_type != DataType.BYTES:
            raise InvalidArgumentError(f"the tensor has datatype {self.data_type.name}, expected BYTES")
        with converting():
            elements = split_bytes(bytes_of(self.memory_buffer))
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(tuple(int(n) for n in self.shape))

    def to_string_array(self) -> np.ndarray:
        """The elements of a BYTES tensor, which must be UTF-8, as an array of str. Raises InvalidArgumentError."""
        array = self.to_bytes_array()
        try:
            decoded = [element.decode() for element in array.reshape(-1)]
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"an element is no UTF-8 text: {error}; use to_bytes_array()"
            ) from None
        return np.array(decoded, dtype=np.str_).reshape(array.shape)

    @staticmethod
    def from_bytes_array(bytes_array: list[str] | list[bytes] | np.ndarray) -> Tensor:
        """A BYTES tensor of str or bytes; str are encoded as UTF-8. Raises InvalidArgumentError."""
        made = Tensor._from_object(bytes_array)
        if made.data_type != DataType.BYTES:
            raise InvalidArgumentError(f"expected str or bytes, got elements of {made.data_type.name}")
        return made

    @staticmethod
    def from_string_array(string_array: list[str] | np.ndarray) -> Tensor:
        """The same."""
        return Tensor.from_bytes_array(string_array)

    @staticmethod
    def from_dlpack(obj: Any) -> Tensor:
        """A tensor over the memory of an array that speaks DLPack. Raises InvalidArgumentError, UnsupportedError."""
        return Tensor._from_numpy(imported(obj))

    @staticmethod
    def _from_object(obj: Any) -> Tensor:
        """A tensor of an array, a numpy scalar, a list, or anything that speaks DLPack. Raises InvalidArgumentError."""
        if isinstance(obj, Tensor):
            return obj
        if isinstance(obj, (np.ndarray, np.generic)):
            return Tensor._from_numpy(np.asarray(obj))
        if isinstance(obj, (list, tuple)):
            try:
                array = np.array(obj)
            except ValueError as error:
                raise InvalidArgumentError(f"the list cannot become a tensor: {error}") from None
            return Tensor._from_numpy(array)
        if hasattr(obj, "__dlpack__"):
            return Tensor.from_dlpack(obj)
        raise InvalidArgumentError(
            f"an input cannot be {type(obj).__name__}, expected a Tensor, a numpy array, a list, or an object that "
            "supports DLPack"
        )

    @staticmethod
    def _from_numpy(array: np.ndarray) -> Tensor:
        number = datatypes.from_numpy(array.dtype)
        if not number:
            raise InvalidArgumentError(f"numpy dtype {array.dtype} has no datatype")
        shape = array.shape
        if number == datatypes.BYTES:
            array = np.frombuffer(join_bytes(array.reshape(-1).tolist()), np.uint8)
        else:
            array = np.ascontiguousarray(array, dtype=datatypes.NUMPY[number])
        return Tensor(DataType(number), shape, buffer_of(array))

    @staticmethod
    def _of_core(tensor: CoreTensor) -> Tensor:
        """An output of the server, over its memory."""
        buffer = MemoryBuffer(tensor.address, MemoryType.CPU, 0, tensor.nbytes, tensor)
        return Tensor(DataType(tensor.dtype), tensor.shape, buffer)

    def _moved(self, name: str, allocator: MemoryAllocator) -> Tensor:
        """A copy in the allocator's memory. Raises InvalidArgumentError for memory that is too small or no MemoryBuffer."""
        buffer = allocator.allocate(self.size, self.memory_type, self.memory_type_id, name)
        if not isinstance(buffer, MemoryBuffer) or buffer.size < self.size:
            raise InvalidArgumentError(
                f"output '{name}': expected a MemoryBuffer of {self.size} bytes from the allocator, got "
                f"{buffer.size if isinstance(buffer, MemoryBuffer) else type_name(buffer)}"
            )
        buffer = replace(buffer, size=self.size)
        place = bytes_of(buffer)
        if not place.flags.writeable:
            raise InvalidArgumentError(f"output '{name}': the allocator's memory must not be written to")
        place[:] = bytes_of(self.memory_buffer)
        return Tensor(self.data_type, self.shape, buffer)

    def _as_core(self, name: str) -> CoreTensor:
        """An input of the server, over this memory."""
        return CoreTensor(
            name, int(self.data_type), tuple(int(n) for n in self.shape), bytes_of(self.memory_buffer)
        )

    def to_host(self) -> Tensor:
        """The tensor in memory of the host."""
        return self.to_device(MemoryType.CPU)

    def to_device(self, device: DeviceOrMemoryType) -> Tensor:
        """The tensor in that memory: itself, if it is there. Raises InvalidArgumentError, UnsupportedError."""
        wanted, number = parsed(device)
        here = (self.memory_type, self.memory_type_id)
        if here == (wanted, number) or (
            self.memory_type == MemoryType.CPU_PINNED and wanted == MemoryType.CPU
        ):
            return self
        raise UnsupportedError(
            f"cannot move a tensor from {self.memory_type.name}:{self.memory_type_id} to {wanted.name}:{number}; "
            "move the array that numpy.from_dlpack() gives with your GPU library"
        )
