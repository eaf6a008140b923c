# The compiled part of an HTTP/1.1 connection and its exchanges. Trio thread only.
from libc.stdint cimport int64_t, uint64_t

from neptrio.transport.connection cimport Connection
from neptrio.transport.rest.head cimport RequestHead
from neptrio.transport.http1.plain_head cimport KnownHead
from neptrio.transport.http1.states cimport Event, State
from neptrio.request.infer_request cimport InferRequest, Owner, Responder
from neptrio.service.held_core cimport HeldCore

cdef class ExchangeCore(Responder):
    cdef public Http1FastPath connection
    cdef public list output          # bytes written that were not yet moved to the connection
    cdef public bint complete        # nothing more will be written
    cdef public bint keep_alive
    cdef public Py_ssize_t held      # bytes of the request's body, of its head where that is kept, and those that wait
    cdef readonly Py_ssize_t waits   # bytes of the output, while earlier requests are not answered (rule 7)
    cdef Py_ssize_t counted          # buffers of the output that these are
    cdef public object turn          # Event for whoever waits until this is the oldest, or None  # type: trio.Event | None
    cdef public object access        # its line of the access log; None: there is none  # type: AccessRecord | None

cdef class FastPathExchange(ExchangeCore):
    cdef InferRequest request        # the request while it executes
    cdef bint binary_default
    cdef public object encoding      # a CancelScope while a worker prints the answer  # type: trio.CancelScope | None
    cpdef encoded(self, InferRequest request, tuple encoded)
    cdef int reply(self, bytes head, list blobs, Py_ssize_t binary_bytes) except -1

cdef class Http1FastPath(Connection):
    cdef readonly State state
    cdef readonly RequestHead head   # of the request under way
    cdef HeldCore budget             # in fact a service.held_bytes.HeldBytes
    cdef Py_ssize_t told             # bytes of answers that wait, as the budget was last told; 0 for few
    cdef KnownHead known_head        # the last head, if the one before was the same
    cdef uint64_t head_seen          # the hash of the last head that is not known
    cdef public bytes known_host     # the last Host that was accepted; most clients always send the same  # type: bytes | None
    cdef public bint asks_who        # requests must say who sends them (service.tokens)
    cdef bytes known_token           # the last Authorization header that was accepted, None: no such header
    cdef str known_model             # for this model
    cdef Owner known_owner           # whose it is, None: nothing is known
    cdef int64_t known_generation    # of the owner, when it was accepted
    cdef public int paused           # jobs of worker threads for this connection: further requests must wait
    cdef public bint fast_path            # plain infer requests may bypass the parser
    cdef public bint draining        # the next answer is the last
    cdef public object exchanges     # deque, oldest first  # type: deque[ExchangeCore]
    cdef public list ready           # bytes to be sent at the next flush
    cdef public bint moved           # output of the oldest exchange was moved; set back by who looks at it
    cdef public Py_ssize_t held      # bytes of the exchanges' heads and bodies, and of answers that wait for earlier ones
    cdef public int64_t max_body
    cdef public int64_t since_ns     # when the last answer was sent, or the connection began
    cdef public int64_t requests
    cdef readonly int64_t passed     # how many of these bypassed the parser
    cdef readonly bytes partial      # the head of a plain request and what has come of its body (rule 6)  # type: bytes | None
    cdef bint incomplete             # take_plain() has ended at such a request
    cdef int pieces                  # in so many pieces the message has come so far (rule 6); 0: it is no such request
    cdef public Py_ssize_t body_received  # bytes of the message under way
    cdef public bint continue_due    # its client waits for a 100 before it sends the body (rule 8)
    cdef public bytes later          # bytes received that are parsed when there is room, or None  # type: bytes | None
    cdef public object direct        # the buffer of a body that is received without the parser
    cdef public object room          # Event for whoever waits for room, or None  # type: trio.Event | None
    cdef public object idle          # Event for whoever waits for the last answer, or None  # type: trio.Event | None
    cpdef int happens(self, Event event) except -1
    cpdef advance(self, ExchangeCore written)
    cpdef int go_ahead(self) except -1
    cdef int count(self, ExchangeCore behind) except -1
    cdef int let_go(self, ExchangeCore oldest) except -1
    cpdef bint has_room(self) except -1
    cdef Py_ssize_t take_plain(self, const char* p, Py_ssize_t n) except -1
    cdef bint take_some(self) except -1
    cdef bint keep_partial(self, const char* p, Py_ssize_t n) except -1
    cdef bint takes_host(self, const char* value, Py_ssize_t n) except -1
    cdef Owner owner_of(self, const char* token, Py_ssize_t n, str model)
    cdef Py_ssize_t take_one(self, const char* p, Py_ssize_t n) except -1
    cdef int infer(self, tuple route, bytes body, Py_ssize_t header_length, int64_t start, Owner owner,
                   object access) except -1
    cdef bytes logged_head           # the last head that the access log was told of
    cdef tuple logged_said           # its target and User-Agent
    cdef object logged(self, bytes head, int64_t start, Py_ssize_t size)
