"""The REST port: gives each connection to the code that speaks its protocol, and drains them at the end.

Over TLS, ALPN says whether a client speaks HTTP/1.1 or HTTP/2; without it, HTTP/2's preface does. Both kinds of connections
answer inference themselves and call the same ASGI app for the rest, with hypercorn's streams in between. With
--http-lean=false hypercorn serves all connections itself. What all ports share is transport.port_server's.

Rules:
 1. A connection that does not send the whole head of a request within the request timeout is closed. For bodies the
    connections have time limits.
 2. Beyond the limits on connections, a new one is still answered health probes; other requests are refused and told
    when to try again (service.connections).
 3. Draining: no new connection is accepted. Within the exit grace each open one may send one more request, whose answer
    says that it is the last; HTTP/2 clients get GOAWAY (transport.http2.connection, rule 2). After that idle connections are closed, and requests that were
    received are answered.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from neptrio.addresses import is_loopback
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services, Verbs
from neptrio.service.connections import PRESSED_IDLE_SECONDS
from neptrio.transport.header_policy import HeaderPolicy, http_policy
from neptrio.transport.http1.connection import Http1Connection
from neptrio.transport.open_connections import OpenConnections
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.port_server import PortServer
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest.http2_connection import RestHttp2Connection
from neptrio.transport.rest.port import Port
from neptrio.transport.tls import rest_tls
from neptrio.transport.wire import Wire

if TYPE_CHECKING:
    from neptrio.transport.hypercorn.server import HypercornServer

LOOK_SECONDS = 0.1  # when draining: between two looks at who may be ended


class RestServer(PortServer):
    """Serves and drains the connections of the REST port."""

    name = "REST"

    def __init__(self, services: Services, verbs: Verbs, listener: socket.socket) -> None:
        settings = services.settings
        super().__init__(services, listener, rest_tls(settings, ["h2", "http/1.1"]))
        self.watch_seconds = min(1.0, settings.http_request_timeout_secs / 4)
        if settings.http_keep_alive_timeout_secs:
            self.watch_seconds = min(self.watch_seconds, settings.http_keep_alive_timeout_secs / 4)
        policy = http_policy(settings, services.tokens)
        self._host = str(listener.getsockname()[0])
        origins = OriginPolicy(settings.cors_allow_origin, settings.allowed_host, is_loopback(self._host))
        self._port = Port(services, self.make_app(services, verbs, policy, origins), policy, origins)
        self.http1 = OpenConnections[Http1Connection](services.request_limits)
        self.http2 = OpenConnections[RestHttp2Connection](services.request_limits)
        self._draining = False
        services.held.add(self.http1.held_bytes)
        services.held.add(self.http2.held_bytes)
        self._hypercorn: HypercornServer | None = None
        self._by_hypercorn: set[trio.CancelScope] = set()  # of the connections that it serves
        if not settings.http_lean:
            from neptrio.transport.hypercorn.server import HypercornServer  # importing it takes long

            self._hypercorn = HypercornServer(services, self._port.app, self._tls, policy)

    def make_app(
        self, services: Services, verbs: Verbs, policy: HeaderPolicy | None, origins: OriginPolicy
    ) -> RestApp:
        """The app that answers every route."""
        return RestApp(services, verbs.at(self._host), policy, origins)

    def tasks(self) -> list[Callable[[], Awaitable[None]]]:
        return [self._port.calls.load]

    def check(self, now_ns: int, pressed: bool) -> None:
        settings = self._services.settings
        request_ns = int(settings.http_request_timeout_secs * 1e9)
        idle_ns = int(settings.http_keep_alive_timeout_secs * 1e9)
        if self._draining:
            request_ns = min(request_ns, int(settings.exit_timeout_secs / 2 * 1e9))
        if pressed:
            pressed_ns = int(PRESSED_IDLE_SECONDS * 1e9)
            idle_ns = min(idle_ns or pressed_ns, pressed_ns)
        self.http1.check(now_ns, request_ns, idle_ns, pressed)
        self.http2.check(now_ns, request_ns, idle_ns, pressed)

    async def begin(self, sock: socket.socket, address: str, turned_away: str, nursery: trio.Nursery) -> None:
        if self._hypercorn is None:
            await super().begin(sock, address, turned_away, nursery)
            return
        with trio.CancelScope() as scope:
            self._by_hypercorn.add(scope)
            try:
                await self._hypercorn.serve(sock, turned_away, address)
            finally:
                self._by_hypercorn.discard(scope)

    async def serve(self, wire: Wire, turned_away: str) -> None:
        begun: bytes | None = b""
        if wire.secure is None or wire.secure.protocol != "h2":
            begun = await self.http1.serve(Http1Connection(wire, self._port, turned_away))
            if not begun:
                return  # else it is HTTP/2 without TLS
        await self.http2.serve(RestHttp2Connection(wire, self._port, turned_away, begun or b""))

    async def drain(self) -> None:
        """Stops accepting and returns when all connections have ended (rule 3)."""
        self._draining = True
        self.http1.start_drain()
        self.http2.start_drain()
        self.stop_accepting()
        if self._hypercorn is not None:
            await self._hypercorn.drain()
        with trio.move_on_after(self._services.settings.grace_secs):
            await self.until_gone()
        for connection in list(self.http1):
            connection.end_grace()
        if self._by_hypercorn:
            with trio.move_on_after(self._services.settings.grace_secs):
                await self.until_gone()
            for scope in list(self._by_hypercorn):  # its connections may stay open without a request
                scope.cancel()
        while self.connections:
            with trio.move_on_after(LOOK_SECONDS):
                await self.until_gone()
            self._end_answered()

    def _end_answered(self) -> None:
        now = int(monotonic_ns())
        for connection in list(self.http2):
            connection.end_answered(now)
