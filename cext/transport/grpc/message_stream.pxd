# A gRPC call without I/O: the messages in its stream's DATA.
from neptrio.transport.http2.stream cimport Stream

cdef class GrpcStream(Stream):
    cdef public Py_ssize_t max_message_bytes
    cdef unsigned char[5] prefix
    cdef int prefix_have
    cdef Py_ssize_t want
    cdef Py_ssize_t have
    cdef public bint keeps             # complete messages are counted until the call calls taken()
    cdef Py_ssize_t kept               # bytes of complete messages that were not taken
    cdef Py_ssize_t ask_at             # the budget is asked again when so many bytes have come; 0: it is not
    cdef Py_ssize_t asked_for          # how much of `kept` the budget was asked for when messages waited
    cdef Py_ssize_t skipping           # bytes still to come of a message that there is no room for
    cdef char* message_at              # NULL for a SplitMessage
    cdef bint undecided                # more bytes will tell whether it can be split
    cdef public object source_of       # what cext/codec/split_message asks for memory; None: messages are not split  # type: Callable[[str, str], Callable[[int], Any] | None] | None
    cdef bint compressed
    cdef Py_ssize_t _split(self, const char* data, Py_ssize_t n) except -1
    cdef bint _allocate(self) except -1
    cdef object _assembled(self)
    cdef bint _room(self, Py_ssize_t size) except -1
    cpdef int taken(self) except -1
    cpdef bint queued(self) except -1
    cpdef int unqueued(self) except -1
