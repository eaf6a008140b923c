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
 5. An exception ends only the connection that raised it.
 6. It drains like the other ports.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import trio

from neptrio.addresses import is_loopback
from neptrio.loop import open_files
from neptrio.loop.socket_writer import listen
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services, Verbs
from neptrio.service.connections import HeldSockets, kept_back
from neptrio.transport.accept import Acceptor
from neptrio.transport.console import Console, Ports
from neptrio.transport.grpc.server import GrpcServer
from neptrio.transport.handshakes import Handshakes
from neptrio.transport.header_policy import http_policy
from neptrio.transport.http1.connection import Http1Connection
from neptrio.transport.metrics_server import PATHS, MetricsServer
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest.connections import Connections
from neptrio.transport.rest.port import Port
from neptrio.transport.tls import rest_tls
from neptrio.transport.unix_socket import UnixListener, client_name

log = logging.getLogger("neptrio.admin")

WATCH_SECONDS = 1.0
MOST_CONNECTIONS = 64


class AdminServer:
    """Listens at --admin-address, accepts connections and drains them."""

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
        verbs = verbs.at("" if address.path is not None else address.host)
        self._services = services
        self._metrics = metrics
        self._unix: UnixListener | None = None
        policy = http_policy(settings, services.tokens)
        if address.path is not None:
            self._origins = OriginPolicy()
        else:
            self._origins = OriginPolicy((), settings.allowed_host, is_loopback(address.host))
        self._rest = RestApp(services, verbs, policy, self._origins, admin=True)
        self._console: Console | None = None
        if settings.console_at("" if address.path is not None else address.host, admin=True):
            found = None if metrics is None else metrics.metrics
            self._console = Console(services, verbs, self._origins, policy, ports, found, admin=True)
        self._grpc = GrpcServer(services, verbs, None)
        # the first that the client offers, too, is chosen: gRPC clients offer HTTP/2 alone
        self._tls = None if address.path is not None else rest_tls(settings, ["http/1.1", "h2"])
        self._handshakes = Handshakes(self._tls, services.loop)
        if address.path is not None:
            self._unix = UnixListener(address.path, settings.admin_socket_mode)
            self.listener = self._unix.sock
        else:
            try:
                self.listener = listen(address.host, address.port)
            except OSError as error:
                raise OSError(f"{error.strerror} (--admin-address chooses another one)") from None
        self._acceptor = Acceptor(self.listener, self._start)
        self._turned_away = HeldSockets(min(MOST_CONNECTIONS, kept_back(open_files.limit()) // 8))
        self._port = Port(
            services,
            self._app,
            policy,
            self._origins,
            only_app=True,
            counted=False,
            on_call=self._turned_away.take,
        )
        self._nursery: trio.Nursery | None = None
        self._http1 = Connections[Http1Connection](self._port)
        self._open = 0
        self._changed = trio.Event()
        services.held.add(self._http1.held_bytes)

    @property
    def console(self) -> bool:
        """Whether it serves the console."""
        return self._console is not None

    @property
    def secure(self) -> bool:
        """Whether it speaks TLS."""
        return self._tls is not None

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return self._open

    def close(self) -> None:
        """Closes the listener and removes its file. Connections are not concerned."""
        if self._unix is not None:
            self._unix.remove()
        self.listener.close()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self._grpc.run)
            self._nursery.start_soon(self._watch)
            self._nursery.start_soon(self._port.calls.load)
            if self._tls is not None:
                self._nursery.start_soon(self._tls.watch)
            task_status.started()
            await self._acceptor.run()
            await trio.sleep_forever()

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
        assert self._nursery is not None
        if self._unix is not None:
            address = client_name(sock)
        self._open += 1
        self._nursery.start_soon(self._serve, sock, address, self._nursery)
        return self._turned_away.take(sock)

    async def _serve(self, sock: socket.socket, address: str, nursery: trio.Nursery) -> None:
        try:
            wire = await self._handshakes.wire(sock, nursery, address)
            if wire is None:
                return
            if wire.secure is not None and wire.secure.protocol == "h2":
                await self._grpc.adopt(wire)
            else:
                begun = await self._http1.serve(Http1Connection(wire, self._port))
                if begun and wire.secure is None:
                    await self._grpc.adopt(wire, begun)
        except Exception:
            log.exception("an admin connection failed")
        finally:
            self._turned_away.free(sock)
            sock.close()
            self._open -= 1
            self._changed.set()

    async def _watch(self) -> None:
        """Checks at an interval which connections have been silent or idle for too long, and ends those."""
        settings = self._services.settings
        request_ns = int(settings.http_request_timeout_secs * 1e9)
        idle_ns = int(settings.http_keep_alive_timeout_secs * 1e9)
        while True:
            await trio.sleep(WATCH_SECONDS)
            now = int(monotonic_ns())
            self._http1.check(now, request_ns, idle_ns)

    async def drain(self) -> None:
        """Stops listening and returns when all connections have ended (transport.rest_server, rule 4)."""
        self._http1.start_drain()
        self._acceptor.stop()
        self.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._grpc.drain)
            self._handshakes.stop()
            with trio.move_on_after(self._services.settings.grace_secs):
                await self._until_gone()
            for connection in list(self._http1):
                connection.end_grace()
            await self._until_gone()

    async def _until_gone(self) -> None:
        while self._open:
            self._changed = trio.Event()
            await self._changed.wait()
