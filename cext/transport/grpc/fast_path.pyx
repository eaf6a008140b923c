"""The compiled part of the gRPC transport: a connection's bytes in and out, and plain ModelInfer calls.

The rules are those of neptrio/transport/grpc/server.py and infer.py. These also contain everything that is rare:
compression, forwarded metadata, parked calls, deadlines, the ends of connections and calls.
"""
from cpython.buffer cimport PyBUF_READ
from cpython.memoryview cimport PyMemoryView_FromMemory

from neptrio.execution.admission cimport Admission
from neptrio.transport.http2.stream cimport Account, GrpcStream, Totals
from neptrio.loop.socket_writer_core cimport RECEIVE, SocketWriterCore, receive, receive_at, received_view
from neptrio.request.infer_request cimport (
    GRPC_PROTOCOL,
    InferRequest,
    InferResponse,
    Responder,
    now_ns,
)
from neptrio.observe.trace cimport Trace

import logging
from collections import deque

from neptrio.codec.outputs import select, selects_slowly
from neptrio.codec.proto_request import decode_request, decodes_slowly
from neptrio.codec.proto_response import encode_response

from neptrio.observe.timing import HEADER as TIMING
from neptrio.observe.timing import wish

from neptrio.errors import Code, TritonError
from neptrio.execution.admission import GRPC_ONE_RESPONSE
from neptrio.transport.http2.grpc_status import OK_TRAILERS, error_trailers

log = logging.getLogger("neptrio.grpc")

cdef enum:
    HELD = 32 << 20      # bytes of replies not yet sent; above this, further requests of the connection are parked
    LARGE_MESSAGE = 64 << 10   # bytes; decoding a larger message is noted for the loop's measurement
    RECEIVE_SMALL = 64 << 10   # most bytes of requests received at once: some hundreds of small ones
    RECEIVE_LARGE = 1 << 20    # most bytes of one large message received before others are served
    AT_ITS_PLACE = 16 << 10    # fewer bytes of it are received into the shared buffer, with what follows, and copied
    LARGE_FRAME = 64 << 10     # a peer that sends smaller frames has several of them received at once, and copied
    BEHIND = 16 << 10          # most bytes received behind those: the next frame's head, small requests

CARDINALITY = Code.UNSUPPORTED  # the status for a unary call with 0 or 2 messages is UNIMPLEMENTED


cdef class GrpcFastPath:
    """The part of a connection through which all bytes pass."""

    def __init__(self, sock, writer, services):
        self.sock = sock
        self.fd = sock.fileno()
        self.writer = writer
        self.services = services
        self.loop_pass = services.loop.loop_pass
        self.admission = services.admission
        self.shared_memory = services.shared_memory
        self.large_files = services.shared_memory.large
        self.source_of = services.admission.body_source
        self.compression = services.settings.grpc_infer_response_compression_level
        self.parked = deque()
        self.totals = Totals()      # GrpcConnection has its server's
        self.received_at = now_ns()

    def take(self):
        """Receives what the socket has, within bounds; returns False when nothing more is to be read.

        It looks again at once only in the middle of a large message, and only after a call that got all it asked for:
        many small requests are work for some milliseconds, a MiB of one message for a fraction of one.
        """
        cdef Account account = self.account
        cdef Py_ssize_t asked = 0, room = RECEIVE_LARGE
        cdef ssize_t n
        if account is None:
            account = self.account = self.session.account
        while True:
            n = self.receive_some(account, room, &asked)
            if n <= 0:
                return n < 0
            room -= n
            if n < asked or room <= 0 or account.filling is None or self.session.dead:
                return not self.session.dead and not self.writer.broken

    cdef ssize_t receive_some(self, Account account, Py_ssize_t room, Py_ssize_t* asked) except -2:
        """Receives once and passes it on; returns like receive(). `asked` becomes how much there was room for."""
        cdef GrpcStream stream = account.filling
        cdef char* place
        cdef ssize_t n
        cdef Py_ssize_t size = 0
        if stream is None:
            asked[0] = RECEIVE_SMALL
        else:
            place = stream.place(&size)
            size = min(size, min(account.frame_left, room))
            if place != NULL and size >= AT_ITS_PLACE:
                message = stream.message    # whatever becomes of the stream, its memory stays while this runs
                asked[0] = size + BEHIND
                n = receive_at(self.fd, place, size, BEHIND)
                if n > 0:
                    account.placed += min(n, size)
                    self.feed(PyMemoryView_FromMemory(place, min(n, size), PyBUF_READ))
                if n > size:
                    self.feed(received_view()[:n - size])
                return n
            # the rest of a large frame, so that the next one, of which the head tells the size, can be placed
            asked[0] = RECEIVE if account.frame_size < LARGE_FRAME else min(account.frame_left + BEHIND, RECEIVE)
        n = receive(self.fd, asked[0])
        if n > 0:
            self.feed(received_view()[:n])
        return n

    cpdef feed(self, data):
        """Passes bytes from the peer to the session."""
        session = self.session
        self.received_at = now_ns()
        session.receive(data, self.received_at)
        if self.totals.in_bytes > self.input_limit:
            self.shed()
        if self.draining and session.pings_acked > self.drain_acked:
            self.finish_drain()
        self.loop_pass.want_flush(self)
        if session.dead and session.failure is not None:
            log.debug("connection from %s ended: %s", self.peer, session.failure)

    cpdef want_flush(self):
        """There is output: has it sent at the end of the loop pass."""
        self.loop_pass.want_flush(self)

    cdef Py_ssize_t unsent(self) except -1:
        writer = self.writer
        if isinstance(writer, SocketWriterCore):
            return (<SocketWriterCore>writer).pending
        return writer.pending

    @property
    def held_bytes(self) -> int:
        """Bytes that the connection holds: of requests until they are answered, and of answers until the kernel has them."""
        cdef Account account = self.session.account
        return account.in_bytes + account.served_bytes + account.out_bytes + account.held + self.unsent()

    @property
    def overfull(self) -> bool:
        """True while more bytes of replies wait for the client than a connection may hold."""
        cdef Account account = self.session.account
        return account.out_bytes + self.unsent() > HELD

    cpdef object unread(self):
        """The error to send instead of an answer, None if there is room for the answer. There is none when all clients
        together leave too many bytes unread, and this one leaves more than a connection may hold."""
        cdef Account account
        if self.totals.out_bytes <= self.output_limit:
            return None
        account = self.session.account
        if account.out_bytes + account.held + self.unsent() <= HELD:
            return None
        return TritonError(
            f"the client does not read its answers: {account.out_bytes + account.held} bytes wait for it, and more "
            f"than {self.output_limit} for all clients; read them, and send the request again",
            Code.RESOURCE_EXHAUSTED)

    def flush(self):
        """Sends the session's output, unless too much is pending already."""
        session = self.session
        writer = self.writer
        while session.wants_output and not writer.congested:
            writer.send(session.data_to_send())
        if self.parked and not self.overfull:
            self.unpark()
            self.loop_pass.want_flush(self)
        elif session.finished and not writer.pending:
            self.close()


cdef class UnaryResponder(Responder):
    """Sends a response to the ModelInfer call in request.context."""

    cpdef object respond(self, InferRequest request, InferResponse response, bint final):
        (<UnaryCore>request.context).answer(request, response)


cdef UnaryResponder _responder = UnaryResponder()
_responder.protocol = GRPC_PROTOCOL
UNARY_RESPONDER = _responder


cdef class UnaryCore(GrpcStream):
    """A ModelInfer call: one request message, one answer."""

    def __init__(self, session, int stream_id, headers, GrpcFastPath connection):
        GrpcStream.__init__(self, session, stream_id, headers)
        self.keeps = True
        if connection.forward is None:  # a header policy looks at whole messages
            self.source_of = connection.source_of
        self._connection = connection
        if connection.admission.tracer.tracing:
            self._began_ns = now_ns()

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
        cdef GrpcFastPath connection = self._connection
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
                or ((large or connection.large_files.count) and decodes_slowly(message))):
            self.start_generally()
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
            admission.submit(request)
        except TritonError as error:
            self._request = None
            self._fail(error)

    cdef int answer(self, InferRequest request, InferResponse response) except -1:
        cdef GrpcFastPath connection = self._connection
        self._request = None
        if self._timer is not None:
            self.stop_clock()
        if self._inflated or self._kept:
            self.give_back()
        self.served(self.serving)
        if self.ended:
            return 0
        if connection.totals.out_bytes > connection.output_limit and response.error is None:
            response.error = connection.unread()
            if response.error is not None:
                response.outputs = None
        if (request.trace is not None and (<Trace>request.trace).headers) or connection.compression != "none":
            self.answer_generally(request, response)
            return 0
        if response.error is not None:
            self.finish(error_trailers(response.error))
            connection.loop_pass.want_flush(connection)
            return 0
        try:
            if request.outputs is not None:
                if selects_slowly(request, response):
                    self.answer_later(request, response)
                    return 0
                select(request, response, connection.services)
            segments = encode_response(response)
        except TritonError as error:
            self.finish(error_trailers(error))
        else:
            self.reply(segments, OK_TRAILERS)
        connection.loop_pass.want_flush(connection)
        return 0
