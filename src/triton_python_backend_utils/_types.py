"""Converts data types between the model configuration and numpy, and strings to and from the form in messages."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from . import _checks
from ._errors import TritonModelException

# number in the model configuration -> (configuration name, numpy type)
_TABLE: dict[int, tuple[str, Any]] = {
    1: ("TYPE_BOOL", np.bool_),
    2: ("TYPE_UINT8", np.uint8),
    3: ("TYPE_UINT16", np.uint16),
    4: ("TYPE_UINT32", np.uint32),
    5: ("TYPE_UINT64", np.uint64),
    6: ("TYPE_INT8", np.int8),
    7: ("TYPE_INT16", np.int16),
    8: ("TYPE_INT32", np.int32),
    9: ("TYPE_INT64", np.int64),
    10: ("TYPE_FP16", np.float16),
    11: ("TYPE_FP32", np.float32),
    12: ("TYPE_FP64", np.float64),
    13: ("TYPE_STRING", np.object_),
}
BYTES = 13
BF16 = 14

try:
    import ml_dtypes

    _TABLE[BF16] = ("TYPE_BF16", ml_dtypes.bfloat16)
except ImportError:  # an environment may lack it; as_numpy() then refuses BF16 tensors
    pass

DATA_TYPES = (*(row[0] for number, row in _TABLE.items() if number != BF16), "TYPE_BF16")
_NUMPY = {number: np.dtype(row[1]) for number, row in _TABLE.items()}
_NUMBER = {np.dtype(row[1]): number for number, row in _TABLE.items()}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {row[0]: row[1] for row in _TABLE.values()}


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a configuration's data_type, e.g. "TYPE_FP32" -> numpy.float32."""
    triton_type_string = _checks.text(triton_type_string, "name of a data type")
    try:
        return TRITON_STRING_TO_NUMPY[triton_type_string]
    except KeyError:
        if triton_type_string == "TYPE_BF16":
            raise TritonModelException("TYPE_BF16 needs the package ml_dtypes in this environment") from None
        raise TritonModelException(
            f"unknown data type '{triton_type_string}', expected one of {sorted(TRITON_STRING_TO_NUMPY)}"
        ) from None


def numpy_to_triton_type(data_type: Any) -> int:
    """The configuration's number of a numpy type; strings and objects are 13 (TYPE_STRING)."""
    dtype = np.dtype(data_type)
    number = _NUMBER.get(dtype)
    if number is None:
        if dtype.kind in "OSU":
            return BYTES
        number = _NUMBER.get(dtype.newbyteorder("="))
    if number is None:
        raise TritonModelException(f"numpy dtype {dtype} has no Triton datatype")
    return number


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a configuration's data type number."""
    try:
        return _TABLE[int(data_type)][1]
    except KeyError:
        raise TritonModelException(f"unknown data type number {data_type}") from None


def numpy_dtype(number: int) -> np.dtype:
    """The numpy dtype of a data type number. Raises TritonModelException for BF16 without ml_dtypes."""
    try:
        return _NUMPY[number]
    except KeyError:
        if number == BF16:
            raise TritonModelException(
                "BF16 tensors need the package ml_dtypes in this environment"
            ) from None
        raise TritonModelException(f"unknown data type number {number}") from None


def serialize_byte_tensor(input_tensor: np.ndarray) -> np.ndarray:
    """A string tensor in its wire form: per element a 4-byte little-endian length and the bytes.

    Returns a one-dimensional uint8 array; empty for a tensor without elements.
    """
    return np.frombuffer(bytearray(join_strings(input_tensor)), dtype=np.uint8)


def deserialize_bytes_tensor(encoded_tensor: Any) -> np.ndarray:
    """The elements of a wire-form string tensor, as a one-dimensional object array of bytes."""
    elements = split_strings(encoded_tensor)
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


def join_strings(array: np.ndarray) -> bytes:
    """Elements (bytes, str, or what str() makes of others) as a length-prefixed buffer."""
    parts = []
    for element in array.reshape(-1).tolist():
        if isinstance(element, str):
            element = element.encode("utf-8")
        elif isinstance(element, (bytearray, memoryview)):
            element = bytes(element)
        elif not isinstance(element, bytes):
            element = str(element).encode("utf-8")
        parts.append(struct.pack("<I", len(element)))
        parts.append(element)
    return b"".join(parts)


def split_strings(raw: Any) -> list[bytes]:
    """The elements of a length-prefixed buffer. Raises TritonModelException when it is cut off."""
    view = memoryview(raw).cast("B")
    at, end = 0, len(view)
    out = []
    while at < end:
        if end - at < 4:
            raise TritonModelException(f"incomplete string length indicator: {end - at} of 4 bytes")
        (n,) = struct.unpack_from("<I", view, at)
        at += 4
        if end - at < n:
            raise TritonModelException(f"incomplete string data: {end - at} of {n} bytes")
        out.append(bytes(view[at : at + n]))
        at += n
    return out
