"""Tensors <-> numpy arrays.

Fixed-size datatypes are views without a copy; BYTES elements are length-prefixed on the wire and
become object arrays of bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.errors import InvalidArgument
from neptrio.request.infer_request import Tensor


def split_bytes(raw: Any) -> list[bytes]:
    """The elements of a BYTES buffer, each preceded by its length (4 bytes, little-endian).

    Raises InvalidArgument when the buffer ends inside an element.
    """
    view = memoryview(raw).cast("B")
    at, end = 0, len(view)
    out = []
    while at < end:
        if end - at < 4:
            raise InvalidArgument(f"incomplete string length indicator: 4 bytes expected, {end - at} left")
        (n,) = struct.unpack_from("<I", view, at)
        at += 4
        if end - at < n:
            raise InvalidArgument(f"incomplete string data: {n} bytes expected, {end - at} left")
        out.append(bytes(view[at : at + n]))
        at += n
    return out


def join_bytes(elements: Any) -> bytes:
    """Elements (bytes or str) as a BYTES buffer, each preceded by its length (4 bytes, little-endian)."""
    parts = []
    for element in elements:
        if isinstance(element, str):
            element = element.encode()
        elif not isinstance(element, bytes):
            element = (
                bytes(element) if isinstance(element, (bytearray, memoryview)) else str(element).encode()
            )
        parts.append(struct.pack("<I", len(element)))
        parts.append(element)
    return b"".join(parts)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor as an array of its shape: a read-only view, or an object array for BYTES."""
    if tensor.dtype == datatypes.BYTES:
        array = np.empty(tensor.count(), dtype=object)
        array[:] = split_bytes(tensor)
        return array.reshape(tensor.shape)
    array = np.frombuffer(tensor, dtype=datatypes.NUMPY[tensor.dtype])  # type: ignore[call-overload]  # it is a buffer
    return array.reshape(tensor.shape)


def from_numpy(name: str, array: np.ndarray) -> Tensor:
    """An array as a tensor, without a copy when it is contiguous and little-endian already."""
    dtype = datatypes.from_numpy(array.dtype)
    if not dtype:
        raise InvalidArgument(
            f"tensor '{name}' has numpy dtype {array.dtype}, which has no protocol datatype"
        )
    shape = tuple(array.shape)
    if dtype == datatypes.BYTES:
        return Tensor(name, dtype, shape, join_bytes(array.reshape(-1).tolist()))
    array = np.ascontiguousarray(array, dtype=datatypes.NUMPY[dtype])
    # a plain byte view: numpy refuses the buffer protocol for bfloat16
    return Tensor(name, dtype, shape, array.reshape(-1).view(np.uint8))
