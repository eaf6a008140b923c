# The system calls of a connection: receive() reads into a buffer that all connections of a thread share, receive_at() elsewhere,
# SocketWriterCore sends. Trio thread only.
from libc.stdint cimport int64_t

cdef enum:
    RECEIVE = 262144        # the bytes of that buffer

cdef char* received_bytes() except NULL     # where receive() puts what it reads
cpdef object received_view()                # the same as a memoryview
cdef ssize_t receive(int fd, size_t most) except -2   # bytes read; 0 at the end of input, -1 when there are none now
# The same, first to `size` bytes at `place`, then `more` to the shared buffer.
cdef ssize_t receive_at(int fd, char* place, size_t size, size_t more) except -2

cdef class SocketWriterCore:
    cdef readonly object sock  # type: socket.socket
    cdef int fd
    cdef int look                    # readable while somebody waits for the loop; -1: nobody knows
    cdef public bint full            # the kernel took less than it was given
    cdef public Py_ssize_t pending   # bytes that the kernel has not taken yet
    cdef public bint broken
    cdef int64_t gone                # pending bytes that the kernel has taken so far, in total
    cdef list watchers               # (value of `gone` that is waited for, callback), None = nobody waits
    cdef public object queue         # deque of memoryviews of these bytes  # type: deque[memoryview]
    cpdef send(self, list buffers)
    cpdef append(self, list buffers)
    cpdef drop(self, Py_ssize_t sent)
    cpdef fail(self)
    cpdef bint when_taken(self, object callback) except -1
    cdef int tell_watchers(self) except -1
    cpdef ssize_t send_pending(self) except -2
    cdef ssize_t try_send(self, list buffers, Py_ssize_t* total) except? -2
    cdef bint congested_now(self) noexcept
