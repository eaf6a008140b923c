"""Turns the text of a traced tensor back into its elements.

Trace files hold tensors as text, elements separated by commas (docs/protocol/trace-extension.md): numbers in
their shortest exact form, BYTES elements in quotes with `\\` before `"` and `\\`. Text of this server is exact
for every datatype (all NaNs come back as the same NaN); a Triton server's text loses some datatypes' values.
"""

from __future__ import annotations

import math
import re
from base64 import b64decode
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.request.numpy_tensor import split_bytes

_ELEMENT = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def strings(data: str) -> list[str]:
    """The elements of a BYTES tensor's text."""
    return [_ESCAPED.sub(r"\1", found) for found in _ELEMENT.findall(data)]


def shape_of(tensor: dict[str, Any], key: str = "shape") -> tuple[int, ...]:
    """The shape; () for a scalar and where the file has none. Raises ValueError."""
    return tuple(int(d) for d in str(tensor.get(key, "")).split(",") if d)


def flat(tensor: dict[str, Any]) -> np.ndarray:
    """The elements in row-major order, in the tensor's datatype; BYTES as bytes objects.

    Raises ValueError when the text does not give their values.
    """
    name = str(tensor.get("source_dtype", tensor.get("dtype", "")))
    number = datatypes.NUMBER.get(name, 0)
    if not number:
        raise ValueError(f"its datatype is '{name}'")
    data = str(tensor.get("data", ""))
    if number == datatypes.BYTES:
        if "base64" in tensor:
            elements = split_bytes(b64decode(str(tensor["base64"]), validate=True))
        else:
            elements = [text.encode() for text in strings(data)]
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array
    texts = data.split(",") if data else []
    dtype = datatypes.NUMPY[number]
    try:
        if dtype.kind == "b":
            return np.array([{"0": False, "1": True}[text] for text in texts], dtype=bool)
        if dtype.kind in "iu":
            return np.array([int(text) for text in texts], dtype=dtype)
        with np.errstate(over="ignore"):
            return np.array([float(text) for text in texts], dtype=np.float64).astype(dtype)
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"its text is not one of {name} elements: {data[:40]!r}") from None


def array_of(tensor: dict[str, Any]) -> np.ndarray:
    """The tensor as an array of its shape (one dimension where the file has none). Raises ValueError as flat()."""
    if "omitted" in tensor:
        raise ValueError(str(tensor["omitted"]))
    elements = flat(tensor)
    if "shape" not in tensor:
        return elements
    shape = shape_of(tensor)
    count = math.prod(shape)
    if count != len(elements):
        raise ValueError(f"its shape [{tensor['shape']}] has {count} elements, its text has {len(elements)}")
    return elements.reshape(shape)
