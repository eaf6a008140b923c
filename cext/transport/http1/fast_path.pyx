"""The fast path of HTTP/1.1: plain infer requests from the socket's bytes to the scheduler, and their answers back.

The problem: most of a small request's time over HTTP/1.1 is spent in calls between the parser, the connection, the
exchange and the inference service, not in parsing. The choice: a request in the form that nearly all clients send is
recognised in one pass over its bytes and goes straight to admission. Everything else is left untouched to the parser
(neptrio/transport/http1/connection.py).

Rules:
 1. The fast path takes a request whole or not at all, and only between messages. For what it takes the parser would
    have had the same result; in doubt it leaves a request to the parser.
 2. It takes: POST /v2/models/NAME[/versions/N]/infer HTTP/1.1 with unescaped names; header lines of token, colon and
    printable ASCII; one Host that is allowed; one Content-Length of digits; a body that is completely received.
 3. It leaves: transfer and content encodings, Expect, Upgrade, Connection other than keep-alive, Accept-Encoding other
    than identity, headers by which browsers describe the page behind a request, folded lines and lines that end in a
    bare LF, and repetitions of headers that matter.
 4. With --auth-config it takes what a client that it knows sends: the last token that was accepted on the connection,
    for the same model, is remembered until the file of tokens is read again. Everybody else, and every refusal, is left
    to the parser's path. The comparison takes the same time whatever the first differing byte.
 5. Answers are sent in the order of the requests, whichever way these took.
 6. Most clients send a head and its body in two calls, which often arrive one by one. So the beginning of a plain request,
    up to MOST_PARTIAL bytes of it, waits for the rest in front of the parser. One that has come in MOST_PIECES pieces and is still
    not whole goes to the parser. To whoever looks at times and limits it is a request that is being received.
 7. What an exchange writes while earlier requests are not answered waits in it, and counts as held for it like its body:
    for the budget of all connections, and for the room that this one has. Only then are its bytes added up.
 8. A client that asks for a 100 is sent it when every earlier request is answered, behind these answers: it would take
    an earlier one for that of an earlier request.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t
from libc.string cimport memcmp, memcpy

from neptrio.transport.connection cimport Connection
from neptrio.transport.rest.head cimport RequestHead
from neptrio.transport.http1.plain_head cimport Head, KnownHead, keep, read_head
from neptrio.transport.http1.states cimport Event, State, after
from neptrio.transport.rest.infer_route cimport route_of
from neptrio.transport.rest.plain_infer cimport check_host_memory, extra_headers, has_extra_headers, print_now, read_plain
from neptrio.loop.loop_pass_core cimport LoopPassCore
from neptrio.loop.socket_writer_core cimport RECEIVE, receive, received_bytes, received_view
from neptrio.codec.bounded cimport add_text
from neptrio.codec.number_text cimport no_room, print_int
from neptrio.request.infer_request cimport (
    HTTP_PROTOCOL,
    SEND_START,
    InferRequest,
    InferResponse,
    Owner,
    Responder,
    Tensor,
    now_ns,
)

import logging
from collections import deque

from neptrio.codec.shared_memory import names_large_inputs

from neptrio import limits
from neptrio.errors import Internal, TritonError
from neptrio.service.access_log import agent_of

log = logging.getLogger("neptrio.http1")

cdef Py_ssize_t LONGEST_KEPT = limits.LONGEST_KEPT

cdef enum:
    MOST_EXCHANGES = 64
    JOIN = 16 << 10        # bytes; smaller answers are sent as one buffer
    MOST_PARTIAL = 16 << 10      # bytes of a request's head and body
    MOST_PIECES = 3
    TOLD = 32 << 10        # bytes of answers that wait; the budget of all connections is told of more

cdef bytes CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MAX_EXCHANGES = MOST_EXCHANGES
JOIN_BYTES = JOIN

cdef inline bint _same(const char* a, const char* b, Py_ssize_t n) noexcept:
    """Compares in a time that does not depend on where the bytes differ (rule 4)."""
    cdef unsigned char differing = 0
    cdef Py_ssize_t i
    for i in range(n):
        differing |= <unsigned char>a[i] ^ <unsigned char>b[i]
    return differing == 0


cdef extern from *:
    r"""
    static const char BINARY_START[] = "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
                                       "Inference-Header-Content-Length: ";
    static const char JSON_START[] = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: ";
    static const char LENGTH[] = "\r\nContent-Length: ";
    static const char LAST[] = "\r\nConnection: close\r\n\r\n";
    """
    const char[1] BINARY_START
    const char[1] JSON_START
    const char[1] LENGTH
    const char[1] LAST
    size_t BINARY_START_N "(sizeof(BINARY_START) - 1)"
    size_t JSON_START_N "(sizeof(JSON_START) - 1)"
    size_t LENGTH_N "(sizeof(LENGTH) - 1)"
    size_t LAST_N "(sizeof(LAST) - 1)"


cdef class ExchangeCore(Responder):
    """One request and its answer, as the connection sees it."""

    def __cinit__(self):
        self.output = []
        self.keep_alive = True
        self.protocol = HTTP_PROTOCOL

    cpdef bint waits_for_kernel(self, InferRequest request, object callback, int stage) except -1:
        # type: (..., Callable[[], None], ...) -> bool
        return stage and self.connection.writer.when_taken(callback)

    def disconnect(self, services):
        # type: (Services) -> None
        """The peer is gone: cancels the request."""
        raise NotImplementedError(f"{type(self).__name__}.disconnect")


cdef class FastPathExchange(ExchangeCore):
    """An exchange of a request that took the fast path."""

    def disconnect(self, services):
        # type: (Services) -> None
        if self.encoding is not None:
            self.encoding.cancel()
        elif self.request is not None and not self.complete:
            services.admission.cancel(self.request)

    cpdef object respond(self, InferRequest request, InferResponse response, bint final):
        cdef tuple encoded
        if not final:
            log.error("model '%s' sent more than one response to an HTTP request", request.model_name)
            return
        self.request = None  # breaks the cycle of request and exchange, so that both are freed at once
        if self.access is not None:
            self.access.answered(request, response)
        request.timestamps[<int>SEND_START] = now_ns()
        encoded = print_now(self, self.connection, request, response, self.binary_default)
        if encoded is not None:
            self.encoded(request, encoded)

    cpdef encoded(self, InferRequest request, tuple encoded):
        # type: (..., tuple[bytes, list[Any] | None, int]) -> None
        """The answer has been printed."""
        cdef bytes head
        cdef list blobs
        cdef Py_ssize_t binary_bytes
        head, blobs, binary_bytes = encoded
        if self.access is not None:
            self.access.answers(200, PyBytes_GET_SIZE(head) + binary_bytes)
        if has_extra_headers(request):
            self.connection.reply_with(self, extra_headers(request), head, blobs)
        else:
            self.reply(head, blobs, binary_bytes)
        self.complete = True
        Http1FastPath.advance(self.connection, self)

    cdef int reply(self, bytes head, list blobs, Py_ssize_t binary_bytes) except -1:
        cdef char[256] line
        cdef char* at = line
        cdef char* end = at + sizeof(line)
        cdef Py_ssize_t n, length = PyBytes_GET_SIZE(head), total = length + binary_bytes
        cdef Tensor tensor
        cdef bytes whole
        if binary_bytes:
            at = add_text(at, end, BINARY_START, BINARY_START_N)
            at = print_int(at, end, length)
            at = add_text(at, end, LENGTH, LENGTH_N)
        else:
            at = add_text(at, end, JSON_START, JSON_START_N)
        at = print_int(at, end, total)
        if self.keep_alive:
            at = add_text(at, end, "\r\n\r\n", 4)
        else:
            at = add_text(at, end, LAST, LAST_N)
        if at >= end:
            no_room()
        n = at - line
        if total > JOIN:
            self.output = [line[:n], head]
            if binary_bytes:
                self.output += blobs
            return 0
        if binary_bytes:
            check_host_memory(blobs)
        whole = PyBytes_FromStringAndSize(NULL, n + total)
        at = PyBytes_AS_STRING(whole)
        end = at + n + total
        at = add_text(add_text(at, end, line, n), end, PyBytes_AS_STRING(head), length)
        if binary_bytes:
            for tensor in blobs:
                if tensor.nbytes > end - at:
                    no_room()
                if tensor.nbytes:      # the pointer of an empty tensor may be NULL
                    at = add_text(at, end, tensor.ptr, tensor.nbytes)
        if at != end:
            raise AssertionError(f"{end - at} bytes of an answer are missing")
        self.output = [whole]
        return 0

    def refuse(self, error, InferRequest request=None):
        # type: (TritonError, ...) -> None
        """Answers with an error."""
        headers = extra_headers(request) if request is not None else []
        self.request = None
        self.connection.reply_error(self, error, headers)
        self.complete = True
        Http1FastPath.advance(self.connection, self)


cdef class Http1FastPath(Connection):
    """The part of a connection through which every request passes."""

    def __init__(self, wire, services):
        # type: (..., Services) -> None
        Connection.__init__(self, wire, services)
        self.head = RequestHead.__new__(RequestHead)
        self.budget = services.held
        self.exchanges = deque()
        self.ready = []
        self.max_body = services.settings.http_max_input_size
        self.since_ns = now_ns()

    cpdef int happens(self, Event event) except -1:
        """The only way to another state (http1.states)."""
        self.state = after(self.state, event)
        return 0

    @property
    def closing(self) -> bool:
        """No further request is read."""
        return self.state >= State.LAST

    @property
    def ended(self) -> bool:
        """The peer has closed its side, or the connection is closed."""
        return self.state == State.ENDED

    # ------------------------------------------------------------ hooks: the rest of the connection

    def over(self):
        """Ends the connection: everything was sent, or cannot be."""
        raise NotImplementedError

    def end_of_input(self):
        """The peer has closed its side."""
        raise NotImplementedError

    def receive_direct(self):
        """Receives more of a body past the parser."""
        raise NotImplementedError

    def feed(self, data):
        # type: (Buffer) -> None
        """Parses bytes that the fast path has left."""
        raise NotImplementedError

    def accepts_host(self, bytes host) -> bool:
        """Whether this Host is allowed; asked for each that is new on this connection."""
        raise NotImplementedError

    def who(self, token, str model):
        # type: (bytes | None, ...) -> tuple[Owner | None, bool]
        """Who sends an infer request of `model` with this Authorization header; None if it is to be refused. And whether
        that may be remembered."""
        raise NotImplementedError

    def reply_error(self, ExchangeCore exchange, error, headers):
        # type: (..., TritonError, list[tuple[bytes, bytes]]) -> None
        """Answers an exchange of the fast path with an error."""
        raise NotImplementedError

    def reply_with(self, ExchangeCore exchange, list extra, bytes text, blobs):
        # type: (..., list[tuple[bytes, bytes]], ..., list[Any] | None) -> None
        """Answers an exchange of the fast path, with headers in addition to the usual ones."""
        raise NotImplementedError

    def encode_later(self, FastPathExchange exchange, InferRequest request, InferResponse response, bint binary_default,
                     bint selecting):
        """Has an answer of the fast path printed by a worker. With `selecting` the worker also does what the client asked
        to be done with the outputs."""
        raise NotImplementedError

    # ------------------------------------------------------------ output

    cpdef advance(self, ExchangeCore written):
        """Moves output of the oldest exchanges to the connection, in their order. `written`: the one that has some more."""
        cdef ExchangeCore first
        exchanges = self.exchanges
        while exchanges:
            first = exchanges[0]
            if first.output:
                self.ready += first.output
                first.output = []
                self.moved = True
                if first.waits:
                    self.let_go(first)
            if not first.complete:
                break
            exchanges.popleft()
            self.held -= first.held
            if first.access is not None:
                first.access.end()
            if not first.keep_alive:
                self.happens(Event.NO_MORE)
        if written.output:
            self.count(written)
        if not exchanges:
            self.since_ns = now_ns()
            if self.head.head_bytes and self.state == State.IDLE:
                self.head.clear()    # which may have 64 KiB, and nobody knows how long the connection is idle
            if self.continue_due:
                self.go_ahead()
            if self.idle is not None:
                self.idle.set()
        if self.room is not None and self.has_room():
            self.room.set()
        LoopPassCore.want_flush(self.loop_pass, self)

    cpdef int go_ahead(self) except -1:
        """Tells a client that waits for it to send its body, if it is its turn (rule 8)."""
        if self.continue_due and not self.exchanges and self.state in (State.BODY, State.DIRECT):
            self.continue_due = False
            self.ready.append(CONTINUE)
            LoopPassCore.want_flush(self.loop_pass, self)
        return 0

    cdef int count(self, ExchangeCore behind) except -1:
        """Counts what was written behind an exchange that is not answered (rule 7)."""
        cdef list output = behind.output
        cdef Py_ssize_t i, size = 0
        if self.writer.broken:     # nobody will read it
            behind.output = []
            behind.counted = 0
            return 0
        for i in range(behind.counted, len(output)):
            buffer = output[i]
            size += PyBytes_GET_SIZE(buffer) if PyBytes_CheckExact(buffer) else <Py_ssize_t>memoryview(buffer).nbytes
        behind.counted = len(output)
        behind.waits += size
        behind.held += size
        self.held += size
        if behind.waits > TOLD:
            (<object>self.budget).made(size if behind.waits - size > TOLD else behind.waits)
        return 0

    cdef int let_go(self, ExchangeCore oldest) except -1:
        """What waited in an exchange was moved: it is the oldest from now on."""
        self.held -= oldest.waits
        oldest.held -= oldest.waits
        oldest.waits = oldest.counted = 0
        if oldest.turn is not None:
            oldest.turn.set()
        return 0

    def flush(self):
        """Sends what is ready. Called at the end of the loop pass."""
        cdef list ready
        cdef Py_ssize_t pending
        if self.ready:
            ready = self.ready
            self.ready = []
            self.writer.send(ready)
            pending = self.writer.pending
            if pending > TOLD:
                if pending > self.told:
                    (<object>self.budget).made(pending - self.told)
                self.told = pending
            else:
                self.told = 0
        if self.writer.broken or (self.state >= State.LAST and not self.exchanges):
            self.over()

    cpdef bint has_room(self) except -1:
        """True when another request may be read."""
        cdef Py_ssize_t n = len(self.exchanges)
        return not self.paused and n < MOST_EXCHANGES and (self.held <= self.max_body or n == 0) and not self.writer.congested_now()

    # ------------------------------------------------------------ the parser's callbacks for heads

    def on_message_begin(self):
        self.head.clear()
        self.happens(Event.BEGUN)
        if self.pieces:
            self.pieces = 0  # it began with the first of them
        else:
            self.head.receive_start = now_ns()

    def on_url(self, bytes url):
        self.head.add_url(url)

    def on_header(self, bytes name, bytes value):
        if self.state == State.HEAD:    # not a trailer
            self.head.add(name, value)

    # ------------------------------------------------------------ input

    def take(self):
        # type: () -> bool
        """Reads once from the socket; returns False when reading must pause or is over."""
        cdef bint go_on = self.take_some()
        if self.secure is not None:
            while go_on and self.secure.more:    # nobody tells again of what is decrypted already
                go_on = self.take_some()
        return go_on

    cdef bint take_some(self) except -1:
        cdef ssize_t n
        cdef Py_ssize_t at = 0
        if self.state == State.DIRECT:
            self.receive_direct()
        else:
            n = receive(self.fd, RECEIVE) if self.secure is None else self.secure.receive()
            if n > 0:
                if self.partial is not None:
                    self.pass_on(received_bytes()[:n])
                else:
                    if self.fast_path and self.state == State.IDLE and not self.budget.full:
                        at = self.take_plain(received_bytes(), n)
                    if at < n and not self.keep_partial(received_bytes() + at, n - at):
                        self.feed(received_view()[at:n])
            elif n == 0:
                self.end_of_input()
        return self.later is None and self.state < State.LAST and self.has_room()

    def pass_on(self, bytes data not None):
        """Handles bytes that were received elsewhere."""
        cdef Py_ssize_t at = 0, n
        if self.partial is not None:
            data = self.partial + data
            self.partial = None
            self.happens(Event.TAKEN_UP)
        n = PyBytes_GET_SIZE(data)
        if self.fast_path and self.state == State.IDLE and not self.budget.full:
            at = self.take_plain(PyBytes_AS_STRING(data), n)
        if at < n and not self.keep_partial(PyBytes_AS_STRING(data) + at, n - at):
            self.feed(data[at:] if at else data)

    cdef bint keep_partial(self, const char* p, Py_ssize_t n) except -1:
        """Keeps the beginning of a request if take_plain() has seen that it is worth waiting for the rest (rule 6)."""
        if not self.incomplete:
            return False
        self.incomplete = False
        if self.pieces + 1 >= MOST_PIECES:
            return False
        if self.pieces == 0:
            self.head.receive_start = now_ns()
        self.pieces += 1
        self.partial = p[:n]
        self.happens(Event.KEPT)
        self.body_received = 0
        return True

    cdef Py_ssize_t take_plain(self, const char* p, Py_ssize_t n) except -1:
        """Takes all plain infer requests at the front of the buffer; returns how many bytes these were."""
        cdef Py_ssize_t at = 0, used
        self.incomplete = False
        if self.admission.tracer.trace_headers:
            return 0
        while at < n and self.state < State.LAST and len(self.exchanges) < MOST_EXCHANGES:
            used = self.take_one(p + at, n - at)
            if used == 0:
                break
            at += used
        return at

    cdef bint takes_host(self, const char* value, Py_ssize_t n) except -1:
        cdef bytes host = self.known_host
        if host is not None and PyBytes_GET_SIZE(host) == n and memcmp(PyBytes_AS_STRING(host), value, n) == 0:
            return True
        host = value[:n]
        if not self.accepts_host(host):
            return False
        if n <= LONGEST_KEPT:
            self.known_host = host
        return True

    cdef Owner owner_of(self, const char* token, Py_ssize_t n, str model):
        """Who sends a request with this Authorization header (NULL: with none) for `model`; None if that is for the
        parser's path to decide."""
        cdef bytes given = self.known_token
        cdef Owner owner = self.known_owner
        if owner is not None and owner.generation == self.known_generation and self.known_model is model:
            if token == NULL:
                if given is None:
                    return owner
            elif given is not None and PyBytes_GET_SIZE(given) == n and _same(PyBytes_AS_STRING(given), token, n):
                return owner
        given = None if token == NULL else token[:n]
        owner, remembered = self.who(given, model)
        if remembered:
            self.known_token = given
            self.known_model = model
            self.known_owner = owner
            self.known_generation = owner.generation
        return owner

    cdef Py_ssize_t take_one(self, const char* p, Py_ssize_t n) except -1:
        """Takes the request at the front of the buffer if it is a plain one; returns its bytes, else 0."""
        cdef Head head
        cdef KnownHead known = self.known_head
        cdef Owner owner = None
        cdef tuple route
        cdef int64_t begun, length
        cdef Py_ssize_t at
        if known is not None and not self.asks_who and known.begins(p, n):
            at = PyBytes_GET_SIZE(known.text)
            route = known.route
            length = known.content_length
            head.header_length = known.header_length
            if length > self.max_body:
                return 0
            if length > n - at:
                self.incomplete = at + length <= MOST_PARTIAL
                return 0
        else:
            if not read_head(p, n, self.asks_who, &head):
                return 0
            at = head.size
            length = head.content_length
            if length > self.max_body or (length > n - at and at + length > MOST_PARTIAL):
                return 0
            if not self.takes_host(head.host, head.host_length):
                return 0
            route = route_of(p[5:head.path_end])
            if route is None:
                return 0
            if length > n - at:
                self.incomplete = True
                return 0
            if not self.asks_who:
                known = keep(p, &head, route, &self.head_seen)
                if known is not None:
                    self.known_head = known
        if length >= self.large_files.least and names_large_inputs(p[at:at + length]):
            return 0
        if self.asks_who:
            owner = self.owner_of(head.token, head.token_length, <str>route[0])
            if owner is None:
                return 0
        if self.admission.forwards and not self.admission.reads(<str>route[0], <str>route[1]):
            return 0
        if self.pieces:
            self.pieces = 0
            begun = self.head.receive_start
        else:
            begun = now_ns()
        self.passed += 1
        self.infer(route, p[at:at + length], head.header_length, begun, owner,
                   None if self.access is None else self.logged(p[:at], begun, length))
        return at + length

    cdef object logged(self, bytes head, int64_t start, Py_ssize_t size):
        """The record of the access log for a request with this head and so many bytes of body."""
        if self.logged_head is None or self.logged_head != head:    # most clients always send the same
            self.logged_head = head
            self.logged_said = head[5:head.index(b" ", 5)].decode("latin-1"), agent_of(head)
        record = self.access.begin("HTTP/1.1", self.wire.client, "POST", self.logged_said[0], start)
        record.agent = self.logged_said[1]
        record.bytes_in = size
        return record

    cdef int infer(self, tuple route, bytes body, Py_ssize_t header_length, int64_t start, Owner owner,
                   object access) except -1:
        """Passes a complete request to admission, or refuses it. `access`: its record of the access log, or None."""
        cdef InferRequest request
        cdef FastPathExchange exchange = FastPathExchange.__new__(FastPathExchange)
        exchange.connection = self
        exchange.access = access
        exchange.held = PyBytes_GET_SIZE(body)
        if self.draining:
            exchange.keep_alive = False
            self.happens(Event.NO_MORE)
        self.held += exchange.held
        self.exchanges.append(exchange)
        self.requests += 1
        try:
            request = InferRequest.__new__(InferRequest)
            request.owner = owner
            exchange.binary_default = read_plain(
                request, route, body, header_length, start, self.admission, self.shared_memory)
            if access is not None:
                access.asks(request)
            request.responder = exchange
            exchange.request = request
            self.admission.submit(request)
        except TritonError as error:
            if access is not None:
                access.asks(request)
            exchange.refuse(error)
        except Exception as error:
            log.exception("an infer request of model '%s' failed", <str>route[0])
            exchange.refuse(Internal(f"internal error: {type(error).__name__}"))
        return 0
