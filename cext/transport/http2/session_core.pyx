"""What the HTTP/2 sessions over libnghttp2 and h2 have in common: streams, the budget for frames that cost a peer nothing,
and what part of a frame has come.

Neither library tells of frames that are not whole, nor of all that are empty or unknown. So their heads are followed here. The
rules are those of cext/transport/http2/nghttp2_session.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t

from neptrio.transport.http2.stream cimport Account, Stream, Totals

import logging

from neptrio.transport.http2.limits import FloodBudget

log = logging.getLogger("neptrio.http2")

cdef enum:
    PREFACE = 24     # bytes
    HEAD = 9         # bytes of a frame's head
    DATA_FRAME = 0
    HEADERS_FRAME = 1
    CONTINUATION_FRAME = 9
    END_HEADERS = 4


cdef class Http2Session:
    """One HTTP/2 connection's state, without I/O: what both sessions are to connections and streams."""

    def __init__(self, open_stream, flood_budget, limits, Totals totals=None):
        # type: (OpenStream, FloodBudget | None, SessionLimits, ...) -> None
        self.open_stream = open_stream
        self.account = Account(totals)
        self.flood_budget = flood_budget if flood_budget is not None else FloodBudget()
        self.streams = {}
        self.most_frameless = 2 * limits.frame_size
        self.most_payload = limits.frame_size
        self.preface = PREFACE
        self.has_output = True

    # ------------------------------------------------------------ frames

    def arrived(self, data not None, int64_t now_ns):
        # type: (Buffer, ...) -> None
        """Bytes of the peer, before they are looked at: follows the frames, and charges those that are empty or unknown."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.follow(<const uint8_t*>view.buf, view.len, now_ns)
        finally:
            PyBuffer_Release(&view)

    cdef int follow(self, const uint8_t* data, size_t n, int64_t now_ns) except -1:
        """See arrived()."""
        cdef size_t at = self.preface if self.preface < n else n
        cdef size_t payload = self.payload
        cdef size_t step, whole = 0
        cdef const uint8_t* head
        cdef int empty = 0
        self.flood_budget.refill(now_ns, self.work)
        self.work = 0
        self.preface -= at
        while at < n:
            if payload:
                step = payload if payload < n - at else n - at
                payload -= step
                at += step
            else:
                if self.head_bytes == 0 and n - at >= HEAD:
                    head = data + at
                    at += HEAD
                else:
                    self.head[self.head_bytes] = data[at]
                    self.head_bytes += 1
                    at += 1
                    if self.head_bytes < HEAD:
                        continue
                    self.head_bytes = 0
                    head = self.head
                self.begun += 1
                payload = <size_t>head[0] << 16 | <size_t>head[1] << 8 | <size_t>head[2]
                if payload > self.most_payload:
                    self.too_large = payload
                if head[3] == HEADERS_FRAME or head[3] == CONTINUATION_FRAME:
                    self.in_block = not head[4] & END_HEADERS
                elif head[3] > CONTINUATION_FRAME or (head[3] == DATA_FRAME and not payload):
                    empty += 1
            if not payload and not self.in_block:
                whole = at
        self.payload = payload
        self.frameless = n - whole if whole else self.frameless + n
        if empty:
            self.charge(empty)
        return 0

    cpdef bint endless(self):
        """Whether too many bytes have come without a whole frame: a header block without end."""
        if self.frameless > self.most_frameless:
            self.flood(f"{self.frameless} bytes without a whole frame")
            return True
        return False

    @property
    def partial(self) -> bool:
        """True in the middle of a frame or of a request's headers."""
        return self.preface > 0 or self.payload > 0 or self.head_bytes > 0 or self.in_block

    cpdef int charge(self, int cost) except -1:
        """Takes from the budget; when it is used up the connection is to be ended."""
        if not self.flood_budget.spend(cost):
            self.flood("too many control frames")
        return 0

    cpdef int flood(self, str why) except -1:
        """The peer only makes noise."""
        self.flooded = True
        self.failure = why
        return 0

    # ------------------------------------------------------------ streams

    cpdef object reset_stream(self, Stream stream, unsigned int code):
        """Tells a stream that it has ended before its reply was complete."""
        try:
            stream.reset_by_peer(code)
        except Exception:
            log.exception("on_reset of stream %d failed", stream.stream_id)

    def hold(self):
        """Withholds the connection's flow-control credit: the peer can send only the rest of its window."""
        self.holding = True

    @property
    def wants_output(self) -> bool:
        """True when data_to_send() may return something."""
        return bool(self.has_output)

    # ------------------------------------------------------------ the sessions say

    @property
    def last_stream(self) -> int:
        """The highest stream id that the peer has opened, 0 before the first."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """True when neither side has anything more to send."""
        raise NotImplementedError

    def receive(self, data not None, int64_t now_ns=0):
        # type: (Buffer, ...) -> None
        """Takes bytes from the peer. A protocol error makes the session `dead`."""
        raise NotImplementedError

    def data_to_send(self) -> list:
        """The buffers to send, in order; [] when there are none."""
        raise NotImplementedError

    def output_ready(self, Stream stream not None):
        """To be called when a stream has something new to send: headers, data or its end."""
        raise NotImplementedError

    def resume_input(self, Stream stream not None):
        """Returns the flow-control credit withheld while the stream was paused."""
        raise NotImplementedError

    def release(self):
        """Ends hold() and returns the credit."""
        raise NotImplementedError

    def reset(self, Stream stream not None, int code=8):
        """Ends a stream at once with RST_STREAM."""
        raise NotImplementedError

    def ping(self):
        """Queues a PING; `pings_acked` counts the answers."""
        raise NotImplementedError

    def start_drain(self):
        """Tells the peer not to open new streams; open ones go on."""
        raise NotImplementedError

    def finish_drain(self):
        """Sends the final GOAWAY: streams after the last one received are ignored."""
        raise NotImplementedError

    def terminate(self, int code):
        """Sends a GOAWAY with an error code; the session is dead once its output was sent."""
        raise NotImplementedError

    def connection_lost(self):
        """The transport is gone, or takes nothing beyond what is queued: resets every open stream. data_to_send() still returns
        final frames (such as a GOAWAY), but no part of an answer."""
        raise NotImplementedError
