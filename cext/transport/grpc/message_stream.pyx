"""One gRPC call on an HTTP/2 stream, without I/O: its DATA are messages with a length in front.

Each message is assembled in a buffer of the announced size, or, with `source_of`, large ones in several
(cext/codec/split_message); a prefix that is too large or malformed refuses the call. The rules of transport/http2/stream
hold; subclasses implement on_message, on_half_close, on_reset and on_writable.

Rules:
 1. A message's bytes are counted until it is complete; with `keeps`, until the call has taken it. A call that lets messages
    wait says so with queued(): each then counts with WAITING bytes more, or a window full of empty ones would cost nothing.
 2. With a `budget` in the account, messages of more than ASKED bytes are received only while there is room for them
    (service.held_bytes): it is asked before the first byte and again for each ASKED_STEP. The bytes of a message without
    room are dropped as they come; on_no_room() says what becomes of the call.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy

from neptrio.codec.split_message cimport SPLIT_BYTES, SplitMessage, split
from neptrio.transport.http2.stream cimport Stream

from grpclib.const import Status


cdef enum:
    MOST = 0x7FFFFFFF      # bytes of a message, where a kind of call has no lower limit
    ASKED = 32 << 10       # bytes of a message that the budget is not asked for
    ASKED_STEP = 256 << 10
    WAITING = 128          # bytes of memory that a message takes in a queue beside its own: 69 if it is empty, else 117

cdef list _OK_HEADERS = [
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
]
cdef dict _NAMES = {b"%d" % status.value: status.name for status in Status}
OK_HEADERS = _OK_HEADERS  # type: list[tuple[bytes, bytes]]


cdef class GrpcStream(Stream):
    """Base of every kind of call the server answers."""

    cdef int begin(self, session, int stream_id, headers) except -1:
        Stream.begin(self, session, stream_id, headers)
        self.max_message_bytes = MOST
        self.want = -1
        return 0

    # ------------------------------------------------------------ for subclasses

    def on_message(self, message, bint compressed):
        """Called with each whole message: bytes, or a SplitMessage if `source_of` is set."""

    def on_no_room(self, error):
        # type: (TritonError) -> None
        """Called in place of on_message when the server has no room for the message (TritonError)."""
        self.refuse(error.code.grpc.value, str(error))

    def on_half_close(self):
        """Called when the client has sent everything."""

    def on_refused(self):
        """Called when refuse() has ended the call because of its input."""

    cpdef list head(self):
        return _OK_HEADERS if self.reply_headers is None else self.reply_headers

    cpdef list whole_head(self):
        # trailers-only: one HEADERS frame ends the call; a refusal brings its own :status
        if self.reply_headers is not None:
            return None
        if self.trailers[0][0] == b":status":
            return self.trailers
        return _OK_HEADERS + self.trailers

    def on_end(self, bint whole):
        """See Stream: adds the status of gRPC, and that of HTTP, which is 200 unless a refusal brings its own."""
        self.access.grpc = "CANCELLED"
        if whole:
            for name, value in self.trailers:
                if name == b"grpc-status":
                    self.access.grpc = _NAMES.get(value, "UNKNOWN")
        if self.headers_sent:
            self.access.answers(200)

    # ------------------------------------------------------------ incoming

    cdef object _assembled(self):
        cdef object message = self.message
        if self.message_at == NULL:
            message = (<SplitMessage>message).finish()
        if self.keeps:
            self.kept += self.have
            if self.have > ASKED:  # _room() was asked for it
                self.asked_for += self.have
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
                if self.want > self.max_message_bytes:
                    self.refuse(8, f"received message larger than max ({self.want} vs. {self.max_message_bytes})")
                    return 0
                self.have = 0
                self.ask_at = 0
                if self.want > ASKED and self.account.budget is not None:
                    self.ask_at = min(self.want, ASKED_STEP)
                    if not self._room(self.want):
                        continue
                    self.expect_input(self.want)
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
            self.came(take)
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
        self.came(self.coming)
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
            self.came(size)
        else:  # in one piece so far, and counted already
            made.add(data + size, self.have - size)
        self.message_at = NULL
        self.message = made
        return size

    cpdef int end_of_input(self) except -1:
        if self.refused:
            return 0
        if self.prefix_have:
            self.refuse(13, "the request ended in the middle of a message")
        else:
            self.on_half_close()
        return 0

    cdef int drop_input(self) except -1:
        self.account.count_in(-(self.have + self.kept))
        self.came(self.coming)
        self.have = self.kept = self.asked_for = 0
        self.message = None
        return 0

    cpdef int taken(self) except -1:
        """The call has taken its complete messages: they are no longer counted for the stream."""
        if self.kept:
            self.account.count_in(-self.kept)
            self.kept = self.asked_for = 0
        return 0

    cpdef bint queued(self) except -1:
        """A complete message waits, until taken() or unqueued(). False: so many wait that there is no room, and the call is
        refused."""
        self.kept += WAITING
        self.account.count_in(WAITING)
        if self.kept - self.asked_for < ASKED or self.account.budget is None:
            return True
        error = self.account.budget.problem(self.kept - self.asked_for)
        self.asked_for = self.kept
        if error is None:
            return True
        self.refuse(error.code.grpc.value, str(error))
        return False

    cpdef int unqueued(self) except -1:
        """One that waited was taken."""
        if self.kept >= WAITING:  # else the call was refused
            self.account.count_in(-WAITING)
            self.kept -= WAITING
            self.asked_for = min(self.asked_for, self.kept)
        return 0

    @property
    def input_held(self) -> int:
        """Bytes of messages that are not complete or not taken."""
        return self.have + self.kept

    @property
    def mid_message(self) -> bool:
        """True while a message is incomplete."""
        return self.prefix_have > 0

    def refuse(self, int status, str message):
        """Ends the call with a status; the rest of its input is ignored."""
        self.refused = True
        self.drop_input()
        self.served(self.serving)
        self.finish([(b"grpc-status", str(status).encode()), (b"grpc-message", percent_encode(message))])
        self.on_refused()


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
