"""What a socket writer gives to the kernel at once, and in which order."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
import trio

from neptrio.loop.socket_writer import SocketWriter

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
                writer = SocketWriter(near, nursery)
                for part in [[piece] for piece in sent] if one_by_one else [sent]:
                    writer.send(part)
                while len(got) < sum(map(len, sent)):
                    got += await peer.recv(3 * MIB)
                await writer.drained()
                assert writer.pending == 0 and not writer.broken
        assert got == b"".join(sent)

    trio.run(main)


def test_others_run_after_each_mebibyte() -> None:
    """The kernel takes all at once here; the writer still gives it a MiB at a time."""

    class Sock:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock
            self.calls: list[int] = []

        def fileno(self) -> int:
            return self._sock.fileno()

        def sendmsg(self, buffers: list[Any]) -> int:
            self.calls.append(sum(map(len, buffers)))
            return self.calls[-1]

    async def main() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        sock: Any = Sock(near)
        with near, far, trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                writer = SocketWriter(sock, nursery)
                writer.append([bytes(MIB // 2), bytes(3 * MIB), b"end"])
                writer.write_later()
                await writer.drained()
        assert sock.calls == [MIB, MIB, MIB, MIB // 2 + 3]

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
        writer = SocketWriter(near, None)  # type: ignore[arg-type]  # nothing is written here
        writer.append([bytes(size) for size in sizes])
        assert [len(buffer) for buffer in writer.some()] == expected
