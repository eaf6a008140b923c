"""Rings of descriptors and the memory they lie in: one producer, one consumer, nothing believed."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from neptrio.rings.ring import Broken, Ring, Segment, is_sealed
from triton_python_backend_utils._process.reserved import sealed_memory

ENTRIES = 8
SIZE = 8192


@pytest.fixture
def segment() -> Iterator[Segment]:
    yield Segment(sealed_memory("test", SIZE), SIZE)


def ends(segment: Segment) -> tuple[Ring, Ring]:
    """A producer and a consumer of the same ring."""
    return Ring(segment, 0, ENTRIES), Ring(segment, 0, ENTRIES)


def test_descriptors_come_out_in_the_order_they_went_in(segment: Segment) -> None:
    producer, consumer = ends(segment)
    assert consumer.pop() is None
    for round in range(50):  # several times around
        for i in range(5):
            assert producer.push(round, i, 1 << 63, 2**64 - 1, i)
        assert [consumer.pop() for _ in range(5)] == [(round, i, 1 << 63, 2**64 - 1, i) for i in range(5)]
        assert consumer.pop() is None


def test_a_full_ring_takes_no_more_and_loses_nothing(segment: Segment) -> None:
    producer, consumer = ends(segment)
    assert all(producer.push(i, 0, 0, 0, 0) for i in range(ENTRIES))
    assert not producer.push(99, 0, 0, 0, 0)
    assert consumer.pop()[0] == 0
    assert producer.push(ENTRIES, 0, 0, 0, 0)
    assert [consumer.pop()[0] for _ in range(ENTRIES)] == list(range(1, ENTRIES + 1))


@pytest.mark.parametrize("value", [ENTRIES + 1, 2**63, 2**64 - ENTRIES - 1])
def test_an_index_that_cannot_be_is_noticed(segment: Segment, value: int) -> None:
    producer, consumer = ends(segment)
    segment.write(0, struct.pack("<Q", value))  # what the producer published
    with pytest.raises(Broken):
        consumer.pop()
    segment.write(64, struct.pack("<Q", value))  # what the consumer published
    with pytest.raises(Broken):
        producer.push(1, 0, 0, 0, 0)


def test_an_end_believes_its_own_index_not_the_memory(segment: Segment) -> None:
    producer, consumer = ends(segment)
    producer.push(1, 0, 0, 0, 0)
    segment.write(0, struct.pack("<Q", 0))
    producer.push(2, 0, 0, 0, 0)
    assert [consumer.pop()[0], consumer.pop()[0]] == [1, 2]


def test_a_consumer_that_waits_is_woken(segment: Segment) -> None:
    producer, consumer = ends(segment)
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(consumer.wait(60 * 10**9)))
    thread.start()
    producer.push(7, 0, 0, 0, 0)
    thread.join(60)
    assert got == [True] and consumer.pop()[0] == 7
    assert not consumer.wait(1) and not consumer.asleep
    producer.push(8, 0, 0, 0, 0)
    assert consumer.wait(1) and consumer.wait(1, spin_ns=1000)


def test_nothing_is_lost_between_two_threads(segment: Segment) -> None:
    """Producer and consumer at full speed: every descriptor arrives once and in order."""
    producer, consumer = ends(segment)
    count = 20_000

    def produce() -> None:
        for i in range(count):
            while not producer.push(1, 0, i, 0, 0):
                os.sched_yield()

    thread = threading.Thread(target=produce)
    thread.start()
    for i in range(count):
        while (got := consumer.pop()) is None:
            consumer.wait(10**9)
        assert got[2] == i
    thread.join()


CHILD = """
import sys
from neptrio.rings.ring import Ring, Segment
there = Segment(int(sys.argv[1]), 8192)
back, mine = Ring(there, 0, 8), Ring(there, 4096, 8)
for _ in range(2000):
    while (got := back.pop()) is None:
        back.wait(60 * 10**9)
    mine.push(got[0], got[1], got[2] + 1, 0, 0)
"""


def test_two_processes(segment: Segment) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(segment.fd)], pass_fds=[segment.fd], stderr=subprocess.PIPE
    ) as child:
        there, back = Ring(segment, 0, ENTRIES), Ring(segment, 4096, ENTRIES)
        for i in range(2000):
            assert there.push(1, 2, i, 0, 0)
            while (got := back.pop()) is None:
                assert back.wait(60 * 10**9)
            assert got == (1, 2, i + 1, 0, 0)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors


def test_memory_cannot_be_taken_away(segment: Segment) -> None:
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(segment.fd, size)
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert is_sealed(segment.fd, SIZE) and not is_sealed(segment.fd, SIZE + 1)


def test_memory_that_could_be_taken_away_is_told_apart() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        assert not is_sealed(fd, SIZE)
    finally:
        os.close(fd)
    with open(os.devnull) as file:
        assert not is_sealed(file.fileno(), 0)


@pytest.mark.parametrize(("offset", "entries"), [(0, 7), (1, 8), (SIZE, 8), (64, 1 << 20), (0, 0)])
def test_a_ring_outside_of_its_memory_is_refused(segment: Segment, offset: int, entries: int) -> None:
    with pytest.raises(ValueError, match="ring"):
        Ring(segment, offset, entries)
