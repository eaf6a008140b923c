# The last finished traces. Trio thread only.
from libc.stdint cimport int64_t

from neptrio.observe.trace cimport Trace

cdef enum:
    RECENT_TRACES = 128
    RECENT_BYTES = 512               # a larger trace is kept as the object that it is

cdef class Recent:
    cdef char* data
    cdef Py_ssize_t sizes[RECENT_TRACES]  # bytes of the records in a place, 0 = `whole` has it
    cdef list whole
    cdef int64_t count               # traces that were added
    cdef int add(self, Trace root, const char* records, Py_ssize_t size) except -1
