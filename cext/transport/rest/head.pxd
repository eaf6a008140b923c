# What has been read of a request's head.
from libc.stdint cimport int64_t

cdef class RequestHead:
    cdef public bytes url
    cdef public list headers               # [(name, value)]  # type: list[tuple[bytes, bytes]]
    cdef dict read                         # name in lower case -> value, of those that are read here
    cdef public int hosts                  # how many Host headers there were
    cdef public bint chunked
    cdef public int64_t content_length     # -1 without Content-Length
    cdef public int64_t receive_start      # when the message's first byte came, CLOCK_MONOTONIC ns
    cdef public int64_t head_limit         # most bytes of URL and headers
    cdef int64_t head_bytes
    cpdef int clear(self) except -1
    cpdef int add(self, bytes name, bytes value) except -1
    cdef int count(self, Py_ssize_t n) except -1
    cpdef object get(self, bytes name)
