"""Converts tensors and responses to and from rows of a message, in the model's process.

A received tensor is a view of the message's memory or of shared memory; it becomes an array when
somebody asks for one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._request import InferenceResponse
from .._tensor import Tensor
from .._types import BYTES, join_strings, numpy_dtype, split_strings
from .wire import Lease, Wire, tensor_row


def _array(source: Any) -> np.ndarray:
    memory, dtype, shape = source
    if dtype == BYTES:
        raw = np.asarray(memory) if isinstance(memory, Lease) else memory
        array = np.empty(math.prod(shape), dtype=object)
        array[:] = split_strings(raw)
        return array.reshape(shape)
    flat = np.asarray(memory) if isinstance(memory, Lease) else np.frombuffer(memory, dtype=np.uint8)
    return flat.view(numpy_dtype(dtype)).reshape(shape)


def tensors_in(wire: Wire, rows: Any, blob: bytearray) -> list[Tensor]:
    """The tensors that a message's rows describe."""
    made = []
    for row in rows:
        shape = tuple(row["s"])
        made.append(
            Tensor._over(row["n"], row["d"], shape, (wire.memory(row, blob), row["d"], shape), _array, False)
        )
    return made


def tensor_out(tensor: Tensor, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The description of a tensor that is sent; adds its bytes to `rows`."""
    array = tensor.as_numpy()
    if tensor.triton_dtype() == BYTES:
        data: Any = np.frombuffer(join_strings(array), dtype=np.uint8)
    else:
        array = np.ascontiguousarray(array, dtype=numpy_dtype(tensor.triton_dtype()))
        data = array.reshape(-1).view(np.uint8)
    return tensor_row(tensor.name(), tensor.triton_dtype(), tensor.shape(), data, rows)


def response_out(response: InferenceResponse, names: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a response that is sent, with only the outputs in `names` (None: all)."""
    error = response.error()
    if error is not None:
        return {"e": [error.message(), error.code()], "p": response._parameters}
    outputs = [tensor_out(t, rows) for t in response.output_tensors() if names is None or t.name() in names]
    return {"o": outputs, "p": response._parameters}
