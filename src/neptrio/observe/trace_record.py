"""A traced tensor: a copy of its bytes, and what a trace file says of it.

The copy is made on the trio thread, while the tensor exists; its text is made on the trace writer's thread.
Source: docs/protocol/trace-file.md.
"""

from __future__ import annotations

from base64 import b64encode
from math import isfinite
from typing import Any

from neptrio import datatypes
from neptrio.observe.element_text import numbers_text
from neptrio.request.infer_request import InferRequest, Tensor


class Copied:
    """The bytes of a tensor at the moment it was traced, up to a limit."""

    __slots__ = ("activity", "dtype", "name", "nbytes", "raw", "response", "shape")

    def __init__(self, activity: str, tensor: Tensor, limit: int, response: int = 0) -> None:
        self.activity = activity
        self.response = response  # the number of a decoupled model's response
        self.name = tensor.name
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.nbytes = tensor.nbytes
        try:
            self.raw: bytes | None = bytes(memoryview(tensor)[:limit])
        except BufferError:  # in GPU memory: copying it to the host would stop the loop
            self.raw = None


def _is_text(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True


def parameters_of(request: InferRequest) -> dict[str, Any]:
    """A request's options, under their names in the protocol: what a replay needs beside the tensors."""
    made: dict[str, Any] = {}
    if request.sequence_id:
        made["sequence_id"] = request.sequence_id
        made["sequence_start"], made["sequence_end"] = request.sequence_start, request.sequence_end
    if request.priority:
        made["priority"] = request.priority
    if request.timeout_us:
        made["timeout"] = request.timeout_us
    return {**made, **(request.parameters or {})}


def tensor_document(copied: Copied) -> dict[str, Any]:
    """The tensor as JSON: name, data (comma-joined text), shape and dtype.

    Of a tensor larger than the limit there are the elements that fit: `shape` is their number, and
    `truncated_from` the tensor's shape. BF16 is written as FP32, which holds all its values. BYTES elements that
    are not UTF-8 cannot be recovered from their text: then `base64` holds the elements as on the wire.
    """
    import numpy as np

    from neptrio.request.numpy_tensor import split_bytes

    dtype = copied.dtype
    made: dict[str, Any] = {"name": copied.name, "data": "", "shape": ",".join(map(str, copied.shape)),
                            "dtype": datatypes.NAME[dtype]}  # fmt: skip
    raw = copied.raw
    if raw is None or copied.raw is None:
        made["omitted"] = "the tensor is in GPU memory"
        return made
    if dtype == datatypes.BYTES:
        elements: list[Any] = []
        at = 0
        while at + 4 <= len(raw) and at + 4 + (size := int.from_bytes(raw[at : at + 4], "little")) <= len(
            raw
        ):
            at += 4 + size
        elements = split_bytes(raw[:at])
        texts = [
            '"' + e.decode(errors="backslashreplace").replace("\\", "\\\\").replace('"', '\\"') + '"'
            for e in elements
        ]
        if any(not _is_text(e) for e in elements):
            made["base64"] = b64encode(raw[:at]).decode()
        made["data"] = ",".join(texts)
        count = len(texts)
    else:
        item = datatypes.ITEM_SIZE[dtype]
        count = len(raw) // item
        raw = raw[: count * item]
        if dtype == datatypes.FP16:
            array = np.frombuffer(raw, dtype=datatypes.NUMPY[dtype])
            made["data"] = ",".join(_short(value) for value in array)
        else:
            if dtype == datatypes.BF16:
                raw = np.frombuffer(raw, dtype=datatypes.NUMPY[dtype]).astype("<f4").tobytes()
                made["dtype"], made["source_dtype"] = "FP32", "BF16"
                dtype = datatypes.NUMBER["FP32"]
            made["data"] = numbers_text(raw, dtype)
    if copied.nbytes > len(copied.raw):
        made["truncated_from"] = made["shape"]
        made["shape"] = str(count)
    return made


def _short(value: Any) -> str:
    """The shortest decimal that is this value and no other of its type. str() would depend on numpy's version."""
    import numpy as np

    size = abs(float(value))
    if size == 0 or 1e-4 <= size < 1e16 or not isfinite(size):
        return np.format_float_positional(value, trim="0")
    return np.format_float_scientific(value, trim="-", exp_digits=2)
