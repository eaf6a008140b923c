"""What all gRPC calls share (connection, deadline, early end), and calls that are refused at once.

Rules:
 1. A call ends once: by its answer, an error, its deadline or a reset, whichever comes first. The others then find
    `ended` or `trailers` set and do nothing.
 2. If a call ends while its request is not answered, the request is cancelled. If its answer comes anyway, the call
    drops it; neptrio.execution.batch.complete counts it in the statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from grpclib.const import Status

from neptrio.errors import TritonError
from neptrio.loop.timers import Timer
from neptrio.request.infer_request import InferRequest
from neptrio.service.audit import REFUSED
from neptrio.transport.grpc.message_stream import GrpcStream
from neptrio.transport.grpc.status import timeout_ns
from neptrio.transport.http2.session import Headers, Http2Session

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


class Call(GrpcStream):
    """A call with a connection and perhaps a deadline; the base of all calls."""

    _connection: GrpcConnection
    _timer: Timer | None = None

    @property
    def client(self) -> str:
        """The client's address."""
        return self._connection.client

    def set_deadline(self, value: bytes) -> None:
        """Starts the deadline that a grpc-timeout header asks for; refuses the call if the header is malformed."""
        try:
            limit = timeout_ns(value)
        except TritonError as error:
            self.refuse(error.code.grpc.value, str(error))
            return
        connection = self._connection
        self._timer = connection.services.loop.timers.at(connection.now() + limit, self.expired)

    def expired(self) -> None:
        """Called at the deadline: refuses the call with DEADLINE_EXCEEDED if it has not ended."""
        self._timer = None
        if not self.ended and self.trailers is None:
            for request in self.requests():
                if request.trace is not None:
                    request.trace.answered_by_front()
            self.refuse(Status.DEADLINE_EXCEEDED.value, "Deadline Exceeded")

    def requests(self) -> Iterable[InferRequest]:
        """The call's requests that are not answered yet."""
        return ()

    def on_refused(self) -> None:
        self.release()
        self._connection.want_flush()

    def on_reset(self, code: int) -> None:
        self.release()

    def release(self) -> None:
        """Called when the call ends before its answer: cancels what it started."""
        self.stop_clock()

    def stop_clock(self) -> None:
        """Cancels the timer of the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_drain(self) -> None:
        """Called when the connection drains. Calls that could go on for ever end here; others may finish."""


class RefusedCall(Call):
    """A call that is answered with a status before its messages are read."""

    def __init__(
        self, session: Http2Session, stream_id: int, headers: Headers, trailers: list[tuple[bytes, bytes]]
    ) -> None:
        super().__init__(session, stream_id, headers)
        self.refused = self.forgets_head = True
        self.finish(trailers)

    def on_refused(self) -> None:
        pass


def apply_policy(connection: GrpcConnection, headers: Headers, request: InferRequest) -> None:
    """Checks a decoded inference request against the call's metadata (token, model), and adds forwarded metadata to its
    parameters. Raises TritonError."""
    try:
        connection.forward.request(headers(), request, connection.certificate)
    except TritonError as error:
        if error.code in REFUSED:
            connection.record(b"ModelInfer", headers, None, error, request.model_name)
        raise


def framed_size(segments: list[Any]) -> int:
    """The size of a list of buffers in bytes."""
    return sum(memoryview(segment).nbytes for segment in segments)
