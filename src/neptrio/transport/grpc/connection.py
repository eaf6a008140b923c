"""One gRPC connection: its bytes go to an HTTP/2 session, through which its calls answer.

The rules are those of server.py, where the port and what all connections share are.
"""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from neptrio.errors import TritonError
from neptrio.loop.socket_writer import SocketWriter, Writer
from neptrio.loop.socket_writer_core import RECEIVE_BYTES
from neptrio.loop.timers import Timer
from neptrio.request.infer_request import monotonic_ns
from neptrio.service.certificates import Certificate, of_peer
from neptrio.service.connections import TURNED_AWAY_SECONDS
from neptrio.transport import admin_only, tls
from neptrio.transport.grpc.audit_call import audit_call
from neptrio.transport.grpc.calls import Call, no_grpc_call, restricted, too_many_connections, unknown_method
from neptrio.transport.grpc.fast_path import GrpcFastPath
from neptrio.transport.grpc.handlers import HandlerCall
from neptrio.transport.grpc.infer import UnaryInfer
from neptrio.transport.grpc.stream_infer import StreamInfer
from neptrio.transport.header_policy import METHOD_CATEGORIES
from neptrio.transport.http2 import limits as limits
from neptrio.transport.http2.session import Headers, Http2Session
from neptrio.transport.http2.stream import GrpcStream
from neptrio.transport.tls import SecureSocketWriter

if TYPE_CHECKING:
    from neptrio.transport.grpc.server import GrpcServer

log = logging.getLogger("neptrio.grpc")

HANDSHAKE_S = tls.HANDSHAKE_S  # from accepting a connection to the end of its preface
DRAIN_ROUND_TRIP_NS = 10**9  # for so long after the first GOAWAY, calls sent before it was seen are taken
LINGER_S = 0.5  # how long the client's last bytes are read after our side is closed
ENGINE_S = 0.001  # how long the engine first has for answers, when the client has closed its side
CLOSE_S = 10.0  # how long the last reply bytes may take to leave
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MODEL_INFER = b"/inference.GRPCInferenceService/ModelInfer"
# calls that are answered even when limits are reached; not Watch, because it never ends by itself
PROBES = frozenset(
    path.encode()
    for path, category in METHOD_CATEGORIES.items()
    if category == "health" and not path.endswith("/Watch")
)
MODEL_STREAM_INFER = b"/inference.GRPCInferenceService/ModelStreamInfer"
NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: 62\r\n\r\n"
    b"This port speaks gRPC over HTTP/2. REST is on another port.   "
)


@dataclass(frozen=True)
class ConnectionStatistics:
    """What a connection holds now."""

    open_calls: int
    parked_calls: int
    unsent_reply_bytes: int
    unfinished_request_bytes: int
    in_place_bytes: int  # of large messages, received where they lie without passing the shared buffer


class GrpcConnection(GrpcFastPath):
    """One HTTP/2 connection."""

    draining: bool
    writer: Writer

    def __init__(
        self,
        sock: socket.socket,
        server: GrpcServer,
        nursery: trio.Nursery,
        turned_away: str = "",
        address: str = "",
        prefix: bytes = b"",
        stream: trio.SSLStream[trio.SocketStream] | None = None,
    ) -> None:
        """`address` is the client's. `prefix` was read from the socket already; `stream` has made its handshake."""
        super().__init__(sock, SocketWriter(sock, nursery, server.services.loop.poller), server.services)
        self.nursery = nursery
        self.peer = sock.getpeername()
        self._address = address
        self._prefix = prefix
        limits = server.services.request_limits
        self._limits = limits if limits.on and not server.admin else None
        self._held = server.services.held
        self.inflating = server.inflating
        policy = server.policy
        self.forward = policy if policy is not None and policy.reads_messages else None
        self._policy = policy
        self._turned_away = turned_away
        self._last_stream = 0  # the newest stream at _idle()'s last check
        self._server = server
        self.totals = server.totals
        self.input_limit = server.input_limit
        self.output_limit = server.output_limit
        self._settings = server.services.settings
        self._handlers = server.handlers
        self._timers = server.services.loop.timers
        # most connections have nothing to check before a call
        self._guarded = bool(
            turned_away or self._limits is not None or self._policy is not None or server.admin_elsewhere
        )
        self._stream = stream
        self.certificate: Certificate | None = None  # what the client has shown
        self.session = server.new_session(self.open_stream)
        if not server.admin:
            self.session.account.budget = self._held
        self._scope = trio.CancelScope()
        self._pending_timers: dict[str, Timer] = {}
        self._pinged_at = 0
        self._speaking = False  # the client's HTTP/2 preface has come
        self._drain_asked = False

    @property
    def client(self) -> str:
        """The client's address."""
        return self._address

    def now(self) -> int:
        """The monotonic clock in nanoseconds."""
        return int(monotonic_ns())

    # ------------------------------------------------------------ calls

    def open_stream(self, session: Http2Session, stream_id: int, path: bytes, headers: Headers) -> GrpcStream:
        """Makes the call of a new stream; one that is refused at once if a limit or policy forbids it."""
        call: UnaryInfer | StreamInfer | HandlerCall
        if headers.problem:
            return no_grpc_call(session, stream_id, headers)
        if self._guarded or self._held.full:
            refused = self._refused(session, stream_id, path, headers)
            if refused is not None:
                return refused
        if path == MODEL_INFER:
            call = UnaryInfer(session, stream_id, headers, self)
        elif path == MODEL_STREAM_INFER:
            call = StreamInfer(session, stream_id, headers, self)
        else:
            handler = self._handlers.get(path)
            if handler is None and self._server.handlers_loaded.is_set():
                return unknown_method(session, stream_id, headers)
            call = self._server.call_class(session, stream_id, headers, self, handler, path)
        if headers.has_timeout:
            call.set_deadline(headers.get(b"grpc-timeout") or b"")
        return call

    def _refused(
        self, session: Http2Session, stream_id: int, path: bytes, headers: Headers
    ) -> GrpcStream | None:
        """The stream that answers a call which a limit or policy forbids, None for one that may go on."""
        always = path in PROBES or (
            self._policy is not None
            and bool(self._turned_away or self._limits is not None or self._held.full)
            and self._policy.controls_call(path.decode("latin-1"), headers(), self.certificate)
        )
        if self._turned_away and not always:
            self._at("turned away", 0, self.start_drain)
            return too_many_connections(session, stream_id, headers, self._turned_away)
        if (self._limits is not None or self._held.full) and not always and not self._server.admin:
            problem = self._over_limits()
            if problem is not None:
                return restricted(session, stream_id, headers, problem)
        if self._policy is not None:
            try:
                self._policy.check_call(path.decode("latin-1"), headers(), self.certificate)
            except TritonError as error:
                self.record(path, headers, None, error)
                return restricted(session, stream_id, headers, error)
        if self._server.admin_elsewhere:
            try:
                admin_only.check_call(path.decode("latin-1"))
            except TritonError as error:
                self.record(path, headers, None, error)
                return restricted(session, stream_id, headers, error)
        return None

    def check_message(self, path: str, headers: Headers, message: Any) -> None:
        """Checks the request message of a call other than inference. Raises TritonError."""
        if self.forward is not None:
            self.forward.message(path, headers(), message, self.certificate)
        if self._server.admin_elsewhere:
            admin_only.check_call(path, message)

    def _over_limits(self) -> TritonError | None:
        """Why a new call is refused now, None if it is not."""
        if self._held.full:
            return self._held.problem(0)
        return self.limit(1)

    def limit(self, itself: int = 0) -> TritonError | None:
        """Why the client's next request is refused by its limits; None if it is not, and then it is counted.

        `itself` is 1 if the new request is not yet counted in open_requests().
        """
        return None if self._limits is None else self._limits.problem(self._address, self.now(), itself)

    def record(
        self, path: bytes, headers: Headers, message: Any, error: TritonError | None, model: str = ""
    ) -> None:
        """Tells the audit log what a call changed or why it was refused. `message` is its request, None if it has not
        come."""
        audit = self.services.audit
        if audit is not None:
            audit_call(
                audit,
                self._policy,
                path.decode("latin-1"),
                headers(),
                self._address,
                self.certificate,
                message,
                error,
                model,
            )

    def open_requests(self) -> int:
        """How many calls are open."""
        return len(self.session.streams)

    def park(self, call: UnaryInfer) -> None:
        """Keeps a complete request back until the client has read some of its answers (rule 2)."""
        self.parked.append(call)
        self.session.hold()

    def unpark(self) -> None:
        while self.parked and not self.overfull:
            self.parked.popleft().start()
        if not self.parked:
            self.session.release()

    async def handler(self, path: bytes) -> Any:
        """Waits until the handlers are imported, and returns that of `path`; None if the method is unknown."""
        await self._server.handlers_loaded.wait()
        return self._handlers.get(path)

    def _calls(self) -> list[Call]:
        """The open calls."""
        return list(self.session.streams.values())  # type: ignore[arg-type]  # open_stream() made them

    # ------------------------------------------------------------ output

    def flush_soon(self) -> None:
        """Asks for output to be sent, outside of a pass of the loop: ends a pass, which flushes it."""
        self.loop_pass.want_flush(self)
        self.loop_pass.end()

    def pass_ends(self) -> None:
        """Ends a pass of the loop for requests that were submitted by a task and not by take()."""
        self.flush_soon()

    # ------------------------------------------------------------ input

    async def run(self) -> None:
        """Serves the connection until either side ends it."""
        try:
            with self._scope:
                if await self._handshake():
                    await self._read()
                    if self.services.admission.forwards:
                        await self._last_answers()
        except (OSError, trio.ClosedResourceError, trio.BrokenResourceError):
            pass
        finally:
            for timer in self._pending_timers.values():
                timer.cancel()
            self._pending_timers.clear()
            self.session.connection_lost()
            self.parked.clear()
            self.loop_pass.end()
            with trio.CancelScope(shield=True):
                await self._close()
            self.writer.let_go()
            if self._stream is not None:
                tls.let_go(self._stream)

    async def _handshake(self) -> bool:
        """Makes the TLS handshake, if the port has TLS, and reads the preface.

        Returns False if the client does not speak HTTP/2 or takes too long.
        """
        with trio.move_on_after(TURNED_AWAY_SECONDS if self._turned_away else HANDSHAKE_S):
            if self._server.tls is not None and self._stream is None:
                transport = trio.SocketStream(trio.socket.from_stdlib_socket(self.sock))
                self._stream = trio.SSLStream(
                    transport, self._server.tls.context, server_side=True, https_compatible=True
                )
            if self._stream is not None:
                self.writer = SecureSocketWriter(self._stream, self.nursery)
                await self._stream.do_handshake()
                self.certificate = of_peer(self._stream.getpeercert())
            first = bytearray(self._prefix)
            while len(first) < len(PREFACE) and first == PREFACE[: len(first)]:
                data = await self._receive_some()
                if not data:
                    return False
                first += data
            if not first.startswith(PREFACE):
                self.writer.send([NOT_HTTP2])
                return False
            self._speaking = True
            self.writer.on_drained = self.flush_soon
            self._start_timers()
            self._take(first)
            if self._drain_asked:
                self.start_drain()
            return True
        return False

    async def _receive_some(self) -> bytes:
        if self._stream is not None:
            return bytes(await self._stream.receive_some(RECEIVE_BYTES))
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                return self.sock.recv(RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                continue

    async def _read(self) -> None:
        if self._stream is None:
            if not self.session.dead and not self.writer.broken:
                await self.services.loop.poller.read(self.sock, self.take)
            return
        while not self.session.dead and not self.writer.broken:
            data = await self._stream.receive_some(RECEIVE_BYTES)
            if not data:
                return
            self._take(data)

    async def _last_answers(self) -> None:
        """The client has closed its sending side, or has gone. Cancels its requests, and sends what the engine has
        answered nevertheless. Without front ends that is unnecessary: what is answered at once was answered before."""
        pause = ENGINE_S
        with trio.move_on_after(CLOSE_S):
            while not self.session.dead and not self.writer.broken:
                requests = [request for call in self._calls() for request in call.requests()]
                if not requests:
                    break
                for request in requests:
                    self.services.admission.cancel(request)
                self.loop_pass.end()
                await trio.sleep(pause)
                pause = min(2 * pause, LINGER_S)

    def _take(self, data: Any) -> None:
        self.feed(data)
        self.loop_pass.end()

    def shed(self) -> None:
        """Called when incomplete requests of all connections hold too many bytes (rule 4)."""
        self._server.shed()

    async def _close(self) -> None:
        """Sends the last bytes and closes. Reads the client's last bytes for a moment: closing a socket with unread
        input makes the kernel reset the connection, and the client might lose our last bytes."""
        if self._speaking and self.session.wants_output:
            self.writer.send(self.session.data_to_send())
        with trio.move_on_after(CLOSE_S):
            await self.writer.drained()
        if self._stream is not None:
            if self.writer.broken:
                await trio.aclose_forcefully(self._stream)
            else:
                with trio.move_on_after(LINGER_S):
                    try:
                        await self._stream.transport_stream.send_eof()
                        while await self._stream.receive_some(RECEIVE_BYTES):
                            pass
                    except (trio.BrokenResourceError, trio.BusyResourceError):
                        pass
                await trio.aclose_forcefully(self._stream)
        elif not self.writer.broken:
            with trio.move_on_after(LINGER_S):
                try:
                    self.sock.shutdown(socket.SHUT_WR)
                    while await self._receive_some():
                        pass
                except OSError:
                    pass
        self.writer.fail()
        self.sock.close()

    # ------------------------------------------------------------ time

    def _start_timers(self) -> None:
        settings = self._settings
        if settings.grpc_max_connection_age_ms:
            spread = random.uniform(0.9, 1.1)  # so that clients do not all reconnect at once
            self._at("age", settings.grpc_max_connection_age_ms * spread, self._too_old)
        self._at("keepalive", settings.grpc_keepalive_time_ms, self._keep_alive)
        if settings.grpc_max_connection_idle_ms:
            self._at("idle", settings.grpc_max_connection_idle_ms, self._idle)
        if self._turned_away:
            self._at("turned away", TURNED_AWAY_SECONDS * 1000, self.start_drain)

    def _at(self, name: str, delay_ms: float, callback: Callable[[], None]) -> None:
        if delay_ms < 2**31 - 1:
            if name in self._pending_timers:
                self._pending_timers[name].cancel()
            self._pending_timers[name] = self._timers.at(self.now() + int(delay_ms * 1e6), callback)

    def _too_old(self) -> None:
        self.start_drain()
        if self._settings.grpc_max_connection_age_grace_ms:
            self._at("grace", self._settings.grpc_max_connection_age_grace_ms, self.close)

    def _idle(self) -> None:
        """Called at an interval: ends the connection if it had no call since the last check."""
        last_stream = self.session.last_stream
        if not self.session.streams and last_stream == self._last_stream:
            self.start_drain()
            return
        self._last_stream = last_stream
        self._at("idle", self._settings.grpc_max_connection_idle_ms, self._idle)

    def press(self, idle_ns: int) -> None:
        """Called while new connections are being refused: ends this one if it was idle for `idle_ns`."""
        if self.now() - self.received_at > idle_ns and not self.session.streams:
            if self._speaking:
                self.start_drain()
            else:
                self.close()

    def _keep_alive(self) -> None:
        settings = self._settings
        silent_ms = (self.now() - self.received_at) / 1e6
        if silent_ms < settings.grpc_keepalive_time_ms:
            self._at("keepalive", settings.grpc_keepalive_time_ms - silent_ms, self._keep_alive)
        elif self.session.streams or settings.grpc_keepalive_permit_without_calls:
            self.session.ping()
            self._pinged_at = self.now()
            self.want_flush()
            soon_ms = min(settings.grpc_keepalive_time_ms, settings.grpc_keepalive_timeout_ms)
            self._at("keepalive", soon_ms, self._await_answer)
        else:
            self._at("keepalive", settings.grpc_keepalive_time_ms, self._keep_alive)

    def _await_answer(self) -> None:
        """Checks whether anything came since the last PING; closes the connection when its time is over."""
        settings = self._settings
        if self.received_at >= self._pinged_at:
            self._keep_alive()
            return
        left_ms = settings.grpc_keepalive_timeout_ms - (self.now() - self._pinged_at) / 1e6
        if left_ms > 0:
            self._at("keepalive", min(left_ms, settings.grpc_keepalive_time_ms), self._await_answer)
        else:
            log.debug("connection from %s does not answer PING", self.peer)
            self.writer.fail()
            self.close()

    # ------------------------------------------------------------ end

    def start_drain(self) -> None:
        """Sends GOAWAY: no new calls are taken, open ones finish, then the connection ends."""
        if self.draining or (self._drain_asked and not self._speaking):
            return
        if not self._speaking:  # the session does not speak yet, and with TLS its writer is not made
            self._drain_asked = True
            self._at("drain", DRAIN_ROUND_TRIP_NS / 1e6, self._close_unless_it_speaks)
            return
        self.draining = True
        self.drain_acked = self.session.pings_acked
        self.session.start_drain()
        self.session.ping()  # its answer shows that the client has seen the GOAWAY
        self._pending_timers["drain"] = self._timers.at(self.now() + DRAIN_ROUND_TRIP_NS, self.finish_drain)
        for call in self._calls():
            call.on_drain()
        self.flush_soon()

    def _close_unless_it_speaks(self) -> None:
        if not self._speaking:
            self.close()

    def finish_drain(self) -> None:
        """Sends the final GOAWAY: no calls are taken after it."""
        timer = self._pending_timers.pop("drain", None)
        if timer is not None:
            timer.cancel()
            self.session.finish_drain()
            for call in self._calls():
                call.on_drain()
            self.want_flush()

    def waiting_input(self) -> tuple[int, Any] | None:
        """When the client last sent something (monotonic ns), and the call that holds most bytes of an incomplete
        request. None if there is no incomplete request."""
        if not self.session.account.in_bytes:
            return None
        return self.received_at, max(self.session.streams.values(), key=lambda call: call.input_held)

    def close(self) -> None:
        """Ends the connection now."""
        self._scope.cancel()

    def statistics(self) -> ConnectionStatistics:
        """What the connection holds now."""
        account = self.session.account
        return ConnectionStatistics(
            open_calls=len(self.session.streams),
            parked_calls=len(self.parked),
            unsent_reply_bytes=account.out_bytes + account.held + self.writer.pending,
            unfinished_request_bytes=account.in_bytes,
            in_place_bytes=account.placed,
        )
