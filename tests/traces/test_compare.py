"""Whether a replayed output is what it was."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from neptrio.traces.compare import compare

F32, F64, I64, U64 = np.float32, np.float64, np.int64, np.uint64


def text(was: Any, now: Any, dtype: Any = F32, **more: Any) -> str:
    found = compare("O", np.array(was, dtype), np.array(now, dtype), **more)
    return found.what if found else ""


@pytest.mark.parametrize("dtype", [np.float16, F32, F64, ml_dtypes.bfloat16])
def test_floats_bit_by_bit(dtype: Any) -> None:
    assert not text([1.5, np.nan, np.inf, -0.0], [1.5, np.nan, np.inf, -0.0], dtype)
    assert "1 of 1 elements differ, the most by 0 at [0]" in text([0.0], [-0.0], dtype)
    assert "1 of 1 elements differ" in text([np.nan], [1.0], dtype)


def test_where_and_how_much() -> None:
    was = np.arange(12, dtype=F32).reshape(3, 4)
    now = was.copy()
    now[1, 2] += 0.5
    now[2, 3] -= 3
    found = compare("O", was, now)
    assert found is not None and found.what == (
        "[1, 2]: expected 6.0, got 6.5; 2 of 12 elements differ, the most by 3 at [2, 3]"
    )
    assert (found.index, found.expected, found.got, found.differing, found.elements) == (
        (1, 2),
        "6.0",
        "6.5",
        2,
        12,
    )
    assert (found.largest, found.largest_at) == (3.0, (2, 3))


@pytest.mark.parametrize(
    ("was", "now", "rtol", "atol", "same"),
    [
        (100.0, 101.0, 0.0, 1.0, True), (100.0, 101.1, 0.0, 1.0, False),
        (100.0, 101.0, 0.01, 0.0, True), (101.0, 100.0, 0.0099, 0.0, False),  # relative to what was recorded
        (0.0, -0.0, 0.0, 1e-9, True), (np.inf, np.inf, 0.1, 0.1, True), (np.inf, 1.0, 0.5, 9.0, False),
        (1.0, np.inf, 0.5, 9.0, False), (np.nan, np.nan, 0.1, 0.1, True), (np.nan, 0.0, 9.0, 9.0, False),
        (np.inf, -np.inf, 9.0, 9.0, False),
    ],
)  # fmt: skip
def test_tolerances(was: float, now: float, rtol: float, atol: float, same: bool) -> None:
    assert (text([was], [now], F64, rtol=rtol, atol=atol) == "") is same


def test_integers() -> None:
    assert "expected 9223372036854775807, got 9223372036854775806" in text([2**63 - 1], [2**63 - 2], I64)
    found = compare("O", np.array([0], U64), np.array([2**64 - 1], U64))
    assert found is not None and found.largest == 2.0**64
    assert not text([10], [12], I64, atol=2) and text([10], [13], I64, atol=2)
    assert not text([-128, 127], [127, -128], np.int8, atol=255) and text([-128], [127], np.int8, atol=254)


def test_strings_and_bools_are_exact_whatever_the_tolerance() -> None:
    was, now = np.array([b"a", b"b"], object), np.array([b"a", b"c"], object)
    assert "expected b'b', got b'c'; 1 of 2" in text(was, now, object, rtol=9, atol=9)
    assert "[1]: expected True, got False" in text([True, True], [True, False], bool, atol=9)


def test_datatypes_and_shapes() -> None:
    found = compare("O", np.zeros(2, F32), np.zeros(2, ml_dtypes.bfloat16))
    assert found is not None and found.what == "expected datatype FP32, got BF16"
    assert text([[1, 2]], [1, 2]) == "expected shape [1, 2], got [2]"
    assert not text(np.zeros((0, 4)), np.zeros((0, 4)))


def test_the_recorded_part_of_an_output() -> None:
    now = np.arange(6, dtype=F32).reshape(2, 3)
    assert compare("O", np.arange(4, dtype=F32), now, full_shape=(2, 3)) is None
    assert compare("O", np.arange(4, dtype=F32), now, full_shape=(3, 2)) is not None
    found = compare("O", np.array([0, 1, 2, 9], F32), now, full_shape=(2, 3))
    assert found is not None and found.index == (1, 0) and found.elements == 4
