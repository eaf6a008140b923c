"""Senders of ensembles' steps wait for what others keep, and never all of them for one another (scheduling.waits)."""

from __future__ import annotations

import random

import pytest

from neptrio.scheduling.waits import Wait, Waits


def wait(keeps: str, needs: str) -> Wait:
    return Wait(*(frozenset(("model", name) for name in names) for names in (keeps, needs)))


def test_the_wait_that_would_close_a_circle_does_not_begin() -> None:
    waits = Waits()
    first, second, third = wait("a", "b"), wait("b", "c"), wait("c", "a")
    assert not waits.begin(wait("a", "a"))
    assert waits.begin(first) and waits.begin(second) and waits.begin(first)
    assert not waits.begin(third)
    assert waits.begin(wait("d", "a")), "it waits for those, and they not for it"
    waits.end(first)
    assert not waits.begin(third), "another request is still at that step"
    waits.end(first)
    assert waits.begin(third)
    assert not waits.begin(first)


@pytest.mark.parametrize("seed", range(4))
def test_one_of_those_that_wait_can_always_go_on(seed: int) -> None:
    chance = random.Random(seed)
    waits, under_way, refused = Waits(), list[Wait](), 0
    steps = [
        wait("".join(chance.sample("abcdef", 2)), "".join(chance.sample("abcdef", 2))) for _ in range(12)
    ]
    for _ in range(400):
        if under_way and chance.random() < 0.5:
            waits.end(under_way.pop(chance.randrange(len(under_way))))
            continue
        step = chance.choice(steps)
        if not waits.begin(step):
            refused += 1
            continue
        under_way.append(step)
        left = list(under_way)
        while left:
            kept = frozenset().union(*(one.keeps for one in left))
            go_on = [one for one in left if one.needs.isdisjoint(kept)]
            assert go_on, "all of them wait for one another"
            left = [one for one in left if one not in go_on]
    assert refused
