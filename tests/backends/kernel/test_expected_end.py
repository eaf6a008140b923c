"""When a waiting thread asks for the end of a run on a GPU, with a clock of the test's own."""

from __future__ import annotations

import random

import pytest

from neptrio.backends.kernel.expected_end import LONG, asleep, expectation, pause

SLEEP_ENDS_LATE = 60_000  # ns, what the system adds to a sleep


def awaited(takes: int, expected: float) -> tuple[int, float]:
    """(when the end of a run of `takes` ns is noticed, what is expected after it)."""
    now, slept = 0, False
    while now < takes:
        slept = asleep(now, int(expected))
        nap = pause(now, int(expected))
        now += nap + SLEEP_ENDS_LATE if nap else 1_000
    return now, expectation(expected, now, slept)


@pytest.mark.parametrize("before", [300_000, 5_000_000, 100_000_000])
def test_after_a_slow_run_quick_ones_are_soon_asked_for_in_time(before: int) -> None:
    expected, runs = float(before), 0
    while expected > LONG:
        _, expected = awaited(30_000, expected)
        runs += 1
    assert runs <= 8
    assert awaited(30_000, expected)[0] == 30_000


@pytest.mark.parametrize("takes", [40_000, 300_000, 1_000_000, 20_000_000])
def test_what_always_takes_the_same_is_noticed_at_its_end(takes: int) -> None:
    expected = float(takes)
    for _ in range(200):
        noticed, expected = awaited(takes, expected)
        assert noticed - takes <= 1_000


@pytest.mark.parametrize("takes", [300_000, 1_000_000, 20_000_000])
def test_what_became_quicker_or_slower_is_learned(takes: int) -> None:
    for before in (takes / 50, takes / 2, takes * 1.5, takes * 50):
        expected = before
        for _ in range(60):
            noticed, expected = awaited(takes, expected)
        assert noticed - takes <= 1_000, before


@pytest.mark.parametrize("takes", [220_000, 240_000, 300_000, 400_000])
def test_runs_that_vary_are_noticed_soon_behind_their_end(takes: int) -> None:
    chance, expected, late, runs = random.Random(1), float(takes), 0, 4_000
    for _ in range(runs):
        this = int(takes * chance.uniform(0.9, 1.1))
        noticed, expected = awaited(this, expected)
        late += noticed - this
    assert late / runs <= 13_000


def test_long_runs_are_slept_through_until_shortly_before_their_end() -> None:
    assert pause(0, LONG) == 0
    assert pause(0, 1_000_000) == 750_000
    assert pause(750_000, 1_000_000) == 0
    assert pause(1_249_000, 1_000_000) == 0
    assert pause(1_251_000, 1_000_000) == 1_251_000 // 16
    assert pause(0, 100_000_000) == 2_000_000, "it may be given up meanwhile, or there is another batch"
