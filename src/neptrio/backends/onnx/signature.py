"""Reads an ONNX file's inputs and outputs without reading its weights.

The problem: a check of a repository needs every model's signature, but making a session would read gigabytes and
optimize the graph. The choice: the file is mapped into memory and its protobuf fields are walked; fields that are
not needed (nodes, weights) are skipped by their length and never read.

The result has those methods of a session that model.py uses. Field numbers: onnx.proto3, a public and stable format.
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
_OVERRIDABLE = 4  # since this IR version an input with an initializer is optional


class Damaged(Exception):
    """The bytes are not an ONNX model."""


@dataclass(frozen=True)
class Tensor:
    """An input or output in onnxruntime's form: a type such as "tensor(float)"; each dim an int, a name or None.

    `shape` is None where the file does not give the number of dims; a session would infer it.
    """

    name: str
    type: str
    shape: list[Any] | None


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model, with the methods of a session."""

    inputs: tuple[Tensor, ...]
    overridable: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    external: tuple[str, ...]  # files with weights beside the model file

    @property
    def complete(self) -> bool:
        """True when the file gives the number of dims of every input and output."""
        return all(t.shape is not None for t in (*self.inputs, *self.overridable, *self.outputs))

    def get_inputs(self) -> tuple[Tensor, ...]:
        """The inputs that every request must have."""
        return self.inputs

    def get_overridable_initializers(self) -> tuple[Tensor, ...]:
        """The inputs that have a default and may be left out."""
        return self.overridable

    def get_outputs(self) -> tuple[Tensor, ...]:
        """The outputs."""
        return self.outputs


def mistaken(path: Path) -> str:
    """What a file is that is called like an ONNX model and is another kind of file; "" when it may be one."""
    try:
        with path.open("rb") as file:
            head = file.read(24)
    except OSError:
        return ""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer and not the model: run `git lfs pull` where the repository was cloned"
    if head.startswith(b"PK"):
        return "an archive, as torch.save() makes it, and no ONNX model: torch.onnx.export() writes one"
    return ""


def read(path: Path) -> Signature:
    """Reads the signature of an ONNX file. Raises InvalidArgument when it is not one."""
    other = mistaken(path)
    if other:
        raise InvalidArgument(f"{path}: this is {other}")
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


def ranked(session: Any, path: Path) -> Any:
    """The inputs and outputs of a session, where it cannot tell a scalar from what has any number of dims: the file can."""
    try:
        given = read(path)
    except InvalidArgument:  # another form of file, which the session can read
        return session
    open_names = {t.name for t in (*given.inputs, *given.overridable, *given.outputs) if t.shape is None}

    def tensors(found: Any) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(t.name, t.type, None if not t.shape and t.name in open_names else t.shape) for t in found
        )

    return Signature(
        tensors(session.get_inputs()),
        tensors(session.get_overridable_initializers()),
        tensors(session.get_outputs()),
        given.external,
    )


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
    """(number, value, start, end) of each field: `value` for a number, `start` and `end` for bytes."""
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
    """(name, the external file of its data or "")."""
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
        if number == 1:  # int64: negative ones are written by tools that mean "any size"
            return value if value < 1 << 63 else None
        if number == 2:
            return _text(data, a, b)
    return None
