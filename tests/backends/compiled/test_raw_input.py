"""What a raw input of a backend's request is, by the model's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from neptrio.backends.compiled.raw_input import CannotBeDeduced, deduced


def config(kind: str, *dims: int, most: int = 0, count: int = 1) -> dict[str, Any]:
    row = {"name": "X", "data_type": f"TYPE_{kind}", "dims": list(dims)}
    return {"name": "m", "max_batch_size": most, "input": [row] * count}


@pytest.mark.parametrize(
    ("given", "size", "found"),
    [
        (config("FP32", 2, -1), 24, ("X", 11, [2, 3])),
        (config("FP32", 2, 3, most=4), 24, ("X", 11, [1, 2, 3])),
        (config("UINT8", 0, -1), 0, ("X", 2, [0, 0])),
        (config("STRING", 1, most=4), 7, ("X", 13, [1, 1])),
    ],
)
def test_deduced(given: dict[str, Any], size: int, found: tuple[str, int, list[int]]) -> None:
    assert deduced(given, size) == found


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (config("FP32", 2, -1), 20),
        (config("FP32", 2), 16),
        (config("FP32", -1, -1), 24),
        (config("FP32", 1, count=2), 4),
        (config("STRING", -1), 4),
        (config("UINT8", 0, -1), 1),
    ],
)
def test_what_is_left_open_is_refused(given: dict[str, Any], size: int) -> None:
    with pytest.raises(CannotBeDeduced):
        deduced(given, size)
