"""What the poller sends for the connections: in turns, in order, and only where there is room."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from typing import Any

import pytest
import trio
import trio.testing

from neptrio.loop.loop_lag import LoopLag
from neptrio.loop.pending_output import Outputs
from neptrio.loop.socket_writer import SocketWriter
from tests.loop.loops import Loop, running

MIB = 1 << 20


class Said:
    """An output that says what a test has it say."""

    def __init__(self, name: str, log: list[str], *answers: Any) -> None:
        self.name, self.log, self.answers, self.full = name, log, deque(answers), False

    def write(self) -> bool:
        self.log.append(self.name)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        self.full = answer == "full"
        return bool(answer)

    def write_by_task(self) -> None:
        self.log.append(f"{self.name} by task")


class Desk:
    """Outputs with an epoll of their own; `waits`: whether somebody does."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.read: set[int] = set()
        self.waits = False
        self.outputs = Outputs(self.epoll, self.read, LoopLag(), lambda: self.waits)
        self.log: list[str] = []
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)

    def fill(self) -> None:
        try:
            while True:
                self.near.send(bytes(65536))
        except BlockingIOError:
            pass

    def events(self) -> list[tuple[int, int]]:
        return self.epoll.poll(0)

    def taken(self) -> str:
        """What was called since the last time."""
        said, self.log[:] = " ".join(self.log), []
        return said


@pytest.fixture
def desk() -> Any:
    made = Desk()
    yield made
    made.epoll.close()
    made.near.close()
    made.far.close()


def test_each_has_its_turn_before_one_has_another(desk: Desk) -> None:
    for number, name in enumerate("abc"):
        desk.outputs.add(number, Said(name, desk.log, True, True, False))
    for _ in range(3):
        desk.outputs.write()
        assert desk.taken() == "a b c"
    desk.outputs.write()
    assert desk.taken() == "" and not desk.outputs.ready


def test_when_somebody_waits_the_others_are_first_in_the_next_pass(desk: Desk) -> None:
    for number, name in enumerate("abc"):
        desk.outputs.add(number, Said(name, desk.log, True, False))
    desk.waits = True
    order = []
    while desk.outputs.ready:
        desk.outputs.write()
        order.append(desk.taken())
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_one_that_fails_is_forgotten(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.outputs.add(0, Said("a", desk.log, ValueError("nobody expected this")))
    desk.outputs.add(1, Said("b", desk.log, True, False))
    for _ in range(3):
        desk.outputs.write()
    assert desk.taken() == "a b b"
    assert "nobody expected this" in caplog.text


@pytest.mark.parametrize("is_read", [False, True])
def test_room_is_asked_for_only_where_there_is_none(desk: Desk, is_read: bool) -> None:
    fd = desk.near.fileno()
    if is_read:
        desk.read.add(fd)
        desk.epoll.register(fd, select.EPOLLIN)
    desk.outputs.add(fd, Said("a", desk.log, "full", True, False))
    assert desk.events() == []
    desk.fill()
    desk.outputs.write()
    assert desk.taken() == "a" and not desk.outputs.ready and desk.events() == []
    while len(desk.far.recv(MIB)) and not (told := desk.events()):
        pass
    assert told == [(fd, select.EPOLLOUT)]
    desk.outputs.has_room(fd)
    assert desk.events() == []
    desk.outputs.write()
    desk.outputs.write()
    assert desk.taken() == "a a"
    desk.far.send(b"x")
    assert desk.events() == ([(fd, select.EPOLLIN)] if is_read else [])


def test_what_is_dropped_ends_and_its_number_is_free(desk: Desk) -> None:
    fd = desk.near.fileno()
    first = Said("a", desk.log, "full", False)
    desk.outputs.add(fd, first)
    desk.outputs.write()
    desk.outputs.drop(fd, Said("another", desk.log))  # of an earlier connection with this number
    assert fd in desk.outputs.full
    desk.outputs.drop(fd, first)
    second = Said("b", desk.log, "full", False)
    second.full = True
    desk.outputs.add(fd, second)
    desk.outputs.write()
    assert desk.taken() == "a a" and desk.outputs.full == {fd: second}


def test_what_is_left_is_given_to_tasks(desk: Desk) -> None:
    full = Said("full", desk.log)
    full.full = True
    desk.outputs.add(desk.near.fileno(), full)
    desk.outputs.add(7, Said("ready", desk.log))
    desk.outputs.give_up()
    assert sorted(desk.log) == ["full by task", "ready by task"]
    assert not desk.outputs.full and not desk.outputs.ready and desk.events() == []


def test_what_the_kernel_does_not_take_is_given_to_a_task(desk: Desk) -> None:
    closed = socket.socketpair()
    fd = closed[0].fileno()
    for end in closed:
        end.close()
    refused = Said("refused", desk.log)
    refused.full = True
    desk.outputs.add(fd, refused)
    assert desk.taken() == "refused by task" and not desk.outputs.full and not desk.outputs.ready


def test_a_socket_that_was_closed_too_soon_ends_alone(desk: Desk) -> None:
    full = Said("full", desk.log, False)
    full.full = True
    fd = desk.near.fileno()
    desk.outputs.add(fd, full)
    desk.near.close()
    desk.outputs.drop(fd, full)
    desk.outputs.write()
    assert desk.taken() == "full" and not desk.outputs.full and not desk.outputs.ready


# ------------------------------------------------------------ with a poller


@pytest.fixture(params=["in trio's stead", "by a task"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by a task":
        monkeypatch.setenv("NEPTRIO_POLLER", "task")
    name: str = request.param
    return name


def writer_of(loop: Loop, nursery: trio.Nursery) -> SocketWriter:
    return SocketWriter(loop.near, nursery.start_soon, loop.poller)


async def read_all(loop: Loop, size: int) -> bytes:
    peer = trio.socket.from_stdlib_socket(loop.far)
    got = bytearray()
    while len(got) < size:
        got += await peer.recv(MIB)
    return bytes(got)


@pytest.mark.parametrize("reads", [False, True])
def test_a_large_answer_arrives_while_the_socket_is_read(way: str, reads: bool) -> None:
    sent = [os.urandom(size) for size in (MIB, 7 * MIB, 100)]

    async def main() -> None:
        async with running(reads) as loop, trio.open_nursery() as nursery:
            assert (loop.poller.outputs is None) == (way == "by a task")
            writer = writer_of(loop, nursery)
            told = trio.Event()
            writer.on_drained = told.set
            writer.send(sent)
            assert writer.pending
            if reads:  # both directions at once, from a peer that reads only what is there
                for part in (b"one", b"two", b"three"):
                    loop.far.send(part)
                    await loop.hear()
                assert b"".join(loop.got) == b"onetwothree"
            assert await read_all(loop, sum(map(len, sent))) == b"".join(sent)
            await writer.drained()
            await told.wait()
            assert writer.pending == 0
            writer.send([b"more"])
            assert await read_all(loop, 4) == b"more"

    trio.run(main)


def test_small_requests_are_taken_between_the_portions(way: str) -> None:
    """A peer that takes everything at once does not keep the loop from others."""

    async def main() -> None:
        async with running() as loop, trio.open_nursery() as nursery:
            near, far = socket.socketpair()
            near.setblocking(False)
            with near, far:
                writer = SocketWriter(near, nursery.start_soon, loop.poller)
                writer.send([bytes(40 * MIB)])
                left = []
                async with (
                    trio.open_nursery() as reading
                ):  # to its end: what was sent last is still in the kernel
                    reading.start_soon(trio.to_thread.run_sync, _swallow, far, 40 * MIB)
                    for _ in range(5):
                        loop.far.send(b"x")
                        await loop.hear()
                        left.append(writer.pending)
                    await writer.drained()
                assert left[0] > 0

    trio.run(main)


def _swallow(far: socket.socket, size: int) -> None:
    while size:
        size -= len(far.recv(min(size, MIB)))


@pytest.mark.parametrize("gone", ["closed by the peer", "failed here"])
def test_a_peer_that_does_not_read_and_goes(way: str, gone: str) -> None:
    async def main() -> None:
        async with running(read=False) as loop, trio.open_nursery() as nursery:
            writer = writer_of(loop, nursery)
            told = trio.Event()
            writer.on_drained = told.set
            writer.send([bytes(8 * MIB)])
            await trio.testing.wait_all_tasks_blocked()
            assert writer.pending
            if gone == "failed here":
                writer.fail()
                trio.lowlevel.notify_closing(loop.near)
            else:
                loop.far.close()
            await writer.drained()
            await told.wait()
            assert writer.broken and not writer.pending
            writer.send([b"nobody"])
            assert not writer.pending

    trio.run(main)


def test_a_new_socket_with_the_number_of_one_that_was_full(way: str) -> None:
    async def main() -> None:
        async with running(read=False) as loop, trio.open_nursery() as nursery:
            writer = writer_of(loop, nursery)
            writer.send([bytes(8 * MIB)])
            await trio.testing.wait_all_tasks_blocked()
            number = loop.near.fileno()
            writer.fail()
            trio.lowlevel.notify_closing(loop.near)
            loop.near.close()
            near, far = socket.socketpair()
            if near.fileno() != number:
                near, far = far, near
            assert near.fileno() == number
            near.setblocking(False)
            loop.far.close()
            loop.near, loop.far = near, far
            nursery.start_soon(loop.poller.read, near, loop.receive)
            again = writer_of(loop, nursery)
            again.send([bytes(6 * MIB), b"end"])
            far.send(b"hello")
            await loop.hear()
            assert (await read_all(loop, 6 * MIB + 3))[-3:] == b"end"
            assert loop.got == [b"hello"]
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_when_the_poller_ends_a_task_sends_the_rest() -> None:
    sent = os.urandom(6 * MIB)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            async with running(read=False) as loop:
                writer = writer_of(loop, nursery)
                writer.send([sent])
                near, far = loop.near, loop.far
                loop.near, loop.far = socket.socketpair()  # which running() closes
                await trio.testing.wait_all_tasks_blocked()
                assert writer.pending
            loop.far = far
            with near, far:
                assert await read_all(loop, len(sent)) == sent
                await writer.drained()

    trio.run(main)
