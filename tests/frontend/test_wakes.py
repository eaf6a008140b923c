"""A front end hears every wake of the engine's, whenever it comes."""

from __future__ import annotations

import select
import socket
from types import SimpleNamespace

import pytest

from neptrio.frontend.front import WAKES_AT_ONCE, Front

MOST_OF_ONE_DRAIN = 16  # SLEEPS_AT_ONCE of cext/rings/channel.pyx


@pytest.mark.parametrize("each", [1, 3, MOST_OF_ONE_DRAIN])
def test_a_wake_that_comes_behind_a_drain_is_heard(each: int) -> None:
    """However often the engine finds this side asleep during one drain: each time it says so, it may be woken."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, select.epoll() as epoll:
        epoll.register(theirs, select.EPOLLIN | select.EPOLLET)

        def drain() -> bool:
            for _ in range(each):
                end.sleeps += 1
                ours.send(b"\0", socket.MSG_DONTWAIT)  # the engine pushes something just then
            return False

        front = Front.__new__(Front)
        end = SimpleNamespace(drain=drain, sleeps=1)
        front._wake, front._heard, front._end = theirs, 0, end  # type: ignore[assignment]
        for number in range(4 * WAKES_AT_ONCE + 2):
            assert front._woken()
            assert epoll.poll(0) == [(theirs.fileno(), select.EPOLLIN)], number
        waiting = len(theirs.recv(1 << 16, socket.MSG_DONTWAIT))
        assert waiting <= WAKES_AT_ONCE + each  # so the socket never fills up
