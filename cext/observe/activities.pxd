# Points in time of a trace that a model reports. Used on the trio thread, read by any once the trace is closed.
from libc.stdint cimport int32_t, int64_t

cdef class Activities:
    cdef list rows                   # [(nanoseconds, name, how its point in a file begins)]
    cdef int32_t bytes               # of all those beginnings
    cdef int add(self, str name, int64_t ns) except -1
    cdef int pack(self, int64_t* points, char* texts, char* end) except -1
