"""Attribution of memory growth to loads, with a fake measure."""

from __future__ import annotations

import mmap
import random
from fractions import Fraction
from types import SimpleNamespace

import pytest

from neptrio import process_parts
from neptrio.observe.memory import Load, MemoryProbe, anonymous_resident_bytes, pinned_pools, usage


def test_overlapping_loads_share_what_grew_meanwhile() -> None:
    now = 1000
    probe = MemoryProbe(lambda: now)
    a = probe.begin()
    now = 1100
    b = probe.begin()
    now = 1300
    assert probe.end(a) == 100 + 100
    now = 1350
    assert probe.end(b) == 100 + 50
    now = 9000
    c = probe.begin()
    now = 8000
    assert probe.end(c) == 0, "never negative"


def test_the_shares_of_overlapping_loads_follow_their_weights() -> None:
    now = 0
    probe = MemoryProbe(lambda: now)
    with probe.measure() as small, probe.measure() as large, probe.measure() as apart:
        small.weigh(1000)
        large.weigh(9000)
        now = 500_000
    assert (small.cpu_bytes, large.cpu_bytes, apart.cpu_bytes) == (50_000, 450_000, 0)


def test_shares_of_many_loads_that_come_and_go() -> None:
    """They are what dividing the growth among all loads each time would give, to the byte."""
    now = 0
    probe = MemoryProbe(lambda: now)
    chance = random.Random(1)
    loads: list[tuple[Load, list[Fraction]]] = []
    last = ended = 0

    def divide() -> None:
        nonlocal last
        weight = sum(load.weight for load, _ in loads)
        for load, share in loads:
            share[0] += (now - last) * (Fraction(load.weight, weight) if weight else Fraction(1, len(loads)))
        last = now

    for _ in range(800):
        now += chance.choice((0, 3, 1 << 12, chance.randrange(1 << 30), -chance.randrange(1 << 28)))
        what = chance.random()
        if not loads or what < 0.35:
            divide()
            loads.append((probe.begin(), [Fraction(0)]))
        elif what < 0.65:
            probe.weigh(chance.choice(loads)[0], chance.choice((0, 0, 1, chance.randrange(1 << 40))))
        else:
            divide()
            load, share = loads.pop(chance.randrange(len(loads)))
            found = probe.end(load)
            assert abs(found - max(0, share[0])) <= Fraction(1, 2) + Fraction(1, 1 << 20)
            ended += 1
    assert ended > 150


def test_what_unloads_free_meanwhile_does_not_count_for_loads() -> None:
    now = 10_000
    probe = MemoryProbe(lambda: now)
    load = probe.begin()
    leaves = probe.releasing(3000)
    now += 500
    now -= 2000  # a part of it is gone
    late = probe.begin()
    now -= 1000
    now += 700
    probe.released([leaves])
    assert (probe.end(load), probe.end(late)) == (600, 600), "together what was allocated"
    now -= 9000
    after = probe.begin()
    now += 40
    assert probe.end(after) == 40


def test_a_failed_load_leaves_the_probe() -> None:
    now = 0
    probe = MemoryProbe(lambda: now)
    try:
        with probe.measure():
            raise ValueError
    except ValueError:
        pass
    with probe.measure() as measured:
        now = 77
    assert measured.cpu_bytes == 77 and measured.seconds >= 0


def test_the_real_measure_sees_an_allocation() -> None:
    size = 32 << 20
    before = anonymous_resident_bytes()
    # of its own, not from the heap, which may hold as much that was freed and is resident still
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(bytes(size))
        assert anonymous_resident_bytes() - before > 24 << 20


def test_usage_lists_what_is_not_zero() -> None:
    assert usage(5, [("GPU", 1, 7), ("CPU_PINNED", 0, 0)]) == [
        {"type": "CPU", "id": 0, "byte_size": 5},
        {"type": "GPU", "id": 1, "byte_size": 7},
    ]
    assert usage(0, []) == []


def test_instances_on_one_device_are_one_row() -> None:
    assert usage(0, [("GPU", 0, 7), ("GPU", 0, 3)]) == [{"type": "GPU", "id": 0, "byte_size": 10}]


def test_pinned_pools_of_all_devices_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_parts, "gpus", {})
    assert pinned_pools(100) == (100, 0)
    for i in (1, 2):
        process_parts.gpus[i] = SimpleNamespace(pinned=SimpleNamespace(used=i))
    assert pinned_pools(100) == (200, 3)
