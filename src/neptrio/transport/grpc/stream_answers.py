"""Answers of a stream on their way out, where the client takes compressed ones: workers compress the large ones, in order.

Rules:
 1. Answers leave in the order in which they are sent. A small one is compressed at once, unless an earlier one is with a worker.
 2. An answer that waits counts for its stream with its full size, and its trace is held until it has left.
 3. The stream is passed with each answer and not kept: two objects that refer to each other live until the collector finds
    them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from neptrio.codec.proto_response import encode_response
from neptrio.errors import TritonError
from neptrio.observe.trace import Trace
from neptrio.request.infer_request import InferResponse
from neptrio.transport.grpc import compression as compression
from neptrio.transport.grpc.calls import framed_size

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection
    from neptrio.transport.grpc.stream_infer import StreamInfer


class Answer(NamedTuple):
    """An answer on its way out: of the request `id`, and whether that has no further one."""

    segments: list[Any]
    trace: Trace | None
    id: str
    final: bool


def error_answer(error: TritonError, request_id: str, final: bool) -> list[Any]:
    """The buffers of an error that is the answer to a request."""
    response = InferResponse(None, error)
    response.id = request_id
    return encode_response(response, True, final)


class StreamAnswers:
    """Those of one stream. Trio thread only."""

    def __init__(self, connection: GrpcConnection, encoding: bytes | None) -> None:
        """`encoding`: how answers are compressed, None: not at all."""
        self._connection = connection
        self._encoding = encoding
        self.waiting: deque[Answer] = deque()  # those that workers compress

    def send(self, stream: StreamInfer, answer: Answer) -> None:
        """Sends it to the stream, now or when it is compressed and those before it have left."""
        segments = answer.segments
        if self._encoding is None:
            stream.send_segments(segments)
        elif not self.waiting and (deflater := self._deflater(segments)).done_here():
            stream.send_segments(deflater.segments)
        else:
            if answer.trace is not None:
                answer.trace.hold()
            self.waiting.append(answer)
            stream.hold_unfinished(framed_size(segments))
            if len(self.waiting) == 1:
                self._connection.wire.start(self._deflate, stream)
            return
        if answer.trace is not None:
            answer.trace.answer_end = stream.outbox_end

    def _deflater(self, segments: list[Any]) -> compression.FrameDeflater:
        assert self._encoding is not None
        return compression.FrameDeflater(segments, self._encoding, self._connection.compression)

    async def _deflate(self, stream: StreamInfer) -> None:
        """Lets the workers compress the large answers, one after the other, and sends them in order."""
        workers = self._connection.services.workers
        while self.waiting and not stream.ended:
            answer = self.waiting[0]
            deflater = self._deflater(answer.segments)
            try:
                if not await workers.finish(deflater.step, lambda: stream.ended, self._connection):
                    break
                segments = deflater.segments
            except TritonError as error:  # there is no thread
                if stream.strict:
                    stream.abort(error)
                    break
                segments = error_answer(error, answer.id, answer.final)
            if self.waiting:
                self.waiting.popleft()
                stream.hold_unfinished(-framed_size(answer.segments))
            stream.send_segments(segments)
            if answer.trace is not None:
                answer.trace.answer_end = stream.outbox_end
                answer.trace.release()
            self._connection.flush_soon()
        if not stream.ended and not stream.out_bytes:
            stream.on_writable()
        stream.settle()
        self._connection.flush_soon()
