"""An ONNX file's inputs and outputs, read from the file without its weights.

The problem: a check of a repository wants every model's signature, but a session would read
gigabytes and optimize the graph. The choice: the file is mapped and its protobuf fields are walked;
what is not needed (nodes, weights) is stepped over by its length and never touched.

The result looks like a session as far as model.py needs one. Field numbers: onnx.proto3, a public
and frozen format.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neptrio.errors import InvalidArgument

_ELEMENTS = {
    1: "float", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string",
    9: "bool", 10: "float16", 11: "double", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16",
}  # fmt: skip
_CONTAINERS = {4: "seq", 5: "map", 8: "sparse_tensor", 9: "optional"}
_EXTERNAL = 1  # TensorProto.DataLocation
_OVERRIDABLE = 4  # the IR version since which an input with an initializer is optional


class Damaged(Exception):
    """The bytes are no ONNX model."""


@dataclass(frozen=True)
class Tensor:
    """An input or output, as onnxruntime describes it: "tensor(float)", dims as int, name or None.

    `shape` is None where the file leaves the number of dims open; a session would infer it.
    """

    name: str
    type: str
    shape: list[Any] | None


@dataclass(frozen=True)
class Signature:
    """What a session would say of its model."""

    inputs: tuple[Tensor, ...]
    overridable: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    external: tuple[str, ...]  # files of weights beside the model

    @property
    def complete(self) -> bool:
        """The file says how many dims every input and output has."""
        return all(t.shape is not None for t in (*self.inputs, *self.overridable, *self.outputs))

    def get_inputs(self) -> tuple[Tensor, ...]:
        """The inputs that a request must give."""
        return self.inputs

    def get_overridable_initializers(self) -> tuple[Tensor, ...]:
        """The inputs that have a default."""
        return self.overridable

    def get_outputs(self) -> tuple[Tensor, ...]:
        """The outputs."""
        return self.outputs


def read(path: Path) -> Signature:
    """The signature of an ONNX file. Raises InvalidArgument when it is none."""
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise Damaged("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _model(data)
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read: {error.strerror}") from None
    except (Damaged, IndexError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: not an ONNX model, or a damaged one: {error}") from None


def _varint(data: Any, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= end or shift > 63:
            raise Damaged(f"a number is cut off at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _fields(data: Any, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, value, start, end) of each field: `value` of a number, start and end of bytes."""
    while at < end:
        key, at = _varint(data, at, end)
        number, wire = key >> 3, key & 7
        if not number:
            raise Damaged(f"field number 0 at byte {at}")
        value, start = 0, at
        if wire == 0:
            value, at = _varint(data, at, end)
        elif wire == 1:
            at += 8
        elif wire == 2:
            length, start = _varint(data, at, end)
            at = start + length
        elif wire == 5:
            at += 4
        else:
            raise Damaged(f"wire type {wire} at byte {at}")
        if at > end:
            raise Damaged(f"a field reaches to byte {at}, beyond the end at {end}")
        yield number, value, start, at


def _text(data: Any, start: int, end: int) -> str:
    return bytes(data[start:end]).decode()


def _model(data: Any) -> Signature:
    graph = None
    ir_version = 0
    for number, value, start, end in _fields(data, 0, len(data)):
        if number == 1:
            ir_version = value
        elif number == 7:
            graph = (start, end)
    if graph is None:
        raise Damaged("it has no graph")
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    initialized: set[str] = set()
    external: dict[str, None] = {}
    for number, _, start, end in _fields(data, *graph):
        if number == 11:
            inputs.append(_value_info(data, start, end))
        elif number == 12:
            outputs.append(_value_info(data, start, end))
        elif number == 5:
            name, file = _initializer(data, start, end)
            initialized.add(name)
            if file:
                external[file] = None
    return Signature(
        tuple(t for t in inputs if t.name not in initialized),
        tuple(t for t in inputs if t.name in initialized and ir_version >= _OVERRIDABLE),
        tuple(outputs),
        tuple(external),
    )


def _initializer(data: Any, start: int, end: int) -> tuple[str, str]:
    """(name, file of its data or "")."""
    name = file = ""
    location = 0
    for number, value, a, b in _fields(data, start, end):
        if number == 8:
            name = _text(data, a, b)
        elif number == 14:
            location = value
        elif number == 13:
            entry = {n: _text(data, x, y) for n, _, x, y in _fields(data, a, b)}
            if entry.get(1) == "location":
                file = entry.get(2, "")
    return name, file if location == _EXTERNAL else ""


def _value_info(data: Any, start: int, end: int) -> Tensor:
    name = ""
    kind: str = "undefined"
    shape: list[Any] | None = None
    for number, _, a, b in _fields(data, start, end):
        if number == 1:
            name = _text(data, a, b)
        elif number == 2:
            for choice, _, c, d in _fields(data, a, b):
                if choice == 1:
                    kind, shape = _tensor_type(data, c, d)
                elif choice in _CONTAINERS:
                    kind = f"{_CONTAINERS[choice]}(...)"
    return Tensor(name, kind, shape)


def _tensor_type(data: Any, start: int, end: int) -> tuple[str, list[Any] | None]:
    element = 0
    shape: list[Any] | None = None
    for number, value, a, b in _fields(data, start, end):
        if number == 1:
            element = value
        elif number == 2:
            shape = [_dimension(data, c, d) for dim, _, c, d in _fields(data, a, b) if dim == 1]
    return f"tensor({_ELEMENTS.get(element, element)})", shape


def _dimension(data: Any, start: int, end: int) -> Any:
    for number, value, a, b in _fields(data, start, end):
        if number == 1:
            return value
        if number == 2:
            return _text(data, a, b)
    return None
