"""ModelInfer, the unary inference call: decodes and submits its message, and a callback sends the answer.

To be fast, a call has no task of its own, and the object of its HTTP/2 stream is also the request's context. Only large
messages that workers must inflate, and large replies that they must compress, need a task. Calls without compression,
header policy and the like do not come here: cext/transport/grpc/fast_path.pyx serves them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import trio

from neptrio.codec.inflate import Inflater
from neptrio.codec.outputs import select
from neptrio.codec.proto_request import decode_request
from neptrio.codec.proto_response import encode_response
from neptrio.errors import TritonError
from neptrio.execution.admission import GRPC_ONE_RESPONSE
from neptrio.loop.timers import Timer
from neptrio.observe.propagation import asked
from neptrio.request.infer_request import InferRequest, InferResponse
from neptrio.transport.grpc import compression as compression
from neptrio.transport.grpc.calls import Call, apply_policy, framed_size
from neptrio.transport.grpc.fast_path import CARDINALITY, UNARY_RESPONDER, UnaryCore
from neptrio.transport.http2.grpc_status import OK_HEADERS, OK_TRAILERS, error_trailers

if TYPE_CHECKING:
    from neptrio.transport.grpc.server import GrpcConnection


class UnaryInfer(UnaryCore, Call):
    """A ModelInfer call, where the fast path of UnaryCore does not apply."""

    _connection: GrpcConnection
    _timer: Timer | None
    _message: bytes | None
    _compressed: bool
    _request: InferRequest | None
    _inflating: trio.CancelScope | None = None

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
                    self._inflating = trio.CancelScope()
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
        try:
            request = InferRequest()
            services.loop.lag.note("decoding a gRPC request", "", len(message))
            decode_request(request, message, services.shared_memory)
            if connection.forward is not None:
                apply_policy(connection, self.headers, request)
            services.admission.find(request, GRPC_ONE_RESPONSE)
            request.context = self
            request.responder = UNARY_RESPONDER
            services.admission.received(request, self._began_ns)
            if self.headers.has_custom and services.admission.tracer.trace_headers:
                request.asked = asked(self.headers())
            self._request = request
            services.admission.submit(request)
        except TritonError as error:
            self._request = None
            self._fail(error)

    def requests(self) -> Iterable[InferRequest]:
        return () if self._request is None else (self._request,)

    async def _inflate(self, message: bytes, inflater: Inflater) -> None:
        connection = self._connection
        assert self._inflating is not None
        try:
            with self._inflating:
                content = await compression.inflate_later(connection.inflating, message, inflater)
                self._inflated = len(content)
        except TritonError as error:
            self._fail(error)
        else:
            if self.ended or self.trailers is not None or self._inflating.cancelled_caught:
                self.give_back()
            else:
                self._submit(content)
        connection.pass_ends()

    def give_back(self) -> None:
        """Returns the bytes of the inflated message to the server's budget."""
        if self._inflated:
            self._connection.inflating.release(self._inflated)
            self._inflated = 0

    def _fail(self, error: TritonError) -> None:
        self.refused = True
        self.taken()
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
            select(request, response, connection.services)
            segments = encode_response(response)
        except TritonError as error:
            self.finish(error_trailers(error))
        else:
            if connection.compression != "none" and self._deflate(segments):
                return
            self.reply(segments, OK_TRAILERS)
        connection.want_flush()

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
        if await self._connection.services.workers.finish(deflater.step, lambda: self.ended):
            self.reply(deflater.segments, OK_TRAILERS)
            self._connection.flush_soon()

    def release(self) -> None:
        self._message = None
        if self._inflating is not None:
            self._inflating.cancel()
        self.stop_clock()
        self.give_back()
        request, self._request = self._request, None
        if request is not None:
            self._connection.services.admission.cancel(request)
