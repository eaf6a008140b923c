"""Looking for what is about to come: how long, how often, and what ends it."""

from __future__ import annotations

import os
import select
import socket

import pytest
import trio

from neptrio.loop.busy_poll import FEW, MOST_IN_VAIN, STEP_NS, BusyPoll, granted_ns
from tests.loop.test_poller import running


class Ring:
    """Something comes with the look of that number, counted from 1."""

    def __init__(self, comes_with: int = 0) -> None:
        self.comes_with = comes_with
        self.looks: list[int] = []
        self.received = 0

    def comes(self, spin_ns: int) -> bool:
        self.looks.append(spin_ns)
        return len(self.looks) == self.comes_with


class Sending(Ring):
    """Nothing comes on it, but on a socket meanwhile."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock

    def comes(self, spin_ns: int) -> bool:
        if len(self.looks) == 3:
            self._sock.send(b"while it looks")
        return super().comes(spin_ns)


def nothing() -> list[tuple[int, int]]:
    return []


def test_what_comes_is_told_as_if_its_bell_had_been_rung() -> None:
    busy = BusyPoll(100_000, lambda: True)
    ring = Ring(comes_with=3)
    busy.add(7, ring)
    assert busy.look(nothing, select.EPOLLIN) == [(7, select.EPOLLIN)]
    assert ring.looks == [STEP_NS] * 3


def test_rings_share_a_step() -> None:
    busy = BusyPoll(100_000, lambda: True)
    first, second = Ring(), Ring(comes_with=2)
    busy.add(7, first)
    busy.add(8, second)
    assert busy.look(nothing, 1) == [(8, 1)]
    assert first.looks == second.looks == [STEP_NS // 2] * 2
    busy.remove(8)
    busy.remove(8)
    assert busy.look(nothing, 1) == []
    assert len(second.looks) == 2


def test_whatever_else_is_ready_ends_the_look() -> None:
    busy = BusyPoll(100_000, lambda: True)
    ring = Ring()
    busy.add(7, ring)
    found = [[], [(3, 1), (4, 1)]]
    assert busy.look(lambda: found.pop(0), 1) == [(3, 1), (4, 1)]
    assert len(ring.looks) == 2
    assert busy.not_now == 0, "it was not in vain"


def test_looks_in_vain_become_seldom_until_one_is_not() -> None:
    busy = BusyPoll(2 * STEP_NS, lambda: True)
    ring = Ring()
    busy.add(7, ring)
    pauses = []
    for _ in range(8):
        before = len(ring.looks)
        assert busy.look(nothing, 1) == []
        assert len(ring.looks) == before + 2, "as long as was asked for"
        pauses.append(busy.not_now)
        while busy.not_now:
            assert busy.look(nothing, 1) == []
    assert pauses == [1, 3, 7, 15, 31, MOST_IN_VAIN, MOST_IN_VAIN, MOST_IN_VAIN]
    ring.comes_with = len(ring.looks) + 1
    assert busy.look(nothing, 1) == [(7, 1)]
    assert busy.look(nothing, 1) == []
    assert busy.not_now == 1


def test_nobody_looks_who_expects_nothing() -> None:
    expects = False
    busy = BusyPoll(100_000, lambda: expects)
    ring = Ring(comes_with=1)
    busy.add(7, ring)
    assert busy.look(nothing, 1) == []
    assert ring.looks == []
    expects = True
    assert busy.look(nothing, 1) == [(7, 1)]


def test_who_gets_many_at_once_sleeps() -> None:
    busy = BusyPoll(100_000, lambda: True)
    ring = Ring(comes_with=1)
    busy.add(7, ring)
    ring.received += FEW + 1
    assert busy.look(nothing, 1) == []
    assert ring.looks == []
    ring.received += FEW
    assert busy.look(nothing, 1) == [(7, 1)]


def test_with_one_processor_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 5})
    assert granted_ns(100) == 100_000
    assert granted_ns(0) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5})
    assert granted_ns(100) == 0


def test_the_poller_tells_the_bells_callback() -> None:
    """And nobody has written to the bell."""

    async def main() -> None:
        async with running(read=False) as loop:
            bell = os.eventfd(0, os.EFD_NONBLOCK)

            def rung() -> bool:
                loop.news.set()
                return True

            loop.poller.listen(bell, rung)
            loop.poller.busy_poll = BusyPoll(100_000, lambda: True)
            loop.poller.busy_poll.add(bell, Ring(comes_with=2))
            await loop.hear()
            loop.poller.unlisten(bell)
            os.close(bell)

    trio.run(main)


def test_a_socket_is_read_while_it_looks() -> None:
    async def main() -> None:
        async with running() as loop:
            loop.poller.busy_poll = BusyPoll(1_000_000, lambda: not loop.got)
            ring = Sending(loop.far)
            loop.poller.busy_poll.add(loop.far.fileno(), ring)
            await loop.hear()
            assert loop.got == [b"while it looks"]
            assert len(ring.looks) < 100, "the look has ended with it"

    trio.run(main)
