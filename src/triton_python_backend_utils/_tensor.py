"""Tensor: a name and an array, or a name and memory on a GPU.

The server makes input tensors over memory that it owns; as_numpy() makes the array when it is first needed. A model may
write to an input: the memory belongs to the request alone, or as_numpy() makes a copy and keeps it. Tensors that a
model makes hold the array that it gave. Tensors in device memory have no array and are exchanged by DLPack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _checks, _host
from ._dlpack import Capsule, array_of, capsule_of
from ._errors import TritonModelException
from ._foreign import text_of
from ._types import BYTES, numpy_to_triton_type

CPU = (1, 0)  # DLPack's device type and number
# devices(name, object or capsule) -> Tensor in device memory, or None; set by a server that has GPUs
devices: Callable[[str, Any], Any] | None = None


def empty(shape: int | Sequence[int], dtype: Any) -> np.ndarray:
    """An array for an output, with elements that are not set, like numpy.empty(); `dtype` is numpy's.

    In a model with a process of its own, a large one lies in shared memory, so that sending it needs no copy.
    """
    host = _host.find()
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if host is None:
        return np.empty(shape, dtype)
    return host.empty(shape, np.dtype(dtype))


class Tensor:
    """A named tensor for inference requests and responses."""

    __slots__ = (
        "__weakref__",
        "_array",
        "_convert",
        "_device",
        "_dtype",
        "_keep",
        "_name",
        "_shape",
        "_source",
    )
    _array: np.ndarray | None
    _device: tuple[int, int]
    _convert: Callable[[Any], Any]  # these three belong to tensors made by _over()
    _keep: bool
    _shape: tuple[int, ...]

    def __init__(self, name: str, numpy_array: np.ndarray) -> None:
        if type(name) is not str:
            name = _checks.text(name, "name of Tensor")
        if not isinstance(numpy_array, np.ndarray):
            expected = "a numpy array (Tensor.from_dlpack takes tensors of other libraries)"
            raise _checks.wrong(f"content of Tensor '{name}'", expected, numpy_array)
        self._name = name
        self._array = numpy_array
        self._dtype = numpy_to_triton_type(numpy_array.dtype)
        self._source: Any = None
        self._device = CPU

    @classmethod
    def _over(
        cls,
        name: str,
        dtype: int,
        shape: tuple[int, ...],
        source: Any,
        convert: Callable[[Any], np.ndarray],
        keep: bool,
        device: tuple[int, int] = (1, 0),
    ) -> Tensor:
        """A tensor whose array `convert(source)` makes on demand; `keep` it once made.

        On a `device` (DLPack's type and number) other than the CPU it has no array.
        """
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._array = None
        tensor._dtype = dtype
        tensor._shape = shape
        tensor._source = source
        tensor._convert = convert
        tensor._keep = keep
        tensor._device = device
        return tensor

    def name(self) -> str:
        """The tensor's name."""
        return self._name

    def triton_dtype(self) -> int:
        """The data type's number in the model configuration (13 is TYPE_STRING)."""
        return self._dtype

    def shape(self) -> list[int]:
        """The dimensions, the batch dimension included."""
        return list(self._shape if self._array is None else self._array.shape)

    def as_numpy(self) -> np.ndarray:
        """The tensor as an array of its shape; TYPE_STRING gives an object array of bytes.

        Raises TritonModelException for a tensor in GPU memory.
        """
        if self._device != CPU:
            raise TritonModelException(
                f"tensor '{self._name}' is in GPU memory and has no numpy array; use to_dlpack(), or let the server "
                "fetch inputs: leave out the parameter FORCE_CPU_ONLY_INPUT_TENSORS"
            )
        array = self._array
        if array is None:
            array = self._convert(self._source)
            if self._keep:
                self._array = array
        return array

    def is_cpu(self) -> bool:
        """False for a tensor in GPU memory, which models see that set FORCE_CPU_ONLY_INPUT_TENSORS to "no"."""
        return self._device == CPU

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the same memory, for from_dlpack of other libraries. It holds the tensor."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of any object that speaks DLPack, or of a DLPack capsule.

        Memory on a GPU that the server uses stays there. Elsewhere it is copied to the CPU where the object's
        library can do that.
        """
        name = _checks.text(name, "name of Tensor.from_dlpack()")
        if devices is not None:
            taken = devices(name, tensor)
            if taken is not None:
                return taken
        if type(tensor).__name__ == "PyCapsule":
            tensor = Capsule(tensor)
        elif not hasattr(tensor, "__dlpack__"):
            raise TritonModelException(
                f"from_dlpack needs an object with __dlpack__ or a DLPack capsule, got {type(tensor).__name__}"
            )
        try:
            array = array_of(tensor)
        except (BufferError, RuntimeError, TypeError) as error:
            move = getattr(tensor, "cpu", None)
            if move is None:
                raise TritonModelException(
                    f"cannot take tensor '{name}' through DLPack: {text_of(error)}"
                ) from error
            array = array_of(move())
        return Tensor(name, array)

    def __dlpack__(self, **options: Any) -> Any:
        if self._dtype == BYTES:
            raise TritonModelException(f"tensor '{self._name}' holds strings, which DLPack cannot express")
        if self._device != CPU:
            return self._convert(self._source)
        array = self.as_numpy()
        if not array.flags.writeable:  # DLPack before 1.0 has no read-only memory
            array = array.copy()
        return capsule_of(array, self._dtype, options, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, dtype={self._dtype}, shape={self.shape()})"
