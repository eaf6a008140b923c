"""A loop without a server: a pass, timers, a poller and a pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.poller import Poller
from neptrio.loop.timers import Timers

LIMIT_S = 60.0  # of every test: reached when somebody was not woken


class Loop:
    """A poller with its timers and turn, and a pair of sockets: `far` is the peer's end."""

    def __init__(self) -> None:
        self.loop_pass = LoopPass()
        self.timers = Timers(self.loop_pass)
        self.poller = Poller(self.loop_pass, self.timers)
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.got: list[bytes] = []
        self.news = trio.Event()

    def receive(self) -> bool:
        try:
            data = self.near.recv(100)
        except BlockingIOError:
            return True
        self.got.append(data)
        self.news.set()
        return data != b""

    async def hear(self) -> None:
        """Returns when receive() has taken something since the last call."""
        await self.news.wait()
        self.news = trio.Event()


@asynccontextmanager
async def running(read: bool = True) -> AsyncIterator[Loop]:
    """A running Loop whose `near` is read."""
    with trio.fail_after(LIMIT_S):
        loop = Loop()
        async with trio.open_nursery() as nursery:
            await nursery.start(loop.loop_pass.run)
            await nursery.start(loop.timers.run)
            await nursery.start(loop.poller.run)
            if read:
                nursery.start_soon(loop.poller.read, loop.near, loop.receive)
            yield loop
            nursery.cancel_scope.cancel()
        loop.near.close()
        loop.far.close()
