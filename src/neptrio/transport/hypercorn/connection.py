"""One connection that hypercorn serves: its TCP server with limits on time and memory.

The problem: hypercorn waits for ever for the second request's head, writes for ever to a client
that does not read (shielded, so that not even the server's end interrupts it), blocks the whole
connection on body events that an app which has answered will never take, and closes with input
unread, which can cost the client the answer. The choice: its protocols and streams stay; the
socket side, the task group and the HTTP/2 protocol (transport.hypercorn.http2) are ours.

Rules:
 1. A TLS handshake must be made within transport.tls.HANDSHAKE_S, or the connection ends. The first request, every further head and every HTTP/2 frame must arrive whole within the request timeout. If not,
    the answer is 408 where that is possible, and the connection ends.
 2. The client must read every WRITE_BYTES of output within the same time, or the connection ends. If the app that
    writes is cancelled, its write still completes, because half a frame would corrupt those of other streams. It stops
    only with the connection.
 3. At most QUEUE_BYTES of a body wait for its app. When the app has ended, the rest of the body is dropped.
 4. Closing: our side is closed first, then the client's last bytes are read for LINGER_SECONDS. Otherwise the kernel
    could reset the connection before the client has read our last bytes.
 5. When the server stops, an HTTP/2 client gets GOAWAY twice: at once with the highest possible stream number, and with
    the number of the last stream when it has answered a PING or the grace is over. An HTTP/1.1 client may send one more
    request within the grace.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from neptrio.service.certificates import Certificate, of_peer
from neptrio.service.connections import TURNED_AWAY_SECONDS
from neptrio.transport import tls
from neptrio.transport.header_policy import CERTIFICATE
from neptrio.transport.hypercorn.app_tasks import AppTasks
from neptrio.transport.hypercorn.protocols import Protocols
from neptrio.transport.tls import let_go

log = logging.getLogger("neptrio.rest")

App = Callable[[Any, Any, Any], Awaitable[None]]
WRITE_BYTES = 64 << 10
LINGER_SECONDS = 0.5
LEFT_BEHIND_SECONDS = 1.0  # how long apps may still run after their connection has closed


class PrefixedStream(trio.abc.Stream):
    """A socket stream that first returns `prefix`, which was read from the socket already."""

    def __init__(self, stream: trio.SocketStream, prefix: bytes) -> None:
        self._stream = stream
        self._prefix = prefix
        self.socket = stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._prefix:
            await trio.lowlevel.checkpoint()
            given, self._prefix = self._prefix, b""
            return given
        try:
            return bytes(await self._stream.receive_some(max_bytes))
        except trio.BrokenResourceError as error:
            _forget_frames(error)
            raise

    async def send_all(self, data: Any) -> None:
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            _forget_frames(error)
            raise

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


def _forget_frames(error: trio.BrokenResourceError) -> None:
    """From Python 3.13 on the system's error, which is the cause, and the frames in which trio has turned it into this one
    refer to each other, and to all frames above: the connection would live until the collector finds it."""
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = None


class HypercornConnection(TCPServer):
    """Serves one connection until either side ends it."""

    def __init__(
        self,
        sock: socket.socket,
        prefix: bytes,
        tls: ssl.SSLContext | trio.SSLStream[trio.SocketStream] | None,
        app: App,
        config: Config,
        context: WorkerContext,
        timeout_s: float,
        grace_s: float,
        turned_away: bool = False,
    ) -> None:
        """`tls`: the context of the handshake, or the stream whose handshake was made; None for a plain connection."""
        stream: Any = tls
        if not isinstance(tls, trio.SSLStream):
            stream = PrefixedStream(trio.SocketStream(trio.socket.from_stdlib_socket(sock)), prefix)
            if tls is not None:
                stream = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        super().__init__(self._app_called, config, context, {}, stream)  # type: ignore[arg-type]
        self._tls = tls is not None
        self._certificate: Certificate | None = None  # what the client has shown
        self._asgi_app = app
        self._timeout = timeout_s
        self._grace = grace_s
        self._turned_away = turned_away
        self._idle_since = trio.current_time()
        self._idle_too_long = trio.Event()
        self._open = trio.Event()  # `protocol` is set
        self._scope = trio.CancelScope()
        self._reading = trio.CancelScope(deadline=trio.current_time() + timeout_s)
        self._partial: int | None = -1  # the partial_input() that has the deadline; -1: the first request
        self._writes: set[trio.CancelScope] = set()
        self._closing = False
        self._broken = False

    async def _app_called(self, scope: Any, receive: Any, send: Any) -> None:
        self._on_time()
        scope[CERTIFICATE] = self._certificate
        await self._asgi_app(scope, receive, send)

    def cancel(self) -> None:
        """Ends the connection now."""
        self._scope.cancel()

    async def run(self) -> None:
        """Serves until either side ends the connection. Raises what the protocols raise."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._end_writes)
                    nursery.start_soon(self._drain)
                    if self._turned_away:
                        nursery.start_soon(self._turn_away)
                    try:
                        await self._serve()
                    finally:
                        nursery.cancel_scope.cancel()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Drops what refers back to the connection, which would otherwise live until the collector finds it."""
        if self._open.is_set():
            self.protocol.let_go()
        self.app = self.protocol = self._task_group = None  # type: ignore[assignment]
        if self._tls:
            let_go(self.stream)

    def press(self, idle_s: float) -> None:
        """Called while new connections are being refused: ends this one if it was idle for `idle_s` seconds."""
        if trio.current_time() - self._idle_since > idle_s:
            if self._open.is_set():
                self._idle_too_long.set()
            else:
                self.cancel()  # in the middle of a TLS handshake

    async def _turn_away(self) -> None:
        """Ends a connection beyond the limit within seconds."""
        await trio.sleep(TURNED_AWAY_SECONDS)
        if self._open.is_set() and await self.protocol.drain(0):
            await self._end_idle()
        self.cancel()

    async def _drain(self) -> None:
        await self.context.terminated.wait()
        await self._open.wait()
        if await self.protocol.drain(self._grace):
            await self._end_idle()

    async def _end_writes(self) -> None:
        """Ends shielded writes when the connection is cancelled (rule 2)."""
        try:
            await trio.sleep_forever()
        finally:
            self._broken = True
            for scope in self._writes:
                scope.cancel()

    async def _serve(self) -> None:
        try:
            alpn = "http/1.1"
            transport = self.stream.socket if not self._tls else self.stream.transport_stream.socket
            if self._tls:
                with self._reading, trio.move_on_after(tls.HANDSHAKE_S) as shaking:
                    await self.stream.do_handshake()
                if self._reading.cancelled_caught or shaking.cancelled_caught:
                    return
                alpn = self.stream.selected_alpn_protocol() or alpn
                self._certificate = of_peer(self.stream.getpeercert())
                self._reading = trio.CancelScope(deadline=self._reading.deadline)
            client = parse_socket_addr(transport.family, transport.getpeername())
            server = parse_socket_addr(transport.family, transport.getsockname())
            async with AppTasks() as tasks:
                self._task_group = tasks
                self.protocol: Any = Protocols(
                    alpn,
                    self._timeout,
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    ConnectionState(self.state),
                    self._tls,
                    client,
                    server,
                    self.protocol_send,
                )
                self._open.set()
                await self.protocol.initiate()
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
                self._scope.deadline = trio.current_time() + LEFT_BEHIND_SECONDS
                await self.idle_task.stop()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            with trio.move_on_after(0 if self._broken else LINGER_SECONDS, shield=True):
                await self.stream.aclose()

    # ------------------------------------------------------------ input

    async def _read_data(self) -> None:
        with self._reading:
            while True:
                try:
                    data = await self.stream.receive_some(MAX_RECV)
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
                if not data:
                    break
                if not self._closing:
                    await self.protocol.handle(RawData(bytes(data)))
                    self._look()
        if self._reading.cancelled_caught and not self._closing:
            log.info("a connection did not send its request in time")
            await self.protocol.too_late()
            await self._say_end()
            with trio.move_on_after(LINGER_SECONDS):
                await self._discard()
        await self.protocol.handle(Closed())

    async def _discard(self) -> None:
        try:
            while await self.stream.receive_some(MAX_RECV):
                pass
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass

    def _look(self) -> None:
        """Starts the deadline of a head or frame that has begun, and clears it when none is incomplete (rule 1)."""
        partial = self.protocol.partial_input()
        if self._closing or self._partial == -1:
            return
        if partial is None:
            self._on_time()
        elif partial != self._partial:
            self._partial = partial
            self._reading.deadline = trio.current_time() + self._timeout

    def _on_time(self) -> None:
        """Clears the deadline: the request or frame has come in time."""
        self._partial = None
        if not self._closing:
            self._reading.deadline = math.inf

    # ------------------------------------------------------------ output

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            if event.data and not await self._write(event.data):
                await self.protocol.handle(Closed())
            # the write was shielded, so an app that waits nowhere else must notice here that it is cancelled
            await trio.lowlevel.checkpoint_if_cancelled()
        elif isinstance(event, Closed):
            await self._say_end()
            await self.protocol.handle(Closed())
        elif isinstance(event, Updated):
            self._idle_since = trio.current_time() if event.idle else math.inf
            if event.idle:
                await self.idle_task.restart(self._task_group, self._idle_timeout)
            else:
                await self.idle_task.stop()

    async def _write(self, data: bytes) -> bool:
        """Sends all of `data`; False if the connection has ended, or ends because the client does not read."""
        with trio.CancelScope(shield=True) as scope:
            self._writes.add(scope)
            try:
                async with self.send_lock:
                    view = memoryview(data)
                    for at in range(0, len(view), WRITE_BYTES):
                        if self._broken:
                            return False
                        scope.deadline = trio.current_time() + self._timeout
                        await self.stream.send_all(view[at : at + WRITE_BYTES])
                    return True
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                self._writes.discard(scope)
        if scope.cancelled_caught and not self._broken:
            log.info("a connection ended: its client does not read")
        self._broken = True
        self._scope.cancel()
        return False

    async def _say_end(self) -> None:
        """Closes our side of the connection; the client has LINGER_SECONDS to close its own."""
        if self._closing:
            return
        self._closing = True
        try:
            async with self.send_lock:  # other tasks complete their writes first
                self._reading.deadline = trio.current_time() + LINGER_SECONDS
                # ending TLS itself would also end reading, so the end of the TCP stream tells the client
                await (self.stream.transport_stream if self._tls else self.stream).send_eof()
        except (trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
            pass

    async def _idle_timeout(self) -> None:
        with trio.move_on_after(self.config.keep_alive_timeout):
            await self._idle_too_long.wait()
        await self._end_idle()

    async def _end_idle(self) -> None:
        with trio.CancelScope(shield=True) as scope:
            self._writes.add(scope)
            try:
                await self.protocol.goodbye()
                await self.protocol_send(Closed())
            finally:
                self._writes.discard(scope)
