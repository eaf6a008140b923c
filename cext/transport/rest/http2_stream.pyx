"""REST over HTTP/2, compiled: plain infer requests from their streams to the scheduler, and their answers back.

The problem: many streams of one connection carry small infer requests, and a Python object per header would cost more than
the request. The choice: as on HTTP/1.1 (cext/transport/http1/fast_path), a request in the form that nearly all clients
send is recognised by one look at its headers and goes straight to admission. Everything else is an exchange
(neptrio/transport/rest/http2_connection.py).

Rules:
 1. A request is plain if plain_rest() of its headers says so (its text lists what it must not have), its path is that of
    an infer route with unescaped names, and its host is allowed. In doubt it is an exchange.
 2. A stream is answered once; what comes for one that has ended is dropped.
"""
from neptrio.execution.admission cimport Admission
from neptrio.loop.loop_pass_core cimport LoopPassCore
from neptrio.request.infer_request cimport (
    HTTP_PROTOCOL,
    SEND_START,
    InferRequest,
    InferResponse,
    Responder,
    now_ns,
)
from neptrio.transport.http2.body_stream cimport BodyStream
from neptrio.transport.http2.connection_core cimport Http2Core
from neptrio.transport.rest.infer_route cimport route_of
from neptrio.transport.rest.plain_infer cimport check_host_memory, extra_headers, has_extra_headers, print_now, read_plain

import logging

from neptrio import limits
from neptrio.codec.shared_memory import names_large_inputs
from neptrio.errors import Internal, TritonError

log = logging.getLogger("neptrio.rest")

cdef Py_ssize_t LONGEST_KEPT = limits.LONGEST_KEPT

cdef enum:
    REFUSED_STREAM = 7
    LARGEST = 1 << 20      # bytes of a plain request's body

cdef tuple _OK = (b":status", b"200")
cdef tuple _JSON = (b"content-type", b"application/json")
cdef tuple _BINARY = (b"content-type", b"application/octet-stream")
cdef list _NO_TRAILERS = []


cdef class PlainResponder(Responder):
    """Sends a response to the stream in request.context."""

    cpdef object respond(self, InferRequest request, InferResponse response, bint final):
        if not final:
            log.error("model '%s' sent more than one response to an HTTP request", request.model_name)
            return
        (<RestStream>request.context).answer(request, response)

    cpdef bint waits_for_kernel(self, InferRequest request, object callback, int stage) except -1:
        # type: (..., Callable[[], None], ...) -> bool
        cdef RestStream stream = <RestStream>request.context
        return stream.connection.writer.when_taken(callback) if stage else stream.when_taken(callback)


cdef PlainResponder _responder = PlainResponder()
_responder.protocol = HTTP_PROTOCOL


cdef class RestHttp2Core(Http2Core):
    """The part of a connection through which every request passes."""

    # ------------------------------------------------------------ hooks: the rest of the connection

    def accepts_host(self, bytes host) -> bool:
        """Whether this host is allowed; asked for each that is new on this connection."""
        raise NotImplementedError

    def begin_exchange(self, RestStream stream):
        """Makes an exchange of a stream, and refuses it at once where its head says why."""
        raise NotImplementedError

    def reply_error(self, RestStream stream, error, list headers=[], int status=0):
        # type: (..., TritonError, list[tuple[bytes, bytes]], ...) -> None
        """Answers a request that has no exchange with an error."""
        raise NotImplementedError

    def encode_later(self, RestStream stream, InferRequest request, InferResponse response, bint binary_default,
                     bint selecting):
        """Has a plain request's answer printed by a worker. With `selecting` the worker also does what the client asked to
        be done with the outputs."""
        raise NotImplementedError

    # ------------------------------------------------------------ streams

    cdef bint takes_host(self, bytes host) except -1:
        if self.known_host is not None and self.known_host == host:
            return True
        if not self.accepts_host(host):
            return False
        if len(host) <= LONGEST_KEPT:
            self.known_host = host
        return True

    def open_stream(self, session, int stream_id, bytes path, headers):
        # type: (Http2Session, ..., ..., neptrio.transport.http2.session.Headers) -> RestStream
        """The stream of a new request."""
        cdef RestStream stream = RestStream.__new__(RestStream)
        cdef tuple plain, route
        stream.begin(session, stream_id, headers)
        stream.connection = self
        stream.began_ns = self.received_at
        if self.overfull:
            stream.refused = True
            session.reset(stream, REFUSED_STREAM)
            return stream
        if self.access is not None:
            stream.logged(self.access, self.wire.client, path, stream.began_ns)
        if self.fast_path and not self.draining and not self.budget.full and not self.admission.tracer.trace_headers:
            plain = headers.plain_rest()
            if plain is not None and self.takes_host(plain[0]):
                route = route_of(path)
                if route is not None and <Py_ssize_t>plain[1] <= LARGEST and <Py_ssize_t>plain[1] <= self.max_body and (
                        not self.admission.forwards or self.admission.reads(<str>route[0], <str>route[1])):
                    stream.route = route
                    stream.header_length = plain[2]
                    stream.expect(plain[1], self.max_body)
                    return stream
        self.begin_exchange(stream)
        return stream


cdef class RestStream(BodyStream):
    """A request and its answer."""

    # ------------------------------------------------------------ what the connection asks

    def requests(self):
        # type: () -> tuple[InferRequest, ...]
        """The requests that are not answered yet."""
        if self.request is not None:
            return (self.request,)
        return () if self.exchange is None else self.exchange.requests()

    def on_drain(self):
        """The connection drains: the request may finish."""

    # ------------------------------------------------------------ input

    def on_body(self):
        if self.route is not None:
            self.infer()
        else:
            self.exchange.on_body(self.body())

    def on_too_large(self):
        if self.exchange is None:
            self.connection.begin_exchange(self)
        self.exchange.on_too_large(self.limit)

    def on_no_room(self, error):
        if self.exchange is None:
            self.refuse(error)
        else:
            self.exchange.refuse(error)

    def on_reset(self, unsigned int code):
        cdef InferRequest request = self.request
        if self.exchange is not None:
            self.exchange.disconnect(self.connection.services)
            self.exchange = None    # which refers to this stream
        elif self.encoding is not None:
            self.encoding.cancel()
        elif request is not None:
            self.connection.admission.cancel(request)

    def on_writable(self):
        if self.exchange is not None:
            self.exchange.on_writable()

    cpdef int over(self) except -1:
        BodyStream.over(self)
        if self.exchange is not None:
            self.exchange.on_writable()
            self.exchange = None    # which refers to this stream
        return 0

    cdef int infer(self) except -1:
        """Passes a complete plain request to admission, or refuses it."""
        cdef RestHttp2Core connection = self.connection
        cdef Admission admission = connection.admission
        cdef InferRequest request
        cdef tuple route = self.route
        cdef bytes body = self.body()    # its size was announced
        if self.ended or self.trailers is not None:
            return 0
        if len(body) >= connection.large_files.least and names_large_inputs(body):
            self.route = None
            connection.begin_exchange(self)
            self.exchange.on_body(body)
            return 0
        try:
            request = InferRequest.__new__(InferRequest)
            self.binary_default = read_plain(
                request, route, body, self.header_length, self.began_ns, admission, connection.shared_memory)
            if self.access is not None:
                self.access.asks(request)
            request.context = self
            request.responder = _responder
            self.request = request
            admission.submit(request)
        except TritonError as error:
            self.request = None
            if self.access is not None:
                self.access.asks(request)
            self.refuse(error)
        except Exception as error:
            self.request = None
            log.exception("an infer request of model '%s' failed", <str>route[0])
            self.refuse(Internal(f"internal error: {type(error).__name__}"))
        return 0

    # ------------------------------------------------------------ the answer

    cpdef list head(self):
        return self.reply_headers

    cpdef list whole_head(self):
        return self.reply_headers

    cdef int answer(self, InferRequest request, InferResponse response) except -1:
        cdef tuple encoded
        self.request = None
        if self.access is not None:
            self.access.answered(request, response)
        request.timestamps[<int>SEND_START] = now_ns()
        if self.ended:
            self.served(self.serving)
            return 0
        if self.connection.totals.out_bytes > self.connection.output_limit and response.error is None:
            response.error = self.connection.unread()
            if response.error is not None:
                response.outputs = None
        encoded = print_now(self, self.connection, request, response, self.binary_default)
        if encoded is not None:
            self.encoded(request, encoded)
        return 0

    cpdef encoded(self, InferRequest request, tuple encoded):
        # type: (..., tuple[bytes, list[Any] | None, int]) -> None
        """The answer has been printed."""
        cdef bytes head = encoded[0]
        cdef list blobs = encoded[1]
        cdef Py_ssize_t binary_bytes = encoded[2]
        cdef list headers
        cdef bytes length = b"%d" % (len(head) + binary_bytes)
        if binary_bytes:
            headers = [_OK, _BINARY, (b"inference-header-content-length", b"%d" % len(head)), (b"content-length", length)]
            check_host_memory(blobs)
        else:
            headers = [_OK, _JSON, (b"content-length", length)]
        if has_extra_headers(request):
            headers += extra_headers(request)
        self.served(self.serving)
        if self.ended or self.trailers is not None:
            return
        self.reply_headers = headers
        self._queue([head, *blobs] if binary_bytes else [head])
        self.trailers = _NO_TRAILERS
        self.session.output_ready(self)
        LoopPassCore.want_flush(self.connection.loop_pass, self.connection)

    def refuse(self, error, InferRequest request=None):
        # type: (TritonError, ...) -> None
        """Answers a plain request with an error."""
        headers = extra_headers(request) if request is not None else []
        self.served(self.serving)
        self.connection.reply_error(self, error, headers)
