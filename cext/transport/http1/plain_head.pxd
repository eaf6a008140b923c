# The heads of plain infer requests. A KnownHead owns its copy of the text.
from libc.stdint cimport int64_t, uint64_t

cdef struct Head:
    Py_ssize_t size              # bytes, with the empty line
    Py_ssize_t path_end          # of the path, which begins at 5
    int64_t content_length       # -1: not said
    int64_t header_length        # Inference-Header-Content-Length, -1: not said
    const char* host             # in the buffer, NULL: not said
    Py_ssize_t host_length
    const char* token            # Authorization, in the buffer, NULL: not said or not asked for
    Py_ssize_t token_length

cdef class KnownHead:
    cdef bytes text
    cdef tuple route             # (model, version)
    cdef int64_t content_length
    cdef int64_t header_length
    cdef bint begins(self, const char* p, Py_ssize_t n) noexcept

cdef bint read_head(const char* p, Py_ssize_t n, bint asks_who, Head* head) except -1
cdef KnownHead keep(const char* p, Head* head, tuple route, uint64_t* seen)
