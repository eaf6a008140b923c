"""The connections of one kind that a port has open: serves, checks and drains them.

A loop over connections is a method here also because the variable of a loop lives on in a task that sleeps, and with it the
last connection. What one of them raises there ends that one only: the loops run in tasks of the port.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from neptrio.service.request_limits import RequestLimits
from neptrio.transport.wire import Wire


class Served(Protocol):
    """A connection."""

    @property
    def wire(self) -> Wire:
        """What carries it."""

    @property
    def held_bytes(self) -> int:
        """Bytes of requests until they are answered, and of answers until the kernel has them."""

    def open_requests(self) -> int:
        """How many requests are under way."""

    async def run(self) -> bytes | None:
        """Serves it until either side ends it. One of HTTP/1.1 returns what begins HTTP/2, for the one that takes over."""

    def start_drain(self) -> None:
        """The server stops."""

    def check(
        self, now_ns: int, request_timeout_ns: int, idle_timeout_ns: int, pressed: bool = False, /
    ) -> None:
        """Ends it, or its request, if a time is over."""


C = TypeVar("C", bound=Served)


class OpenConnections(set[C]):
    """Those of one port and one kind."""

    def __init__(self, limits: RequestLimits | None) -> None:
        """`limits`: on the requests of the clients' addresses; None where none hold."""
        super().__init__()
        self._limits = limits
        self._draining = False

    async def serve(self, connection: C) -> bytes | None:
        """Serves a connection until it ends; returns what its run() does."""
        client = connection.wire.client
        if self._limits is not None:
            self._limits.join(client, connection.open_requests)
        self.add(connection)
        if self._draining:
            connection.start_drain()
        try:
            return await connection.run()
        finally:
            if self._limits is not None:
                self._limits.leave(client, connection.open_requests)
            self.discard(connection)

    def held_bytes(self) -> int:
        """What they hold."""
        return sum(connection.held_bytes for connection in self)

    def check(
        self, now_ns: int, request_timeout_ns: int, idle_timeout_ns: int, pressed: bool = False
    ) -> None:
        """Calls check() of each."""
        for connection in list(self):
            try:
                connection.check(now_ns, request_timeout_ns, idle_timeout_ns, pressed)
            except Exception:
                connection.wire.fail()

    def start_drain(self) -> None:
        """Tells them, and those that still come, that the server stops."""
        self._draining = True
        for connection in list(self):
            try:
                connection.start_drain()
            except Exception:
                connection.wire.fail()
