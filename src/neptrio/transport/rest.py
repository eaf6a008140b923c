"""The REST front: hypercorn's configuration, lifespan and protocols around our lean HTTP/1.1.

Plain connections that speak HTTP/1.1 are served by Http1Connection; HTTP/2 (by prior knowledge)
and TLS are hypercorn's. Both call the same ASGI app.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app

from neptrio.service import Services
from neptrio.transport.app import RestApp
from neptrio.transport.http1 import Http1Connection
from neptrio.transport.link import accept_loop

log = logging.getLogger("neptrio.rest")

PREFACE = b"PRI * HTTP/2.0"


class RestServer:
    """Accepts REST connections and drains them."""

    def __init__(self, services: Services, listener: socket.socket) -> None:
        self._services = services
        self._listener = listener
        self._app = RestApp(services)
        self._connections: set[Http1Connection] = set()
        self._accepting = trio.CancelScope()
        self._config = Config()
        self._config.max_app_queue_size = 64
        self._context = WorkerContext(None)
        self._wrapped = wrap_app(self._app, 0, "asgi")  # type: ignore[arg-type]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            with self._accepting:
                await accept_loop(self._listener, lambda sock: nursery.start_soon(self._serve, sock, nursery))
            self._listener.close()
            await trio.sleep_forever()

    async def _serve(self, sock: socket.socket, nursery: trio.Nursery) -> None:
        try:
            await trio.lowlevel.wait_readable(sock)
            if PREFACE.startswith(sock.recv(len(PREFACE), socket.MSG_PEEK) or b"-"):
                await self._hypercorn(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
                return
            connection = Http1Connection(sock, self._services, self._app, nursery)
            self._connections.add(connection)
            try:
                await connection.run()
            finally:
                self._connections.discard(connection)
        except OSError:
            sock.close()
        except Exception:
            log.exception("a REST connection failed")
            sock.close()

    async def _hypercorn(self, stream: Any) -> None:
        server: Any = TCPServer(self._wrapped, self._config, self._context, {}, stream)
        await server.run()

    async def drain(self) -> None:
        """Stops accepting and lets open connections finish their answers."""
        self._accepting.cancel()
        for connection in list(self._connections):
            connection.drain()
        while self._connections:
            await trio.sleep(0.01)
