# The two halves of a connection: receive(), into a buffer that all connections share, and
# SocketWriterCore, which sends. Trio thread only.
cdef const char* received_bytes() noexcept   # where receive() puts them
cdef ssize_t receive(int fd) except -2       # how many; 0 at the end of input, -1 when there is nothing now

cdef class SocketWriterCore:
    cdef readonly object sock
    cdef int fd
    cdef public Py_ssize_t pending   # bytes the kernel did not take yet
    cdef public bint broken
    cdef public object queue         # deque of memoryviews, those bytes
    cpdef send(self, list buffers)
    cpdef append(self, list buffers)
    cpdef drop(self, Py_ssize_t sent)
    cpdef fail(self)
    cdef ssize_t try_send(self, list buffers, Py_ssize_t* total) except? -2
    cdef bint congested_now(self) noexcept
