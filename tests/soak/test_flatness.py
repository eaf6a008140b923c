"""The soak test's judge of memory: it must see a slow leak and must not see noise."""

from __future__ import annotations

import random

from tests.support.memory import growth, peak

MB = 1 << 20


def series(leak: float, seed: int) -> list[int]:
    """Forty seconds of 80 MB that leak `leak` bytes a second, with noise of a megabyte."""
    dice = random.Random(seed)
    return [int(80 * MB + leak * i + dice.uniform(-MB, MB)) for i in range(40)]


def test_noise_does_not_grow() -> None:
    assert all(abs(growth(series(0, seed))) < MB for seed in range(50))


def test_a_leak_of_a_hundred_bytes_a_request_is_seen() -> None:
    for seed in range(50):
        assert 0.7 * 40 * 150_000 < growth(series(150_000, seed)) < 1.3 * 40 * 150_000


def test_a_spike_is_a_peak_and_no_growth() -> None:
    sizes = series(0, 1)
    sizes[-1] += 50 * MB
    assert growth(sizes) < MB and peak(sizes) > 45 * MB


def test_a_saw_does_not_grow() -> None:
    assert growth([80 * MB + (i % 5) * MB for i in range(40)]) == 0
