"""ModelInfer, without a task per call: bytes in, completion callback, bytes out.

The call is one object: the stream itself is the request's context, so nothing else is made for it. A
message that must be inflated off the trio thread and a reply that must be deflated there are the
exceptions. The plain case does not even get here: cext/grpc_lane.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import trio

from neptrio._cext.grpc_lane import CARDINALITY, UNARY_RESPONDER, UnaryCore
from neptrio._cext.request import InferRequest, InferResponse
from neptrio._cext.wire_request import decode_request
from neptrio._cext.wire_response import encode_response
from neptrio.codec.outputs import select
from neptrio.errors import TritonError, Unsupported
from neptrio.observe.propagation import asked
from neptrio.stamps import Stamp
from neptrio.transport import grpc_compression as compression
from neptrio.transport.grpc_calls import Call, forward_metadata, framed_size
from neptrio.transport.grpc_status import OK_HEADERS, OK_TRAILERS, error_trailers

RECV_START = int(Stamp.RECV_START)
RECV_END = int(Stamp.RECV_END)


class UnaryInfer(UnaryCore, Call):
    """ModelInfer."""

    _message: bytes | None
    _compressed: bool
    _request: InferRequest | None

    def start_generally(self) -> None:
        """The request is complete, and something about it is not plain: decodes and submits it."""
        message, self._message = self._message, None
        connection = self._connection
        services = connection.services
        try:
            if message is None:
                raise TritonError("a unary call carries one request message, got none", CARDINALITY)
            if self._compressed:
                bits = compression.window_bits(self.headers.get(b"grpc-encoding"))
                content = compression.inflate(message, bits, compression.INLINE_BYTES)
                if content is None:
                    connection.nursery.start_soon(self._inflate, message, bits)
                    return
                message = content
            request = InferRequest()
            decode_request(request, message, services.shared_memory)
            if connection.forward is not None:
                forward_metadata(connection.forward, self.headers, request)
            model = services.inference.lookup(request.model_name, request.model_version)
            if model.decoupled:
                raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
            request.model = model
            request.context = self
            request.responder = UNARY_RESPONDER
            if services.inference.tracing:
                request.stamp(RECV_START, self._began_ns)
                request.stamp(RECV_END)
                if self.headers.has_custom and services.inference.trace_headers:
                    request.asked = asked(self.headers())
            self._request = request
            services.inference.submit(request)
        except TritonError as error:
            self._request = None
            self._fail(error)

    def requests(self) -> Iterable[InferRequest]:
        return () if self._request is None else (self._request,)

    async def _inflate(self, message: bytes, bits: int) -> None:
        connection = self._connection
        try:
            content = await connection.inflating.inflate(message, bits)
        except TritonError as error:
            self._fail(error)
        else:
            self._inflated = len(content)
            if self.ended or self.trailers is not None:
                self.give_back()
            else:
                self._message, self._compressed = content, False
                self.start()
        connection.turn_ends()

    def give_back(self) -> None:
        """Returns what its message took of the inflate budget."""
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
        """The request's answer, compressed or with headers of its own."""
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
        """Sends the answer compressed if the client takes that; a large one from a worker thread."""
        connection = self._connection
        encoding = compression.choose(connection.compression, self.headers.get(b"grpc-accept-encoding"))
        if encoding is None:
            return False
        self.send_headers([*(self.reply_headers or OK_HEADERS), (b"grpc-encoding", encoding)])
        level = compression.LEVELS[connection.compression]
        if framed_size(segments) <= compression.INLINE_BYTES:
            self.reply(compression.deflate(segments, encoding, level), OK_TRAILERS)
            connection.want_flush()
        else:
            connection.nursery.start_soon(self._deflate_large, segments, encoding, level)
        return True

    async def _deflate_large(self, segments: list[Any], encoding: bytes, level: int) -> None:
        self.reply(await trio.to_thread.run_sync(compression.deflate, segments, encoding, level), OK_TRAILERS)
        self._connection.flush_soon()

    def release(self) -> None:
        self._message = None
        self.stop_clock()
        self.give_back()
        request, self._request = self._request, None
        if request is not None:
            self._connection.services.inference.cancel(request)
