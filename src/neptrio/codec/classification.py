"""The classification extension: the k largest values of an output as `value:index[:label]`.

Source: docs/protocol/features.md A3, docs/protocol/observed.md 4.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.errors import InvalidArgument
from neptrio.request.infer_request import Tensor
from neptrio.request.numpy_tensor import join_bytes, to_numpy

log = logging.getLogger("neptrio.classification")

UNSUPPORTED = {"BOOL", "FP16", "BF16", "BYTES"}


def labels(model: Any, output: str) -> list[str]:
    """The lines of the output's label_filename, read once per model; [] when it has none."""
    cache: dict[str, list[str]] | None = getattr(model, "labels", None)
    if cache is None:
        cache = model.labels = {}
    if output not in cache:
        cache[output] = _read_labels(model, output)
    return cache[output]


def _read_labels(model: Any, output: str) -> list[str]:
    for entry in model.config.output:
        if entry.name == output and entry.label_filename:
            path = model.context.model_dir / entry.label_filename
            try:
                return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                log.error("labels of output '%s' of model '%s' are not used: %s", output, model.name, error)
    return []


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest values of a one-dimensional array, largest first; ties by the lowest index."""
    n = len(values)
    ascending = np.argsort(values[::-1], kind="stable")
    return (n - 1 - ascending)[::-1][:k]


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
    names = labels(model, tensor.name)
    elements: list[str] = []
    for row in rows:
        for index in largest(row, k):
            value = row[index]
            text = f"{float(value):f}" if row.dtype.kind == "f" else str(int(value))
            label = f":{names[index]}" if index < len(names) else ""
            elements.append(f"{text}:{index}{label}")
    count = min(k, rows.shape[1])
    shape = (rows.shape[0] if values.size else tensor.shape[0], count) if batching else (count,)
    return Tensor(tensor.name, datatypes.BYTES, shape, join_bytes(elements))
