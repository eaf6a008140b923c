# A stream without I/O. The HTTP/2 session that carries it (nghttp2 or h2) calls feed(), end_of_input() and on_reset() and
# takes from the outbox; session.output_ready(stream) tells it of new output.
from libc.stdint cimport int64_t

cdef class Stream

cdef class Totals:                     # the bytes that the streams of all connections of a server hold
    cdef readonly Py_ssize_t in_bytes  # of request messages that no call has taken
    cdef readonly Py_ssize_t out_bytes # of answers: in outboxes, and held

cdef class Account:                    # the bytes that one connection's streams hold
    cdef Totals totals                 # counts them too
    cdef readonly Py_ssize_t out_bytes # bytes of replies that no window or socket has taken yet
    cdef readonly Py_ssize_t in_bytes  # bytes of request messages that no call has taken
    cdef readonly Py_ssize_t coming    # bytes of input for which there was room, and which have not come
    cdef readonly Py_ssize_t held      # bytes of answers that wait for earlier ones, or to be compressed
    cdef readonly Py_ssize_t served_bytes # bytes of request messages whose calls are not answered
    cdef readonly Py_ssize_t heads     # bytes of the headers of open streams
    cdef public object budget          # service.held_bytes.HeldBytes; None: nobody is asked  # type: HeldBytes | None
    cdef Stream filling            # the stream whose large message the next bytes belong to, None: not known
    cdef Py_ssize_t frame_size         # bytes of the current DATA frame, 0: it is no plain one
    cdef Py_ssize_t frame_left         # how many of them are still to come
    cdef readonly Py_ssize_t placed    # bytes that were received at their place, so far
    cdef void count_in(self, Py_ssize_t n) noexcept
    cdef void count_out(self, Py_ssize_t n) noexcept
    cpdef int hold(self, Py_ssize_t n) except -1

cdef class Stream:
    cdef readonly object session  # type: Http2Session
    cdef readonly int stream_id
    cdef public object headers         # a callable that returns [(name, value)], with .get(name) (bytes)  # type: Headers
    cdef readonly Account account
    cdef Py_ssize_t head_bytes         # of the headers, until the stream has ended
    cdef public bint forgets_head      # nobody looks at its headers once it is open
    # incoming
    cdef object message                # what is being received: bytes, or a SplitMessage
    cdef Py_ssize_t coming             # bytes of expect_input() that have not come
    cdef readonly Py_ssize_t serving   # bytes of complete input that was taken, until it is answered
    cdef public bint input_ended
    cdef public bint refused           # further input is ignored
    cdef public bint paused            # flow-control credit is withheld
    cdef public Py_ssize_t withheld    # bytes received while paused
    # outgoing
    cdef list outbox                   # buffers; outbox[out_first] is partly sent up to out_at
    cdef Py_ssize_t out_first
    cdef Py_ssize_t out_at
    cdef readonly Py_ssize_t out_bytes # bytes waiting in the outbox
    cdef int64_t gone                  # bytes that have ever left the outbox
    cdef list watchers                 # (value of `gone` that is waited for, callback), None = nobody waits
    cdef Py_ssize_t moved              # bytes that left it since stalled() looked
    cdef int64_t seen_ns               # when stalled() first saw that something waits, 0: it did not
    cdef public list reply_headers     # None: the usual ones  # type: list[tuple[bytes, bytes]] | None
    cdef public list trailers          # None until the reply is complete; [] for none  # type: list[tuple[bytes, bytes]] | None
    cdef public bint headers_sent
    cdef public bint ended             # closed in both directions or reset
    cdef public object access          # its line of the access log; None: there is none  # type: AccessRecord | None
    cdef int begin(self, session, int stream_id, headers) except -1
    cdef int opened(self, Py_ssize_t n) except -1
    cpdef list head(self)
    cpdef list whole_head(self)
    cdef int feed(self, const char* data, Py_ssize_t n) except -1
    cpdef int end_of_input(self) except -1
    cdef bint lacks(self, Py_ssize_t n) noexcept             # at least so many bytes of what is being received
    cdef char* place(self, Py_ssize_t* n) noexcept           # where feed() would copy the next bytes, and how many; or NULL
    cdef int drop_input(self) except -1
    cpdef int logged(self, object access, str client, bytes path, int64_t began=*) except -1
    cdef int tell_access(self, bint whole) except -1
    cdef void expect_input(self, Py_ssize_t n) noexcept
    cdef void came(self, Py_ssize_t n) noexcept
    cpdef int serve(self, Py_ssize_t n) except -1
    cpdef int served(self, Py_ssize_t n) except -1
    cdef int _queue(self, list segments) except -1
    cdef int sent(self, Py_ssize_t n) except -1
    cpdef bint when_taken(self, object callback, int64_t end=*) except -1
    cdef int _tell_watchers(self, bint all) except -1
    cdef int abandon(self) except -1
    cpdef int over(self) except -1
    cpdef bint stalled(self, int64_t now_ns, int64_t limit_ns) except -1
