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
NARROW = 256  # columns: rows of fewer are sorted together, as a call for each would take longer than its work
BLOCK = 64 << 10  # elements that are sorted together


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


def largest_of_each(rows: np.ndarray, k: int) -> np.ndarray:
    """largest() of each row of a two-dimensional array; k is at most its columns."""
    count, columns = rows.shape
    indices = np.empty((count, k), np.int64)
    if columns > NARROW:
        for i, row in enumerate(rows):
            indices[i] = largest(row, k)
        return indices
    step = BLOCK // max(columns, 1)
    for at in range(0, count, step):
        ascending = np.argsort(rows[at : at + step, ::-1], axis=1, kind="stable")
        indices[at : at + step] = (columns - 1 - ascending)[:, ::-1][:, :k]
    return indices


def takes_long(tensor: Tensor, k: int) -> bool:
    """Whether classified() takes so long that a worker must do it: see docs/loop.md."""
    if tensor.nbytes > ON_LOOP_BYTES:
        return True
    rows = tensor.shape[0] if tensor.shape else 1  # of a model with batches; of others more than there are
    return min(k * rows, tensor.count()) > ON_LOOP_CLASSES


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
    indices = largest_of_each(rows, count)
    kind = values.dtype.kind
    chosen = np.take_along_axis(rows, indices, 1).astype({"f": "<f8", "i": "<i8", "u": "<u8"}[kind])
    shape = (rows.shape[0] if values.size else tensor.shape[0], count) if batching else (count,)
    text = class_strings(chosen.data, indices.data, kind, names)
    return Tensor(tensor.name, datatypes.BYTES, shape, text)
