"""Plain ModelInfer calls, compiled: from their message to the scheduler, and their answers back.

The rules are those of neptrio/transport/grpc/server.py and infer.py. These also contain everything that is rare:
compression, forwarded metadata, parked calls, deadlines, the ends of calls.
"""
from neptrio.codec.proto_request cimport decode_request
from neptrio.codec.proto_response cimport encode_response
from neptrio.execution.admission cimport Admission
from neptrio.loop.loop_pass_core cimport LoopPassCore
from neptrio.transport.grpc.message_stream cimport GrpcStream
from neptrio.transport.http2.connection_core cimport Http2Core
from neptrio.request.infer_request cimport GRPC_PROTOCOL, InferRequest, InferResponse, Responder, now_ns
from neptrio.observe.trace cimport Trace

from neptrio.codec.outputs import select, selects_slowly
from neptrio.codec.proto_request import decodes_slowly

from neptrio.observe.timing import HEADER as TIMING
from neptrio.observe.timing import wish

from neptrio.errors import Code, TritonError
from neptrio.execution.admission import GRPC_ONE_RESPONSE
from neptrio.transport.grpc.status import OK_TRAILERS, error_trailers

cdef enum:
    LARGE_MESSAGE = 64 << 10   # bytes; decoding a larger message is noted for the loop's measurement

CARDINALITY = Code.UNSUPPORTED  # the status for a unary call with 0 or 2 messages is UNIMPLEMENTED  # type: Code


cdef class UnaryResponder(Responder):
    """Sends a response to the ModelInfer call in request.context."""

    cpdef object respond(self, InferRequest request, InferResponse response, bint final):
        (<UnaryCore>request.context).answer(request, response)

    cpdef bint waits_for_kernel(self, InferRequest request, object callback, int stage) except -1:
        # type: (..., Callable[[], None], ...) -> bool
        cdef UnaryCore stream = <UnaryCore>request.context
        return stream._connection.writer.when_taken(callback) if stage else stream.when_taken(callback)


cdef UnaryResponder _responder = UnaryResponder()
_responder.protocol = GRPC_PROTOCOL
UNARY_RESPONDER = _responder  # type: Responder


cdef class UnaryCore(GrpcStream):
    """A ModelInfer call: one request message, one answer."""

    def __init__(self, session, int stream_id, headers, Http2Core connection):
        # type: (Http2Session, ..., neptrio.transport.http2.session.Headers, ...) -> None
        self.begin(session, stream_id, headers)
        self.keeps = True
        if connection.forward is None:  # a header policy looks at whole messages
            self.source_of = connection.source_of
        self._connection = connection
        if connection.admission.tracer.tracing:
            self._began_ns = now_ns()

    # ------------------------------------------------------------ hooks: the rest of the call

    def start_slow_path(self):
        """The message is complete, and is not plain: decodes and submits the request."""
        raise NotImplementedError

    def answer_slow_path(self, InferRequest request, InferResponse response):
        """Sends an answer that is not plain."""
        raise NotImplementedError

    def answer_by_worker(self, InferRequest request, InferResponse response):
        """Sends an answer whose outputs a worker classifies."""
        raise NotImplementedError

    def give_back(self):
        """Returns the bytes of the inflated and decoded message to the server's budgets."""
        raise NotImplementedError

    def stop_clock(self):
        """Cancels the timer of the deadline."""
        raise NotImplementedError

    def _fail(self, error):
        # type: (TritonError) -> None
        """Ends the call with an error."""
        raise NotImplementedError

    # ------------------------------------------------------------ input

    def on_message(self, message, bint compressed):
        if self._message is not None:
            self._fail(TritonError("a unary call carries one request message, got a second one", CARDINALITY))
            return
        self._message = message
        self._compressed = compressed

    def on_half_close(self):
        if self._connection.overfull:
            self._connection.park(self)
        else:
            self.start()

    cpdef start(self):
        """The request is complete: decodes it and passes it to admission."""
        cdef Http2Core connection = self._connection
        cdef Admission admission = connection.admission
        cdef InferRequest request
        cdef object message = self._message
        cdef bint large
        if self.kept:
            self.serve(self.kept)
        self.taken()
        if self.ended or self.trailers is not None:
            self._message = None
            return
        large = message is not None and len(message) > LARGE_MESSAGE
        if (message is None or self._compressed or connection.forward is not None or admission.tracer.trace_headers
                or ((large or len(message) >= connection.large_files.least) and decodes_slowly(message))):
            self.start_slow_path()
            return
        self._message = None
        try:
            request = InferRequest.__new__(InferRequest)
            if large:
                connection.services.loop.lag.note("decoding a gRPC request", "", len(message))
            decode_request(request, message, connection.shared_memory)
            if self.headers.has_custom:
                asked = self.headers.get(TIMING)
                if asked is not None:
                    request.timing = wish(asked)
            admission.find(request, GRPC_ONE_RESPONSE)
            request.context = self
            request.responder = _responder
            admission.received(request, self._began_ns)
            self._request = request
            if self.access is not None:
                self.access.asks(request)
            admission.submit(request)
        except TritonError as error:
            self._request = None
            if self.access is not None:
                self.access.asks(request)
            self._fail(error)

    cdef int answer(self, InferRequest request, InferResponse response) except -1:
        cdef Http2Core connection = self._connection
        self._request = None
        if self.access is not None:
            self.access.answered(request, response)
        if self._timer is not None:
            self.stop_clock()
        if self._infer is not None:
            self.give_back()
        self.served(self.serving)
        if self.ended:
            return 0
        if connection.totals.out_bytes > connection.output_limit and response.error is None:
            response.error = connection.unread()
            if response.error is not None:
                response.outputs = None
        if (request.trace is not None and (<Trace>request.trace).headers) or connection.compression != "none":
            self.answer_slow_path(request, response)
            return 0
        if response.error is not None:
            self.finish(error_trailers(response.error))
            LoopPassCore.want_flush(connection.loop_pass, connection)
            return 0
        try:
            if request.outputs is not None:
                if selects_slowly(request, response):
                    self.answer_by_worker(request, response)
                    return 0
                select(request, response, connection.services)
            segments = encode_response(response)
        except TritonError as error:
            self.finish(error_trailers(error))
        else:
            self.reply(segments, OK_TRAILERS)
        LoopPassCore.want_flush(connection.loop_pass, connection)
        return 0
