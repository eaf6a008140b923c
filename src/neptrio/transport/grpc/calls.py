"""What every gRPC call has: its connection, its deadline, its end before time; and calls that are refused.

Rules:
 1. A call answers once. Whatever ends it first (answer, error, deadline, reset) wins; the others
    find `ended` or `trailers` set and do nothing.
 2. Whoever ends a call whose request is under way cancels that request; its late answer is
    dropped by the call, the accounts are kept by neptrio.execution.batch.complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from grpclib.const import Status

from neptrio.errors import TritonError
from neptrio.loop.timers import Timer
from neptrio.request.infer_request import InferRequest
from neptrio.service.audit import REFUSED
from neptrio.service.connections import TURNED_AWAY_SECONDS
from neptrio.transport.http2.grpc_status import error_trailers, problem_headers, status_trailers, timeout_ns
from neptrio.transport.http2.session import Headers, Http2Session
from neptrio.transport.http2.stream import GrpcStream

if TYPE_CHECKING:
    from neptrio.transport.grpc.server import GrpcConnection

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


class Call(GrpcStream):
    """What every call has: its connection, its deadline, its refusals."""

    _connection: GrpcConnection
    _timer: Timer | None = None

    def set_deadline(self, value: bytes) -> None:
        """Starts the clock of a grpc-timeout header."""
        try:
            limit = timeout_ns(value)
        except TritonError as error:
            self.refuse(error.code.grpc.value, str(error))
            return
        connection = self._connection
        self._timer = connection.services.loop.timers.at(connection.now() + limit, self.expired)

    def expired(self) -> None:
        """The deadline is over."""
        self._timer = None
        if not self.ended and self.trailers is None:
            for request in self.requests():
                if request.trace is not None:
                    request.trace.told()
            self.refuse(Status.DEADLINE_EXCEEDED.value, "Deadline Exceeded")

    def requests(self) -> Iterable[InferRequest]:
        """Its requests that are under way."""
        return ()

    def on_refused(self) -> None:
        self.release()
        self._connection.want_flush()

    def on_reset(self, code: int) -> None:
        self.release()

    def release(self) -> None:
        """The call is over before its answer: what it started is cancelled."""
        self.stop_clock()

    def stop_clock(self) -> None:
        """The deadline does not matter any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_drain(self) -> None:
        """The server is about to stop; the call may finish."""


class RefusedCall(Call):
    """A call that ends with a status before anything is read."""

    def __init__(
        self, session: Http2Session, stream_id: int, headers: Headers, trailers: list[tuple[bytes, bytes]]
    ) -> None:
        super().__init__(session, stream_id, headers)
        self.refused = True
        self.finish(trailers)

    def on_refused(self) -> None:
        pass


def unknown_method(session: Http2Session, stream_id: int, headers: Headers) -> RefusedCall:
    """UNIMPLEMENTED with no text, as a Triton server answers (docs/protocol/observed.md 2)."""
    return RefusedCall(session, stream_id, headers, status_trailers(Status.UNIMPLEMENTED))


def no_grpc_call(session: Http2Session, stream_id: int, headers: Headers) -> RefusedCall:
    """The answer to a request whose headers are not those of a call."""
    return RefusedCall(session, stream_id, headers, problem_headers(headers.problem))


def restricted(session: Http2Session, stream_id: int, headers: Headers, error: TritonError) -> RefusedCall:
    """The answer to a call that lacks the metadata of a restriction, or comes over a limit."""
    return RefusedCall(session, stream_id, headers, error_trailers(error))


def too_many_connections(session: Http2Session, stream_id: int, headers: Headers, why: str) -> RefusedCall:
    """The answer to a call on a connection there is no room for; says when to try again."""
    trailers = status_trailers(Status.UNAVAILABLE, why)
    return RefusedCall(
        session,
        stream_id,
        headers,
        [*trailers, (b"grpc-retry-pushback-ms", b"%d" % (TURNED_AWAY_SECONDS * 1000))],
    )


def apply_policy(connection: GrpcConnection, headers: Headers, request: InferRequest) -> None:
    """What the call's metadata means for a decoded request of it. Raises TritonError."""
    try:
        connection.forward.request(headers(), request)
    except TritonError as error:
        if error.code in REFUSED:
            connection.record(b"ModelInfer", headers, None, error, request.model_name)
        raise


def framed_size(segments: list[Any]) -> int:
    """Bytes of a list of buffers."""
    return sum(memoryview(segment).nbytes for segment in segments)
