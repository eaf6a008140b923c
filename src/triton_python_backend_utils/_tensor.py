"""Tensor: a name and an array.

Input tensors are made by the server over memory that it owns; as_numpy() makes the array when it
is asked for. Tensors that a model makes hold the array it gave. Writing to an input is allowed:
the memory is the request's own, or as_numpy() makes a copy once and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._errors import TritonModelException
from ._types import BYTES, numpy_to_triton_type


class Tensor:
    """A named tensor for inference requests and responses."""

    __slots__ = ("__weakref__", "_array", "_convert", "_dtype", "_keep", "_name", "_shape", "_source")
    _array: np.ndarray | None
    _convert: Callable[[Any], np.ndarray]  # these three belong to tensors made by _over()
    _keep: bool
    _shape: tuple[int, ...]

    def __init__(self, name: str, numpy_array: np.ndarray) -> None:
        if not isinstance(name, str):
            raise TritonModelException(f"the name of a Tensor must be a str, got {type(name).__name__}")
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(
                f"Tensor '{name}' needs a numpy array, got {type(numpy_array).__name__}; "
                "use Tensor.from_dlpack for tensors of other libraries"
            )
        self._name = name
        self._array = numpy_array
        self._dtype = numpy_to_triton_type(numpy_array.dtype)
        self._source: Any = None

    @classmethod
    def _over(
        cls,
        name: str,
        dtype: int,
        shape: tuple[int, ...],
        source: Any,
        convert: Callable[[Any], np.ndarray],
        keep: bool,
    ) -> Tensor:
        """A tensor whose array `convert(source)` makes on demand; `keep` it once made."""
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._array = None
        tensor._dtype = dtype
        tensor._shape = shape
        tensor._source = source
        tensor._convert = convert
        tensor._keep = keep
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
        """The tensor as an array of its shape; TYPE_STRING gives an object array of bytes."""
        array = self._array
        if array is None:
            array = self._convert(self._source)
            if self._keep:
                self._array = array
        return array

    def is_cpu(self) -> bool:
        """True: tensors are handed over in CPU memory."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the same memory, for from_dlpack of other libraries."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of any object that speaks DLPack, or of a DLPack capsule.

        Memory on another device is copied to the CPU where the object's library can do that.
        """
        if type(tensor).__name__ == "PyCapsule":
            tensor = _Capsule(tensor)
        elif not hasattr(tensor, "__dlpack__"):
            raise TritonModelException(
                f"from_dlpack needs an object with __dlpack__ or a DLPack capsule, got {type(tensor).__name__}"
            )
        try:
            array = np.from_dlpack(tensor)
        except (BufferError, RuntimeError, TypeError) as error:
            move = getattr(tensor, "cpu", None)
            if move is None:
                raise TritonModelException(f"cannot take tensor '{name}' through DLPack: {error}") from error
            array = np.from_dlpack(move())
        return Tensor(name, array)

    def __dlpack__(self, **options: Any) -> Any:
        if self._dtype == BYTES:
            raise TritonModelException(f"tensor '{self._name}' holds strings, which DLPack cannot express")
        array = self.as_numpy()
        if not array.flags.writeable:  # DLPack before 1.0 has no read-only memory
            array = array.copy()
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, dtype={self._dtype}, shape={self.shape()})"


class _Capsule:
    """A bare capsule, in the form numpy.from_dlpack wants."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)
