"""What the benchmark of front ends decides: who runs where, and how results are shown."""

from __future__ import annotations

import os

import pytest

from benchmarks.frontends import only_on, shares, shown


@pytest.mark.parametrize(
    "cores, own, generators",
    [
        ([0], [0], [None]),
        ([0, 1], [0, 1], [None]),
        ([0, 1, 2, 3], [0, 1, 2], [3]),
        (list(range(16)), list(range(12)), [12, 13, 14, 15]),
        (list(range(64)), list(range(56)), list(range(56, 64))),
    ],
)
def test_who_runs_where(cores: list[int], own: list[int], generators: list[int | None]) -> None:
    assert shares(cores) == (own, generators)


def test_the_cores_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    with pytest.raises(ZeroDivisionError), only_on([one]):
        assert os.sched_getaffinity(0) == {one}
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before


def test_how_results_are_shown() -> None:
    assert shown("one client's p50, gRPC", 61.6) == "62 us"
    assert shown("small tensors, gRPC", 12345.6) == "12,346/s"
    assert shown("1 MiB in and out, gRPC", 8.125e9) == "8.12 GB/s"
