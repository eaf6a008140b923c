"""Looking for what is about to come: how long, how often, and what ends it."""

from __future__ import annotations

import os
import select
import socket

import pytest
import trio

from neptrio.loop.busy_poll import (
    FEW,
    LONGEST_PAUSE_NS,
    MOST_IN_VAIN,
    MUCH_NS,
    PAUSE_NS,
    STEP_NS,
    TAKEN_NS,
    BusyPoll,
    granted_ns,
)
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


class Sockets:
    """A clock, and sockets of which each look takes `takes` nanoseconds; something is ready with the look of that number."""

    def __init__(self, ready_with: int = 0, takes: int = 1000) -> None:
        self.ready_with = ready_with
        self.takes = takes
        self.now = 5_000_000_000
        self.looks = 0

    def clock(self) -> int:
        return self.now

    def poll(self) -> list[tuple[int, int]]:
        self.looks += 1
        self.now += self.takes
        return [(3, 1)] if self.looks == self.ready_with else []


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


def test_without_rings_sockets_are_looked_at() -> None:
    sockets = Sockets(ready_with=30)
    busy = BusyPoll(100_000, lambda: True, sockets=True, clock=sockets.clock)
    assert busy.look(sockets.poll, 1) == [(3, 1)]
    assert sockets.looks == 30
    sockets.ready_with = 0
    for pause in (1, 3, 7, 15, 31, MOST_IN_VAIN, MOST_IN_VAIN):
        before = sockets.looks
        assert busy.look(sockets.poll, 1) == []
        assert (sockets.looks - before, busy.not_now) == (100, pause), "as long as was asked for"
        for _ in range(pause):
            assert busy.look(sockets.poll, 1) == []
        assert (sockets.looks - before, busy.not_now) == (100, 0)
    sockets.ready_with = sockets.looks + 1
    assert busy.look(sockets.poll, 1) == [(3, 1)]
    assert busy.look(sockets.poll, 1) == [] and busy.not_now == 1


def test_sockets_are_not_looked_at_where_nobody_asked_for_it() -> None:
    sockets = Sockets(ready_with=1)
    assert BusyPoll(100_000, lambda: True).look(sockets.poll, 1) == []
    assert BusyPoll(0, lambda: True, sockets=True).look(sockets.poll, 1) == []
    assert sockets.looks == 0


def test_a_processor_that_was_taken_away_pauses_looks() -> None:
    sockets = Sockets(takes=TAKEN_NS + 1)
    busy = BusyPoll(1_000_000, lambda: True, sockets=True, clock=sockets.clock)
    pauses = [PAUSE_NS * 2**n for n in range(11)] + [LONGEST_PAUSE_NS] * 2
    for pause in pauses:
        before = sockets.looks
        assert busy.look(sockets.poll, 1) == []
        sockets.now += pause - 1
        assert busy.look(sockets.poll, 1) == []
        assert sockets.looks == before + 1, "the second time it slept at once"
        sockets.now += 1
    sockets.ready_with = sockets.looks + 1
    assert busy.look(sockets.poll, 1) == [(3, 1)], "what came meanwhile is told"


def pause_of(busy: BusyPoll, sockets: Sockets) -> int:
    """For how long it does not look, from now on."""
    begun = sockets.now
    while True:
        before = sockets.looks
        sockets.ready_with = before + 1
        if busy.look(sockets.poll, 1):
            return sockets.now - sockets.takes - begun
        assert sockets.looks == before
        sockets.now += PAUSE_NS // 4


def test_much_work_pauses_looks_and_little_makes_pauses_short_again() -> None:
    sockets = Sockets(ready_with=1)
    busy = BusyPoll(100_000, lambda: True, sockets=True, clock=sockets.clock)
    assert busy.look(sockets.poll, 1) == [(3, 1)]
    sockets.now += MUCH_NS
    assert pause_of(busy, sockets) == 0, "it was not much"
    for pause in [PAUSE_NS * 2**n for n in range(5)]:
        sockets.now += MUCH_NS + 1
        assert pause_of(busy, sockets) == pause
    for _ in range(3):
        sockets.now += MUCH_NS
        assert pause_of(busy, sockets) == 0
    sockets.now += MUCH_NS + 1
    assert pause_of(busy, sockets) == PAUSE_NS * 2**2, "each time half, and then as long as that"


def test_what_came_during_a_sleep_is_nobodys_work() -> None:
    sockets = Sockets(ready_with=1)
    busy = BusyPoll(100_000, lambda: True, sockets=True, clock=sockets.clock)
    assert busy.look(sockets.poll, 1) == [(3, 1)]
    assert busy.look(sockets.poll, 1) == [] and busy.not_now == 1
    assert busy.look(sockets.poll, 1) == []
    sockets.now += 1000 * MUCH_NS
    assert pause_of(busy, sockets) == 0


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
