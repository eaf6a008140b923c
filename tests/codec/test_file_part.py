"""Parts of files: whole or not at all, in memory that is used again and given back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from neptrio.request import file_part

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)
    file_part.trim()


def fill(fd: int, size: int, seed: int = 1) -> np.ndarray:
    content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    assert os.pwrite(fd, content, 0) == size
    return content


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 256 << 10, (256 << 10) + 1, 3 * MIB])
def test_a_part_is_what_the_file_holds(file: int, size: int) -> None:
    content = fill(file, size + 10)
    files, others = file_part.LargeFiles(), file_part.LargeFiles()
    part = file_part.read(file, 5, size, files)
    assert part is not None
    assert (part.nbytes, files.held, others.held) == (size, size, 0)
    np.testing.assert_array_equal(np.frombuffer(part, np.uint8), content[5 : 5 + size])
    assert not memoryview(part).readonly
    del part
    assert files.held == 0


@pytest.mark.parametrize("size", [1, 70000, 3 * MIB])
def test_a_part_that_the_file_does_not_have(file: int, size: int) -> None:
    fill(file, size)
    files = file_part.LargeFiles()
    assert file_part.read(file, 1, size, files) is None
    assert file_part.read(file, size + 100, size, files) is None
    assert files.held == 0


def test_large_parts_take_turns_in_memory(file: int) -> None:
    """A part that is alive is never given to another one, and none shows what another one held."""
    size = 12 * MIB
    content = fill(file, size)
    rng = random.Random(3)
    alive: list[tuple[object, int, int]] = []
    for _ in range(200):
        offset, n = rng.randrange(size), rng.choice([1000, 300_000, MIB, 3 * MIB])
        part = file_part.read(file, offset, n)
        assert (part is None) == (offset + n > size)
        if part is not None:
            alive.append((part, offset, n))
        if len(alive) > 6:
            for kept, at, length in alive:
                assert np.array_equal(np.frombuffer(kept, np.uint8), content[at : at + length])
            del alive[rng.randrange(len(alive))]
    alive.clear()


def resident() -> int:
    """Of mappings and heap, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_that_waits_is_bounded_and_given_back(file: int) -> None:
    fill(file, 32 * MIB)
    parts = [file_part.read(file, 0, 32 * MIB) for _ in range(8)]
    before = resident()
    del parts
    assert before - resident() > 180 * MIB  # 64 MiB wait
    file_part.trim()
    assert before - resident() > 240 * MIB


@pytest.mark.parametrize("size", [0, 1, 65537, 3 * MIB])
def test_write(file: int, size: int) -> None:
    fill(file, size + 20)
    data = np.full(size, 7, np.uint8)
    file_part.write(file, 9, data)
    found = np.frombuffer(os.pread(file, size + 20, 0), np.uint8)
    np.testing.assert_array_equal(found[9 : 9 + size], data)
    assert len(found) == size + 20


def test_errors(file: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_part.read(-1, 0, 10)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_part.write(-1, 0, b"x")
    with pytest.raises(MemoryError):
        file_part.read(file, 0, 1 << 60)
    for offset, size in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError):
            file_part.read(file, offset, size)
    with pytest.raises(ValueError):
        file_part.write(file, -1, b"x")
