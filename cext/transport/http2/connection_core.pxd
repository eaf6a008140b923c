# The compiled part of an HTTP/2 connection. Trio thread only.
from libc.stdint cimport int64_t

from neptrio.transport.connection cimport Connection
from neptrio.transport.http2.stream cimport Account, Totals

cdef class Http2Core(Connection):
    cdef public object session         # nghttp2's or h2's (neptrio.transport.http2.session)  # type: Http2Session
    cdef Account account               # the session's, once something was received
    cdef public object forward         # the header policy if it reads each message's metadata, else None
    cdef public object compression     # level for replies: "none", "low", ...  # type: str
    cdef public object parked          # deque of complete calls that wait until the client has read enough
    cdef readonly object source_of     # see message_stream's source_of
    cdef public int64_t received_at    # CLOCK_MONOTONIC ns of the last bytes
    cdef public Totals totals          # of all connections
    cdef public Py_ssize_t input_limit # most bytes of incomplete requests, over all connections
    cdef public Py_ssize_t output_limit  # most bytes of unread answers, over all connections
    cdef public bint draining
    cdef public int64_t drain_acked    # how many PINGs were answered before the drain began
    cdef bint take_secure(self) except -1
    cdef ssize_t receive_some(self, Account account, Py_ssize_t room, Py_ssize_t* asked) except -2
    cpdef feed(self, data)
    cpdef want_flush(self)
    cpdef object unread(self)
