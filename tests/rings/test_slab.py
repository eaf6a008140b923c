"""The accounts of shared memory: nothing is handed out twice, everything comes back."""

from __future__ import annotations

import itertools
import random

import pytest

from neptrio.rings.slab import Block, Slab

FIRST, SIZE = 4096, 1 << 20


def test_low_addresses_are_used_again() -> None:
    slab = Slab(FIRST, SIZE)
    a = slab.block(1000)
    b = slab.block(1)
    assert (a.offset, b.offset) == (FIRST, FIRST + 1024)
    del a
    assert slab.block(500).offset == FIRST
    assert slab.used == 256


def test_a_block_that_does_not_fit() -> None:
    slab = Slab(FIRST, SIZE)
    assert slab.block(SIZE + 1) is None and slab.block(2**63) is None
    whole = slab.block(SIZE)
    assert slab.block(1) is None and slab.largest == 0
    del whole
    assert slab.largest == SIZE and slab.fragments == 1


def test_an_area_of_nothing() -> None:
    assert Slab(0, 0).block(0) is None


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_taking_and_giving(seed: int) -> None:
    """Blocks never overlap, lie in the area, and leave one gap when all are gone."""
    chance = random.Random(seed)
    slab = Slab(FIRST, SIZE)
    held: list[Block] = []
    for _ in range(3000):
        if held and chance.random() < 0.5:
            held.pop(chance.randrange(len(held)))
            continue
        block = slab.block(chance.choice([0, 1, 255, 256, 257, 5000, 60000]))
        if block is not None:
            held.append(block)
        spans = sorted((b.offset, b.offset + max(b.size, 1)) for b in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert not spans or (spans[0][0] >= FIRST and spans[-1][1] <= FIRST + SIZE)
    assert slab.peak >= slab.used > 0
    held.clear()
    del block
    assert slab.used == 0 and slab.fragments == 1 and slab.largest == SIZE
