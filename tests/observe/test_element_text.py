"""The text of traced tensors' elements: numpy's shortest digits, and strings as Python would escape them twice."""

from __future__ import annotations

import json
import random
import struct
from math import isfinite
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neptrio import datatypes
from neptrio.observe.element_text import numbers_text, strings_text
from neptrio.request.numpy_tensor import join_bytes

EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    1e-4,
    9.9e-5,
    1e16,
    9.9e15,
    123456789.0,
    1e-45,
    3.4e38,
    0.1,
    1 / 3,
    5e-324,
    1.7e308,
]
EDGES += [float("inf"), float("-inf"), float("nan"), 1e10, 1e15, 16777216.0, 0.001, 1e22, 100.0]


def _short(value: Any) -> str:
    """The shortest decimal that is this value and no other of its type. str() would depend on numpy's version."""
    size = abs(float(value))
    if size == 0 or 1e-4 <= size < 1e16 or not isfinite(size):
        return np.format_float_positional(value, trim="0")
    return np.format_float_scientific(value, trim="-", exp_digits=2)


@pytest.mark.parametrize(("name", "kind"), [("FP16", "<f2"), ("FP32", "<f4"), ("FP64", "<f8")])
def test_real_numbers_are_numpys(name: str, kind: str) -> None:
    dice = random.Random(7)
    size = np.dtype(kind).itemsize
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate(
            [
                np.array(EDGES).astype(kind),
                np.frombuffer(dice.randbytes(size * 5000), kind),
                np.array([dice.random() for _ in range(5000)], kind),
                np.array([dice.randrange(10**6) / 1000 for _ in range(5000)], kind),
                np.array([2.0**i for i in range(-1080, 1024)]).astype(kind),
            ]
        )
    texts = numbers_text(values.tobytes(), datatypes.NUMBER[name]).decode().split(",")
    assert len(texts) == len(values)
    for text, value in zip(texts, values, strict=True):
        if text != _short(value):  # of several texts with as few digits numpy may take another one
            assert np.array(text, kind) == value and len(text) == len(_short(value)), value
    assert texts[: len(EDGES)] == [_short(value) for value in values[: len(EDGES)]]


@pytest.mark.slow
def test_all_halves() -> None:
    values = np.arange(1 << 16, dtype="<u2")
    halves = numbers_text(values.tobytes(), datatypes.NUMBER["FP16"]).decode().split(",")
    for text, value in zip(halves, values.view("<f2"), strict=True):
        shown = _short(value)
        assert text == shown or (np.float16(text) == value and len(text) == len(shown)), value
    wide = numbers_text(values.tobytes(), datatypes.NUMBER["BF16"])
    assert wide == numbers_text((values.astype("<u4") << 16).tobytes(), datatypes.NUMBER["FP32"])


@pytest.mark.parametrize(
    ("name", "letter"),
    [
        ("INT8", "b"), ("INT16", "h"), ("INT32", "i"), ("INT64", "q"),
        ("UINT8", "B"), ("UINT16", "H"), ("UINT32", "I"), ("UINT64", "Q"), ("BOOL", "B"),
    ],
)  # fmt: skip
def test_integers(name: str, letter: str) -> None:
    bits = 8 * struct.calcsize(letter)
    values = [0, 1]
    if name != "BOOL":
        values += [2**bits - 1, 5] if letter.isupper() else [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, -7]
    raw = struct.pack(f"<{len(values)}{letter}", *values)
    assert numbers_text(raw, datatypes.NUMBER[name]).decode() == ",".join(map(str, values))
    assert numbers_text(b"", datatypes.NUMBER[name]) == b""


def test_other_datatypes_are_refused() -> None:
    for dtype in (0, datatypes.NUMBER["BYTES"], 99):
        with pytest.raises(ValueError, match="no numbers"):
            numbers_text(b"\0\0\0\0", dtype)


def test_more_than_one_portion() -> None:
    values = np.arange(-5000, 5000, dtype=np.int32)
    assert numbers_text(values.tobytes(), datatypes.NUMBER["INT32"]).decode() == ",".join(map(str, values))
    elements = [b"x" * n for n in (100_000, 0, 70_000, 1)] * 3
    text, count, end, is_text = strings_text(join_bytes(elements))
    assert text == b",".join(b'\\"' + e + b'\\"' for e in elements)
    assert (count, end, is_text) == (12, sum(map(len, elements)) + 48, True)


def _strings(elements: list[bytes]) -> str:
    """What Python makes of them, one element at a time."""
    texts = [e.decode(errors="backslashreplace").replace("\\", "\\\\").replace('"', '\\"') for e in elements]
    return ",".join(f'"{text}"' for text in texts)


@pytest.mark.slow
@given(
    st.lists(
        st.binary(max_size=9) | st.text('\\",aé€😀\n\x00\x7f\u2028', max_size=6).map(str.encode), max_size=5
    )
)
@example(
    [
        b"\xc0\x80",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf0\x80\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xf5\x80\x80\x80",
    ]
)
@example(["€".encode()[:2], "😀".encode()[:3], "é".encode()[:1] + b"a", b"\x80", b"\xff", b"\xfe\xff"])
@example(["\ud7ff\ue000\uffff\U00010000\U0010ffff\u0080\u07ff\u0800".encode()])
def test_strings_are_escaped_as_python_does(elements: list[bytes]) -> None:
    def is_text(element: bytes) -> bool:
        try:
            element.decode()
        except UnicodeDecodeError:
            return False
        return True

    raw = join_bytes(elements)
    text, count, end, all_text = strings_text(raw)
    assert json.loads(b'"' + text + b'"') == _strings(elements)
    assert (count, end, all_text) == (len(elements), len(raw), all(map(is_text, elements)))


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=4), st.integers(1, 8))
def test_a_string_that_is_cut_off_is_left_out(elements: list[bytes], less: int) -> None:
    raw = join_bytes(elements)[:-less]
    text, count, end, _ = strings_text(raw)
    assert raw[:end] == join_bytes(elements[:count]) and json.loads(b'"' + text + b'"') == _strings(
        elements[:count]
    )
    assert count == len(elements) or end + 4 + len(elements[count]) > len(raw)
