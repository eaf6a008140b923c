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
import ssl
import sys
from dataclasses import dataclass
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from neptrio._cext.request import monotonic_ns
from neptrio.service import Services
from neptrio.transport.app import RestApp
from neptrio.transport.header_policy import RAW_HEADERS, http_policy
from neptrio.transport.http1 import MAX_HEAD_BYTES, HandOver, Http1Connection
from neptrio.transport.hypercorn_server import HypercornConnection
from neptrio.transport.link import accept_loop

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
        self._hypercorns: set[HypercornConnection] = set()
        self._accepting = trio.CancelScope()
        self._changed = trio.Event()
        self._lean = settings.http_lean
        self._config = config = Config()
        config.h11_max_incomplete_size = MAX_HEAD_BYTES
        config.keep_alive_max_requests = sys.maxsize
        config.include_server_header = False
        config.include_date_header = False
        config.keep_alive_timeout = settings.http_keep_alive_timeout_secs or float("inf")
        config.read_timeout = None
        # models are shown forwarded headers in their own case, as on the lean connection
        config.h11_pass_raw_headers = self._raw = bool(settings.http_header_forward_pattern)
        config.accesslog = None
        config.errorlog = logging.getLogger("neptrio.hypercorn")
        self._tls: ssl.SSLContext | None = None
        if settings.http_tls_cert is not None:
            config.certfile = str(settings.http_tls_cert)
            config.keyfile = str(settings.http_tls_key)
            self._tls = config.create_ssl_context()
        self._context = WorkerContext(None)

    def statistics(self) -> RestStatistics:
        """What the front holds now."""
        return RestStatistics(len(self._connections), len(self._hypercorns))

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
            if self._tls is not None or not self._lean:
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
        connection = HypercornConnection(
            sock,
            prefix,
            self._tls,
            self._show_raw if self._raw else self._app,
            self._config,
            self._context,
            self._services.settings.http_request_timeout_secs,
        )
        self._hypercorns.add(connection)
        try:
            await connection.run()
        except trio.Cancelled:
            raise
        except BaseExceptionGroup as group:
            others = group.split(trio.Cancelled)[1]
            if others is None or others.split(Exception)[1] is not None:
                raise  # KeyboardInterrupt and the like are not the connection's
            log.info("an HTTP/2 or TLS connection ended: %r", others.exceptions[0])
        except Exception as error:
            log.info("an HTTP/2 or TLS connection ended: %r", error)
        finally:
            self._hypercorns.discard(connection)
            self._changed.set()
            sock.close()

    async def _show_raw(self, scope: Any, receive: Any, send: Any) -> None:
        """The app, with the headers' names in their own case beside the lower-case ones."""
        raw = scope["headers"]
        lower = [(name.lower(), value) for name, value in raw]
        await self._app({**scope, "headers": lower, RAW_HEADERS: raw}, receive, send)

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._connections) + len(self._hypercorns)

    async def drain(self) -> None:
        """Stops accepting and lets open connections finish their answers."""
        self._accepting.cancel()
        await self._context.terminated.set()
        for connection in list(self._connections):
            connection.drain()
        quiet_since: float | None = None
        while self._connections or self._hypercorns:
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
                for left in self._hypercorns:
                    left.cancel()
