"""One gRPC connection: what its streams are, and which of them are refused.

The rules are those of server.py, where the port and what all connections share are; the life of a connection is
transport/http2/connection.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpclib.const import Status

from neptrio.errors import TritonError
from neptrio.service.connections import TURNED_AWAY_SECONDS
from neptrio.transport import admin_only
from neptrio.transport.grpc.audit_call import audit_call
from neptrio.transport.grpc.calls import RefusedCall
from neptrio.transport.grpc.handlers import HandlerCall
from neptrio.transport.grpc.infer import UnaryInfer
from neptrio.transport.grpc.message_stream import GrpcStream
from neptrio.transport.grpc.status import error_trailers, problem_headers, status_trailers
from neptrio.transport.grpc.stream_infer import StreamInfer
from neptrio.transport.header_policy import METHOD_CATEGORIES
from neptrio.transport.http2.connection import Http2Connection
from neptrio.transport.http2.session import Headers, Http2Session
from neptrio.transport.wire import Wire

if TYPE_CHECKING:
    from neptrio.service.tokens import Account
    from neptrio.transport.grpc.server import GrpcServer

MODEL_INFER = b"/inference.GRPCInferenceService/ModelInfer"
# calls that are answered even when limits are reached; not Watch, because it never ends by itself
PROBES = frozenset(
    path.encode()
    for path, category in METHOD_CATEGORIES.items()
    if category == "health" and not path.endswith("/Watch")
)
MODEL_STREAM_INFER = b"/inference.GRPCInferenceService/ModelStreamInfer"
PROBE_HEAD = (
    4 << 10
)  # bytes of a probe's headers; larger ones are refused, too, while more is held than may be
_NOT_HTTP2 = b"This port speaks gRPC over HTTP/2. REST is on another port, --http-port (8000)\n"
NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_NOT_HTTP2), _NOT_HTTP2)
)


class GrpcConnection(Http2Connection):
    """One HTTP/2 connection whose streams are gRPC calls."""

    def __init__(self, wire: Wire, server: GrpcServer, turned_away: str = "", prefix: bytes = b"") -> None:
        """`prefix` was read from the connection already."""
        self._server = server
        super().__init__(wire, server.services, server.times, turned_away, prefix)
        limits = server.services.request_limits
        self._limits = limits if limits.on and not server.admin else None
        self._held = server.services.held
        policy = server.policy
        self.forward = policy if policy is not None and policy.reads_messages else None
        self._policy = policy
        self.totals = server.totals
        self.input_limit = server.input_limit
        self.output_limit = server.output_limit
        self._handlers = server.handlers
        # most connections have nothing to check before a call
        self._guarded = bool(
            turned_away or self._limits is not None or self._policy is not None or server.admin_elsewhere
        )
        if not server.admin:
            self.session.account.budget = self._held

    def new_session(self) -> Http2Session:
        return self._server.new_session(self.open_stream if self.access is None else self._open_logged)

    def stranger(self) -> bytes:
        return NOT_HTTP2

    def shed(self) -> None:
        self._server.shed()

    def check(
        self, now_ns: int, request_timeout_ns: int, idle_timeout_ns: int, pressed: bool = False
    ) -> None:
        """Ends what its client does not read; while new connections are being refused also one that was idle for
        `idle_timeout_ns`. Called regularly."""
        self.check_unread(now_ns, request_timeout_ns)
        if pressed and now_ns - self.received_at > idle_timeout_ns and not self.session.streams:
            if self.speaking:
                self.start_drain()
            else:
                self.close()

    # ------------------------------------------------------------ calls

    def open_stream(self, session: Http2Session, stream_id: int, path: bytes, headers: Headers) -> GrpcStream:
        """Makes the call of a new stream; one that is refused at once if a limit or policy forbids it."""
        call: UnaryInfer | StreamInfer | HandlerCall
        refusal = None
        if headers.problem:
            refusal = problem_headers(headers.problem)
        elif self._guarded or self._held.full:
            refusal = self._refusal(path, headers)
        if refusal is not None:
            return RefusedCall(session, stream_id, headers, refusal)
        if path == MODEL_INFER:
            call = UnaryInfer(session, stream_id, headers, self)
        elif path == MODEL_STREAM_INFER:
            call = StreamInfer(session, stream_id, headers, self)
        else:
            handler = self._handlers.get(path)
            if handler is None and self._server.handlers_loaded.is_set():
                # without a text, like a Triton server (docs/protocol/observed.md 2)
                return RefusedCall(session, stream_id, headers, status_trailers(Status.UNIMPLEMENTED))
            call = self._server.call_class(session, stream_id, headers, self, handler, path)
        if headers.has_timeout:
            call.set_deadline(headers.get(b"grpc-timeout") or b"")
        return call

    def _open_logged(
        self, session: Http2Session, stream_id: int, path: bytes, headers: Headers
    ) -> GrpcStream:
        """open_stream() of a server that has an access log."""
        call = self.open_stream(session, stream_id, path, headers)
        assert self.access is not None
        call.logged(self.access, self.client, path)
        return call

    def _refusal(self, path: bytes, headers: Headers) -> list[tuple[bytes, bytes]] | None:
        """The trailers of a call that a limit or policy forbids, None for one that may go on."""
        method = path.decode("latin-1")
        always = (path in PROBES and not (self._held.full and head_bytes(headers) > PROBE_HEAD)) or (
            self._policy is not None
            and bool(self.turned_away or self._limits is not None or self._held.full)
            and self._policy.controls_call(method, headers(), self.certificate)
        )
        if self.turned_away and not always:
            self._at("turned away", 0, self.start_drain)
            again = (b"grpc-retry-pushback-ms", b"%d" % (TURNED_AWAY_SECONDS * 1000))
            return [*status_trailers(Status.UNAVAILABLE, self.turned_away), again]
        if (self._limits is not None or self._held.full) and not always and not self._server.admin:
            problem = self._held.problem(0) if self._held.full else self.limit(1)
            if problem is not None:
                return error_trailers(problem)
        try:
            if self._policy is not None:
                self._policy.check_call(method, headers(), self.certificate)
            if self._server.admin_elsewhere:
                admin_only.check_call(method)
        except TritonError as error:
            self.record(path, headers, None, error)
            return error_trailers(error)
        return None

    def check_message(self, path: str, headers: Headers, message: Any) -> Account | None:
        """Checks the request message of a call other than inference; the client, None where nobody is asked who they are.
        Raises TritonError."""
        account = None
        if self.forward is not None:
            account = self.forward.message(path, headers(), message, self.certificate)
        if self._server.admin_elsewhere:
            admin_only.check_call(path, message)
        return account

    def limit(self, itself: int = 0) -> TritonError | None:
        """Why the client's next request is refused by its limits; None if it is not, and then it is counted.

        `itself` is 1 if the new request is not yet counted in open_requests().
        """
        return None if self._limits is None else self._limits.problem(self.client, self.now(), itself)

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
                self.client,
                self.certificate,
                message,
                error,
                model,
            )

    async def handler(self, path: bytes) -> Any:
        """Waits until the handlers are imported, and returns that of `path`; None if the method is unknown."""
        await self._server.handlers_loaded.wait()
        return self._handlers.get(path)


def head_bytes(headers: Headers) -> int:
    """Bytes of a call's headers."""
    return sum(len(name) + len(value) for name, value in headers())
