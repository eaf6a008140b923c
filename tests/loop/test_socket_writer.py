"""What a socket writer gives to the kernel at once, and in which order."""

from __future__ import annotations

import os
import random
import socket

import pytest
import trio

from neptrio.loop.slices import waiting_fd
from neptrio.loop.socket_writer import SocketWriter
from neptrio.loop.socket_writer_core import SocketWriterCore

MIB = 1 << 20


def pieces(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 100, 70_000, MIB - 1, MIB, MIB + 1, 3 * MIB]) for _ in range(12)]
    return [chance.randbytes(size) for size in [*sizes, 5 * MIB]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("one_by_one", [True, False])
def test_everything_arrives_in_order(seed: int, one_by_one: bool) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        sent = pieces(seed)
        got = bytearray()
        with near, trio.socket.from_stdlib_socket(far) as peer, trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                writer = SocketWriter(near, nursery.start_soon)
                for part in [[piece] for piece in sent] if one_by_one else [sent]:
                    writer.send(part)
                while len(got) < sum(map(len, sent)):
                    got += await peer.recv(3 * MIB)
                await writer.drained()
                assert writer.pending == 0 and not writer.broken
        assert got == b"".join(sent)

    trio.run(main)


class Steps(trio.abc.Instrument):
    """How many bytes the kernel has taken in each step of a task."""

    def __init__(self, writer: SocketWriter) -> None:
        self.writer, self.before = writer, writer.pending
        self.taken: list[int] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.writer.pending != self.before:
            self.taken.append(self.before - self.writer.pending)
            self.before = self.writer.pending


@pytest.mark.parametrize(("somebody_waits", "most"), [(False, MIB), (True, MIB // 4)])
def test_others_run_after_each_portion(somebody_waits: bool, most: int) -> None:
    """However much the kernel takes, a pass of the loop gives it a MiB, and a quarter of one when somebody waits."""
    sent = bytes(MIB // 2), bytes(6 * MIB), b"end"

    async def main() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        waits = os.eventfd(int(somebody_waits), os.EFD_CLOEXEC)
        waiting_fd.set(waits)
        with near, trio.socket.from_stdlib_socket(far) as peer, trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                writer = SocketWriter(near, nursery.start_soon)
                writer.send(list(sent))
                total = sum(map(len, sent))
                assert 0 < total - writer.pending <= most
                steps = Steps(writer)
                trio.lowlevel.add_instrument(steps)
                left = total
                while left:
                    left -= len(await peer.recv(MIB))
                await writer.drained()
                trio.lowlevel.remove_instrument(steps)
        os.close(waits)
        assert max(steps.taken) <= most + 65_536
        assert sum(steps.taken) > 5 * MIB

    trio.run(main)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([MIB, 100], [MIB, 100]),  # a tensor with what is around it is one call
        ([63, MIB - 42, 9, 42, 500], [63, MIB - 42, 9, 42, 500]),
        ([MIB + 65_536], [MIB + 65_536]),
        ([MIB + 65_537], [MIB]),
        ([MIB, 65_536, 1], [MIB, 65_536, 0]),
        ([100, 3 * MIB], [100, MIB - 100]),
    ],
)
def test_a_little_more_than_a_mebibyte_is_given_at_once(sizes: list[int], expected: list[int]) -> None:
    near, far = socket.socketpair()
    with near, far:
        writer = SocketWriterCore(near)
        writer.append([bytes(size) for size in sizes])
        assert [len(buffer) for buffer in writer.some()] == expected
