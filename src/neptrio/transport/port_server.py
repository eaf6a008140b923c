"""What the servers of all ports share: accepting connections, TLS handshakes, a task for each connection, the end of it.

The problem: REST, gRPC, metrics and the admin listener each accepted, counted and let go of connections; what one of them
did right another forgot. The choice: this class does it for all. Subclasses say how a connection is served (serve), what is
looked at meanwhile (check), and how the port drains.

Rules:
 1. Every connection has a task of its own. What it raises ends that connection only; so does what its further tasks raise
    (transport.wire, rule 4), and looking at it.
 2. A connection that does not make its TLS handshake in time is closed. Handshakes end when the port drains.
 3. Where the limits on connections hold (service.connections), a connection beyond them has one of PLACES places for a few
    seconds, and is told why. A port for which they do not hold has places itself, `most` of them or fewer: the newest
    connection takes that of the one whose last request is oldest.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable

import trio

from neptrio.loop import open_files, periodic, threads
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services
from neptrio.service.connections import PLACES, TURNED_AWAY_SECONDS, HeldSockets, kept_back
from neptrio.transport.accept import Acceptor
from neptrio.transport.secure_socket import SecureSocket
from neptrio.transport.tls import HANDSHAKE_S, ServerTls
from neptrio.transport.wire import Wire


class PortServer:
    """Accepts the connections of one listener, and serves them until it is cancelled."""

    name = ""  # of the port, for the log
    watch_seconds = 1.0  # between two calls of check()

    def __init__(
        self, services: Services, listener: socket.socket | None, tls: ServerTls | None, most: int = 0
    ) -> None:
        """`listener`: None for a server whose connections another one accepts. `tls`: None where connections are plain.
        `most`: see rule 3; 0 where the limits on connections hold."""
        self._services = services
        self._tls = tls
        self._limited = most == 0
        self._places = HeldSockets(min(most, kept_back(open_files.limit()) // 8) if most else PLACES)
        balance = services.connections.balance if self._limited else None
        self._acceptor = None if listener is None else Acceptor(listener, self._start, balance)
        self._nursery: trio.Nursery | None = None
        self._handshakes: set[trio.CancelScope] = set()
        self._open = 0
        self._changed = trio.Event()
        self._log = logging.getLogger(f"neptrio.{self.name.lower()}")

    # ------------------------------------------------------------ subclasses say

    async def serve(self, wire: Wire, turned_away: str) -> None:
        """Serves a connection until it ends. `turned_away` says why there is no room for it, "" if there is."""
        raise NotImplementedError

    def check(self, now_ns: int, pressed: bool) -> None:
        """Ends what is silent, idle or not read for too long. `pressed`: others wait for a place."""
        raise NotImplementedError

    def tasks(self) -> list[Callable[[], Awaitable[None]]]:
        """What else runs as long as the port is served."""
        return []

    # ------------------------------------------------------------ the life of a port

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as self._nursery:
            for task in (self._watch, *self.tasks()):
                self._nursery.start_soon(task)
            if self._tls is not None:
                self._nursery.start_soon(self._tls.watch)
            task_status.started()
            if self._acceptor is not None:
                await self._acceptor.run()
            await trio.sleep_forever()

    async def _watch(self) -> None:
        async def look() -> None:
            # what loops over connections is a call: the variable of a loop here would keep the last one meanwhile
            self.check(int(monotonic_ns()), self._services.connections.pressed)

        await periodic.for_ever(self.watch_seconds, look, f"looking at {self.name} connections", self._log)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return self._open

    def stop_accepting(self) -> None:
        """Accepts whoever has connected already, and nobody after that; ends handshakes."""
        if self._acceptor is not None:
            self._acceptor.stop()
        for scope in self._handshakes:
            scope.cancel()

    async def until_gone(self) -> None:
        """Waits for the end of all connections."""
        while self.connections:
            self._changed = trio.Event()
            await self._changed.wait()

    # ------------------------------------------------------------ the life of a connection

    def _start(self, sock: socket.socket, address: str) -> bool:
        """Begins a connection; whether there was room for it (transport.accept, rule 1)."""
        assert self._nursery is not None
        turned_away = self._services.connections.enter(sock.fileno(), address) if self._limited else ""
        room = not turned_away
        if turned_away or not self._limited:
            room = self._places.take(sock) and room
        self._open += 1
        self._nursery.start_soon(self._serve, sock, address, turned_away, self._nursery)
        return room

    async def _serve(
        self, sock: socket.socket, address: str, turned_away: str, nursery: trio.Nursery
    ) -> None:
        try:
            await self.begin(sock, address, turned_away, nursery)
        except threads.NoThread as error:
            self._log.warning("a %s connection is closed: %s", self.name, str(error))
        except Exception:
            self._log.exception("a %s connection failed", self.name)
        finally:
            sock.close()
            self._places.free(sock)
            if self._limited and not turned_away:
                self._services.connections.leave(address)
            self._open -= 1
            self._changed.set()

    async def begin(self, sock: socket.socket, address: str, turned_away: str, nursery: trio.Nursery) -> None:
        """Serves a connection from its TLS handshake on, where there is one."""
        secure = None
        if self._tls is not None:
            secure = await self._handshake(SecureSocket(sock, self._tls.context), turned_away)
            if secure is None:
                return
        wire = Wire(sock, nursery, self._services.loop, secure, address)
        try:
            await self.serve(wire, turned_away)
        finally:
            wire.let_go()  # however it has ended

    async def _handshake(self, secure: SecureSocket, turned_away: str) -> SecureSocket | None:
        """Makes the handshake as the server. None when the client has left, was not let in or took too long, or the port
        stops accepting."""
        with trio.move_on_after(TURNED_AWAY_SECONDS if turned_away else HANDSHAKE_S) as scope:
            self._handshakes.add(scope)
            try:
                await secure.handshake()
                return secure
            except OSError as error:
                # its text: a log may keep what it is given, and the error knows the frames of the handshake
                self._log.info("a TLS handshake failed: %s", str(error))
            finally:
                self._handshakes.discard(scope)
        return None
