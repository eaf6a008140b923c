"""The REST front: hypercorn's configuration and protocols around our lean HTTP/1.1.

Plain connections that speak HTTP/1.1 are served by Http1Connection; HTTP/2 (by prior knowledge or
`Upgrade: h2c`) and TLS are hypercorn's, and so is plain HTTP/1.1 when the lean path is turned off
(--http-lean=false). All of them call the same ASGI app.

Rules:
 1. Whatever a connection raises ends at that connection: hypercorn's HTTP/2 protocol raises
    KeyError, TooManyStreamsError and others when clients drop streams or connections.
 2. A connection whose first request does not come within the request timeout is closed; bodies
    are timed by the app.
 3. Draining: no new connection, idle ones close, busy ones close behind their last answer.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app

from neptrio._cext.request import monotonic_ns
from neptrio.service import Services
from neptrio.transport.app import RestApp
from neptrio.transport.header_policy import RAW_HEADERS, http_policy
from neptrio.transport.http1 import HandOver, Http1Connection
from neptrio.transport.link import accept_loop

log = logging.getLogger("neptrio.rest")

MAX_HTTP2_STREAMS = 1000
LEFT_BEHIND_SECONDS = 1.0  # for hypercorn's tasks to end once their connection is closed
MAX_APP_BODY_EVENTS = 64  # hypercorn events waiting for the app, per request


@dataclass(frozen=True)
class RestStatistics:
    """What the front holds."""

    connections: int
    hypercorn_connections: int


class PrefixedStream(trio.abc.Stream):
    """A socket stream some of whose input was read already, and which tells when it is closed.

    hypercorn may leave tasks behind when it closes a connection on an error; on_close ends them.
    """

    def __init__(self, stream: trio.SocketStream, prefix: bytes, on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._on_close = on_close
        self._prefix = prefix
        self.socket = stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._prefix:
            await trio.lowlevel.checkpoint()
            given, self._prefix = self._prefix, b""
            return given
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_all(self, data: Any) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self._on_close()
        await self._stream.aclose()


class RestServer:
    """Accepts REST connections and drains them."""

    def __init__(self, services: Services, listener: socket.socket) -> None:
        settings = services.settings
        self._services = services
        self._listener = listener
        self._policy = http_policy(settings)
        self._app = RestApp(services, self._policy)
        self._connections: set[Http1Connection] = set()
        self._hypercorn_scopes: set[trio.CancelScope] = set()
        self._accepting = trio.CancelScope()
        self._changed = trio.Event()
        self._lean = settings.http_lean
        self._config = config = Config()
        config.max_app_queue_size = MAX_APP_BODY_EVENTS
        config.h2_max_concurrent_streams = MAX_HTTP2_STREAMS
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
        return RestStatistics(len(self._connections), len(self._hypercorn_scopes))

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
        # until its first request has come, a connection lives as long as a request may take
        scope = trio.CancelScope(
            deadline=trio.current_time() + self._services.settings.http_request_timeout_secs
        )
        asked = False

        def closed() -> None:
            scope.deadline = min(scope.deadline, trio.current_time() + LEFT_BEHIND_SECONDS)

        async def app(asgi_scope: Any, receive: Any, send: Any) -> None:
            nonlocal asked
            if not asked:
                asked = True
                scope.deadline = math.inf
            if self._raw and asgi_scope["type"] == "http":
                raw = asgi_scope["headers"]
                lower = [(name.lower(), value) for name, value in raw]
                asgi_scope = {**asgi_scope, "headers": lower, RAW_HEADERS: raw}
            await self._app(asgi_scope, receive, send)

        plain = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        stream: Any = PrefixedStream(plain, prefix, closed)
        if self._tls is not None:
            stream = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
        self._hypercorn_scopes.add(scope)
        wrapped = wrap_app(app, 0, "asgi")
        server: Any = TCPServer(wrapped, self._config, self._context, {}, stream)
        try:
            with scope:
                await server.run()
        except trio.Cancelled:
            raise
        except BaseExceptionGroup as group:
            others = group.split(trio.Cancelled)[1]
            if others is not None and others.split(Exception)[1] is not None:
                raise  # KeyboardInterrupt and the like are not the connection's
            if others is not None:
                log.info("an HTTP/2 or TLS connection ended: %r", others.exceptions[0])
            if others is None:
                raise
        except Exception as error:
            log.info("an HTTP/2 or TLS connection ended: %r", error)
        finally:
            self._hypercorn_scopes.discard(scope)
            self._changed.set()
            sock.close()

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._connections) + len(self._hypercorn_scopes)

    async def drain(self) -> None:
        """Stops accepting and lets open connections finish their answers."""
        self._accepting.cancel()
        await self._context.terminated.set()
        for connection in list(self._connections):
            connection.drain()
        quiet_since: float | None = None
        while self._connections or self._hypercorn_scopes:
            self._changed = trio.Event()
            with trio.move_on_after(0.1):
                await self._changed.wait()
            # hypercorn can keep a connection whose streams were dropped: once nothing is under way
            # and answers had their time to leave, what is left of it is ended
            if self._connections or self._services.inference.inflight():
                quiet_since = None
            elif quiet_since is None:
                quiet_since = trio.current_time()
            elif trio.current_time() - quiet_since > LEFT_BEHIND_SECONDS:
                for scope in self._hypercorn_scopes:
                    scope.cancel()
