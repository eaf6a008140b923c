"""Marks are found at the addresses that they were given to, and at no others."""

from __future__ import annotations

import random

import pytest

from neptrio.loop.address_marks import AddressMarks

MIB = 1 << 20
ENDS = (0, 16, MIB - 16, MIB, (1 << 47) - 16, (1 << 64) - 16)


@pytest.mark.parametrize("address", ENDS)
def test_a_mark_is_at_its_address_alone(address: int) -> None:
    marks = AddressMarks()
    assert marks.mark(address, 1) == 0
    assert marks.mark(address, 2) == 1
    assert marks.mark(address, 1) == marks.marks_of(address) == 3
    others = [address + far for far in (-MIB, -64, -16, 16, 64, MIB) if 0 <= address + far < 1 << 64]
    assert not any(marks.marks_of(other) for other in others)


def test_two_bits_are_all_that_is_kept() -> None:
    marks = AddressMarks()
    marks.mark(32, 0xFF)
    assert [marks.marks_of(address) for address in (16, 32, 48)] == [0, 3, 0]


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_regions(seed: int) -> None:
    """The table grows, whatever is in it."""
    chance = random.Random(seed)
    marks, expected = AddressMarks(), dict[int, int]()
    addresses = [chance.randrange(1 << 31 if seed else 1 << 48) * 16 for _ in range(5_000)]
    for _ in range(20_000):
        address, mark = chance.choice(addresses), chance.randrange(1, 4)
        assert marks.mark(address, mark) == expected.get(address, 0)
        expected[address] = expected.get(address, 0) | mark
    assert all(marks.marks_of(address) == expected.get(address, 0) for address in addresses)
