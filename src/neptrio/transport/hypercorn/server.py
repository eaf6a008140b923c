"""--http-lean=false: hypercorn, as it is released, serves the REST port's connections, from the socket to the app.

Our own connections are faster and harder to abuse; this is for whoever wants to compare them with a server that others
maintain. What hypercorn does not limit is not limited here: how slowly clients send heads and read is up to its time limits.
Bodies have --http-request-timeout-secs, as everywhere: the app waits no longer.
"""

from __future__ import annotations

import logging
import socket
import sys
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext

from neptrio.limits import MAX_HEAD_BYTES
from neptrio.service import Services
from neptrio.transport.header_policy import RAW_HEADERS, HeaderPolicy
from neptrio.transport.hypercorn.early_answer import end_after_body
from neptrio.transport.hypercorn.logged import logged
from neptrio.transport.rest.app_call import App
from neptrio.transport.rest.guards import Bounded, turn_away
from neptrio.transport.tls import ServerTls

log = logging.getLogger("neptrio.rest")


class HypercornServer:
    """Serves connections of the REST port."""

    def __init__(
        self, services: Services, app: App, tls: ServerTls | None, policy: HeaderPolicy | None
    ) -> None:
        settings = services.settings
        self._services = services
        self._app = app
        self._tls = tls
        self._policy = policy
        self._held = 0  # bytes of bodies whose requests are not answered
        services.held.add(lambda: self._held)
        self._raw = bool(settings.http_header_forward_pattern)
        self._config = config = Config()
        config.h11_max_incomplete_size = MAX_HEAD_BYTES
        config.h11_pass_raw_headers = self._raw  # forwarded headers keep the case of their names
        config.keep_alive_max_requests = sys.maxsize
        config.keep_alive_timeout = settings.http_keep_alive_timeout_secs or float("inf")
        # hypercorn's would end a connection on which an answer is awaited; whoever reads a body gives it its time
        config.read_timeout = None
        config.include_server_header = config.include_date_header = False
        config.accesslog = None
        config.errorlog = logging.getLogger("neptrio.hypercorn")
        if tls is not None:
            config.certfile = str(tls.certificate)  # tells hypercorn that the scheme is https
            config.keyfile = str(tls.key)
        self._context = WorkerContext(None)

    async def serve(self, sock: socket.socket, turned_away: str, address: str) -> None:
        """Serves a connection until it ends. `turned_away` says why there is no room for it, "" if there is."""
        app: Any = self._show_raw if self._raw else self._app
        if turned_away:
            app = partial(turn_away, app, turned_away, self._policy)
        bounded = Bounded(app, self._services, address, self._count, self._policy)
        access = self._services.access
        asked: App = bounded if access is None else partial(logged, bounded, access, address)
        self._services.request_limits.join(address, bounded.open_requests)
        stream: Any = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        if self._tls is not None:
            stream = trio.SSLStream(stream, self._tls.context, server_side=True, https_compatible=True)

        async def called(scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
            if scope["type"] == "http":  # the app answers nothing else
                await end_after_body(asked, scope, receive, send)

        try:
            await TCPServer(called, self._config, self._context, {}, stream).run()
        except BaseExceptionGroup as group:
            others = group.split(trio.Cancelled)[1]
            if others is None or others.split(Exception)[1] is not None:
                raise
            log.info("a connection of hypercorn ended: %s", repr(others.exceptions[0]))
        except Exception as error:
            log.info("a connection of hypercorn ended: %s", repr(error))
        finally:
            self._services.request_limits.leave(address, bounded.open_requests)

    def _count(self, size: int) -> None:
        self._held += size

    async def _show_raw(self, scope: Any, receive: Any, send: Any) -> None:
        """Calls the app with the headers' names in lower case, and as the client wrote them under RAW_HEADERS."""
        raw = scope["headers"]
        lower = [(name.lower(), value) for name, value in raw]
        await self._app({**scope, "headers": lower, RAW_HEADERS: raw}, receive, send)

    async def drain(self) -> None:
        """Tells every connection that the server stops."""
        self._config.keep_alive_max_requests = 0  # from now on every answer over HTTP/1.1 is the last
        await self._context.terminated.set()
