"""What carries a connection: a socket, plain or with TLS, its writer, and how it is read and closed.

The problem: REST, gRPC, metrics and the admin listener each read, watch and close sockets, plain and secure ones; what
one of them does right another forgets. The choice: one object does it for all. A connection (an HTTP/1.1 driver or an
HTTP/2 session) is given a Wire and never asks whether it is secure.

Rules:
 1. Received bytes lie in the thread's buffer (loop.socket_writer_core) and must be used before anything else is received.
 2. At most one task waits for the socket to be readable: read(), receive_some() and watch_end() exclude each other.
 3. close() first ends our side, then reads for a while what the peer still sends: closing a socket with unread input
    makes the kernel reset the connection, and the peer could lose our last bytes.
 4. Whatever a connection does beside its own task is started with start(). What that raises is logged and ends this
    connection; in the port's nursery, where it runs, it would end the server. Cancellation passes through.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from neptrio.loop import threads
from neptrio.loop.socket_writer import SocketWriter
from neptrio.loop.socket_writer_core import receive_into, received_view
from neptrio.service.certificates import Certificate, of_peer
from neptrio.transport.secure_socket import SecureSocket

if TYPE_CHECKING:
    from neptrio.scheduling.base import LoopServices

log = logging.getLogger("neptrio.connections")


class Wire:
    """A connected socket with its writer; with `secure`, TLS in between, whose handshake was made."""

    def __init__(
        self,
        sock: socket.socket,
        nursery: trio.Nursery,
        loop: LoopServices,
        secure: SecureSocket | None = None,
        client: str = "",
    ) -> None:
        """`client` is the peer's address as limits and logs name it."""
        self.sock = sock
        self.secure = secure
        self._nursery = nursery
        self.on_failed: Callable[[], None] | None = None  # how its connection is ended; None: by close()
        self._loop = loop
        self.client = client
        self.certificate: Certificate | None = None  # what the client has shown
        if secure is None:
            self.writer = SocketWriter(sock, self.start, loop.poller)
        else:
            self.writer = secure.writer(self.start, loop.poller)
            self.certificate = of_peer(secure.client_certificate())

    def start(self, task: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Has `task(*args)` run beside the connection's own task (rule 4)."""
        self._nursery.start_soon(self._guarded, task, args, name=task)

    async def _guarded(self, task: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        try:
            await task(*args)
        except Exception:
            self.fail()
        except BaseExceptionGroup as group:  # it failed while it was cancelled
            failures, others = group.split(Exception)
            if failures is not None:
                log.error("what a connection does has failed", exc_info=failures)
            if others is not None:
                raise others from None

    def fail(self) -> None:
        """Ends the connection because of an exception, in whose except block it is called."""
        error = sys.exception()
        if isinstance(error, threads.NoThread):
            log.warning("a connection is ended: %s", str(error))
        else:
            log.exception("a connection is ended: what it does has failed")
        (self.on_failed or self.close)()

    @property
    def peer(self) -> Any:
        """The peer's address as sockets give it; that of nobody when it has left."""
        try:
            return self.sock.getpeername()
        except OSError:
            return ("", 0)

    def receive_into(self, place: Any) -> int:
        """Receives once to a writable array of bytes: how many, 0 at the end, -1 when there are none now. Raises OSError."""
        if self.secure is None:
            return receive_into(self.sock.fileno(), place)
        n = self.secure.receive(len(place))
        if n > 0:
            place[:n] = np.frombuffer(received_view(), np.uint8, n)
        return n

    async def receive_some(self) -> int:
        """Waits for bytes; how many there are in the thread's buffer, 0 at the end. Raises OSError."""
        n = -1 if self.secure is None or not self.secure.more else self.secure.receive()
        while n < 0:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                n = self.sock.recv_into(received_view()) if self.secure is None else self.secure.receive()
            except (BlockingIOError, InterruptedError):
                continue
        return n

    async def read(self, take: Callable[[], bool]) -> None:
        """Calls `take()`, which receives, whenever there is something, until it returns False or raises."""
        # decrypted bytes are left where the connection stopped reading: nobody tells of those again
        if self.secure is not None and self.secure.more:
            go_on = take()
            self._loop.loop_pass.end()
            if not go_on:
                return
        await self._loop.poller.read(self.sock, take)

    async def watch_end(self) -> bool:
        """Waits for the peer to end its side while nothing is read; False when it has sent something instead."""
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                if self.secure is None:
                    return not self.sock.recv(1, socket.MSG_PEEK)
                ended = self.secure.look()
            except (BlockingIOError, InterruptedError):
                continue
            if ended or self.secure.more:
                return ended

    async def end(self, seconds: float) -> None:
        """Ends our side, and reads for up to `seconds` what the peer still sends, until it ends its own (rule 3)."""
        with trio.move_on_after(seconds):
            try:
                if self.secure is not None:
                    self.secure.say_end()
                    await self.writer.drained()
                self.sock.shutdown(socket.SHUT_WR)
                while await self.receive_some():
                    pass
            except OSError:
                pass

    def close(self) -> None:
        """Closes the socket; whoever waits for it is woken."""
        if self.secure is not None and not self.writer.broken:
            self.secure.say_end()
        self.writer.fail()
        trio.lowlevel.notify_closing(self.sock)
        self.sock.close()

    def let_go(self) -> None:
        """The connection has ended: drops what refers back to it."""
        self.on_failed = None
        self.writer.let_go()
        if self.secure is not None:
            self.secure.let_go()
