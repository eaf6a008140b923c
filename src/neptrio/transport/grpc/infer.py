"""ModelInfer, the unary inference call: decodes and submits its message, and a callback sends the answer.

To be fast, a call has no task of its own, and the object of its HTTP/2 stream is also the request's context. Only large
messages that workers must inflate or decode, and large replies that they must classify or compress, need a task. Calls without compression,
header policy and the like do not come here: cext/transport/grpc/fast_path.pyx serves them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import trio

from neptrio.codec.outputs import select, selects_slowly
from neptrio.codec.proto_response import encode_response
from neptrio.errors import Internal, TritonError
from neptrio.execution.admission import GRPC_ONE_RESPONSE
from neptrio.request.infer_request import InferRequest, InferResponse
from neptrio.transport.grpc import compression as compression
from neptrio.transport.grpc.calls import Call
from neptrio.transport.grpc.decoding import GrpcInfer
from neptrio.transport.grpc.fast_path import CARDINALITY, UNARY_RESPONDER, UnaryCore
from neptrio.transport.grpc.status import OK_HEADERS, OK_TRAILERS, error_trailers
from neptrio.transport.infer_call import select_later

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection

log = logging.getLogger("neptrio.grpc")


class UnaryInfer(Call, UnaryCore):
    """A ModelInfer call, where the fast path of UnaryCore does not apply."""

    _connection: GrpcConnection
    _infer: GrpcInfer | None
    _working: trio.CancelScope | None = None  # of the task that works on the message or the answer

    def start_slow_path(self) -> None:
        message, self._message = self._message, None
        infer = self._infer = GrpcInfer(self, self._connection, self._compressed)
        try:
            if message is None:
                raise TritonError("a unary call carries one request message, got none", CARDINALITY)
            if infer.take(message):
                self._submit(infer)
            else:
                self._work(self._take_later, infer)
        except TritonError as error:
            self._fail(error)

    def _submit(self, infer: GrpcInfer) -> None:
        """Submits the decoded message. Raises TritonError when the request is refused."""
        infer.prepare(self, UNARY_RESPONDER, GRPC_ONE_RESPONSE, self._began_ns)
        self._request = infer.request
        if self.access is not None:
            self.access.asks(infer.request)
        infer.services.admission.submit(infer.request)

    def _work(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Has a task await `function`, in which a worker does something, for as long as somebody waits for the answer."""
        scope = self._working = trio.CancelScope()
        self._connection.wire.start(self._worked, scope, function, *args)

    async def _worked(
        self, scope: trio.CancelScope, function: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> None:
        try:
            with scope:
                await function(*args)
        except TritonError as error:
            self._fail(error)
        except Exception as error:
            log.exception("working on a call failed")
            self._fail(Internal(f"internal error: {type(error).__name__}: {error}"))
        if self._over:
            self._working = None
            self.give_back()
        self._connection.pass_ends()

    @property
    def _over(self) -> bool:
        return self.ended or self.trailers is not None

    async def _take_later(self, infer: GrpcInfer) -> None:
        await infer.take_later()
        if not self._over:
            self._working = None
            self._submit(infer)

    def requests(self) -> Iterable[InferRequest]:
        return () if self._request is None else (self._request,)

    def give_back(self) -> None:
        if self._infer is not None:
            self._infer.give_back()
            if self._working is None:  # else a worker may take more
                self._infer = None  # whose request refers to this call: both would live until a collection

    def _fail(self, error: TritonError) -> None:
        self._request = None
        if self.access is not None and self._infer is not None:
            self.access.asks(self._infer.request)
        self.refused = True
        self.taken()
        self.served(self.serving)
        self.stop_clock()
        self.give_back()
        self.finish(error_trailers(error))
        self._connection.want_flush()

    def answer_slow_path(self, request: InferRequest, response: InferResponse) -> None:
        if request.trace is not None and request.trace.headers:
            self.send_headers([*OK_HEADERS, *request.trace.headers])
        try:
            if response.error is None and request.outputs is not None:
                if selects_slowly(request, response):
                    self.answer_by_worker(request, response)
                    return
                select(request, response, self._connection.services)
            self._reply(response)
        except TritonError as error:
            self._fail(error)

    def answer_by_worker(self, request: InferRequest, response: InferResponse) -> None:
        self._work(self._answer_by_worker, request, response)

    async def _answer_by_worker(self, request: InferRequest, response: InferResponse) -> None:
        await select_later(self._connection.services, request, response, self._connection)
        if not self._over:
            self._reply(response)

    def _reply(self, response: InferResponse) -> None:
        """Sends a response. Raises TritonError if it cannot be sent."""
        if response.error is not None:
            self._fail(response.error)
            return
        segments = encode_response(response)
        if self._connection.compression == "none" or not self._deflate(segments):
            self.reply(segments, OK_TRAILERS)
        self._connection.want_flush()

    def _deflate(self, segments: list[Any]) -> bool:
        """Sends the answer compressed, and returns True, if the client accepts that. Workers compress a large one."""
        connection = self._connection
        encoding = compression.choose(connection.compression, self.headers.get(b"grpc-accept-encoding"))
        if encoding is None:
            return False
        self.send_headers([*(self.reply_headers or OK_HEADERS), (b"grpc-encoding", encoding)])
        deflater = compression.FrameDeflater(segments, encoding, connection.compression)
        if deflater.done_here():
            self.reply(deflater.segments, OK_TRAILERS)
        else:
            self._work(self._deflate_large, deflater)
        return True

    async def _deflate_large(self, deflater: compression.FrameDeflater) -> None:
        workers = self._connection.services.workers
        if await workers.finish(deflater.step, lambda: self.ended, self._connection):
            self.reply(deflater.segments, OK_TRAILERS)

    def release(self) -> None:
        self._message = None
        if self._working is not None:
            self._working.cancel()
        self.stop_clock()
        self.give_back()
        request, self._request = self._request, None
        if request is not None:
            self._connection.services.admission.cancel(request)
