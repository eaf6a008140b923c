"""The REST port: accepts connections, gives each to the code that speaks its protocol, and drains them at the end.

Over TLS, ALPN says whether a client speaks HTTP/1.1 or HTTP/2; without it, HTTP/2's preface does. Both kinds of connections
answer inference themselves and call the same ASGI app for the rest, with hypercorn's streams in between. With
--http-lean=false hypercorn serves all connections itself.

Rules:
 1. An exception ends only the connection that raised it.
 2. A connection that does not make its TLS handshake within HANDSHAKE_S, or does not send the whole head of a request within
    the request timeout, is closed. For bodies the connections have time limits.
 3. Beyond the limits on connections, a new one is still answered health probes; other requests are refused and told
    when to try again (service.connections).
 4. Draining: no new connection is accepted. Within the exit grace each open one may send one more request, whose answer
    says that it is the last; HTTP/2 clients get GOAWAY (transport.http2.connection, rule 2). After that idle connections are closed, and requests that were
    received are answered.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from neptrio.addresses import is_loopback
from neptrio.loop import threads
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services, Verbs
from neptrio.service.connections import PLACES, PRESSED_IDLE_SECONDS, TURNED_AWAY_SECONDS, HeldSockets
from neptrio.transport.accept import Acceptor
from neptrio.transport.handshakes import Handshakes
from neptrio.transport.header_policy import HeaderPolicy, http_policy
from neptrio.transport.http1.connection import Http1Connection
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest.connections import Connections
from neptrio.transport.rest.http2_connection import RestHttp2Connection
from neptrio.transport.rest.port import Port
from neptrio.transport.tls import HANDSHAKE_S, rest_tls

if TYPE_CHECKING:
    from neptrio.transport.hypercorn.server import HypercornServer

log = logging.getLogger("neptrio.rest")

LOOK_SECONDS = 0.1  # when draining: between two looks at who may be ended


@dataclass(frozen=True)
class RestStatistics:
    """How many connections the REST port has open, by what serves them."""

    http1: int
    http2: int
    hypercorn: int


class RestServer:
    """Accepts REST connections and drains them."""

    def __init__(self, services: Services, verbs: Verbs, listener: socket.socket) -> None:
        settings = services.settings
        self._services = services
        self._acceptor = Acceptor(listener, self._start, services.connections.balance)
        self._nursery: trio.Nursery | None = None
        self._turned_away = HeldSockets(PLACES)
        policy = http_policy(settings, services.tokens)
        self._host = str(listener.getsockname()[0])
        origins = OriginPolicy(settings.cors_allow_origin, settings.allowed_host, is_loopback(self._host))
        self._port = Port(services, self.make_app(services, verbs, policy, origins), policy, origins)
        self.http1 = Connections[Http1Connection](self._port)
        self.http2 = Connections[RestHttp2Connection](self._port)
        self._draining = False
        self._changed = trio.Event()
        self._starting = 0  # connections whose task has not begun
        self._tls = rest_tls(settings, ["h2", "http/1.1"])
        self._handshakes = Handshakes(self._tls, services.loop)
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

    def statistics(self) -> RestStatistics:
        """How many connections are open now."""
        return RestStatistics(len(self.http1), len(self.http2), len(self._by_hypercorn))

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._watch)
            self._nursery.start_soon(self._port.calls.load)
            if self._tls is not None:
                self._nursery.start_soon(self._tls.watch)
            task_status.started()
            await self._acceptor.run()
            await trio.sleep_forever()

    def _start(self, sock: socket.socket, address: str) -> bool:
        assert self._nursery is not None
        turned_away = self._services.connections.enter(sock.fileno(), address)
        if turned_away:
            self._turned_away.take(sock)
        self._starting += 1
        self._nursery.start_soon(self._serve, sock, address, turned_away, self._nursery)
        return not turned_away

    async def _watch(self) -> None:
        """Checks at an interval which connections have been silent or idle for too long, and ends those."""
        settings = self._services.settings
        request_ns = int(settings.http_request_timeout_secs * 1e9)
        last_ns = min(request_ns, int(settings.exit_timeout_secs / 2 * 1e9))  # while the server stops
        idle_ns = int(settings.http_keep_alive_timeout_secs * 1e9)
        pressed_ns = int(PRESSED_IDLE_SECONDS * 1e9)
        interval = min(1.0, settings.http_request_timeout_secs / 4)
        if idle_ns:
            interval = min(interval, settings.http_keep_alive_timeout_secs / 4)
        while True:
            await trio.sleep(interval)
            now = int(monotonic_ns())
            pressed = self._services.connections.pressed
            idle = min(idle_ns or pressed_ns, pressed_ns) if pressed else idle_ns
            request = last_ns if self._draining else request_ns
            self.http1.check(now, request, idle, pressed)
            self.http2.check(now, request, idle, pressed)

    async def _serve(
        self, sock: socket.socket, address: str, turned_away: str, nursery: trio.Nursery
    ) -> None:
        self._starting -= 1
        try:
            if self._hypercorn is not None:
                with trio.CancelScope() as scope:
                    self._by_hypercorn.add(scope)
                    try:
                        await self._hypercorn.serve(sock, turned_away, address)
                    finally:
                        self._by_hypercorn.discard(scope)
                sock.close()
                return
            seconds = TURNED_AWAY_SECONDS if turned_away else HANDSHAKE_S
            wire = await self._handshakes.wire(sock, nursery, address, seconds)
            if wire is None:
                sock.close()
            elif wire.secure is not None and wire.secure.protocol == "h2":
                await self.http2.serve(RestHttp2Connection(wire, self._port, turned_away))
            else:
                begun = await self.http1.serve(Http1Connection(wire, self._port, turned_away))
                if begun:  # HTTP/2 without TLS
                    await self.http2.serve(RestHttp2Connection(wire, self._port, turned_away, begun))
        except threads.NoThread as error:
            log.warning("a REST connection is closed: %s", error)
            sock.close()
        except Exception:
            log.exception("a REST connection failed")
            sock.close()
        finally:
            self._changed.set()
            if turned_away:
                self._turned_away.free(sock)
            else:
                self._services.connections.leave(address)

    @property
    def connections(self) -> int:
        """How many connections are open, with those whose task has not begun."""
        served = len(self.http1) + len(self.http2) + len(self._by_hypercorn)
        return self._starting + len(self._handshakes) + served

    async def drain(self) -> None:
        """Stops accepting and returns when all connections have ended (rule 4)."""
        self._draining = True
        self.http1.start_drain()
        self.http2.start_drain()
        self._acceptor.stop()
        self._handshakes.stop()
        if self._hypercorn is not None:
            await self._hypercorn.drain()
        with trio.move_on_after(self._services.settings.grace_secs):
            await self._until_gone()
        for connection in list(self.http1):
            connection.end_grace()
        if self._by_hypercorn:
            with trio.move_on_after(self._services.settings.grace_secs):
                await self._until_gone()
            for scope in list(self._by_hypercorn):  # its connections may stay open without a request
                scope.cancel()
        while self.connections:
            self._changed = trio.Event()
            with trio.move_on_after(LOOK_SECONDS):
                await self._changed.wait()
            self._end_answered()

    def _end_answered(self) -> None:
        now = int(monotonic_ns())
        for connection in list(self.http2):
            connection.end_answered(now)

    async def _until_gone(self) -> None:
        while self.connections:
            self._changed = trio.Event()
            await self._changed.wait()
