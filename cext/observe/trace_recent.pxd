# The traces that finished last. Trio thread only.
from libc.stdint cimport int64_t

from neptrio.observe.trace cimport Trace

cdef enum:
    RECENT_TRACES = 128
    RECENT_BYTES = 512               # a trace whose records are larger is kept as its parts

cdef class Recent:
    cdef char* data
    cdef Py_ssize_t sizes[RECENT_TRACES]  # bytes of the records in each place, 0 = the trace is in `whole`
    cdef list whole
    cdef int64_t count               # how many traces were added
    cdef int add(self, Trace root, const char* records, Py_ssize_t size) except -1
