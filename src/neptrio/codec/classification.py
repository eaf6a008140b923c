"""The classification extension: the k largest values of an output as `value:index[:label]`.

Source: docs/protocol/features.md A3, docs/protocol/observed.md 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.codec.class_strings import class_strings
from neptrio.errors import InvalidArgument
from neptrio.request.infer_request import Tensor
from neptrio.request.numpy_tensor import to_numpy

UNSUPPORTED = {"BOOL", "FP16", "BF16", "BYTES"}
FEW = 8  # of so many values one is wanted at most: then it pays to find these before sorting
ON_LOOP_BYTES = 32 << 10  # sorting more takes over a quarter of a millisecond
ON_LOOP_CLASSES = 1024  # printing more takes as long


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest values of a one-dimensional array, largest first; ties by the lowest index.

    NaN counts as the largest.
    """
    n = len(values)
    if k < n // FEW:
        # sorting all of them takes ten times as long as finding those that can be among the k
        least = np.partition(values, n - k)[n - k]
        if least == least:
            found = np.flatnonzero(~(values < least))
            if len(found) < n // FEW:
                return found[largest(values[found], k)]
    ascending = np.argsort(values[::-1], kind="stable")
    return (n - 1 - ascending)[::-1][:k]


def takes_long(tensor: Tensor, k: int) -> bool:
    """Whether classified() takes so long that a worker must do it: see docs/loop.md."""
    return tensor.nbytes > ON_LOOP_BYTES or (k > ON_LOOP_CLASSES and tensor.count() > ON_LOOP_CLASSES)


def classified(model: Any, tensor: Tensor, k: int) -> Tensor:
    """`tensor` as a BYTES tensor of shape [batch, k], or [k] for a model without batching.

    k is clipped to the elements per batch entry. Raises InvalidArgument for datatypes without an
    order or without a printed form.
    """
    datatype = datatypes.NAME[tensor.dtype]
    if datatype in UNSUPPORTED:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{datatype}'")
    batching = model.max_batch_size > 0 and len(tensor.shape) > 0
    values = to_numpy(tensor)
    rows = values.reshape(tensor.shape[0], -1) if batching and values.size else values.reshape(1, -1)
    names = model.labels.get(tensor.name, [])
    count = min(k, rows.shape[1])
    indices = np.empty((rows.shape[0], count), np.int64)
    for i, row in enumerate(rows):
        indices[i] = largest(row, count)
    kind = values.dtype.kind
    chosen = np.take_along_axis(rows, indices, 1).astype({"f": "<f8", "i": "<i8", "u": "<u8"}[kind])
    shape = (rows.shape[0] if values.size else tensor.shape[0], count) if batching else (count,)
    text = class_strings(chosen.data, indices.data, kind, names)
    return Tensor(tensor.name, datatypes.BYTES, shape, text)
