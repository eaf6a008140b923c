"""The gRPC port: one task per connection passes received bytes to an HTTP/2 session, through which calls answer.

Life of a connection: a TLS handshake if the settings ask for TLS (transport.port_server); then HTTP/2's preface must come; then
all bytes go to the session. A call with output asks for it to be sent by want_flush(). The connection ends when the client closes
it, when the session has ended, when it is too old or silent for too long, or when the server drains.

Rules:
 1. Reply bytes that a client does not read are bounded. While a connection has more than HELD of them, its complete
    requests are parked: they are not submitted, and flow control stops the client from sending more. So the connection
    holds at most HELD, one flow-control window of requests, and the answers of requests submitted before. Those cannot
    be taken back, and the size of their answers is not known. So if all clients together leave more unread than
    --grpc-max-unread-bytes, connections above HELD get an error in place of each such answer.
 2. Beyond the limits on connections (service.connections), a new one is answered health probes; other calls are refused
    with UNAVAILABLE, and it is ended within seconds. A connection without calls gets GOAWAY after
    --grpc-max-connection-idle, and within seconds while new connections are being refused.
 3. The bytes of incomplete requests, and of messages that wait, are bounded for all connections together. Above --grpc-max-unfinished-bytes, such
    calls are refused, beginning with the client that was silent longest.
 4. A drain waits until open calls have ended and their bytes are sent. It does not wait for idle clients.
 5. The handlers of calls other than inference import modules that take as long as the rest of the server. A thread
    imports them when the port already serves (handler_import); calls that come earlier wait for it.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from grpclib.const import Status

from neptrio.observe import memory_limit
from neptrio.service import Services, Verbs
from neptrio.service.connections import PRESSED_IDLE_SECONDS
from neptrio.transport.grpc import handler_import
from neptrio.transport.grpc.connection import GrpcConnection
from neptrio.transport.grpc.handlers import HandlerCall
from neptrio.transport.header_policy import grpc_policy
from neptrio.transport.http2 import limits as limits
from neptrio.transport.http2.connection import ConnectionTimes
from neptrio.transport.http2.session import Http2Session, OpenStream, session_class
from neptrio.transport.http2.stream import Totals
from neptrio.transport.open_connections import OpenConnections
from neptrio.transport.port_server import PortServer
from neptrio.transport.tls import ServerTls
from neptrio.transport.wire import Wire

TOO_MUCH_INPUT = "the server holds more than {} bytes of unfinished requests; send the request again"


def default_input_limit() -> int:
    """Half of the container's memory or the machine's in bytes; without a limit on the container at least 2.5 GiB,
    so that a message of the largest size fits."""
    return memory_limit.share(2, at_least=5 << 29)


class GrpcServer(PortServer):
    """Serves and drains the connections of the gRPC port, or those of the admin listener that speak gRPC."""

    name = "gRPC"
    call_class = HandlerCall  # of calls other than the two inference ones

    def __init__(self, services: Services, verbs: Verbs, listener: socket.socket | None) -> None:
        """Without a listener it serves the connections of the admin listener, which adopt() is given: they are encrypted
        already where they are to be, and the public port's limits on clients do not hold for them."""
        settings = services.settings
        tls: ServerTls | None = None
        if listener is not None and (settings.grpc_use_ssl or settings.grpc_use_ssl_mutual):
            assert settings.grpc_server_cert is not None and settings.grpc_server_key is not None
            roots = settings.grpc_root_cert if settings.grpc_use_ssl_mutual else None
            tls = ServerTls(settings.grpc_server_cert, settings.grpc_server_key, roots, ["h2"], settings)
        super().__init__(services, listener, tls)
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
        if self.admin:
            self.input_limit = self.output_limit = sys.maxsize
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
        self.totals = Totals()
        self.open = OpenConnections[GrpcConnection](None if self.admin else services.request_limits)
        services.held.add(self.open.held_bytes)

    def new_session(self, open_stream: OpenStream) -> Http2Session:
        """The HTTP/2 session of a new connection."""
        return self._session_class(open_stream, limits.FloodBudget(self._pings), totals=self.totals)

    def tasks(self) -> list[Callable[[], Awaitable[None]]]:
        return [self.load_handlers]

    async def load_handlers(self) -> None:
        verbs = self._verbs if self._host is None else self._verbs.at(self._host)
        self.handlers |= await handler_import.imported(self.services, verbs)
        self.handlers_loaded.set()

    def check(self, now_ns: int, pressed: bool) -> None:
        self.services.held.count()
        unread_ns = int(self.services.settings.http_request_timeout_secs * 1e9)
        idle_ns = int(PRESSED_IDLE_SECONDS * 1e9)
        self.open.check(now_ns, unread_ns, idle_ns, pressed and not self.admin)

    async def serve(self, wire: Wire, turned_away: str) -> None:
        await self.open.serve(GrpcConnection(wire, self, turned_away))

    async def adopt(self, wire: Wire, prefix: bytes = b"") -> None:
        """Serves a connection of the admin listener until it ends. `prefix` was read from it already."""
        await self.open.serve(GrpcConnection(wire, self, prefix=prefix))

    def shed(self) -> None:
        """Refuses calls with incomplete requests until the rest is within the limit (rule 3)."""
        while self.totals.in_bytes > self.input_limit:
            waiting = [found for c in self.open if (found := c.waiting_input()) is not None]
            if not waiting:
                return
            call = min(waiting, key=lambda found: found[0])[1]
            call.refuse(Status.RESOURCE_EXHAUSTED.value, TOO_MUCH_INPUT.format(self.input_limit))

    async def drain(self) -> None:
        """Stops accepting, sends GOAWAY, and returns when all connections have ended."""
        self.open.start_drain()
        self.stop_accepting()
        await self.until_gone()
