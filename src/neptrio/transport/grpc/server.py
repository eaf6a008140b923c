"""The gRPC port: one task per connection passes received bytes to an HTTP/2 session, through which calls answer.

Life of a connection: a TLS handshake if the settings ask for TLS; then HTTP/2's preface must come; then all bytes go to
the session. A call with output asks for it to be sent by want_flush(). The connection ends when the client closes it,
when the session has ended, when it is too old or silent for too long, or when the server drains.

Rules:
 1. An exception ends only the connection that raised it.
 2. Reply bytes that a client does not read are bounded. While a connection has more than HELD of them, its complete
    requests are parked: they are not submitted, and flow control stops the client from sending more. So the connection
    holds at most HELD, one flow-control window of requests, and the answers of requests submitted before. Those cannot
    be taken back, and the size of their answers is not known. So if all clients together leave more unread than
    --grpc-max-unread-bytes, connections above HELD get an error in place of each such answer.
 3. Beyond the limits on connections (service.connections), a new one is answered health probes; other calls are refused
    with UNAVAILABLE, and it is ended within seconds. A connection without calls gets GOAWAY after
    --grpc-max-connection-idle, and within seconds while new connections are being refused.
 4. The bytes of incomplete requests are bounded for all connections together. Above --grpc-max-unfinished-bytes, such
    calls are refused, beginning with the client that was silent longest.
 5. A drain waits until open calls have ended and their bytes are sent. It does not wait for idle clients.
 6. The handlers of calls other than inference import modules that take as long as the rest of the server. A thread
    imports them when the port already serves (handler_import); calls that come earlier wait for it.
"""

from __future__ import annotations

import logging
import socket
import sys
from dataclasses import dataclass
from typing import Any

import trio
from grpclib.const import Status

from neptrio.observe import memory_limit
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services, Verbs
from neptrio.service.connections import (
    PLACES,
    PRESSED_IDLE_SECONDS,
    TURNED_AWAY_SECONDS,
    HeldSockets,
)
from neptrio.transport.accept import Acceptor
from neptrio.transport.grpc import handler_import
from neptrio.transport.grpc.connection import GrpcConnection
from neptrio.transport.grpc.handlers import HandlerCall
from neptrio.transport.handshakes import Handshakes
from neptrio.transport.header_policy import grpc_policy
from neptrio.transport.http2 import limits as limits
from neptrio.transport.http2.connection import ConnectionTimes
from neptrio.transport.http2.session import Http2Session, OpenStream, session_class
from neptrio.transport.http2.stream import Totals
from neptrio.transport.tls import HANDSHAKE_S, ServerTls
from neptrio.transport.wire import Wire

log = logging.getLogger("neptrio.grpc")

TOO_MUCH_INPUT = "the server holds more than {} bytes of unfinished requests; send the request again"


def default_input_limit() -> int:
    """Half of the container's memory or the machine's in bytes; without a limit on the container at least 2.5 GiB,
    so that a message of the largest size fits."""
    return memory_limit.share(2, at_least=5 << 29)


@dataclass(frozen=True)
class GrpcStatistics:
    """What all connections hold now, and how many were accepted so far."""

    connections: int
    accepted: int
    open_calls: int
    parked_calls: int
    unsent_reply_bytes: int
    unfinished_request_bytes: int
    in_place_bytes: int
    inflated_bytes: int


class GrpcServer:
    """Accepts gRPC connections and drains them."""

    call_class = HandlerCall  # of calls other than the two inference ones

    def __init__(self, services: Services, verbs: Verbs, listener: socket.socket | None) -> None:
        """Without a listener it serves the connections of the admin listener, which adopt() is given: they are encrypted
        already where they are to be, and the public port's limits on clients do not hold for them."""
        settings = services.settings
        self.admin = listener is None
        self.admin_elsewhere = settings.admin_address is not None and not self.admin
        self.services = services
        self._verbs = verbs
        self._host = None if listener is None else str(listener.getsockname()[0])
        self.handlers: dict[bytes, Any] = {}
        self.handlers_loaded = trio.Event()
        self.policy = grpc_policy(settings, services.tokens)
        self.input_limit = settings.grpc_max_unfinished_bytes or default_input_limit()
        self.output_limit = settings.grpc_max_unread_bytes or memory_limit.share(4, at_least=1 << 30)
        self.inflating = services.inflating
        self.tls: ServerTls | None = None
        if self.admin:
            self.input_limit = self.output_limit = sys.maxsize
        elif settings.grpc_use_ssl or settings.grpc_use_ssl_mutual:
            assert settings.grpc_server_cert is not None and settings.grpc_server_key is not None
            roots = settings.grpc_root_cert if settings.grpc_use_ssl_mutual else None
            self.tls = ServerTls(settings.grpc_server_cert, settings.grpc_server_key, roots, ["h2"], settings)
        self._session_class = session_class()
        self.times = ConnectionTimes(
            settings.grpc_keepalive_time_ms,
            settings.grpc_keepalive_timeout_ms,
            bool(settings.grpc_keepalive_permit_without_calls),
            settings.grpc_max_connection_age_ms,
            settings.grpc_max_connection_age_grace_ms,
            settings.grpc_max_connection_idle_ms,
        )
        self._pings = limits.PingPolicy(
            min_interval_ns=settings.grpc_http2_min_recv_ping_interval_without_data_ms * 10**6,
            max_strikes=settings.grpc_http2_max_ping_strikes,
        )
        balance = services.connections.balance
        self._acceptor = None if listener is None else Acceptor(listener, self._start, balance)
        self.totals = Totals()
        services.held.add(lambda: sum(connection.held_bytes for connection in self._connections))
        self._nursery: trio.Nursery | None = None
        self._turned_away = HeldSockets(PLACES)
        self._connections: set[GrpcConnection] = set()
        self._accepted = 0
        self._handshakes = Handshakes(self.tls, services.loop)
        self._draining = False
        self._one_gone: trio.Event | None = None

    def new_session(self, open_stream: OpenStream) -> Http2Session:
        """The HTTP/2 session of a new connection."""
        return self._session_class(open_stream, limits.FloodBudget(self._pings), totals=self.totals)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self.load_handlers)
            self._nursery.start_soon(self._watch)
            if self.tls is not None:
                self._nursery.start_soon(self.tls.watch)
            task_status.started()
            if self._acceptor is not None:
                await self._acceptor.run()
            await trio.sleep_forever()

    async def _watch(self) -> None:
        """Each second, updates the server's budget of bytes, and ends idle connections while new ones are refused."""
        unread_ns = int(self.services.settings.http_request_timeout_secs * 1e9)
        while True:
            await trio.sleep(1.0)
            self.services.held.count()
            self._check_unread(unread_ns)
            if self.services.connections.pressed and not self.admin:
                self._press()

    def _check_unread(self, limit_ns: int) -> None:
        # not in _watch(), because the variable of a loop lives on in a task that sleeps, and with it the last connection
        now = int(monotonic_ns())
        for connection in list(self._connections):
            connection.check_unread(now, limit_ns)

    def _press(self) -> None:
        for connection in list(self._connections):
            connection.press(int(PRESSED_IDLE_SECONDS * 1e9))

    @property
    def accepted(self) -> int:
        """Connections that were accepted so far."""
        return self._accepted

    async def load_handlers(self) -> None:
        verbs = self._verbs if self._host is None else self._verbs.at(self._host)
        self.handlers |= await handler_import.imported(self.services, verbs)
        self.handlers_loaded.set()

    def _start(self, sock: socket.socket, address: str) -> bool:
        assert self._nursery is not None
        turned_away = self.services.connections.enter(sock.fileno(), address)
        if turned_away:
            self._turned_away.take(sock)
        self._accepted += 1
        if self.tls is None:
            connection = self._connected(
                Wire(sock, self._nursery, self.services.loop, None, address), turned_away
            )
            self._nursery.start_soon(self._serve, connection, address, turned_away)
        else:
            self._nursery.start_soon(self._secure, sock, self._nursery, address, turned_away)
        return not turned_away

    def _connected(self, wire: Wire, turned_away: str = "", prefix: bytes = b"") -> GrpcConnection:
        connection = GrpcConnection(wire, self, turned_away, prefix)
        self._connections.add(connection)
        if not self.admin:
            self.services.request_limits.join(wire.client, connection.open_requests)
        if self._draining:
            connection.start_drain()
        return connection

    async def _secure(
        self, sock: socket.socket, nursery: trio.Nursery, address: str, turned_away: str
    ) -> None:
        """Serves a connection that begins with a TLS handshake."""
        seconds = TURNED_AWAY_SECONDS if turned_away else HANDSHAKE_S
        wire = await self._handshakes.wire(sock, nursery, address, seconds)
        if wire is not None:
            await self._serve(self._connected(wire, turned_away), address, turned_away)
            return
        sock.close()
        self._leave(sock, address, turned_away)
        self._gone()

    async def adopt(self, wire: Wire, prefix: bytes = b"") -> None:
        """Serves a connection of the admin listener until it ends. `prefix` was read from it already."""
        connection = self._connected(wire, "", prefix)
        self._accepted += 1
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._gone()

    def _gone(self) -> None:
        if self._one_gone is not None:
            self._one_gone.set()

    def _leave(self, sock: socket.socket, address: str, turned_away: str) -> None:
        if turned_away:
            self._turned_away.free(sock)
        else:
            self.services.connections.leave(address)

    async def _serve(self, connection: GrpcConnection, address: str, turned_away: str) -> None:
        try:
            await connection.run()
        except Exception:
            log.exception("a gRPC connection failed")
        finally:
            self._connections.discard(connection)
            self.services.request_limits.leave(address, connection.open_requests)
            self._leave(connection.sock, address, turned_away)
            self._gone()

    def shed(self) -> None:
        """Refuses calls with incomplete requests until the rest is within the limit (rule 4)."""
        while self.totals.in_bytes > self.input_limit:
            waiting = [found for c in self._connections if (found := c.waiting_input()) is not None]
            if not waiting:
                return
            call = min(waiting, key=lambda found: found[0])[1]
            call.refuse(Status.RESOURCE_EXHAUSTED.value, TOO_MUCH_INPUT.format(self.input_limit))

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections) + len(self._handshakes)

    async def drain(self) -> None:
        """Stops accepting, sends GOAWAY, and returns when all connections have ended."""
        self._draining = True
        if self._acceptor is not None:
            self._acceptor.stop()
        self._handshakes.stop()
        for connection in list(self._connections):
            connection.start_drain()
        while self.connections:
            self._one_gone = trio.Event()
            await self._one_gone.wait()

    def statistics(self) -> GrpcStatistics:
        """What all connections hold now."""
        each = [connection.statistics() for connection in self._connections]
        return GrpcStatistics(
            connections=len(each),
            accepted=self._accepted,
            open_calls=sum(s.open_calls for s in each),
            parked_calls=sum(s.parked_calls for s in each),
            unsent_reply_bytes=sum(s.unsent_reply_bytes for s in each),
            unfinished_request_bytes=sum(s.unfinished_request_bytes for s in each),
            in_place_bytes=sum(s.in_place_bytes for s in each),
            inflated_bytes=self.inflating.held,
        )
