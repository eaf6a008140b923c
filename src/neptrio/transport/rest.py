"""The REST front: hypercorn's configuration and protocols around our lean HTTP/1.1.

Plain connections that speak HTTP/1.1 are served by Http1Connection; HTTP/2 (by prior knowledge or
`Upgrade: h2c`) and TLS are hypercorn's, and so is plain HTTP/1.1 when the lean path is turned off
(--http-lean=false). All of them call the same ASGI app.

Rules:
 1. Whatever a connection raises ends at that connection.
 2. A connection whose request's head does not come within the request timeout is closed; bodies
    are timed by the app (transport.hypercorn_server has the rules of hypercorn's connections).
 3. Draining: no new connection, idle ones close, busy ones close behind their last answer.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from neptrio._cext.request import monotonic_ns
from neptrio.service import Services
from neptrio.transport.app import RestApp
from neptrio.transport.header_policy import http_policy
from neptrio.transport.http1 import HandOver, Http1Connection
from neptrio.transport.link import accept_loop

if TYPE_CHECKING:
    from neptrio.transport.hypercorn_front import HypercornFront

log = logging.getLogger("neptrio.rest")

QUIET_SECONDS = 1.0  # at the end, with nothing under way: then what is left is ended


@dataclass(frozen=True)
class RestStatistics:
    """What the front holds."""

    connections: int
    hypercorn_connections: int


class RestServer:
    """Accepts REST connections and drains them."""

    def __init__(self, services: Services, listener: socket.socket) -> None:
        settings = services.settings
        self._services = services
        self._listener = listener
        self._policy = http_policy(settings)
        self._app = RestApp(services, self._policy)
        self._connections: set[Http1Connection] = set()
        self._accepting = trio.CancelScope()
        self._changed = trio.Event()
        self._handed_over = 0  # connections that are hypercorn's
        self._by_hypercorn = settings.http_tls_cert is not None or not settings.http_lean
        self._front: HypercornFront | None = self._make_front() if self._by_hypercorn else None

    def _make_front(self) -> HypercornFront:
        from neptrio.transport.hypercorn_front import HypercornFront

        return HypercornFront(self._services.settings, self._app)

    def statistics(self) -> RestStatistics:
        """What the front holds now."""
        return RestStatistics(len(self._connections), self._handed_over)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            task_status.started()
            try:
                with self._accepting:
                    await accept_loop(
                        self._listener, lambda sock: nursery.start_soon(self._serve, sock, nursery)
                    )
            finally:
                self._listener.close()
            await trio.sleep_forever()

    async def _watch(self) -> None:
        """Looks for connections whose request does not come."""
        settings = self._services.settings
        request_ns = int(settings.http_request_timeout_secs * 1e9)
        idle_ns = int(settings.http_keep_alive_timeout_secs * 1e9)
        interval = min(1.0, settings.http_request_timeout_secs / 4)
        if idle_ns:
            interval = min(interval, settings.http_keep_alive_timeout_secs / 4)
        while True:
            await trio.sleep(interval)
            now = int(monotonic_ns())
            for connection in list(self._connections):
                connection.check(now, request_ns, idle_ns)

    async def _serve(self, sock: socket.socket, nursery: trio.Nursery) -> None:
        try:
            if self._by_hypercorn:
                await self._hypercorn(sock, b"")
                return
            connection = Http1Connection(sock, self._services, self._app, nursery, self._policy)
            self._connections.add(connection)
            try:
                await connection.run()
            except HandOver as hand_over:
                self._connections.discard(connection)
                await self._hypercorn(sock, hand_over.data)
            finally:
                self._connections.discard(connection)
                self._changed.set()
        except Exception:
            log.exception("a REST connection failed")
            sock.close()

    async def _hypercorn(self, sock: socket.socket, prefix: bytes) -> None:
        self._handed_over += 1
        try:
            if self._front is None:
                # on a thread, so that nobody else waits for hypercorn's import; it is done once
                made = await trio.to_thread.run_sync(self._make_front)
                if self._front is None:
                    self._front = made
                    if self._accepting.cancel_called:
                        await made.drain()
            await self._front.serve(sock, prefix)
        finally:
            self._handed_over -= 1
            self._changed.set()
            sock.close()

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._connections) + self._handed_over

    async def drain(self) -> None:
        """Stops accepting and lets open connections finish their answers."""
        self._accepting.cancel()
        if self._front is not None:
            await self._front.drain()
        for connection in list(self._connections):
            connection.drain()
        quiet_since: float | None = None
        while self._connections or self._handed_over:
            self._changed = trio.Event()
            with trio.move_on_after(0.1):
                await self._changed.wait()
            # hypercorn can keep a connection whose streams were dropped: once nothing is under way
            # and answers had their time to leave, what is left of it is ended
            if self._connections or self._services.inference.inflight():
                quiet_since = None
            elif quiet_since is None:
                quiet_since = trio.current_time()
            elif trio.current_time() - quiet_since > QUIET_SECONDS:
                for left in self._front.connections if self._front is not None else ():
                    left.cancel()
