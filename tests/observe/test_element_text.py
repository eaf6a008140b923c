"""The text of traced numbers: numpy's shortest digits, or a text that is the same number."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from neptrio import datatypes
from neptrio.observe.element_text import numbers_text
from neptrio.observe.trace_record import _short

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


@pytest.mark.parametrize("name", ["FP32", "FP64"])
def test_real_numbers_are_numpys(name: str) -> None:
    dice = random.Random(7)
    kind, size = ("<f4", 4) if name == "FP32" else ("<f8", 8)
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate(
            [
                np.array(EDGES).astype(kind),
                np.frombuffer(dice.randbytes(size * 5000), kind),
                np.array([dice.random() for _ in range(5000)], kind),
                np.array([dice.randrange(10**6) / 1000 for _ in range(5000)], kind),
            ]
        )
    texts = numbers_text(values.tobytes(), datatypes.NUMBER[name]).split(",")
    assert len(texts) == len(values)
    for text, value in zip(texts, values, strict=True):
        if text != _short(value):  # of several texts with as few digits numpy may take another one
            assert np.array(text, kind) == value and len(text) <= len(_short(value)) + 1, value
    assert texts[: len(EDGES)] == [_short(value) for value in values[: len(EDGES)]]


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
    assert numbers_text(raw, datatypes.NUMBER[name]) == ",".join(map(str, values))
    assert numbers_text(b"", datatypes.NUMBER[name]) == ""


def test_other_datatypes_are_refused() -> None:
    for name in ("FP16", "BF16", "BYTES"):
        with pytest.raises(ValueError, match="no text here"):
            numbers_text(b"\0\0\0\0", datatypes.NUMBER[name])
