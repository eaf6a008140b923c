"""One gRPC call on an HTTP/2 stream, without I/O.

Incoming: DATA bytes are assembled into length-prefixed messages, each in one buffer of the
announced size; an oversized or malformed prefix refuses the call. Outgoing: buffers wait in the
outbox until the peer's windows let them go; large tensors are never joined.

Subclasses implement on_headers, on_message, on_half_close and on_reset.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy


cdef class GrpcStream:
    """Base of every kind of call the server answers."""

    def __init__(self, session, int stream_id, headers, max_message_bytes=0x7FFFFFFF):
        self.session = session
        self.stream_id = stream_id
        self.headers = headers
        self.max_message_bytes = max_message_bytes
        self.outbox = []
        self.want = -1

    # ------------------------------------------------------------ for subclasses

    def on_message(self, bytes message, bint compressed):
        """A whole message has arrived."""

    def on_half_close(self):
        """The client has sent everything it will send."""

    def on_reset(self, int code):
        """The client or the connection gave the call up. Nothing may be sent any more."""

    def on_writable(self):
        """The outbox has been emptied."""

    # ------------------------------------------------------------ incoming

    cdef bytes _assembled(self):
        cdef bytes message = self.message
        self.message = None
        self.message_at = NULL
        self.want = -1
        self.prefix_have = 0
        return message

    cdef int feed(self, const char* data, Py_ssize_t n) except -1:
        cdef Py_ssize_t take
        while n > 0 and not self.refused:
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
                self.message = PyBytes_FromStringAndSize(NULL, self.want)
                self.message_at = PyBytes_AS_STRING(self.message)
            take = self.want - self.have
            if take > n:
                take = n
            memcpy(self.message_at + self.have, data, take)
            self.have += take
            data += take
            n -= take
            if self.have == self.want:
                self.on_message(self._assembled(), self.compressed)
        return 0

    def receive(self, const unsigned char[::1] data not None):
        """feed() for sessions written in Python."""
        if data.shape[0]:
            self.feed(<const char*>&data[0], data.shape[0])

    @property
    def mid_message(self) -> bool:
        """True while a message is incomplete."""
        return self.prefix_have > 0

    # ------------------------------------------------------------ outgoing

    def send_headers(self, list headers):
        """Reply headers; must come before the first message."""
        self.reply_headers = headers

    def send_segments(self, list segments):
        """Queues a framed message (a list of buffers)."""
        if self.ended:
            return
        for segment in segments:
            self.outbox.append(segment)
            self.out_bytes += len(memoryview(segment))
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
        self.message = None
        self.finish([(b"grpc-status", str(status).encode()), (b"grpc-message", percent_encode(message))])

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
                self.out_bytes -= limit
                limit = 0
            else:
                taken.append(view)
                self.out_bytes -= n
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


def percent_encode(str message) -> bytes:
    """A status message as the gRPC wire wants it: printable ASCII, the rest percent-encoded UTF-8."""
    cdef bytes raw = message.encode("utf-8", "replace")
    cdef bytearray out = bytearray()
    cdef unsigned char b
    for b in raw:
        if 0x20 <= b <= 0x7E and b != 0x25:
            out.append(b)
        else:
            out += b"%%%02X" % b
    return bytes(out)
