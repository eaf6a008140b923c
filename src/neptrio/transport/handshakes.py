"""Makes the wires of a port's new connections, with their TLS handshakes, which a port that drains can end."""

from __future__ import annotations

import logging
import socket
import ssl
from typing import TYPE_CHECKING

import trio

from neptrio.transport.secure_socket import SecureSocket
from neptrio.transport.tls import HANDSHAKE_S, ServerTls
from neptrio.transport.wire import Wire

if TYPE_CHECKING:
    from neptrio.scheduling.base import LoopServices

log = logging.getLogger("neptrio.transport")


class Handshakes:
    """len() tells how many handshakes are under way."""

    def __init__(self, tls: ServerTls | None, loop: LoopServices) -> None:
        """`tls`: None where connections are plain."""
        self._tls = tls
        self._loop = loop
        self._scopes: set[trio.CancelScope] = set()

    def __len__(self) -> int:
        return len(self._scopes)

    async def wire(
        self, sock: socket.socket, nursery: trio.Nursery, address: str, seconds: float = HANDSHAKE_S
    ) -> Wire | None:
        """The wire of a new connection, whose handshake was made where the port has TLS."""
        secure = None
        if self._tls is not None:
            secure = await self._make(sock, self._tls.context, seconds)
            if secure is None:
                return None
        return Wire(sock, nursery, self._loop, secure, address)

    async def _make(
        self, sock: socket.socket, context: ssl.SSLContext, seconds: float
    ) -> SecureSocket | None:
        """Makes the handshake as the server. None when the client has left, was not let in, took longer than `seconds`, or
        the port has been told to stop()."""
        secure = SecureSocket(sock, context)
        with trio.move_on_after(seconds) as scope:
            self._scopes.add(scope)
            try:
                await secure.handshake()
                return secure
            except OSError as error:
                log.info("a TLS handshake failed: %s", error)
            finally:
                self._scopes.discard(scope)
        return None

    def stop(self) -> None:
        """Ends them: the port takes no new connection."""
        for scope in self._scopes:
            scope.cancel()
