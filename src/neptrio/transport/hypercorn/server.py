"""One connection that hypercorn serves: its TCP server with limits on time and memory.

The problem: hypercorn waits for ever for the second request's head, writes for ever to a client
that does not read (shielded, so that not even the server's end interrupts it), blocks the whole
connection on body events that an app which has answered will never take, and closes with input
unread, which can cost the client the answer. The choice: its protocols and streams stay; the
socket side, the task group and the HTTP/2 protocol (transport.hypercorn.http2) are ours.

Rules:
 1. The first request, every further head and every HTTP/2 frame must arrive whole within the request timeout. If not,
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
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from neptrio.errors import TritonError
from neptrio.service.certificates import Certificate, of_peer
from neptrio.service.connections import TURNED_AWAY_SECONDS
from neptrio.transport.header_policy import CERTIFICATE
from neptrio.transport.host import host_problem
from neptrio.transport.http1.connection import MAX_HEAD_BYTES, SHUTTING_DOWN
from neptrio.transport.hypercorn.http2 import Http2
from neptrio.transport.rest.infer import JSON, error_body

log = logging.getLogger("neptrio.rest")

App = Callable[[Any, Any, Any], Awaitable[None]]
QUEUE_BYTES = 1 << 20  # of body events waiting for the app, per request
EVENT_BYTES = 256  # what an event counts for, besides its body
WRITE_BYTES = 64 << 10
LINGER_SECONDS = 0.5
REFUSALS = {
    408: "the request did not arrive in time",
    503: SHUTTING_DOWN,
    431: f"request headers exceed the limit of {MAX_HEAD_BYTES} bytes",
}
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
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_all(self, data: Any) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class AppQueue:
    """A queue of a request's events (body, disconnect) between hypercorn's stream and the app."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._bytes = 0
        self._over = False
        self._news = trio.Event()
        self._room = trio.Event()

    async def put(self, event: dict[str, Any]) -> None:
        """Adds an event; waits while more than QUEUE_BYTES wait for the app."""
        if self._over:
            return
        self._events.append(event)
        self._bytes += len(event.get("body", b"")) + EVENT_BYTES
        self._news.set()
        if event["type"] == "http.request":
            while self._bytes > QUEUE_BYTES and not self._over:
                self._room = trio.Event()
                await self._room.wait()
        else:
            self._room.set()  # a disconnect: a put() that waits for the app may go on

    async def get(self) -> dict[str, Any]:
        """The app's receive(). A disconnect stays in the queue and is returned each time."""
        while not self._events:
            self._news = trio.Event()
            await self._news.wait()
        event = self._events[0]
        if event["type"] == "http.request":
            self._events.popleft()
            self._bytes -= len(event["body"]) + EVENT_BYTES
            self._room.set()
        return event

    def close(self) -> None:
        """Called when the app has ended: drops the events, and all that follow."""
        self._over = True
        self._events.clear()
        self._room.set()


class AppTasks(TaskGroup):
    """hypercorn's task group, with an AppQueue between each stream and its app."""

    async def spawn_app(self, app: Any, config: Any, scope: Any, send: Any) -> Any:
        queue = AppQueue()

        async def run() -> None:
            try:
                await app(scope, queue.get, send)
            except Exception:
                log.exception("an app call failed")
            finally:
                queue.close()
            await send(None)

        assert self._nursery is not None
        self._nursery.start_soon(run)
        return queue.put


class _Parser(h11.Connection):
    """h11's connection, which also keeps the reason why it refused a request."""

    problem = ""

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.problem = f": {error}"
            raise


class Http11(H11Protocol):
    """hypercorn's HTTP/1.1, but the requests that it refuses itself are answered in JSON, like all others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.last_call = False  # the server stops, and the grace is over
        self.connection: _Parser = _Parser(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
        )

    async def _maybe_recycle(self) -> None:
        """Called when an answer is complete: goes on with the next request or ends the connection. An answer that began
        before the drain did not announce the end, so its client may send one more request."""
        await self._close_stream()
        await self.can_read.set()
        both = (self.connection.our_state, self.connection.their_state)
        if both == (h11.DONE, h11.DONE) and not self.last_call:
            self.connection.start_next_cycle()
            await self.send(Updated(idle=True))
        else:
            await self.send(Closed())

    async def _check_protocol(self, request: h11.Request) -> None:
        if (request.method, request.target, request.http_version) == (b"PRI", b"*", b"2.0"):
            raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])

    async def _create_stream(self, request: h11.Request) -> None:
        hosts = [value for name, value in request.headers if name == b"host"]
        problem = host_problem(hosts[-1] if hosts else None, len(hosts), request.http_version.decode())
        if problem is not None:
            await self._refuse(problem.code.http, str(problem))
            await self.send(Closed())
            return
        # upgrades (to WebSocket or h2c) are ignored: hypercorn does not see the header
        kept = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"upgrade"]
        await super()._create_stream(
            h11.Request(
                method=request.method,
                target=request.target,
                headers=kept,
                http_version=request.http_version,
            )
        )

    async def _send_error_response(self, status_code: int) -> None:
        text = REFUSALS.get(status_code) or f"malformed HTTP request{self.connection.problem}"
        await self._refuse(status_code, text)

    async def _refuse(self, status_code: int, text: str) -> None:
        body = b"".join(error_body(TritonError(text)))
        headers = [*JSON, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await self._send_h11_event(h11.Response(headers=headers, status_code=status_code))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class Protocols(ProtocolWrapper):
    """Chooses between hypercorn's HTTP/1.1 and our HTTP/2: by ALPN, or by HTTP/2's preface."""

    def __init__(self, alpn: str, *args: Any) -> None:
        super().__init__(*args)
        self._is_http2 = trio.Event()
        self.protocol: Any = self._http2() if alpn == "h2" else self._make(Http11)

    def _http2(self) -> Http2:
        made: Http2 = self._make(Http2)
        self._is_http2.set()
        return made

    def _make(self, protocol: Any) -> Any:
        return protocol(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.state,
            self.ssl,
            self.client,
            self.server,
            self.send,
        )

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
            return
        except H2ProtocolAssumedError as error:
            data = error.data
        self.protocol = self._http2()
        await self.protocol.initiate()
        if data:
            await self.protocol.handle(RawData(data=data))

    def partial_input(self) -> int | None:
        """A number that identifies the head or frame that is incomplete now; None if there is none."""
        protocol = self.protocol
        if isinstance(protocol, Http2):
            return protocol.partial_input
        waiting = protocol.connection.their_state is h11.IDLE and protocol.connection.trailing_data[0]
        return protocol.keep_alive_requests if waiting else None

    async def too_late(self) -> None:
        """Tells the client that its head or frame came too late: 408, or GOAWAY."""
        protocol = self.protocol
        if isinstance(protocol, Http2):
            await protocol.goodbye()
        elif protocol.connection.our_state is h11.IDLE:
            await protocol._send_error_response(408)

    async def goodbye(self) -> None:
        """Tells an HTTP/2 client that the server ends its idle connection."""
        if isinstance(self.protocol, Http2):
            await self.protocol.goodbye()

    async def drain(self, grace_s: float) -> bool:
        """Tells the client that the server stops. Returns when the client knows or after `grace_s` seconds.

        Returns True if no request waits for its answer then.
        """
        with trio.move_on_after(grace_s):
            await self._is_http2.wait()  # a connection counts as HTTP/1.1 until the preface comes
        if isinstance(self.protocol, Http2):
            await self.protocol.drain(grace_s)
            return self.protocol.idle
        self.protocol.last_call = True
        if self.protocol.stream is not None:
            return False
        if self.protocol.connection.trailing_data[0]:
            await self.protocol._send_error_response(503)
        return True


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
                with self._reading:
                    await self.stream.do_handshake()
                if self._reading.cancelled_caught:
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
