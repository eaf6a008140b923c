"""What hypercorn serves of REST: its configuration and the connections it has.

These are HTTP/2, TLS and, with --http-lean=false, plain HTTP/1.1. It is a module of its own because importing hypercorn
takes long and only this needs it. transport.rest_server imports it at the start if the settings need it, otherwise with
the first connection that does.
"""

from __future__ import annotations

import logging
import socket
import sys
from copy import copy
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from neptrio.service import Services
from neptrio.service.connections import TURNED_AWAY_SECONDS
from neptrio.transport.header_policy import RAW_HEADERS, HeaderPolicy
from neptrio.transport.http1.input import MAX_HEAD_BYTES
from neptrio.transport.hypercorn.connection import App, HypercornConnection
from neptrio.transport.rest.guards import Bounded, TurnAway
from neptrio.transport.tls import ServerTls

log = logging.getLogger("neptrio.rest")


class HypercornFront:
    """Configures hypercorn and serves connections with it."""

    def __init__(
        self,
        services: Services,
        app: App,
        tls: ServerTls | None = None,
        limited: bool = True,
        policy: HeaderPolicy | None = None,
    ) -> None:
        """`limited`: the REST port's limits on clients and bytes hold; not for the admin listener and metrics."""
        settings = services.settings
        self._limited = limited
        self._policy = policy
        self._services = services
        self._held = 0  # bytes of bodies whose requests are not answered
        services.held.add(lambda: self._held)
        self._plain_app = app
        self._timeout = settings.http_request_timeout_secs
        self._grace = settings.grace_secs
        self._config = config = Config()
        config.h11_max_incomplete_size = MAX_HEAD_BYTES
        config.keep_alive_max_requests = sys.maxsize
        config.include_server_header = False
        config.include_date_header = False
        config.keep_alive_timeout = settings.http_keep_alive_timeout_secs or float("inf")
        config.read_timeout = None
        # forwarded headers keep the case of their names, as on our own HTTP/1.1 connection
        raw = config.h11_pass_raw_headers = bool(settings.http_header_forward_pattern)
        self._app = self._show_raw if raw else app
        config.accesslog = None
        config.errorlog = logging.getLogger("neptrio.hypercorn")
        self.tls = tls
        if tls is not None:
            config.certfile = str(tls.certificate)  # tells hypercorn that the scheme is https
            config.keyfile = str(tls.key)
        self._context = WorkerContext(None)
        self.connections: set[HypercornConnection] = set()

    async def serve(
        self,
        sock: socket.socket,
        prefix: bytes,
        turned_away: str = "",
        address: str = "",
        secured: trio.SSLStream[trio.SocketStream] | None = None,
        app: App | None = None,
    ) -> None:
        """Serves a connection until it ends.

        `prefix` are the bytes that were read from it already, `turned_away` says why it is beyond the limit on
        connections ("" if it is not), `address` is the client's. With `secured` the TLS handshake was made.
        `app` answers this connection's requests instead of the front's app.
        """
        app, config, timeout = app or self._app, self._config, self._timeout
        if turned_away:
            app, config, timeout = TurnAway(app, turned_away, self._policy), copy(config), TURNED_AWAY_SECONDS
            config.keep_alive_max_requests = 0
        tls = None if self.tls is None else self.tls.context
        bounded = Bounded(app, self._services, address, self._count, self._policy)
        limits = self._services.request_limits
        limits.join(address, bounded.open_requests)
        connection = HypercornConnection(
            sock,
            prefix,
            secured or tls,
            bounded if self._limited else app,
            config,
            self._context,
            timeout,
            self._grace,
            bool(turned_away),
        )
        self.connections.add(connection)
        try:
            await connection.run()
        except trio.Cancelled:
            raise
        except BaseExceptionGroup as group:
            reason = _reason(group)
            if reason is None:
                raise  # KeyboardInterrupt and its like concern the whole server
            log.info("an HTTP/2 or TLS connection ended: %s", reason)
        except Exception as error:
            log.info("an HTTP/2 or TLS connection ended: %r", error)
        finally:
            limits.leave(address, bounded.open_requests)
            self.connections.discard(connection)

    def press(self, idle_s: float) -> None:
        """Called while new connections are being refused: ends those that were idle for `idle_s` seconds."""
        for connection in list(self.connections):
            connection.press(idle_s)

    def _count(self, size: int) -> None:
        self._held += size

    async def _show_raw(self, scope: Any, receive: Any, send: Any) -> None:
        """Calls the app with the headers' names in lower case, and as the client wrote them under RAW_HEADERS."""
        raw = scope["headers"]
        lower = [(name.lower(), value) for name, value in raw]
        await self._plain_app({**scope, "headers": lower, RAW_HEADERS: raw}, receive, send)

    async def drain(self) -> None:
        """Tells every connection that the server stops; each then ends by itself."""
        self._config.keep_alive_max_requests = 0  # from now on every answer over HTTP/1.1 is the last
        await self._context.terminated.set()


def _reason(group: BaseExceptionGroup[BaseException]) -> str | None:
    """What has failed, apart from being cancelled; None if there are errors that do not concern one connection alone."""
    others = group.split(trio.Cancelled)[1]
    if others is None or others.split(Exception)[1] is not None:
        return None
    return repr(others.exceptions[0])
