"""One stream of an HTTP/2 connection, without I/O: what it holds, and its answer on the way out.

The problem: gRPC calls and REST requests share connections' windows, budgets and ends, and what one kind counts the
other must count, too. The choice: the session and the connection know only a Stream. It has the answer's buffers, which
wait in the outbox until the peer's windows have room (large tensors are never joined to other data), and counts its bytes.
What its DATA means is its subclass's: messages (transport/grpc/message_stream) or a body (transport/http2/body_stream).

Subclasses implement feed() and end_of_input(), on_reset and on_writable, head() and whole_head().

Rules:
 1. A stream's bytes are counted in its connection's Account exactly while it holds them: those of its headers from when the
    session has opened it until it has ended; those of its input until they
    are complete or abandoned, then, where it says so with serve(), until it says served(), or has ended; those of an
    answer until the session took them.
 2. A stream is refused once; after that its input is read and dropped.
 3. `ended` is set before on_reset; nothing is queued on an ended stream.
 4. Whoever has received bytes at place() already passes them to feed() like any others, before anything else is called;
    they are then not copied.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.stdint cimport int64_t


cdef enum:
    TOLD = 32 << 10       # bytes of an answer that the budget is not told of
    UNREAD = 64 << 10     # bytes of an answer that a client must take within the time for that
    TOLD_HEAD = 4 << 10   # bytes of headers that the budget is not told of


class _NoHeaders:
    """In place of headers that nobody looks at."""

    def __call__(self):
        return []

    def get(self, name):
        return None


cdef object NO_HEADERS = _NoHeaders()


cdef class Totals:
    """What all accounts of a server count together. They are used on the server's thread."""


@cython.no_gc_clear    # until its end it knows the totals, which refer to nothing
cdef class Account:
    """Counts the bytes that a connection's streams hold."""

    def __cinit__(self):
        self.totals = Totals.__new__(Totals)

    def __init__(self, Totals totals=None):
        if totals is not None:
            self.totals = totals

    def __dealloc__(self):
        # however the connection ended, the totals must not include it any more
        self.totals.in_bytes -= self.in_bytes
        self.totals.out_bytes -= self.out_bytes + self.held

    cdef void count_in(self, Py_ssize_t n) noexcept:
        self.in_bytes += n
        self.totals.in_bytes += n

    cdef void count_out(self, Py_ssize_t n) noexcept:
        self.out_bytes += n
        self.totals.out_bytes += n

    cpdef int hold(self, Py_ssize_t n) except -1:
        """`n` more bytes of answers are held back; a negative `n`: so many fewer."""
        self.held += n
        self.totals.out_bytes += n
        return 0


cdef class Stream:
    """Base of whatever a stream of a connection may be."""

    def __init__(self, session, int stream_id, headers):
        # type: (Http2Session, ..., Headers) -> None
        self.begin(session, stream_id, headers)

    cdef int begin(self, session, int stream_id, headers) except -1:
        """What __init__() does, for subclasses that are compiled."""
        self.session = session
        self.account = session.account
        self.stream_id = stream_id
        self.headers = headers
        self.outbox = []
        return 0

    # ------------------------------------------------------------ for subclasses

    def on_reset(self, unsigned int code):
        """Called when the client or the connection has ended the stream. Nothing may be sent any more."""

    def on_writable(self):
        """Called when the outbox has become empty."""

    cpdef list head(self):
        # type: () -> list[tuple[bytes, bytes]]
        """The headers of an answer with a body."""
        return self.reply_headers

    cpdef list whole_head(self):
        # type: () -> list[tuple[bytes, bytes]] | None
        """The headers of an answer without a body; None if head() and the trailers must be sent apart."""
        return None

    # ------------------------------------------------------------ incoming

    cdef int opened(self, Py_ssize_t n) except -1:
        """The stream is open; called once, by the session. Its headers have `n` bytes."""
        if self.forgets_head:
            self.headers = NO_HEADERS
        elif not self.ended:
            self.head_bytes = n
            self.account.heads += n
            if n > TOLD_HEAD and self.account.budget is not None:
                self.account.budget.made(n)
        return 0

    def note_opened(self, Py_ssize_t n):
        """opened() for sessions written in Python."""
        self.opened(n)

    cdef int feed(self, const char* data, Py_ssize_t n) except -1:
        """Takes the next bytes of the stream's DATA."""
        return 0

    cpdef int end_of_input(self) except -1:
        """The client has sent everything; called once, by the session, after it has set `input_ended`."""
        return 0

    cdef bint lacks(self, Py_ssize_t n) noexcept:
        return False

    cdef char* place(self, Py_ssize_t* n) noexcept:
        return NULL

    cdef int drop_input(self) except -1:
        """Forgets what was received and not taken."""
        return 0

    def receive(self, data not None):
        # type: (Buffer) -> None
        """feed() for sessions written in Python. `data` is any buffer of bytes."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len:
                if self.access is not None:
                    self.access.bytes_in += view.len
                self.feed(<const char*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef void expect_input(self, Py_ssize_t n) noexcept:
        """`n` bytes are still to come for which there is room: nobody else may be given it."""
        self.coming += n
        self.account.coming += n

    cdef void came(self, Py_ssize_t n) noexcept:
        """`n` bytes of expect_input() have come, or will not."""
        if n > self.coming:
            n = self.coming
        self.coming -= n
        self.account.coming -= n

    cpdef int serve(self, Py_ssize_t n) except -1:
        """`n` bytes of complete messages are held until the call says served(), or has ended."""
        self.serving += n
        self.account.served_bytes += n
        return 0

    cpdef int served(self, Py_ssize_t n) except -1:
        """`n` bytes of serve() are held no longer. Does nothing when the call has ended."""
        if n > self.serving:
            n = self.serving
        self.serving -= n
        self.account.served_bytes -= n
        return 0

    @property
    def input_held(self) -> int:
        """Bytes of input that is not complete or not taken."""
        return 0

    cdef int abandon(self) except -1:
        """Drops everything half received or not yet sent."""
        if self.account.filling is self:
            self.account.filling = None
        self.drop_input()
        self.account.heads -= self.head_bytes
        self.head_bytes = 0
        self.came(self.coming)
        self.served(self.serving)
        self.account.count_out(-self.out_bytes)
        self.out_bytes = 0
        self.outbox = []
        self.out_first = self.out_at = 0
        if self.watchers is not None:
            self._tell_watchers(True)
        return 0

    cpdef int over(self) except -1:
        """Called by sessions when the stream has closed behind a complete answer."""
        self.ended = True
        if self.access is not None:
            self.tell_access(True)
        self.abandon()
        return 0

    def reset_by_peer(self, unsigned int code):
        """Called by sessions when the stream closes before its reply was complete. Calls on_reset once."""
        if not self.ended:
            self.ended = True
            self.refused = True
            if self.access is not None:
                self.tell_access(False)
            self.abandon()
            self.on_reset(code)

    cpdef bint stalled(self, int64_t now_ns, int64_t limit_ns) except -1:
        """True when the client has taken less than UNREAD of what waits for it within `limit_ns`. To be called regularly;
        the time counts from the first call that finds something waiting."""
        if not self.out_bytes or self.moved >= UNREAD or not self.seen_ns:
            self.moved = 0
            self.seen_ns = now_ns if self.out_bytes else 0
            return False
        return now_ns - self.seen_ns > limit_ns

    # ------------------------------------------------------------ the access log

    cpdef int logged(self, access, str client, bytes path, int64_t began=0) except -1:
        # type: (AccessLog, ..., ..., ...) -> int
        """Begins the stream's line of the access log. `began`: when its head came, 0 for now."""
        cdef bytes method = self.headers.get(b":method") or b""
        self.access = access.begin("HTTP/2.0", client, method.decode("latin-1"), path.decode("latin-1"), began)
        self.access.agent = self.headers.get(b"user-agent") or b""
        return 0

    cdef int tell_access(self, bint whole) except -1:
        """The stream has ended, with a whole answer or before that."""
        if self.headers_sent:
            for name, value in (self.reply_headers or self.trailers or ()):
                if name == b":status":
                    self.access.answers(int(value))
        self.on_end(whole)
        self.access.end()
        return 0

    def on_end(self, bint whole):
        """Called where the stream has a line of the access log, before it is written: subclasses add what only they know."""

    # ------------------------------------------------------------ outgoing

    def send_headers(self, list headers):
        # type: (list[tuple[bytes, bytes]]) -> None
        """Sets reply headers other than the usual ones; before the first buffer."""
        self.reply_headers = headers

    cdef int _queue(self, list segments) except -1:
        cdef Py_ssize_t n = 0
        for segment in segments:
            self.outbox.append(segment)
            if PyBytes_CheckExact(segment):
                n += PyBytes_GET_SIZE(segment)
            else:
                n += memoryview(segment).nbytes
        self.out_bytes += n
        self.account.count_out(n)
        if n > TOLD and self.account.budget is not None:
            self.account.budget.made(n)
        return 0

    def send_segments(self, list segments):
        """Queues a part of the answer (a list of buffers)."""
        if self.ended or self.trailers is not None:
            return
        self._queue(segments)
        self.session.output_ready(self)

    def reply(self, list segments, list trailers):
        # type: (..., list[tuple[bytes, bytes]]) -> None
        """Queues the whole answer: its buffers and the trailers, [] for none."""
        if self.ended or self.trailers is not None:
            return
        self._queue(segments)
        self.trailers = trailers
        self.session.output_ready(self)

    def finish(self, list trailers):
        # type: (list[tuple[bytes, bytes]]) -> None
        """Ends the reply once everything queued has been sent."""
        if self.ended or self.trailers is not None:
            return
        self.trailers = trailers
        self.session.output_ready(self)

    cdef int sent(self, Py_ssize_t n) except -1:
        self.out_bytes -= n
        self.moved += n
        self.gone += n
        if self.access is not None:
            self.access.bytes_out += n
        self.account.count_out(-n)
        if self.watchers is not None:
            self._tell_watchers(False)
        return 0

    @property
    def outbox_end(self) -> int:
        """Bytes that were ever put into the outbox."""
        return self.gone + self.out_bytes

    cpdef bint when_taken(self, object callback, int64_t end=0) except -1:
        # type: (Callable[[], None], ...) -> bool
        """Has callback() called once when the session has taken what is in the outbox, or it was dropped; with `end`, an
        earlier value of `outbox_end`, what was in it then. False: it was taken already, and callback() is not called."""
        cdef Py_ssize_t at
        if not end:
            end = self.gone + self.out_bytes
        if end <= self.gone or self.ended:
            return False
        if self.watchers is None:
            self.watchers = []
        at = len(self.watchers)
        while at and <int64_t>self.watchers[at - 1][0] > end:
            at -= 1
        self.watchers.insert(at, (end, callback))
        return True

    cdef int _tell_watchers(self, bint all) except -1:
        cdef list watchers = self.watchers
        while watchers and (all or <int64_t>watchers[0][0] <= self.gone):
            watchers.pop(0)[1]()
        if not watchers:
            self.watchers = None
        return 0

    def take(self, Py_ssize_t limit):
        # type: (...) -> list[Any]
        """Removes up to `limit` bytes from the outbox as a list of buffers (sessions in Python)."""
        cdef list taken = []
        cdef Py_ssize_t n
        while limit > 0 and self.out_first < len(self.outbox):
            view = memoryview(self.outbox[self.out_first]).cast("B")[self.out_at:]
            n = len(view)
            if n > limit:
                taken.append(view[:limit])
                self.out_at += limit
                self.sent(limit)
                limit = 0
            else:
                taken.append(view)
                self.sent(n)
                limit -= n
                self.next_segment()
        return taken

    def next_segment(self):
        """Drops the first buffer of the outbox."""
        self.outbox[self.out_first] = None
        self.out_first += 1
        self.out_at = 0
        if self.out_first == len(self.outbox) or self.out_first > 64:
            del self.outbox[: self.out_first]
            self.out_first = 0
