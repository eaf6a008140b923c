# What has been read of a request's head.
from libc.stdint cimport int64_t

cdef class RequestHead:
    cdef readonly bytes url
    cdef readonly list headers               # [(name, value)]  # type: list[tuple[bytes, bytes]]
    cdef dict blanks                       # number of a header -> its value with the blanks behind it; None: there are none
    cdef dict read                         # name in lower case -> value, of those that are read here
    cdef readonly int hosts                  # how many Host headers there were
    cdef readonly bint chunked
    cdef readonly int64_t content_length     # -1 without Content-Length
    cdef public int64_t receive_start      # when the message's first byte came, CLOCK_MONOTONIC ns
    cdef readonly int64_t head_bytes         # of its texts, and what keeping them takes beside
    cpdef int clear(self) except -1
    cpdef int add(self, bytes name, bytes value) except -1
    cpdef int aim(self, bytes host, bytes path) except -1
    cpdef int add_url(self, bytes part) except -1
    cdef int count(self, Py_ssize_t n) except -1
    cpdef list as_sent(self)
    cpdef object get(self, bytes name)
