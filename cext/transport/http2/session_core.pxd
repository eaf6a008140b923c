# What the HTTP/2 sessions over libnghttp2 and h2 have in common. Trio thread only.
from libc.stdint cimport int64_t, uint8_t

from neptrio.transport.http2.stream cimport Account, Stream

cdef class Http2Session:
    cdef public object open_stream  # type: OpenStream | None
    cdef readonly Account account
    cdef readonly object flood_budget  # type: FloodBudget
    cdef readonly dict streams  # type: dict[int, Stream]
    cdef public Py_ssize_t pings_acked
    cdef public bint dead
    cdef public str failure  # type: str | None
    cdef public bint draining
    cdef public bint has_output
    cdef public bint holding       # connection credit is being withheld
    cdef public Py_ssize_t held_credit
    cdef public Py_ssize_t work    # DATA frames sent and calls ended since the last receive()
    cdef readonly bint flooded
    # frames
    cdef readonly int64_t begun    # that have begun
    cdef size_t preface            # bytes of the preface that are still to come
    cdef size_t payload            # and of the current frame
    cdef uint8_t[9] head           # the beginning of a frame's head
    cdef int head_bytes            # how many bytes of it have come
    cdef bint in_block             # a request's headers have begun and not ended
    cdef Py_ssize_t frameless      # bytes received since the last whole frame
    cdef Py_ssize_t most_frameless
    cdef size_t most_payload       # of a frame
    cdef readonly size_t too_large  # the payload of a frame that has more, 0: none
    cdef int follow(self, const uint8_t* data, size_t n, int64_t now_ns) except -1
    cpdef bint endless(self)
    cpdef int charge(self, int cost) except -1
    cpdef int flood(self, str why) except -1
    cpdef object reset_stream(self, Stream stream, unsigned int code)
