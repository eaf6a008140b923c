"""What the classification extension prints of every kind of number, against Python's own formatting."""

from __future__ import annotations

import math
import struct
import sys
from typing import Any

import numpy as np
import pytest

from neptrio.codec.class_strings import class_strings

LARGEST = sys.float_info.max
REALS = [
    0.0,
    -0.0,
    1.5,
    -1.5,
    5e-324,
    -5e-324,
    1e-7,
    0.9999995,
    1e35,
    1e308,
    LARGEST,
    -LARGEST,
    math.inf,
    -math.inf,
    math.nan,
]


def printed(values: Any, kind: str, labels: list[bytes] | None = None, indices: Any = None) -> list[bytes]:
    """The elements of what class_strings() makes of the values, which are numbered from 0 on."""
    array = np.array(values, {"f": np.float64, "i": np.int64, "u": np.uint64}[kind])
    places = np.arange(len(array), dtype=np.int64) if indices is None else np.array(indices, np.int64)
    text = bytes(class_strings(array.data, places.data, kind, labels or []))
    found = []
    while text:
        (length,) = struct.unpack_from("<I", text)
        assert len(text) >= 4 + length
        found.append(text[4 : 4 + length])
        text = text[4 + length :]
    return found


def expected(value: float) -> bytes:
    return b"nan" if math.isnan(value) else b"%.6f" % value


@pytest.mark.parametrize("short", [math.inf, -math.inf, math.nan, 0.0])
@pytest.mark.parametrize("long", [LARGEST, -LARGEST, 1e300, 3.4028234663852886e38])
def test_short_numbers_leave_room_for_long_ones(short: float, long: float) -> None:
    values = [short, *[long] * 300, short]
    assert printed(values, "f") == [b"%s:%d" % (expected(value), i) for i, value in enumerate(values)]


def test_every_kind_of_real_alone_and_beside_all_others() -> None:
    assert printed(REALS, "f") == [b"%s:%d" % (expected(value), i) for i, value in enumerate(REALS)]
    for value in REALS:
        assert printed([value], "f") == [expected(value) + b":0"]


def test_integers_indices_and_labels_of_any_length() -> None:
    signed = [-(2**63), 2**63 - 1, 0, -1, 99999999, 100000000]
    assert printed(signed, "i") == [b"%d:%d" % (value, i) for i, value in enumerate(signed)]
    unsigned = [2**64 - 1, 0, 7]
    assert printed(unsigned, "u") == [b"%d:%d" % (value, i) for i, value in enumerate(unsigned)]
    labels = [b"", b"x" * 10000, "\N{SNOWMAN}".encode()]
    assert printed([1, 2, 3], "i", labels, [2, 1, 0]) == [b"1:2:" + labels[2], b"2:1:" + labels[1], b"3:0:"]
    assert printed([-(2**63)], "i", [], [2**63 - 1]) == [b"-9223372036854775808:9223372036854775807"]
    assert printed([], "f") == []


def test_a_label_is_of_an_index_and_sizes_agree() -> None:
    with pytest.raises(ValueError, match="16 bytes of values for 1 indices"):
        class_strings(np.zeros(2).data, np.zeros(1, np.int64).data, "f", [])
