"""ModelInfer, the unary inference call: decodes and submits its message, and a callback sends the answer.

To be fast, a call has no task of its own, and the object of its HTTP/2 stream is also the request's context. Only large
messages that workers must inflate or decode, and large replies that they must classify or compress, need a task. Calls without compression,
header policy and the like do not come here: cext/transport/grpc/fast_path.pyx serves them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import trio

from neptrio.codec.inflate import Inflater
from neptrio.codec.outputs import select, selects_slowly
from neptrio.codec.proto_request import decode_request, decodes_slowly
from neptrio.codec.proto_response import encode_response
from neptrio.errors import Internal, TritonError
from neptrio.execution.admission import GRPC_ONE_RESPONSE
from neptrio.loop.timers import Timer
from neptrio.observe.propagation import asked
from neptrio.observe.timing import HEADER as TIMING
from neptrio.observe.timing import wish
from neptrio.request.infer_request import InferRequest, InferResponse
from neptrio.transport.grpc import compression as compression
from neptrio.transport.grpc.calls import Call, apply_policy, framed_size
from neptrio.transport.grpc.decoding import LARGE_MESSAGE, decode_later, select_later
from neptrio.transport.grpc.fast_path import CARDINALITY, UNARY_RESPONDER, UnaryCore
from neptrio.transport.grpc.status import OK_HEADERS, OK_TRAILERS, error_trailers

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection

log = logging.getLogger("neptrio.grpc")


class UnaryInfer(Call, UnaryCore):
    """A ModelInfer call, where the fast path of UnaryCore does not apply."""

    _connection: GrpcConnection
    _timer: Timer | None
    _message: Any
    _compressed: bool
    _request: InferRequest | None
    _working: trio.CancelScope | None = None  # of the task that works on the message or the answer

    def start_generally(self) -> None:
        """Called when the message is complete and the fast path does not apply: decodes and submits the request."""
        message, self._message = self._message, None
        connection = self._connection
        try:
            if message is None:
                raise TritonError("a unary call carries one request message, got none", CARDINALITY)
            if self._compressed:
                bits = compression.window_bits(self.headers.get(b"grpc-encoding"))
                inflater = compression.inflater(message, bits)
                if not inflater.done:
                    self._working = trio.CancelScope()
                    connection.nursery.start_soon(self._inflate, message, inflater)
                    return
                self._submit(inflater.content)
            else:
                self._submit(message)
        except TritonError as error:
            self._fail(error)

    def _submit(self, message: Any) -> None:
        """Decodes and submits the message, which must not be compressed."""
        connection = self._connection
        services = connection.services
        large = len(message) > LARGE_MESSAGE or services.shared_memory.large.count
        if large and decodes_slowly(message):
            self._working = trio.CancelScope()
            connection.nursery.start_soon(self._decode, message)
            return
        try:
            request = InferRequest()
            services.loop.lag.note("decoding a gRPC request", "", len(message))
            decode_request(request, message, services.shared_memory)
            self._submit_decoded(request)
        except TritonError as error:
            self._request = None
            self._fail(error)

    async def _decode(self, message: Any) -> None:
        """_submit() of a message that a worker decodes, for as long as somebody waits for the answer."""
        connection = self._connection
        request = InferRequest()
        assert self._working is not None
        try:
            with self._working:
                self._keep(len(message))
                await decode_later(connection, request, message, self._keep)
            if self.ended or self.trailers is not None or self._working.cancelled_caught:
                self.give_back()
            else:
                self._working = None
                self._submit_decoded(request)
        except TritonError as error:
            self._request = None
            self._fail(error)
        except Exception as error:
            self._unexpected("decoding a message", error)
        connection.pass_ends()

    def _keep(self, size: int) -> None:
        self._connection.services.held.keep(size)
        self._kept += size

    def _submit_decoded(self, request: InferRequest) -> None:
        """Raises TritonError when the request is refused."""
        connection = self._connection
        services = connection.services
        if connection.forward is not None:
            apply_policy(connection, self.headers, request)
        services.admission.find(request, GRPC_ONE_RESPONSE)
        request.context = self
        request.responder = UNARY_RESPONDER
        services.admission.received(request, self._began_ns)
        if self.headers.has_custom and services.admission.tracer.trace_headers:
            request.asked = asked(self.headers())
        if self.headers.has_custom and (value := self.headers.get(TIMING)) is not None:
            request.timing = wish(value)
        self._request = request
        services.admission.submit(request)

    def _unexpected(self, what: str, error: Exception) -> None:
        log.error("%s failed", what, exc_info=error)
        self._request = None
        self._fail(Internal(f"internal error: {type(error).__name__}: {error}"))

    def requests(self) -> Iterable[InferRequest]:
        return () if self._request is None else (self._request,)

    async def _inflate(self, message: bytes, inflater: Inflater) -> None:
        connection = self._connection
        assert self._working is not None
        try:
            with self._working:
                content = await compression.inflate_later(connection.inflating, message, inflater, connection)
                self._inflated = len(content)
        except TritonError as error:
            self._fail(error)
        else:
            if self.ended or self.trailers is not None or self._working.cancelled_caught:
                self.give_back()
            else:
                self._submit(content)
        connection.pass_ends()

    def give_back(self) -> None:
        """Returns the bytes of the inflated and decoded message to the server's budgets."""
        if self._inflated:
            self._connection.inflating.release(self._inflated)
            self._inflated = 0
        if self._kept:
            self._connection.services.held.let_go(self._kept)
            self._kept = 0

    def _fail(self, error: TritonError) -> None:
        self.refused = True
        self.taken()
        self.served(self.serving)
        self.stop_clock()
        self.give_back()
        self.finish(error_trailers(error))
        self._connection.want_flush()

    def answer_generally(self, request: InferRequest, response: InferResponse) -> None:
        """Sends the request's answer where the fast path does not apply."""
        connection = self._connection
        if request.trace is not None and request.trace.headers:
            self.send_headers([*OK_HEADERS, *request.trace.headers])
        if response.error is not None:
            self.finish(error_trailers(response.error))
            connection.want_flush()
            return
        try:
            if request.outputs is not None:
                if selects_slowly(request, response):
                    self.answer_later(request, response)
                    return
                select(request, response, connection.services)
            segments = encode_response(response)
        except TritonError as error:
            self.finish(error_trailers(error))
        else:
            if connection.compression != "none" and self._deflate(segments):
                return
            self.reply(segments, OK_TRAILERS)
        connection.want_flush()

    def answer_later(self, request: InferRequest, response: InferResponse) -> None:
        """Sends an answer whose outputs a worker classifies, for as long as somebody waits for it."""
        self._working = trio.CancelScope()
        self._connection.nursery.start_soon(self._answer_later, request, response)

    async def _answer_later(self, request: InferRequest, response: InferResponse) -> None:
        connection = self._connection
        assert self._working is not None
        try:
            with self._working:
                await select_later(connection, request, response)
            if self.ended or self.trailers is not None or self._working.cancelled_caught:
                return
            segments = encode_response(response)
        except TritonError as error:
            self.finish(error_trailers(error))
        except Exception as error:
            self._unexpected("classifying outputs", error)
        else:
            if connection.compression != "none" and self._deflate(segments):
                return
            self.reply(segments, OK_TRAILERS)
        connection.flush_soon()

    def _deflate(self, segments: list[Any]) -> bool:
        """Sends the answer compressed, and returns True, if the client accepts that. Workers compress a large one."""
        connection = self._connection
        encoding = compression.choose(connection.compression, self.headers.get(b"grpc-accept-encoding"))
        if encoding is None:
            return False
        self.send_headers([*(self.reply_headers or OK_HEADERS), (b"grpc-encoding", encoding)])
        level = compression.LEVELS[connection.compression]
        if framed_size(segments) <= compression.INLINE_BYTES:
            deflater = compression.FrameDeflater(segments, encoding, level)
            deflater.step()
            self.reply(deflater.segments, OK_TRAILERS)
            connection.want_flush()
        else:
            deflater = compression.FrameDeflater(segments, encoding, level)
            connection.nursery.start_soon(self._deflate_large, deflater)
        return True

    async def _deflate_large(self, deflater: compression.FrameDeflater) -> None:
        workers = self._connection.services.workers
        if await workers.finish(deflater.step, lambda: self.ended, self._connection):
            self.reply(deflater.segments, OK_TRAILERS)
            self._connection.flush_soon()

    def release(self) -> None:
        self._message = None
        if self._working is not None:
            self._working.cancel()
        self.stop_clock()
        self.give_back()
        request, self._request = self._request, None
        if request is not None:
            self._connection.services.admission.cancel(request)
