"""Shapes on both sides of a reshape."""

from __future__ import annotations

import pytest

from neptrio.request.reshape import Reshape


@pytest.mark.parametrize(
    ("before", "after", "batching", "shape", "expected"),
    [
        ([6], [2, 3], False, (6,), (2, 3)),
        ([6], [2, 3], True, (5, 6), (5, 2, 3)),
        ([1], [], True, (5, 1), (5,)),
        ([1], [], False, (1,), ()),
        ([-1, 6], [-1, 2, 3], False, (7, 6), (7, 2, 3)),
        ([-1, 4, -1], [-1, 2, 2, -1], True, (2, 7, 4, 9), (2, 7, 2, 2, 9)),
        ([6], [2, 3], True, (6,), None),
        ([], [1], True, (5,), (5, 1)),
    ],
)
def test_shapes(
    before: list[int],
    after: list[int],
    batching: bool,
    shape: tuple[int, ...],
    expected: tuple[int, ...] | None,
) -> None:
    assert Reshape(before, after, batching)(shape) == expected
