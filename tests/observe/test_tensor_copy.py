"""Copies of traced tensors: what they hold, who makes them, and what is kept until then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from neptrio.datatypes import NUMBER
from neptrio.observe.tensor_copier import TensorCopier
from neptrio.observe.tensor_copy import TensorCopy
from neptrio.request.infer_request import MemoryKind, Tensor, tensor_at

LARGE = 3 << 20


def tensor(memory: bytearray, name: str = "x") -> Tensor:
    return Tensor(name, NUMBER["UINT8"], (len(memory),), memory)


@pytest.fixture
def copier() -> Iterator[TensorCopier]:
    made = TensorCopier()
    yield made
    made.close()


@pytest.mark.parametrize("size", [0, 1, 32767, 32768, 262144, 262145, 524288, LARGE])
def test_every_byte_is_copied(size: int) -> None:
    memory = bytearray(i * 7 % 251 for i in range(size))
    for limit in (size, size // 2, 1 << 40):
        copy = TensorCopy(tensor(memory), limit)
        assert (copy.nbytes, copy.size, copy.raw, copy.made) == (size, min(size, limit), None, False)
        copy.make()
        assert copy.made and copy.raw == memory[:limit] and copy.omitted is None


def test_a_copy_is_made_once() -> None:
    memory = bytearray(b"ab")
    copy = TensorCopy(tensor(memory), 10)
    copy.make()
    memory[0] = 0
    copy.make()
    copy.omit("too late")
    assert (copy.raw, copy.omitted) == (b"ab", None)


@pytest.mark.parametrize("end", ["make", "omit"])
def test_the_tensor_is_kept_until_then(end: str) -> None:
    of = tensor(bytearray(LARGE))
    before = sys.getrefcount(of)
    copy = TensorCopy(of, LARGE)
    assert sys.getrefcount(of) == before + 1
    copy.make() if end == "make" else copy.omit("not wanted")
    assert sys.getrefcount(of) == before
    assert copy.omitted == (None if end == "make" else "not wanted")


def test_device_memory_is_left_out() -> None:
    copy = TensorCopy(tensor_at("x", NUMBER["UINT8"], (9,), 4096, 9, None, int(MemoryKind.GPU_MEMORY), 0), 9)
    copy.make()
    assert (copy.raw, copy.size, copy.omitted) == (None, 0, "the tensor is in GPU memory")


def test_many_threads_make_one_copy() -> None:
    memory = bytearray(LARGE)
    copies = [TensorCopy(tensor(memory), LARGE) for _ in range(20)]
    start = threading.Barrier(4)
    seen: list[list[bytes | None]] = []

    def work() -> None:
        start.wait(60)
        mine = []
        for copy in copies:
            copy.make()
            mine.append(copy.raw)
        seen.append(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 4
    for i, copy in enumerate(copies):
        assert copy.raw == memory and all(mine[i] is copy.raw for mine in seen)


def test_the_copier_keeps_the_order(copier: TensorCopier) -> None:
    gate, done = threading.Event(), threading.Event()
    made: list[bool] = []
    copier.behind(lambda: gate.wait(60))
    memory = bytearray(LARGE)
    copies = [TensorCopy(tensor(memory), LARGE) for _ in range(3)]
    numbers = [copier.put(copy) for copy in copies[:2]]
    copier.behind(lambda: made.extend(copy.made for copy in copies))
    copier.put(copies[2])
    copier.behind(done.set)
    assert numbers == [2, 3] and copier.done == 0
    gate.set()
    assert done.wait(60)
    assert made == [True, True, False] and copies[2].made


def test_the_copier_outlives_a_failure(copier: TensorCopier, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("nobody expected this")

    done = threading.Event()
    copier.behind(fails)
    copier.behind(done.set)
    assert done.wait(60)
    assert "nobody expected this" in caplog.text


def test_a_closed_copier_has_made_everything_and_can_be_used_again(copier: TensorCopier) -> None:
    memory = bytearray(LARGE)
    for _ in range(2):
        copies = [TensorCopy(tensor(memory), LARGE) for _ in range(5)]
        for copy in copies:
            copier.put(copy)
        copier.close()
        assert all(copy.made for copy in copies)
    assert copier.done == 10
