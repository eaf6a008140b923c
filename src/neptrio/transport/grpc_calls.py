"""The calls of the gRPC front: the two inference RPCs without tasks, all others as grpclib handlers.

Contract of HandlerCall: grpclib's Stream, as far as generated handlers use it (recv_message,
send_message, `async for`, deadline, metadata), over a GrpcStream.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from typing import Any

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from neptrio._cext.grpc_stream import GrpcStream, percent_encode
from neptrio._cext.infer_wire import decode_request, encode_response
from neptrio._cext.request import InferRequest, InferResponse, Responder
from neptrio.codec.outputs import select
from neptrio.errors import Cancelled, InvalidArgument, TritonError, Unsupported

log = logging.getLogger("neptrio.grpc")

OK_TRAILERS = [(b"grpc-status", b"0")]
UNITS_NS = {b"H": 3600 * 10**9, b"M": 60 * 10**9, b"S": 10**9, b"m": 10**6, b"u": 10**3, b"n": 1}


def status_trailers(status: Status, message: str) -> list[tuple[bytes, bytes]]:
    """The trailers that end a call with a status."""
    trailers = [(b"grpc-status", str(status.value).encode())]
    if message:
        trailers.append((b"grpc-message", percent_encode(message)))
    return trailers


def timeout_ns(value: bytes | None) -> int | None:
    """A grpc-timeout header in nanoseconds; None when absent or malformed."""
    if not value or value[-1:] not in UNITS_NS or not value[:-1].isdigit() or len(value) > 9:
        return None
    return int(value[:-1]) * UNITS_NS[value[-1:]]


def decompress(call: GrpcStream, message: bytes) -> bytes:
    """A compressed message's content. Raises TritonError."""
    encoding = call.headers.get(b"grpc-encoding")
    if encoding not in (b"gzip", b"deflate"):
        raise Unsupported(f"grpc-encoding {encoding!r} is not supported, expected gzip, deflate or identity")
    try:
        return zlib.decompress(message, 31 if encoding == b"gzip" else 15)
    except zlib.error as error:
        raise InvalidArgument(f"cannot decompress the message: {error}") from None


class InferResponder(Responder):
    """Sends responses to the call that request.context names."""

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        request.context.respond(request, response, final)


RESPONDER = InferResponder()


class UnaryInfer(GrpcStream):
    """ModelInfer."""

    def __init__(self, session: Any, stream_id: int, headers: Any, connection: Any) -> None:
        super().__init__(session, stream_id, headers)
        self._connection = connection
        self._message: bytes | None = None
        self._request: InferRequest | None = None
        self._timer: Any = None

    def on_message(self, message: bytes, compressed: bool) -> None:
        try:
            if self._message is not None:
                raise InvalidArgument("a unary call carries one request message, got a second one")
            self._message = decompress(self, message) if compressed else message
        except TritonError as error:
            self._fail(error)

    def on_half_close(self) -> None:
        services = self._connection.services
        try:
            if self._message is None:
                raise TritonError("a unary call carries one request message, got none")
            request = InferRequest()
            decode_request(request, self._message, services.shared_memory)
            self._message = None
            model = services.inference.lookup(request.model_name, request.model_version)
            if model.decoupled:
                raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
            request.model = model
            request.context = self
            request.responder = RESPONDER
            self._request = request
            services.inference.submit(request)
        except TritonError as error:
            self._request = None
            self._fail(error)
            return
        limit = timeout_ns(self.headers.get(b"grpc-timeout"))
        if limit is not None and self._request is not None:
            self._timer = services.loop.timers.at(self._connection.now() + limit, self._expired)

    def _expired(self) -> None:
        if self._request is not None:
            self._connection.services.inference.cancel(self._request)

    def _fail(self, error: TritonError) -> None:
        self.refused = True
        self.finish(status_trailers(error.code.grpc, str(error)))
        self._connection.want_flush()

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self._request = None
        if self._timer is not None:
            self._timer.cancel()
        if self.ended:
            return
        try:
            if response.error is not None:
                raise response.error
            select(request, response, self._connection.services)
            self.send_segments(encode_response(response))
            self.finish(OK_TRAILERS)
        except TritonError as error:
            self.finish(status_trailers(error.code.grpc, str(error)))
        self._connection.want_flush()

    def on_reset(self, code: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        request, self._request = self._request, None
        if request is not None:
            self._connection.services.inference.cancel(request)


class _Entry:
    """A request of a stream and the responses that wait for earlier ones."""

    __slots__ = ("done", "held", "ordered", "request")

    def __init__(self, request: InferRequest, ordered: bool) -> None:
        self.request = request
        self.ordered = ordered
        self.held: list[list[Any]] = []
        self.done = False


class StreamInfer(GrpcStream):
    """ModelStreamInfer: answers of non-decoupled models leave in request order."""

    def __init__(self, session: Any, stream_id: int, headers: Any, connection: Any) -> None:
        super().__init__(session, stream_id, headers)
        self._connection = connection
        self._order: deque[_Entry] = deque()
        self._open: dict[InferRequest, _Entry] = {}

    def on_message(self, message: bytes, compressed: bool) -> None:
        services = self._connection.services
        request = InferRequest()
        entry = _Entry(request, True)
        try:
            decode_request(
                request, decompress(self, message) if compressed else message, services.shared_memory
            )
            request.model = services.inference.lookup(request.model_name, request.model_version)
            entry.ordered = not request.model.decoupled
            request.context = self
            request.responder = RESPONDER
            self._add(entry)
            services.inference.submit(request)
        except TritonError as error:
            if request not in self._open:
                self._add(entry)
            response = InferResponse(None, error)
            response.id = request.id
            self._deliver(entry, encode_response(response, True, True), True)

    def _add(self, entry: _Entry) -> None:
        self._open[entry.request] = entry
        if entry.ordered:
            self._order.append(entry)

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        entry = self._open.get(request)
        if entry is None or self.ended:
            return
        segments: list[Any] = []
        if response.error is None and not response.null:
            select(request, response, self._connection.services)
        if not response.null or request.want_empty_final:
            segments = encode_response(response, True, final)
        self._deliver(entry, segments, final)

    def _deliver(self, entry: _Entry, segments: list[Any], final: bool) -> None:
        if final:
            entry.done = True
            del self._open[entry.request]
        if not entry.ordered or self._order[0] is entry:
            if segments:
                self.send_segments(segments)
        elif segments:
            entry.held.append(segments)
        order = self._order
        while order and order[0].done:
            order.popleft()
            if order:
                for held in order[0].held:
                    self.send_segments(held)
                order[0].held = []
        if self.input_ended and not self._open:
            self.finish(OK_TRAILERS)
        self._connection.want_flush()

    def on_half_close(self) -> None:
        if not self._open:
            self.finish(OK_TRAILERS)
            self._connection.want_flush()

    def on_reset(self, code: int) -> None:
        open_, self._open = self._open, {}
        self._order.clear()
        for request in open_:
            self._connection.services.inference.cancel(request)


class HandlerCall(GrpcStream):
    """Any other RPC: a task that runs the generated grpclib handler on this stream."""

    def __init__(self, session: Any, stream_id: int, headers: Any, connection: Any, handler: Any) -> None:
        super().__init__(session, stream_id, headers, 64 << 20)
        self._connection = connection
        self._handler = handler
        self._inbox: deque[bytes] = deque()
        self._news = trio.Event()
        self._scope = trio.CancelScope()
        connection.nursery.start_soon(self._run)

    def on_message(self, message: bytes, compressed: bool) -> None:
        self._inbox.append(decompress(self, message) if compressed else message)
        self._news.set()

    def on_half_close(self) -> None:
        self._news.set()

    def on_reset(self, code: int) -> None:
        self._scope.cancel()
        self._news.set()

    async def recv_message(self) -> Any:
        """The next request message, None at the end of the input."""
        while not self._inbox:
            if self.input_ended:
                return None
            self._news = trio.Event()
            await self._news.wait()
        raw = self._inbox.popleft()
        try:
            return self._handler.request_type.parse(raw)
        except Exception as error:
            raise GRPCError(Status.INTERNAL, f"cannot parse the request message: {error}") from None

    async def send_message(self, message: Any) -> None:
        """Queues a reply message."""
        body = bytes(message)
        self.send_segments([b"\0" + len(body).to_bytes(4, "big") + body])
        self._connection.flush_soon()

    def __aiter__(self) -> HandlerCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message

    async def _run(self) -> None:
        trailers = OK_TRAILERS
        with self._scope:
            try:
                limit = timeout_ns(self.headers.get(b"grpc-timeout"))
                if limit is not None:
                    self._scope.deadline = trio.current_time() + limit / 1e9
                await self._handler.func(self)
            except TritonError as error:
                trailers = status_trailers(error.code.grpc, str(error))
            except GRPCError as error:
                trailers = status_trailers(error.status, error.message or "")
            except Exception as error:
                log.exception("a gRPC handler failed")
                trailers = status_trailers(Status.INTERNAL, f"{type(error).__name__}: {error}")
        if self._scope.cancelled_caught:
            trailers = status_trailers(Status.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if not self.ended:
            self.finish(trailers)
            self._connection.flush_soon()


class RefusedCall(GrpcStream):
    """A call that ends with a status before anything is read."""

    def __init__(self, session: Any, stream_id: int, headers: Any, status: Status, message: str = "") -> None:
        super().__init__(session, stream_id, headers)
        self.refused = True
        self._trailers = status_trailers(status, message)

    def start(self) -> None:
        """Sends the status; called once the session knows the stream."""
        self.finish(self._trailers)


__all__ = ["Cancelled", "HandlerCall", "RefusedCall", "StreamInfer", "UnaryInfer", "status_trailers"]
