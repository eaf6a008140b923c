"""Graphs of TensorFlow, made without it: messages of Protocol Buffers, written byte by byte."""

from __future__ import annotations

import struct

FLOAT = 1  # tensorflow.DataType


def _number(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a message: a number, a text, or the bytes of another message."""
    if isinstance(value, int):
        return _number(number << 3) + _number(value % (1 << 64))
    content = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | 2) + _number(len(content)) + content


def _shape(*sizes: int) -> bytes:
    return b"".join(_field(2, _field(1, size)) for size in sizes)


def _node(name: str, operator: str, *inputs: str, **attributes: bytes) -> bytes:
    given = b"".join(_field(3, one) for one in inputs)
    told = b"".join(_field(5, _field(1, key) + _field(2, value)) for key, value in attributes.items())
    return _field(1, _field(1, name) + _field(2, operator) + given + told)


def doubling() -> bytes:
    """A GraphDef: y = 2 x, with rows of four."""
    kind = _field(6, FLOAT)
    two = _field(1, FLOAT) + _field(2, _shape(4)) + _field(4, struct.pack("<4f", 2, 2, 2, 2))
    return b"".join(
        (
            _node("x", "Placeholder", dtype=kind, shape=_field(7, _shape(-1, 4))),
            _node("two", "Const", dtype=kind, value=_field(8, two)),
            _node("y", "Mul", "x", "two", T=kind),
            _field(4, _field(1, 1000)),
        )
    )


def saved_doubling() -> bytes:
    """The same as the saved_model.pb of a SavedModel."""

    def tensor(name: str) -> bytes:
        return _field(1, name) + _field(
            2, _field(1, f"{name}:0") + _field(2, FLOAT) + _field(3, _shape(-1, 4))
        )

    signature = _field(1, tensor("x")) + _field(2, tensor("y")) + _field(3, "tensorflow/serving/predict")
    named = _field(1, "serving_default") + _field(2, signature)
    return _field(1, 1) + _field(2, _field(1, _field(4, "serve")) + _field(2, doubling()) + _field(5, named))
