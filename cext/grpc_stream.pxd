# A gRPC stream without I/O: message framing on the way in, an outbox on the way out. The HTTP/2
# session that carries it (nghttp2 or h2) calls feed(), half_closed() and closed(), and takes
# from the outbox; it is told of new output through session.output_ready(stream).
cdef class GrpcStream:
    cdef readonly object session
    cdef readonly int stream_id
    cdef public object headers         # callable -> [(name, value)], with .get(name) (bytes)
    cdef public object max_message_bytes
    # incoming
    cdef unsigned char[5] prefix
    cdef int prefix_have
    cdef Py_ssize_t want
    cdef Py_ssize_t have
    cdef object message                # bytes under construction
    cdef char* message_at
    cdef bint compressed
    cdef public bint input_ended
    cdef public bint refused           # no more input is looked at
    cdef public bint paused            # flow-control credit is withheld
    cdef public Py_ssize_t withheld    # bytes received while paused
    # outgoing
    cdef list outbox                   # buffers; outbox[out_first] is partly sent up to out_at
    cdef Py_ssize_t out_first
    cdef Py_ssize_t out_at
    cdef readonly Py_ssize_t out_bytes # bytes waiting in the outbox
    cdef public list reply_headers     # None until they are to be sent
    cdef public list trailers          # None until the reply is complete
    cdef public bint headers_sent
    cdef public bint ended             # closed in both directions or reset
    cdef int feed(self, const char* data, Py_ssize_t n) except -1
    cdef bytes _assembled(self)
