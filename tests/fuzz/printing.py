"""What compiled code prints of the elements it is given, against plain Python: classes, JSON and the text of traces.

A text that is longer than the room made for it is found by the sanitizers, and by the comparison, which misses its end.
"""

from __future__ import annotations

import json
import math
import re
import struct
from decimal import Decimal
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.codec.class_strings import class_strings
from neptrio.codec.json_tensor import tensor_json
from neptrio.codec.json_writer import dump
from neptrio.errors import InvalidArgument
from neptrio.observe.element_text import numbers_text, strings_text
from neptrio.request.infer_request import Tensor
from neptrio.request.numpy_tensor import join_bytes

JSON_REAL = re.compile(r"-?(\d+\.\d+|\d(\.\d+)?e-?\d+)", re.ASCII)
WIDE = {"f": np.dtype("<f8"), "i": np.dtype("<i8"), "u": np.dtype("<u8")}
MOST = 1 << 16  # bytes of elements


def printing(data: bytes) -> None:
    """1 byte says which datatype the rest has (of strings: 1 byte before each says how long it is), 1 how often it comes."""
    if len(data) < 2:
        return
    dtype, times = 1 + data[0] % len(datatypes.TABLE), 1 + data[1]
    rest = (data[2:] * times)[:MOST]
    if dtype == datatypes.BYTES:
        strings(rest)
        return
    size = datatypes.ITEM_SIZE[dtype]
    raw = rest[: len(rest) // size * size]
    if dtype == datatypes.NUMBER["BOOL"]:
        raw = bytes(value & 1 for value in raw)
    values = np.frombuffer(raw, datatypes.NUMPY[dtype])
    if dtype in (datatypes.FP16, datatypes.BF16):
        values = values.astype(np.float32)
    trace_of(raw, values, dtype)
    if values.dtype.kind != "b":
        classes_of(values)
    json_of(raw, values, dtype)


def classes_of(values: np.ndarray) -> None:
    """`value:index:label`, with a label for two of three."""
    with np.errstate(invalid="ignore"):  # a NaN that signals is one of these
        wide = values.astype(WIDE[values.dtype.kind])
    labels = [b"x" * (i % 3) * 7 for i in range(len(wide) * 2 // 3)]
    indices = np.arange(len(wide), dtype=np.int64)[::-1].copy()
    expected = []
    for value, index in zip(wide.tolist(), indices.tolist(), strict=True):
        shown = f"{value:.6f}" if isinstance(value, float) else str(value)
        label = b":" + labels[index] if index < len(labels) else b""
        expected.append(b"%b:%d%b" % (shown.encode(), index, label))
    text = bytes(class_strings(wide.data, indices.data, wide.dtype.kind, labels))
    assert text == b"".join(struct.pack("<I", len(one)) + one for one in expected)


def json_of(raw: bytes, values: np.ndarray, dtype: int) -> None:
    """The array of a response."""
    tensor = Tensor("x", dtype, (len(values),), raw)
    if dtype in (datatypes.FP16, datatypes.BF16):
        try:
            tensor_json(tensor)
        except InvalidArgument:
            return
        raise AssertionError("this datatype has no JSON form")
    text = tensor_json(tensor).decode()
    assert text[0] == "[" and text[-1] == "]"
    shown = text[1:-1].split(",") if len(values) else []
    assert len(shown) == len(values)
    for one, value in zip(shown, values.tolist(), strict=True):
        if isinstance(value, bool):
            assert one == str(value).lower()
        elif isinstance(value, int):
            assert one == str(value)
        else:
            assert real_is(one, value), (one, value)
            assert dump(value).decode() == one


def real_is(text: str, value: float) -> bool:
    """Whether a text has the shortest digits of a number, as Python has them, in the form of rapidjson."""
    if not math.isfinite(value):
        return text == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if JSON_REAL.fullmatch(text) is None or text.startswith("-") != (math.copysign(1, value) < 0):
        return False
    return len(text) <= 26 and Decimal(text) == Decimal(repr(value))


def trace_of(raw: bytes, values: np.ndarray, dtype: int) -> None:
    """The text of a traced tensor. Of several texts as short, numpy may take another one than we do."""
    shown = numbers_text(raw, dtype).decode().split(",") if len(values) else []
    assert len(shown) == len(values)
    kind: Any = datatypes.NUMPY[dtype] if dtype != datatypes.BF16 else np.dtype("<f4")
    for one, value in zip(shown, values.astype(kind), strict=True):
        if kind.kind != "f":
            assert one == str(int(value))
        elif not math.isfinite(value):
            assert one == str(float(value))
        else:
            size = abs(float(value))
            scientific = size != 0 and not 1e-4 <= size < 1e16
            form = np.format_float_scientific if scientific else np.format_float_positional
            same = form(value, trim="-", exp_digits=2) if scientific else form(value, trim="0")
            assert one == same or (np.array(one, kind) == value and len(one) == len(same)), (one, same)


def strings(rest: bytes) -> None:
    """Elements of BYTES: as JSON and in a trace."""
    elements = []
    while rest:
        elements.append(rest[1 : 1 + rest[0]])
        rest = rest[1 + rest[0] :]
    raw = join_bytes(elements)
    tensor = Tensor("x", datatypes.BYTES, (len(elements),), raw)
    text = tensor_json(tensor).decode("utf-8", "surrogateescape")
    assert [one.encode("utf-8", "surrogateescape") for one in json.loads(text)] == elements
    for element in elements:
        assert dump(element) == dump(element.decode("utf-8", "surrogateescape"))
    made, count, end, is_text = strings_text(raw)
    escaped = [
        e.decode(errors="backslashreplace").replace("\\", "\\\\").replace('"', '\\"') for e in elements
    ]
    assert json.loads(b'"' + made + b'"') == ",".join(f'"{one}"' for one in escaped)
    assert (count, end) == (len(elements), len(raw))
    assert is_text == all(readable(element) for element in elements)


def readable(element: bytes) -> bool:
    """Whether it is UTF-8."""
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True
