# The system calls of a connection: receive() reads into a buffer that all connections share, SocketWriterCore
# sends. Trio thread only.
cdef const char* received_bytes() noexcept   # where receive() puts what it reads
cdef ssize_t receive(int fd) except -2       # bytes read; 0 at the end of input, -1 when there are none now

cdef class SocketWriterCore:
    cdef readonly object sock
    cdef int fd
    cdef public Py_ssize_t pending   # bytes that the kernel has not taken yet
    cdef public bint broken
    cdef public object queue         # deque of memoryviews of these bytes
    cpdef send(self, list buffers)
    cpdef append(self, list buffers)
    cpdef drop(self, Py_ssize_t sent)
    cpdef fail(self)
    cdef ssize_t try_send(self, list buffers, Py_ssize_t* total) except? -2
    cdef bint congested_now(self) noexcept
