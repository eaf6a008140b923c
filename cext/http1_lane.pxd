# The hot half of the lean HTTP/1.1 connection. Trio thread only.
from libc.stdint cimport int64_t

from neptrio._cext.door cimport Door
from neptrio._cext.http1_head cimport RequestHead
from neptrio._cext.link cimport LinkCore
from neptrio._cext.request cimport InferRequest, Responder
from neptrio._cext.turn cimport TurnCore

cdef class ExchangeCore(Responder):
    cdef public Http1Lane connection
    cdef public list output          # bytes written so far that have not moved to the connection
    cdef public bint complete        # nothing more will be written
    cdef public bint keep_alive
    cdef public Py_ssize_t held      # bytes of the request's body

cdef class LaneExchange(ExchangeCore):
    cdef InferRequest request        # while it is under way
    cdef bint binary_default
    cdef int reply(self, bytes head, list blobs, Py_ssize_t binary_bytes) except -1

cdef class Http1Lane(RequestHead):
    cdef readonly object sock
    cdef readonly LinkCore link
    cdef readonly TurnCore turn
    cdef readonly object services
    cdef int fd
    cdef Door door
    cdef object shared_memory
    cdef public bint lane            # plain infer requests may be taken past the parser
    cdef public bint closing
    cdef public bint ended           # the peer will send nothing more
    cdef public object exchanges     # deque, oldest first
    cdef public list ready           # bytes for the next flush
    cdef public Py_ssize_t held      # bytes of the exchanges' bodies
    cdef public int64_t max_body
    cdef public int64_t since_ns     # of the last answer, or of the connection's start
    cdef public int64_t requests
    cdef readonly int64_t passed     # of those, the ones that did not meet the parser
    cdef public bytes later          # received, and to be parsed when there is room; None: nothing
    cdef public object direct        # the buffer of a body that is received past the parser
    cdef public object room          # Event of whoever waits for room, or None
    cdef public object idle          # Event of whoever waits for the last answer, or None
    cpdef advance(self)
    cpdef bint has_room(self) except -1
    cdef Py_ssize_t pass_by(self, const char* p, Py_ssize_t n) except -1
    cdef Py_ssize_t one(self, const char* p, Py_ssize_t n) except -1
    cdef int infer(self, tuple route, bytes body, Py_ssize_t header_length, int64_t start) except -1
