"""Histograms: the promised relative error, exact merging, sliding windows with an explicit clock."""

from __future__ import annotations

import math
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neptrio.observe.histogram import LARGEST, RELATIVE_ERROR, Histogram, SlidingHistogram
from tests.support.memory import anonymous
from tests.support.sanitizer import no_memory_figures


def nearest_rank(values: list[int], percent: float) -> int:
    rank = max(1, math.ceil(percent / 100 * len(values) - 1e-9 * len(values)))
    return sorted(values)[min(rank, len(values)) - 1]


@given(
    st.lists(st.integers(1, LARGEST) | st.integers(1, 5000), min_size=1, max_size=200),
    st.sampled_from([0, 1, 25, 50, 90, 99, 99.9, 100]),
)
def test_percentiles_are_within_the_relative_error(values: list[int], percent: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    exact = nearest_rank(values, percent)
    assert abs(histogram.percentile(percent) - exact) <= exact * RELATIVE_ERROR
    assert (histogram.count, histogram.sum, histogram.max) == (len(values), sum(values), max(values))


def test_small_values_are_exact() -> None:
    for value in range(1, 65):
        histogram = Histogram()
        histogram.record(value)
        histogram.record(10**6)
        assert histogram.percentile(50) == value


def test_powers_of_two_are_exact_bounds() -> None:
    histogram = Histogram()
    for exponent in range(43):
        for value in (2**exponent, 2**exponent + 1):
            histogram.record(value)
    bounds = [2**exponent for exponent in range(42)]
    # each bound takes itself and the two values of every smaller exponent; 2**0 + 1 == 2**1
    assert histogram.cumulative(bounds) == [1, 3, *(2 * e + 1 for e in range(2, 42))]


def test_outliers_are_kept_in_the_last_bucket() -> None:
    histogram = Histogram()
    histogram.record(-5)
    histogram.record(2**60)
    assert histogram.count == 2 and histogram.sum == 2**60
    assert histogram.percentile(50) <= 1 and histogram.percentile(100) == 2**60


def test_merging_and_transport_lose_nothing() -> None:
    values = [random.Random(3).randrange(1, 10**9) for _ in range(2000)]
    whole, parts = Histogram(), [Histogram() for _ in range(4)]
    for i, value in enumerate(values):
        whole.record(value)
        parts[i % 4].record(value)
    merged = Histogram()
    for part in parts:
        merged.merge(part)
    assert merged.buckets() == whole.buckets() and merged.sum == whole.sum and merged.max == whole.max
    again = Histogram.from_buckets(whole.buckets())
    assert again.buckets() == whole.buckets() and again.percentile(50) == whole.percentile(50)
    with pytest.raises(ValueError, match="upper bound"):
        Histogram.from_buckets([(1001, 1)])


def test_percentiles_outside_0_to_100_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        Histogram().percentile(101)
    assert Histogram().percentile(99) == 0


def test_a_window_forgets_in_slices() -> None:
    window = SlidingHistogram(50, 5)
    for now in range(100, 150, 10):
        window.record(now, now)
    assert window.window(149).count == 5
    assert window.window(150).count == 4, "the oldest slice is gone"
    assert window.window(1_000_000).count == 0
    assert window.count == 5 and window.sum == 100 + 110 + 120 + 130 + 140
    window.record(7, 1_000_001)
    assert window.window(1_000_002).percentile(50) == 7


@no_memory_figures
def test_a_histogram_has_the_memory_of_what_it_has_counted() -> None:
    """Thousands of models that are put away keep theirs: five each, of durations that are alike."""
    before = anonymous(os.getpid())
    kept = [Histogram() for _ in range(2000)]
    for histogram in kept:
        histogram.record(1000)
        histogram.record(1_000_000)
    assert (anonymous(os.getpid()) - before) / len(kept) < 4096
    assert [count for _, count in kept[-1].buckets()] == [1, 1]
