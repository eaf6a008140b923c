"""What a module gives, found by running it: for files that do not say it.

Rules:
 1. It is run where a configuration has inputs and no outputs, with zeros (and empty texts), once where all sizes are known and
    twice where some are open: a result's sizes that differ then are open, too.
 2. In a batch the first size of every result must be the batch.
 3. Results that are no tensors (numbers, nothing) are left out.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_files import DATATYPES, Loaded

SIZES = (2, 3)  # what stands for sizes that are open
TYPES = {name: kind for kind, name in DATATYPES.items()}
Row = tuple[str, str, list[int]]  # (name, data_type, dims)


def outputs(loaded: Loaded, inputs: list[Row], batched: bool) -> list[Row]:
    """What it gives for these inputs. Raises ValueError."""
    fixed = not batched and all(-1 not in dims for _, _, dims in inputs)
    runs = [_run(loaded, inputs, batched, size) for size in (SIZES[:1] if fixed else SIZES)]
    found = []
    for place, (name, value) in enumerate(runs[0]):
        kind, shape = _described(value)
        if not kind:
            continue
        for size, run in zip(SIZES, runs, strict=False):
            if len(run) != len(runs[0]):
                raise ValueError("it gives another number of results for other sizes")
            _, other = _described(run[place][1])
            if len(other) != len(shape) or (batched and other[:1] != [size]):
                raise ValueError(
                    f"'{name}' has the shape {other} for {size} rows: it does not batch, so leave max_batch_size out and give "
                    "inputs their whole shape"
                    if batched
                    else f"'{name}' has the shapes {shape} and {other}"
                )
            shape = [a if a == b else -1 for a, b in zip(shape, other, strict=True)]
        found.append(
            (name, kind, [1] if kind == "TYPE_STRING" and batched else shape[1:] if batched else shape)
        )
    if not found:
        raise ValueError("it gives no tensor")
    return found


def _run(loaded: Loaded, inputs: list[Row], batched: bool, size: int) -> list[tuple[str, Any]]:
    values: list[Any] = []
    for _, kind, dims in inputs:
        shape = [size] * batched + [size if one < 0 else one for one in dims]
        if kind == "TYPE_STRING":
            values.append([""] * shape[0])
        else:
            values.append(torch.zeros(shape, dtype=TYPES[kind]))
    args, kwargs = loaded.arrange([name for name, _, _ in inputs])(values)
    with torch.inference_mode():
        return loaded.named(loaded.call(*args, **kwargs))


def _described(value: Any) -> tuple[str, list[int]]:
    """(data_type, shape) of a result; no datatype for what cannot be answered."""
    if isinstance(value, torch.Tensor) and value.dtype in DATATYPES:
        return DATATYPES[value.dtype], list(value.shape)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "TYPE_STRING", [len(value)]
    return "", []
