"""Makes inputs for a model out of its metadata: what can be made up without knowing what the model is about.

Floating point numbers are random in [0, 1). Integers are 0, which is a valid index whatever is indexed; booleans are
false; strings are "0", which reads as text and as a number. Where the cost of a request depends on its values, a file
of real inputs (--input-data) is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.errors import InvalidArgument

Row = dict[str, np.ndarray]


def rows_of(path: Path, metadata: dict[str, Any], batching: bool) -> list[Row]:
    """The rows of a file in the form of Triton's perf_analyzer: `{"data": [{NAME: [...]}, ...]}`.

    A value may be `{"content": [...], "shape": [...]}`; otherwise its shape is the model's, without the batch
    dimension, or that of the nested list. Raises InvalidArgument, OSError.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["data"]
        if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument(
            f'{path}: expected {{"data": [{{"INPUT": [...]}}, ...]}} with at least one entry'
        ) from None
    tensors = {tensor["name"]: tensor for tensor in metadata["inputs"]}
    return [
        {name: _value(path, number, tensors, name, value, batching) for name, value in entry.items()}
        for number, entry in enumerate(entries)
    ]


def _value(
    path: Path, number: int, tensors: dict[str, Any], name: str, value: Any, batching: bool
) -> np.ndarray:
    where = f"{path}: entry {number}, input '{name}'"
    if name not in tensors:
        raise InvalidArgument(f"{where}: the model has {', '.join(map(repr, tensors))}")
    shape = None
    if isinstance(value, dict):
        if "content" not in value:
            raise InvalidArgument(f'{where}: expected a list or {{"content": [...], "shape": [...]}}')
        shape, value = value.get("shape"), value["content"]
    kind = datatypes.NUMBER[tensors[name]["datatype"]]
    try:
        if kind == datatypes.BYTES:
            array = np.array([str(element).encode() for element in np.ravel(value)], dtype=object)
            array = array.reshape(np.shape(value))
        else:
            array = np.array(value, dtype=datatypes.NUMPY[kind])
        wanted = [int(d) for d in tensors[name]["shape"][1 if batching else 0 :]]
        if shape is None and all(d >= 0 for d in wanted):
            shape = wanted
        return array if shape is None else array.reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"{where}: {error}") from None


class Inputs:
    """Makes the inputs of requests to one model.

    `metadata` and `config` are the server's JSON answers; `shapes` are dims by input name, without the batch
    dimension; `rows` are from rows_of(). Raises InvalidArgument when something cannot be made up.
    """

    def __init__(
        self,
        metadata: dict[str, Any],
        config: dict[str, Any],
        shapes: dict[str, tuple[int, ...]],
        rows: list[Row],
    ) -> None:
        self.batching = int(config.get("max_batch_size", 0)) > 0
        self.left_out: list[str] = []
        self._rows = rows
        self._tensors: list[tuple[str, int, tuple[int, ...], bool]] = []
        known = {tensor["name"] for tensor in metadata["inputs"]}
        if unknown := [name for name in shapes if name not in known]:
            raise InvalidArgument(
                f"--shape: '{unknown[0]}' is no input of the model, which has {', '.join(map(repr, sorted(known)))}"
            )
        flags = {tensor["name"]: tensor for tensor in config.get("input", [])}
        for tensor in metadata["inputs"]:
            name = tensor["name"]
            asked = flags.get(name, {})
            given = [name in row for row in rows]
            if any(given) and not all(given):
                raise InvalidArgument(f"--input-data: input '{name}' is in some entries and not in others")
            if asked.get("optional") and not any(given) and name not in shapes:
                self.left_out.append(name)
                continue
            if not any(given) and asked.get("is_shape_tensor"):
                raise InvalidArgument(
                    f"the values of input '{name}' are a shape, which cannot be made up: give them with --input-data"
                )
            dims = tuple(int(d) for d in tensor["shape"][1 if self.batching else 0 :])
            if not any(given):
                dims = _dims(name, dims, shapes.get(name))
            self._tensors.append((name, datatypes.NUMBER[tensor["datatype"]], dims, any(given)))

    def make(self, batch: int) -> Row:
        """Inputs of a request with `batch` rows (of a model without batches: 1). The same ones every time."""
        random = np.random.default_rng(1)
        made: Row = {}
        for name, kind, dims, given in self._tensors:
            if given:
                chosen = [self._rows[i % len(self._rows)][name] for i in range(batch)]
                if len({array.shape for array in chosen}) > 1:
                    raise InvalidArgument(
                        f"--input-data: input '{name}' has rows of different shapes, which cannot be one request of "
                        f"{batch}: use --batch-sizes 1"
                    )
                made[name] = np.stack(chosen) if self.batching else chosen[0]
                continue
            shape = (batch, *dims) if self.batching else dims
            if kind == datatypes.BYTES:
                made[name] = np.full(shape, b"0", dtype=object)
            elif datatypes.NAME[kind] in ("FP16", "FP32", "FP64", "BF16"):
                made[name] = random.random(shape).astype(datatypes.NUMPY[kind])
            else:
                made[name] = np.zeros(shape, datatypes.NUMPY[kind])
        return made


def _dims(name: str, dims: tuple[int, ...], chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    shown = ",".join(map(str, dims))
    if chosen is None:
        if any(d < 0 for d in dims):
            raise InvalidArgument(
                f"input '{name}' has variable dims [{shown}]: choose them with --shape {name}:"
                + ",".join(str(d) if d >= 0 else "N" for d in dims)
            )
        return dims
    if len(chosen) != len(dims) or any(d not in (-1, c) for d, c in zip(dims, chosen, strict=True)):
        raise InvalidArgument(
            f"--shape {name}:{','.join(map(str, chosen))} does not fit the model's [{shown}]"
        )
    return chosen
