"""A front end hears every wake of the engine's, whenever it comes."""

from __future__ import annotations

import select
import socket
from types import SimpleNamespace

from neptrio.frontend.front import WAKES_AT_ONCE, Front


def test_a_wake_that_comes_behind_a_drain_is_heard() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, select.epoll() as epoll:
        epoll.register(theirs, select.EPOLLIN | select.EPOLLET)

        def drain() -> bool:
            ours.send(b"\0")  # the engine pushes something when the ring has just been looked through
            return False

        front = Front.__new__(Front)
        front._wake, front._unread = theirs, 0
        front._end = SimpleNamespace(drain=drain)  # type: ignore[assignment]
        for number in range(2 * WAKES_AT_ONCE + 2):
            assert front._woken()
            assert epoll.poll(0) == [(theirs.fileno(), select.EPOLLIN)], number
        waiting = len(theirs.recv(1 << 16, socket.MSG_DONTWAIT))
        assert waiting <= WAKES_AT_ONCE + 1  # so the socket never fills up
