"""The REST port: accepts connections, gives each to the code that speaks its protocol, and drains them at the end.

Our own Http1Connection serves plain HTTP/1.1. Hypercorn serves TLS, HTTP/2 without TLS (for clients that begin with
it), and everything with --http-lean=false. Both call the same ASGI app.

Rules:
 1. An exception ends only the connection that raised it.
 2. A connection that does not send the whole head of a request within the request timeout is closed. For bodies, our
    own connection and the app have a time limit. transport.hypercorn.connection has the rules of hypercorn's connections.
 3. Beyond the limits on connections, a new one is still answered health probes; other requests are refused and told
    when to try again (service.connections).
 4. Draining: no new connection is accepted. Within the exit grace each open one may send one more request, whose answer
    says that it is the last; HTTP/2 clients get GOAWAY. After that idle connections are closed, and requests that were
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
from neptrio.service import Services
from neptrio.service.connections import PLACES, PRESSED_IDLE_SECONDS, Places
from neptrio.transport.accept import Acceptor
from neptrio.transport.header_policy import HeaderPolicy, http_policy
from neptrio.transport.http1.connection import Http1Connection, check_all
from neptrio.transport.http1.input import HandOver
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest.app import RestApp
from neptrio.transport.tls import rest_tls

if TYPE_CHECKING:
    from neptrio.transport.hypercorn.front import HypercornFront

log = logging.getLogger("neptrio.rest")

QUIET_SECONDS = 1.0  # when draining: connections left after this time without a request are ended


@dataclass(frozen=True)
class RestStatistics:
    """How many connections the REST port has open: our own HTTP/1.1 ones, and hypercorn's."""

    connections: int
    hypercorn_connections: int


class RestServer:
    """Accepts REST connections and drains them."""

    def __init__(self, services: Services, listener: socket.socket) -> None:
        settings = services.settings
        self._services = services
        self._acceptor = Acceptor(listener, self._start, services.connections.turn)
        self._nursery: trio.Nursery | None = None
        self._places = Places(PLACES)
        self._policy = http_policy(settings, services.tokens)
        self._origins = OriginPolicy(
            settings.cors_allow_origin, settings.allowed_host, is_loopback(str(listener.getsockname()[0]))
        )
        self._app = self.make_app(services, self._policy, self._origins)
        self._connections: set[Http1Connection] = set()
        self._draining = False
        self._changed = trio.Event()
        self._starting = 0  # connections whose task has not begun
        self._handed_over = 0  # connections that hypercorn serves
        self._by_hypercorn = settings.http_tls_cert is not None or not settings.http_lean
        services.held.add(self._held_bytes)
        self._front: HypercornFront | None = self._make_front() if self._by_hypercorn else None

    def make_app(self, services: Services, policy: HeaderPolicy | None, origins: OriginPolicy) -> RestApp:
        """The app that answers every route."""
        return RestApp(services, policy, origins)

    def _make_front(self) -> HypercornFront:
        from neptrio.transport.hypercorn.front import HypercornFront

        tls = rest_tls(self._services.settings, ["h2", "http/1.1"])
        return HypercornFront(self._services, self._app, tls, policy=self._policy)

    def _held_bytes(self) -> int:
        return sum(connection.held_bytes() for connection in self._connections)

    def statistics(self) -> RestStatistics:
        """How many connections are open now."""
        return RestStatistics(len(self._connections), self._handed_over)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._watch)
            if self._front is not None and self._front.tls is not None:
                self._nursery.start_soon(self._front.tls.watch)
            task_status.started()
            await self._acceptor.run()
            await trio.sleep_forever()

    def _start(self, sock: socket.socket, address: str) -> bool:
        assert self._nursery is not None
        turned_away = self._services.connections.enter(sock.fileno(), address)
        if turned_away:
            self._places.take(sock)
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
            check_all(self._connections, now, last_ns if self._draining else request_ns, idle, pressed)
            if pressed and self._front is not None:
                self._front.press(PRESSED_IDLE_SECONDS)

    async def _serve(
        self, sock: socket.socket, address: str, turned_away: str, nursery: trio.Nursery
    ) -> None:
        self._starting -= 1
        try:
            if self._by_hypercorn:
                await self._hypercorn(sock, b"", turned_away, address)
                return
            connection = Http1Connection(
                sock,
                self._services,
                self._app,
                nursery,
                self._policy,
                turned_away,
                self._origins,
                client=address,
            )
            self._services.request_limits.join(address, connection.open_requests)
            self._connections.add(connection)
            if self._draining:
                connection.drain()
            try:
                await connection.run()
            except HandOver as hand_over:
                self._connections.discard(connection)
                await self._hypercorn(sock, hand_over.data, turned_away, address)
            finally:
                self._services.request_limits.leave(address, connection.open_requests)
                self._connections.discard(connection)
                self._changed.set()
        except threads.NoThread as error:
            log.warning("a REST connection is closed: %s", error)
            sock.close()
        except Exception:
            log.exception("a REST connection failed")
            sock.close()
        finally:
            if turned_away:
                self._places.free(sock)
            else:
                self._services.connections.leave(address)

    async def _hypercorn(self, sock: socket.socket, prefix: bytes, turned_away: str, address: str) -> None:
        self._handed_over += 1
        try:
            if self._front is None:
                # importing hypercorn takes long: a thread does it, so that the loop does not wait
                made = await threads.run(self._make_front)
                if self._front is None:
                    self._front = made
                    if self._draining:
                        await made.drain()
            await self._front.serve(sock, prefix, turned_away, address)
        finally:
            self._handed_over -= 1
            self._changed.set()
            sock.close()

    @property
    def connections(self) -> int:
        """How many connections are open, with those whose task has not begun."""
        return self._starting + len(self._connections) + self._handed_over

    async def drain(self) -> None:
        """Stops accepting and returns when all connections have ended (rule 4)."""
        self._draining = True
        for connection in self._connections:
            connection.drain()
        self._acceptor.stop()
        if self._front is not None:
            await self._front.drain()
        with trio.move_on_after(self._services.settings.grace_secs):
            while self.connections:
                self._changed = trio.Event()
                await self._changed.wait()
        for connection in list(self._connections):
            connection.end_grace()
        quiet_since: float | None = None
        while self.connections:
            self._changed = trio.Event()
            with trio.move_on_after(0.1):
                await self._changed.wait()
            # hypercorn can keep a connection open after its streams were dropped: end it when no request has been
            # under way for QUIET_SECONDS, which is enough for answers to leave
            if self._connections or self._services.admission.inflight():
                quiet_since = None
            elif quiet_since is None:
                quiet_since = trio.current_time()
            elif trio.current_time() - quiet_since > QUIET_SECONDS:
                for left in self._front.connections if self._front is not None else ():
                    left.cancel()
