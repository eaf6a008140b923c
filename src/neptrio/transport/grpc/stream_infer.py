"""ModelStreamInfer, the streaming inference call: submits each message as a request, and callbacks send the answers.

Rules:
 1. Answers of non-decoupled models are sent in the order of the requests. Answers of decoupled models are sent as they
    come.
 2. A stream takes no more requests while it has too many unanswered ones, or its client does not read the answers.
    Messages that came then wait undecoded, and flow control stops the client from sending more.
 3. An error is sent as the answer of its request (error_message). With the metadata `triton_grpc_error: true`, the
    first error ends the whole stream with its status instead.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import trio
from grpclib.const import Status

from neptrio.codec.outputs import select
from neptrio.codec.proto_response import encode_response
from neptrio.errors import Internal, TritonError, Unavailable, raise_it
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    Timestamp,
    monotonic_ns,
)
from neptrio.service.access_log import AccessRecord
from neptrio.transport.grpc import compression as compression
from neptrio.transport.grpc.calls import SHUTTING_DOWN, Call, framed_size
from neptrio.transport.grpc.decoding import GrpcInfer
from neptrio.transport.grpc.message_stream import GrpcStream
from neptrio.transport.grpc.selecting import Selecting
from neptrio.transport.grpc.status import OK_HEADERS, OK_TRAILERS
from neptrio.transport.grpc.stream_answers import Answer, StreamAnswers, error_answer
from neptrio.transport.grpc.stream_responder import RESPONDER
from neptrio.transport.http2.session import Headers, Http2Session

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection

log = logging.getLogger("neptrio.grpc")

RECV_END = int(Timestamp.RECV_END)

# A stream takes no more requests while it holds more than this. The limits are far above what a client needs that
# bounds its own unanswered requests. Lower ones could block: the request that ends a sequence might wait behind
# requests that begin other sequences and need its slot.
STREAM_REQUESTS = 16384
STREAM_INPUT_BYTES = 256 << 20
STREAM_HELD_BYTES = 256 << 20
STREAM_OUTPUT_BYTES = 16 << 20
AT_ONCE = 256  # messages that waited and are taken before others are served; a window has room for 800,000 empty ones


class _Entry(GrpcInfer):
    """A message of a stream, its request, and responses that wait until those of earlier requests are sent."""

    __slots__ = ("access", "came", "done", "held", "ordered", "serving", "size", "stream")

    def __init__(self, stream: StreamInfer, size: int, compressed: bool) -> None:
        super().__init__(stream, stream._connection, compressed)
        self.stream = stream
        self.came = size  # bytes of the message as it came
        self.access = stream.line(size)
        self.ordered = True
        self.held: list[Answer] = []
        self.done = False
        self.size = self.serving = 0  # bytes of the plain message, and what of it serve() has counted

    def begin(self, message: Any) -> None:
        self.size = len(message)
        self.serving = 0 if self.inflated else self.size
        if self.compressed:
            self.stream.served(self.came)
            self.stream.serve(self.serving)
        self.stream.begin_request()


class StreamInfer(Call):
    """A ModelStreamInfer call; see the module's rules."""

    def __init__(
        self, session: Http2Session, stream_id: int, headers: Headers, connection: GrpcConnection
    ) -> None:
        GrpcStream.__init__(self, session, stream_id, headers)
        self._connection = connection
        self.writer = connection.writer
        if connection.forward is None:  # a header policy looks at whole messages
            self.source_of = connection.source_of
        self._order: deque[_Entry] = deque()
        self._open: dict[InferRequest, _Entry] = {}
        # sequences that began on this stream and must end with it -> their schedulers
        self.sequences: dict[Any, Any] = {}
        self._waiting: deque[tuple[Any, bool]] = deque()  # messages that are not decoded yet
        self._advancing = False  # _advance() runs, or a task will call it again
        self._input_bytes = 0
        self._working: trio.CancelScope | None = None  # of the worker that inflates or decodes a message
        self._draining = False
        self._unfinished_bytes = 0  # of answers that workers classify or compress
        self._selecting = Selecting(connection, self._respond, self.hold_unfinished)
        self._held_bytes = 0  # of answers that wait for earlier ones
        self._writable: list[Callable[[], None]] = []
        self._began_ns = monotonic_ns() if connection.services.admission.tracer.tracing else 0
        # metadata `triton_grpc_error: true`: the first error ends the stream with its status
        self.strict = headers.has_custom and headers.get(b"triton_grpc_error") == b"true"
        self._encoding: bytes | None = None
        if connection.compression != "none":
            accepted = headers.get(b"grpc-accept-encoding")
            self._encoding = compression.choose(connection.compression, accepted)
            if self._encoding is not None:
                self.send_headers([*OK_HEADERS, (b"grpc-encoding", self._encoding)])
        self._answers = StreamAnswers(connection, self._encoding)

    # ------------------------------------------------------------ the access log

    def line(self, size: int) -> AccessRecord | None:
        """The line of the access log of the next message, which has so many bytes; None: there is no such log."""
        call, access = self.access, self._connection.access
        if call is None or access is None:
            return None
        call.messages = max(call.messages, 0) + 1
        record = access.begin(call.protocol, call.client, call.method, call.target)
        record.message = call.messages
        record.agent = call.agent
        record.bytes_in = size
        record.status = 200
        record.grpc = "CANCELLED"  # until there is an answer
        return record

    def on_end(self, whole: bool) -> None:
        super().on_end(whole)
        assert self.access is not None
        self.access.messages = max(self.access.messages, 0)
        for entry in self._open.values():  # nobody waits for their answers
            if entry.access is not None:
                entry.access.end()

    # ------------------------------------------------------------ requests

    def requests(self) -> Iterable[InferRequest]:
        return self._open

    @property
    def _full(self) -> bool:
        return (
            len(self._open) >= STREAM_REQUESTS
            or self._input_bytes > STREAM_INPUT_BYTES
            or self._held_bytes > STREAM_HELD_BYTES
            or self._unsent_bytes > STREAM_OUTPUT_BYTES
        )

    @property
    def _unsent_bytes(self) -> int:
        """Bytes of answers that are not sent yet. Answers that are not compressed yet count with their full size."""
        return self.out_bytes + self._unfinished_bytes

    def on_no_room(self, error: TritonError) -> None:
        self.on_message(error, False)  # answered in its turn; the stream goes on

    def on_message(self, message: Any, compressed: bool) -> None:
        if not isinstance(message, TritonError):
            self.serve(len(message))
        if self._waiting or self._working or self._full:
            if self.queued():
                self._waiting.append((message, compressed))
                self.paused = True
        else:
            self._accept(message, compressed)

    def _accept(self, message: Any, compressed: bool) -> None:
        if isinstance(message, TritonError):
            self._reject(_Entry(self, 0, False), message)
            return
        entry = _Entry(self, len(message), compressed)
        try:
            if entry.take(message):
                self._submit(entry)
            else:
                self._working = trio.CancelScope()
                self._connection.wire.start(self._take_later, entry, self._working)
        except TritonError as error:
            self._unread(entry, error)

    def begin_request(self) -> None:
        """Called with each message that can be read. Raises TritonError for one that is not taken."""
        if self._draining:
            raise Unavailable(SHUTTING_DOWN)
        raise_it(self._connection.limit())

    async def _take_later(self, entry: _Entry, scope: trio.CancelScope) -> None:
        """Has workers inflate and decode a message; later messages wait meanwhile."""
        refused: TritonError | None = None
        try:
            with scope:
                await entry.take_later()
        except TritonError as error:
            refused = error.with_traceback(None)  # which holds this call
        except Exception as error:
            log.exception("decoding a message failed")
            refused = Internal(f"internal error: {type(error).__name__}: {error}")
        self._working = None
        if self.ended or self.refused or scope.cancelled_caught:
            entry.give_back()
        elif refused is not None:
            self._unread(entry, refused)
        else:
            self._submit(entry)
        self._advance()
        self._connection.pass_ends()

    def _submit(self, entry: _Entry) -> None:
        """Submits a decoded message."""
        request = entry.request
        try:
            # in a trace, receiving a message begins when the previous message was complete
            entry.prepare(self, RESPONDER, None, self._began_ns)
            self._began_ns = request.timestamp(RECV_END)
            request.stream = self
            entry.ordered = not request.model.decoupled
            self._add(entry)
            if entry.access is not None:
                entry.access.asks(request)
            entry.services.admission.submit(request)
        except TritonError as error:
            self._reject(entry, error)

    def _unread(self, entry: _Entry, error: TritonError) -> None:
        """A message is refused before it is submitted. What follows one that cannot be inflated cannot be trusted either."""
        if entry.plain:
            self._reject(entry, error)
        else:
            self.abort(error)

    def _reject(self, entry: _Entry, error: TritonError) -> None:
        """Answers a message with an error, in its turn, or ends the stream with it."""
        if entry.request not in self._open:
            self._add(entry)
        if self.strict:
            self.abort(error)
            return
        if entry.access is not None:
            entry.access.asks(entry.request)
            entry.access.grpc = error.code.grpc.name
        self._deliver(entry, error_answer(error, entry.request.id, True), True)

    def _add(self, entry: _Entry) -> None:
        self._open[entry.request] = entry
        self._input_bytes += entry.size
        if entry.ordered:
            self._order.append(entry)

    def _close(self, entry: _Entry) -> None:
        self._input_bytes -= entry.size
        self.served(entry.serving)
        entry.give_back()

    def _advance(self) -> None:
        """Decodes waiting messages while there is room, then lets the client send more, then ends a finished stream.

        A message may be answered before it is taken: that calls this again, which leaves the next message to the call that
        is under way. Each waiting message would otherwise be taken inside of the one before it.
        """
        if self._advancing:
            return
        self._advancing = True
        try:
            for _ in range(AT_ONCE):
                if not self._may_take:
                    break
                self.unqueued()
                self._accept(*self._waiting.popleft())
        finally:
            self._advancing = False
        if self._may_take:
            self._advancing = True
            self._connection.wire.start(self._advance_later)
            return
        if self.paused and not self._waiting and not self._full:
            self.session.resume_input(self)
        self.settle()

    @property
    def _may_take(self) -> bool:
        """Whether a message waits that may be decoded."""
        return bool(self._waiting) and not (self._working or self._full or self.refused)

    async def _advance_later(self) -> None:
        """_advance() after others were served."""
        await trio.lowlevel.checkpoint()
        self._advancing = False
        self._advance()
        self._connection.pass_ends()

    def settle(self) -> None:
        """Ends the stream if all its requests are answered and no more will come, or the server drains."""
        if self._open or self._waiting or self._working or self._answers.waiting or self.refused:
            return
        if self.input_ended:
            self.stop_clock()
            self._end_sequences()
            self._selecting.end()
            self.finish(OK_TRAILERS)
        elif self._draining and not self.mid_message:
            self.refuse(Status.UNAVAILABLE.value, SHUTTING_DOWN)
        self._connection.want_flush()

    def _end_sequences(self) -> None:
        """Ends the sequences that began on this stream, for models whose configuration asks for that."""
        while self.sequences:
            sequence, scheduler = self.sequences.popitem()
            scheduler.disconnected(sequence)

    def on_half_close(self) -> None:
        self.settle()

    def on_drain(self) -> None:
        self._draining = True
        self.settle()

    # ------------------------------------------------------------ answers

    @property
    def congested(self) -> bool:
        """True while too many answers are unsent, because the client does not read them; decoupled models then wait."""
        return self._unsent_bytes > STREAM_OUTPUT_BYTES or self._connection.overfull

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, on the trio thread, when the answers so far are sent or the call has ended."""
        if self.ended or self.trailers is not None or not self._unsent_bytes:
            callback()
        else:
            self._writable.append(callback)

    def on_writable(self) -> None:
        if not self._answers.waiting:
            self._wake()
        if self.paused or self._waiting:
            self._advance()

    def _wake(self) -> None:
        waiting, self._writable = self._writable, []
        for callback in waiting:
            try:
                callback()
            except Exception:
                log.exception("a sender that waited for a stream failed")

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        """Takes one response of a request; `final` says that it is the last."""
        if not self._selecting.take(request, response, final):
            self._respond(request, response, final, False)

    def _respond(self, request: InferRequest, response: InferResponse, final: bool, selected: bool) -> None:
        entry = self._open.get(request)
        if entry is None or self.ended:
            return
        segments: list[Any] = []
        try:
            if response.error is None and not response.null and not selected:
                select(request, response, self._connection.services)
        except TritonError as error:
            response.outputs = None
            response.error = error.with_traceback(None)  # the frames of its traceback refer to the response
        if response.error is None and not response.null:
            response.error = self._connection.unread()
            if response.error is not None:
                response.outputs = response.parameters = None
        if entry.access is not None:
            entry.access.answered(request, response)
            entry.access.grpc = "OK" if response.error is None else response.error.code.grpc.name
        if response.error is not None and self.strict:
            self.abort(response.error)
            return
        if not response.null or request.want_empty_final:
            try:
                segments = encode_response(response, True, final)
            except TritonError as error:
                if self.strict:
                    self.abort(error)
                    return
                response.outputs = response.parameters = None
                response.error = error.with_traceback(None)
                segments = encode_response(response, True, final)
        self._deliver(entry, segments, final)

    def _deliver(self, entry: _Entry, segments: list[Any], final: bool) -> None:
        order = self._order
        trace = entry.request.trace
        if entry.access is not None:
            entry.access.bytes_out += framed_size(segments)
            if final:
                entry.access.end()
        if final:
            entry.done = True
            del self._open[entry.request]
            self._close(entry)
        if segments:
            if entry.ordered and order[0] is not entry:
                if trace is not None:
                    trace.hold()
                entry.held.append(Answer(segments, trace, entry.request.id, final))
                self._hold(framed_size(segments))
            elif self._encoding is None:
                self.send_segments(segments)
                if trace is not None:
                    trace.answer_end = self.outbox_end
            else:
                self._answers.send(self, Answer(segments, trace, entry.request.id, final))
        while order and order[0].done:
            order.popleft()
            if order:
                held, order[0].held = order[0].held, []
                for answer in held:
                    self._hold(-framed_size(answer.segments))
                    self._answers.send(self, answer)
                    if answer.trace is not None:
                        answer.trace.release()
        if final and (self._waiting or self.paused):
            self._advance()
        elif not self._open:
            self.settle()
        self._connection.want_flush()

    def _hold(self, n: int) -> None:
        self._held_bytes += n
        self.account.hold(n)

    def hold_unfinished(self, n: int) -> None:
        self._unfinished_bytes += n
        self.account.hold(n)

    def abort(self, error: TritonError) -> None:
        """Ends the whole stream with an error's status."""
        self.refuse(error.code.grpc.value, str(error))

    def release(self) -> None:
        self.stop_clock()
        if self._working is not None:
            self._working.cancel()
        self._waiting.clear()
        for answer in itertools.chain(self._answers.waiting, *(entry.held for entry in self._order)):
            if answer.trace is not None:  # what waited will not be sent
                answer.trace.abandon()
                answer.trace.release()
        self._answers.waiting.clear()
        self._selecting.end()
        self._hold(-self._held_bytes)
        self.hold_unfinished(-self._unfinished_bytes)
        self._order.clear()
        open_, self._open = self._open, {}
        self._input_bytes = 0
        for request, entry in open_.items():
            entry.give_back()
            if request.model is not None:
                self._connection.services.admission.cancel(request)
        self._end_sequences()
        self._wake()
