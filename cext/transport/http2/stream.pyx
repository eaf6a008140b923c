"""One gRPC call on an HTTP/2 stream, without I/O.

Incoming: DATA bytes are assembled into length-prefixed messages, each in a buffer of the announced size, or, with
`source_of`, large ones in several (cext/codec/split_message); a prefix that is too large or malformed refuses the call. Outgoing: buffers wait in the outbox until the peer's windows have room;
large tensors are never joined to other data.

Subclasses implement on_message, on_half_close, on_reset and on_writable.

Rules:
 1. A stream's bytes are counted in its connection's Account exactly while it holds them: those of a message until it is
    complete (with `keeps`, until the call has taken it) or abandoned, then, where the call says so with serve(), until
    the call says served(), or has ended; those of a reply until the session took them.
 2. A call is refused once; after that its input is read and dropped.
 3. `ended` is set before on_reset; nothing is queued on an ended stream.
 4. With a `budget` in the account, messages of more than ASKED bytes are received only while there is room for them
    (service.held_bytes): it is asked before the first byte and again for each ASKED_STEP. The bytes of a message without
    room are dropped as they come; on_no_room() says what becomes of the call.
 5. Whoever has received bytes at place() already passes them to feed() like any others, before anything else is called;
    they are then not copied.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from libc.string cimport memcpy

from neptrio.codec.split_message cimport SPLIT_BYTES, SplitMessage, split


cdef enum:
    ASKED = 32 << 10       # bytes of a message or an answer that the budget is not asked for, or told of
    ASKED_STEP = 256 << 10


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

    cdef void count_served(self, Py_ssize_t n) noexcept:
        self.served_bytes += n

    cdef void count_out(self, Py_ssize_t n) noexcept:
        self.out_bytes += n
        self.totals.out_bytes += n

    cpdef int hold(self, Py_ssize_t n) except -1:
        """`n` more bytes of answers are held back; a negative `n`: so many fewer."""
        self.held += n
        self.totals.out_bytes += n
        return 0


cdef class GrpcStream:
    """Base of every kind of call the server answers."""

    def __init__(self, session, int stream_id, headers, max_message_bytes=0x7FFFFFFF):
        self.session = session
        self.account = session.account
        self.stream_id = stream_id
        self.headers = headers
        self.max_message_bytes = max_message_bytes
        self.outbox = []
        self.want = -1

    # ------------------------------------------------------------ for subclasses

    def on_message(self, message, bint compressed):
        """Called with each whole message: bytes, or a SplitMessage if `source_of` is set."""

    def on_no_room(self, error):
        """Called in place of on_message when the server has no room for the message (TritonError)."""
        self.refuse(error.code.grpc.value, str(error))

    def on_half_close(self):
        """Called when the client has sent everything."""

    def on_reset(self, unsigned int code):
        """Called when the client or the connection has ended the call. Nothing may be sent any more."""

    def on_writable(self):
        """Called when the outbox has become empty."""

    # ------------------------------------------------------------ incoming

    cdef object _assembled(self):
        cdef object message = self.message
        if self.message_at == NULL:
            message = (<SplitMessage>message).finish()
        if self.keeps:
            self.kept += self.have
        else:
            self.account.count_in(-self.have)
        self.have = 0
        self.message = None
        self.message_at = NULL
        self.want = -1
        self.prefix_have = 0
        return message

    cdef int feed(self, const char* data, Py_ssize_t n) except -1:
        cdef Py_ssize_t take
        while n > 0 and not self.refused:
            if self.skipping > 0:
                take = self.skipping if self.skipping < n else n
                self.skipping -= take
                data += take
                n -= take
                if self.skipping == 0:
                    self.prefix_have = 0
                continue
            if self.want < 0:
                take = 5 - self.prefix_have
                if take > n:
                    take = n
                memcpy(&self.prefix[self.prefix_have], data, take)
                self.prefix_have += <int>take
                data += take
                n -= take
                if self.prefix_have < 5:
                    return 0
                self.compressed = self.prefix[0] == 1
                if self.prefix[0] > 1:
                    self.refuse(13, f"invalid gRPC frame: compression flag is {self.prefix[0]}, expected 0 or 1")
                    return 0
                self.want = (<Py_ssize_t>self.prefix[1] << 24 | <Py_ssize_t>self.prefix[2] << 16
                             | <Py_ssize_t>self.prefix[3] << 8 | <Py_ssize_t>self.prefix[4])
                if self.want > <Py_ssize_t>self.max_message_bytes:
                    self.refuse(8, f"received message larger than max ({self.want} vs. {self.max_message_bytes})")
                    return 0
                self.have = 0
                self.ask_at = 0
                if self.want > ASKED and self.account.budget is not None:
                    self.ask_at = min(self.want, ASKED_STEP)
                    if not self._room(self.want):
                        continue
                self.undecided = self.source_of is not None and self.want > SPLIT_BYTES and not self.compressed
                if not self.undecided and not self._allocate():
                    return 0
            if self.message is None and n > 0:
                take = self._split(data, n)
                data += take
                n -= take
                if self.message is None and not self._allocate():
                    return 0
            take = self.want - self.have
            if take > n:
                take = n
            if self.message_at != NULL:
                if self.message_at + self.have != data:
                    memcpy(self.message_at + self.have, data, take)
            elif self.message is not None:
                try:
                    (<SplitMessage>self.message).add(data, take)
                except MemoryError:
                    self.refuse(8, f"no memory for a message of {self.want} bytes")
                    return 0
            self.have += take
            self.account.count_in(take)
            data += take
            n -= take
            if self.undecided and take > 0 and self.have > take:
                self._split(self.message_at, self.have)
            if self.ask_at and self.have >= self.ask_at:
                self.ask_at = min(self.want, self.have + ASKED_STEP)
                if not self._room(0):
                    continue
            if self.have == self.want:
                self.on_message(self._assembled(), self.compressed)
        return 0

    cdef bint _room(self, Py_ssize_t size) except -1:
        """Asks for room for the message under way; `size`: for how many bytes that were not asked for yet."""
        error = self.account.budget.problem(size)
        if error is None:
            return True
        if self.account.filling is self:
            self.account.filling = None
        self.skipping = self.want - self.have
        self.prefix_have = 5 if self.skipping else 0
        self.account.count_in(-self.have)
        self.have = 0
        self.want = -1
        self.undecided = False
        self.message = None
        self.message_at = NULL
        self.on_no_room(error)
        return False

    cdef bint lacks(self, Py_ssize_t n) noexcept:
        return self.want - self.have >= n and self.message is not None

    cdef char* place(self, Py_ssize_t* n) noexcept:
        cdef SplitMessage parts
        if self.refused or self.message is None:
            return NULL
        if self.message_at != NULL:
            n[0] = self.want - self.have
            return self.message_at + self.have
        parts = <SplitMessage>self.message
        n[0] = parts.left
        return parts.at if parts.whole is None and parts.left > 0 else NULL

    cdef bint _allocate(self) except -1:
        """Makes room for the message in one piece. A large buffer's pages use no memory until they are written."""
        try:
            self.message = PyBytes_FromStringAndSize(NULL, self.want)
        except MemoryError:
            self.refuse(8, f"no memory for a message of {self.want} bytes")
            return False
        self.message_at = PyBytes_AS_STRING(self.message)
        return True

    cdef Py_ssize_t _split(self, const char* data, Py_ssize_t n) except -1:
        """Splits the message, of which these are the first bytes, if it can be split. Returns how many it has taken."""
        cdef SplitMessage made = split(data, min(n, self.want), self.want, self.source_of, &self.undecided)
        cdef Py_ssize_t size
        if made is None:
            return 0
        size = len(made.head)
        if self.message is None:
            self.have = size
            self.account.count_in(size)
        else:  # in one piece so far, and counted already
            made.add(data + size, self.have - size)
        self.message_at = NULL
        self.message = made
        return size

    def receive(self, data not None):
        """feed() for sessions written in Python. `data` is any buffer of bytes."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len:
                self.feed(<const char*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    cpdef int taken(self) except -1:
        """The call has taken its complete messages: they are no longer counted for the stream."""
        if self.kept:
            self.account.count_in(-self.kept)
            self.kept = 0
        return 0

    cpdef int serve(self, Py_ssize_t n) except -1:
        """`n` bytes of complete messages are held until the call says served(), or has ended."""
        self.serving += n
        self.account.count_served(n)
        return 0

    cpdef int served(self, Py_ssize_t n) except -1:
        """`n` bytes of serve() are held no longer. Does nothing when the call has ended."""
        if n > self.serving:
            n = self.serving
        self.serving -= n
        self.account.count_served(-n)
        return 0

    @property
    def input_held(self) -> int:
        """Bytes of messages that are not complete or not taken."""
        return self.have + self.kept

    @property
    def mid_message(self) -> bool:
        """True while a message is incomplete."""
        return self.prefix_have > 0

    cdef int abandon(self) except -1:
        """Drops everything half received or not yet sent."""
        if self.account.filling is self:
            self.account.filling = None
        self.account.count_in(-(self.have + self.kept))
        self.have = self.kept = 0
        self.served(self.serving)
        self.message = None
        self.account.count_out(-self.out_bytes)
        self.out_bytes = 0
        self.outbox = []
        self.out_first = self.out_at = 0
        return 0

    def reset_by_peer(self, unsigned int code):
        """Called by sessions when the stream closes before its reply was complete. Calls on_reset once."""
        if not self.ended:
            self.ended = True
            self.refused = True
            self.abandon()
            self.on_reset(code)

    # ------------------------------------------------------------ outgoing

    def send_headers(self, list headers):
        """Sets reply headers other than the usual ones; before the first message."""
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
        if n > ASKED and self.account.budget is not None:
            self.account.budget.made(n)
        return 0

    def send_segments(self, list segments):
        """Queues a message with its frame header (a list of buffers)."""
        if self.ended or self.trailers is not None:
            return
        self._queue(segments)
        self.session.output_ready(self)

    def reply(self, list segments, list trailers):
        """Queues the whole answer of a unary call: one message and the trailers."""
        if self.ended or self.trailers is not None:
            return
        self._queue(segments)
        self.trailers = trailers
        self.session.output_ready(self)

    def finish(self, list trailers):
        """Ends the reply once everything queued has been sent."""
        if self.ended or self.trailers is not None:
            return
        self.trailers = trailers
        self.session.output_ready(self)

    def refuse(self, int status, str message):
        """Ends the call with a status; the rest of its input is ignored."""
        self.refused = True
        self.account.count_in(-(self.have + self.kept))
        self.have = self.kept = 0
        self.served(self.serving)
        self.message = None
        self.finish([(b"grpc-status", str(status).encode()), (b"grpc-message", percent_encode(message))])
        self.on_refused()

    def on_refused(self):
        """Called when refuse() has ended the call because of its input."""

    cdef int sent(self, Py_ssize_t n) except -1:
        self.out_bytes -= n
        self.account.count_out(-n)
        return 0

    def take(self, Py_ssize_t limit):
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


cdef enum:
    LONGEST_STATUS = 6000  # clients refuse trailers of more than 8 KiB


def percent_encode(str message) -> bytes:
    """A status message in the form that gRPC sends: printable ASCII, other characters as percent-encoded UTF-8.

    Text that is longer than clients accept in trailers is cut between two characters. Spaces at the ends are encoded,
    because a header value must not begin or end with one (RFC 9113, 8.2.1): strict clients drop such a connection.
    """
    cdef bytes raw = message.encode("utf-8", "replace")
    cdef bytearray out = bytearray()
    cdef unsigned char b
    if len(raw) <= LONGEST_STATUS and not raw.startswith(b" ") and not raw.endswith(b" "):
        for b in raw:
            if not 0x20 <= b <= 0x7E or b == 0x25:
                break
        else:
            return raw
    for b in raw:
        if len(out) > LONGEST_STATUS and b & 0xC0 != 0x80:
            out += b"..."
            break
        if 0x20 <= b <= 0x7E and b != 0x25:
            out.append(b)
        else:
            out += b"%%%02X" % b
    if out and out[0] == 0x20:
        out[0:1] = b"%20"
    if out and out[len(out) - 1] == 0x20:
        out[len(out) - 1:] = b"%20"
    return bytes(out)
