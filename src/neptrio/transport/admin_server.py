"""The admin listener (--admin-address): everything over REST and gRPC, and /metrics, for operators.

The problem: an operator wants to load models and change settings while clients, who must not, reach the same server, and
while the public ports may be full. The choice: one more listener, at a TCP address or a Unix socket that only operators
reach. Where there is one, the public ports refuse control verbs (transport.admin_only). It calls the same handlers as
they do, so tokens, restricted categories, --read-only and the audit log hold here too.

Rules:
 1. The first bytes tell the protocols apart: HTTP/2's preface begins gRPC, all else is REST over HTTP/1.1. Over TLS, a
    client that offers HTTP/1.1 gets REST, and one that offers only HTTP/2 gets gRPC. REST is not served over HTTP/2.
 2. A TCP address speaks TLS if REST does, with the same files. A Unix socket never does: its file's mode says who
    may connect.
 3. The limits on connections, requests and bytes of the public ports do not hold here, so that operators get in when
    those are full. The number of connections is bounded: beyond it, the one whose last request is oldest is closed.
 4. Host and Origin are checked as at the REST port, but no web page may use this listener, whatever --cors-allow-origin
    says. At a Unix socket the Host does not matter.
 5. It drains like the other ports.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from neptrio.addresses import is_loopback
from neptrio.loop.socket_writer import listen
from neptrio.service import Services, Verbs
from neptrio.transport.console import Console, Ports
from neptrio.transport.grpc.server import GrpcServer
from neptrio.transport.header_policy import http_policy
from neptrio.transport.http1.connection import Http1Connection
from neptrio.transport.metrics_server import PATHS, MetricsServer
from neptrio.transport.open_connections import OpenConnections
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.port_server import PortServer
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest.port import Port
from neptrio.transport.tls import ServerTls, rest_tls
from neptrio.transport.unix_socket import UnixListener, client_name
from neptrio.transport.wire import Wire

MOST_CONNECTIONS = 64


class AdminServer(PortServer):
    """Listens at --admin-address, and serves and drains its connections."""

    name = "admin"

    def __init__(
        self,
        services: Services,
        verbs: Verbs,
        metrics: MetricsServer | None,
        ports: Ports | None = None,
    ) -> None:
        """Without `metrics`, /metrics is not found. `ports`: where the console says that clients reach the server. Raises
        OSError if the address or the certificate cannot be used."""
        settings = services.settings
        address = settings.admin_address
        assert address is not None
        self._unix: UnixListener | None = None
        self._origins = OriginPolicy()
        host = ""
        tls: ServerTls | None = None
        if address.path is not None:
            self._unix = UnixListener(address.path, settings.admin_socket_mode)
            self.listener = self._unix.sock
        else:
            host = address.host
            self._origins = OriginPolicy((), settings.allowed_host, is_loopback(host))
            # the first that the client offers, too, is chosen: gRPC clients offer HTTP/2 alone
            tls = rest_tls(settings, ["http/1.1", "h2"])
            try:
                self.listener = listen(host, address.port)
            except OSError as error:
                raise OSError(f"{error.strerror} (--admin-address chooses another one)") from None
        super().__init__(services, self.listener, tls, MOST_CONNECTIONS)
        verbs = verbs.at(host)
        self._metrics = metrics
        policy = http_policy(settings, services.tokens)
        self._rest = RestApp(services, verbs, policy, self._origins, admin=True)
        self._console: Console | None = None
        if settings.console_at(host, admin=True):
            found = None if metrics is None else metrics.metrics
            self._console = Console(services, verbs, self._origins, policy, ports, found, admin=True)
        self._grpc = GrpcServer(services, verbs, None)
        self._port = Port(
            services,
            self._app,
            policy,
            self._origins,
            only_app=True,
            counted=False,
            on_call=self._places.take,
        )
        self._http1 = OpenConnections[Http1Connection](None)
        services.held.add(self._http1.held_bytes)

    @property
    def console(self) -> bool:
        """Whether it serves the console."""
        return self._console is not None

    @property
    def secure(self) -> bool:
        """Whether it speaks TLS."""
        return self._tls is not None

    def close(self) -> None:
        """Closes the listener and removes its file. Connections are not concerned."""
        if self._unix is not None:
            self._unix.remove()
        self.listener.close()

    def tasks(self) -> list[Callable[[], Awaitable[None]]]:
        return [self._grpc.run, self._port.calls.load]

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        is_metrics = scope["type"] == "http" and scope["raw_path"].partition(b"?")[0] in PATHS
        if is_metrics and self._metrics is not None:
            await self._metrics.answer(scope, self._origins, send)
        elif (
            self._console is not None and scope["type"] == "http" and self._console.serves(scope["raw_path"])
        ):
            await self._console(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    def _start(self, sock: socket.socket, address: str) -> bool:
        return super()._start(sock, address if self._unix is None else client_name(sock))

    async def serve(self, wire: Wire, turned_away: str) -> None:
        begun: bytes | None = b""
        if wire.secure is None or wire.secure.protocol != "h2":
            begun = await self._http1.serve(Http1Connection(wire, self._port))
            if not begun or wire.secure is not None:
                return
        await self._grpc.adopt(wire, begun or b"")

    def check(self, now_ns: int, pressed: bool) -> None:
        settings = self._services.settings
        request_ns = int(settings.http_request_timeout_secs * 1e9)
        self._http1.check(now_ns, request_ns, int(settings.http_keep_alive_timeout_secs * 1e9))

    async def drain(self) -> None:
        """Stops listening and returns when all connections have ended (transport.rest_server, rule 3)."""
        self._http1.start_drain()
        self._grpc.open.start_drain()
        self.stop_accepting()
        self.close()
        with trio.move_on_after(self._services.settings.grace_secs):
            await self.until_gone()
        for connection in list(self._http1):
            connection.end_grace()
        await self.until_gone()
