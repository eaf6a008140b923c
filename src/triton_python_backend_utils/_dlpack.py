"""DLPack for tensors in host memory. numpy implements it, except for BF16, which numpy does not know.

A capsule of BF16 differs from one of 16-bit integers only in its type code. So the code is changed: to integers before
numpy reads another library's capsule, and to BF16 after numpy has made one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ._types import BF16, triton_to_numpy_type

UNSIGNED, BFLOAT = 1, 4  # DLPack's type codes


class _ManagedTensor(ctypes.Structure):
    """The beginning of DLPack's structure without a version."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Capsule:
    """Wraps a capsule in an object that numpy.from_dlpack accepts."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _inside(capsule: Any) -> _ManagedTensor | None:
    """The structure in a capsule; None if the capsule was already used or has another form."""
    try:
        return _ManagedTensor.from_address(_pointer(capsule, b"dltensor"))
    except ValueError:
        return None


def array_of(source: Any) -> np.ndarray:
    """An array over the memory of an object that speaks DLPack. Raises what numpy and the object raise."""
    try:
        return np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError):
        capsule = source.__dlpack__()
        inside = _inside(capsule)
        if inside is None or (inside.code, inside.bits, inside.lanes) != (BFLOAT, 16, 1):
            raise
        bfloat16 = triton_to_numpy_type(BF16)
        inside.code = UNSIGNED
        return np.from_dlpack(Capsule(capsule)).view(bfloat16)


class _Holding(np.ndarray):
    """A view of an array, which numpy's capsule holds, that holds what belongs to the array."""

    owner: Any


def capsule_of(array: np.ndarray, dtype: int, options: dict[str, Any], owner: Any) -> Any:
    """A capsule over an array's memory, which holds `owner`; `dtype` is the number of its data type in the model
    configuration."""
    view = array.view(_Holding)
    view.owner = owner
    array = view
    if dtype != BF16:
        return array.__dlpack__(**options)
    options.pop("max_version", None)  # capsules with a version have another structure
    capsule = array.view(np.uint16).__dlpack__(**options)  # whose base is the view
    inside = _inside(capsule)
    assert inside is not None, "numpy makes a capsule without a version where none is asked for"
    inside.code = BFLOAT
    return capsule
