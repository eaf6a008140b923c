"""Server-side HTTP/2 over libnghttp2, without I/O: bytes in -> calls on streams, replies -> bytes out.

The problem: at tens of thousands of calls a second every Python object per frame counts. The choice: nghttp2 parses and
makes frames; headers stay in nghttp2's shared buffers until somebody asks for them; message bytes go from the receive
buffer straight into the message; replies leave through a no-copy data source, so a large tensor is only referenced
until the socket takes it.

Rules:
 1. Nothing here touches a socket. receive() takes bytes, data_to_send() returns buffers to be
    sent in order.
 2. The session calls a stream's methods only inside receive() or data_to_send(). When one raises, its stream is reset
    and the session goes on.
 3. A stream is in `streams` from its headers to its close; on_reset is called if and only if it closes before its reply
    was complete.
 4. Flow-control credit of the connection is returned as bytes arrive, credit of a stream only while that
    stream is not paused: a slow call holds back its own sender, not its neighbours.
 5. A fatal protocol error queues a GOAWAY; `dead` is then true and the connection must be closed
    once the output is flushed.
 6. Frames that cost the peer little and us something (PING, SETTINGS, RST_STREAM, PRIORITY, WINDOW_UPDATE, empty DATA)
    are paid from a budget, which useful work and time refill. A peer that exceeds it is disconnected with
    ENHANCE_YOUR_CALM. See neptrio.transport.http2.limits.FloodBudget. So is one that leaves MOST_QUEUED frames unread that
    the library has to send: it refuses streams beyond the limit by itself, and lets a peer open them that has not
    acknowledged our SETTINGS.
 7. A reply that ends before its request did is followed by RST_STREAM(NO_ERROR), so that the client does not send the
    rest of a message that nobody reads.
 8. The library holds two kinds of pointers to our objects, without counting them. Pointers to the Session: the
    library's session is deleted before the Session or together with it. Pointers to a stream, from the submission of
    its reply to its close: all that time it is in `streams`, because it is put there before, and only
    on_stream_close removes it, after which the library does not use the pointer. Whoever else empties `streams` must
    delete the library's session first (connection_lost).
 9. In the middle of a large message the account says whose bytes come next, and how many of them this frame still
    has: the connection receives them at their place and passes them here from there. Nothing but a frame's payload
    may be received so, since somebody else can write to that memory, and the library believes what it is given.
10. The library is not entered twice at a time: no callback calls receive(), data_to_send() or connection_lost(). After
    sending has failed it is not asked to send again.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from neptrio.transport.http2.stream cimport Account, Stream, Totals
from neptrio.transport.http2.output cimport Output
from neptrio.transport.http2.session_core cimport Http2Session
from neptrio.transport.http2.nghttp2 cimport *
from neptrio.transport.http2.nghttp2_headers cimport (
    MAX_REPLY_HEADERS,
    Collected,
    block_of,
    collect,
    drop,
    reply_headers,
)

import logging

from neptrio.transport.http2.limits import ENHANCE_YOUR_CALM, GRPC, HEADER_BOMB, MAX_HEADER_LIST

log = logging.getLogger("neptrio.http2")

cdef enum:
    LARGE = 32768    # with so much of a message still to come, it is worth receiving it at its place
    MOST_QUEUED = 16384    # frames to be sent, of some 200 bytes each: several times what one pass of a peer that reads makes

cdef int _ENHANCE_YOUR_CALM = ENHANCE_YOUR_CALM
cdef bytes TOO_MANY_PINGS = b"too_many_pings"


cdef class Session(Http2Session):
    """One HTTP/2 connection's state. `open_stream(session, stream_id, path, headers)` makes calls.

    `open_stream` returns a Stream; `headers` is a callable that gives the request's header
    list, so calls that need none pay for none.
    """

    cdef nghttp2_session* session
    cdef Output out
    cdef Collected headers         # the headers being received
    cdef bint unsendable           # sending has failed: the state of the last frame is unknown
    cdef bint inside               # the library, and with it one of its callbacks, is running
    cdef bint opening              # open_stream() is running: its stream is not yet in `streams`

    def __cinit__(self):
        self.session = NULL
        self.out = Output.__new__(Output)
        self.headers.limit = MAX_HEADER_LIST
        self.headers.bomb = HEADER_BOMB

    def __init__(self, open_stream, flood_budget=None, *, limits=GRPC, Totals totals=None):
        # type: (OpenStream, FloodBudget | None, SessionLimits, ...) -> None
        cdef nghttp2_session_callbacks* callbacks
        cdef nghttp2_option* option
        cdef nghttp2_settings_entry[4] settings
        Http2Session.__init__(self, open_stream, flood_budget, limits, totals)
        nghttp2_session_callbacks_new(&callbacks)
        nghttp2_session_callbacks_set_on_begin_frame_callback(callbacks, <void*>on_begin_frame)
        nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, <void*>on_begin_headers)
        nghttp2_session_callbacks_set_on_header_callback2(callbacks, <void*>on_header)
        nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, <void*>on_frame_recv)
        nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, <void*>on_frame_send)
        nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, <void*>on_data_chunk_recv)
        nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, <void*>on_stream_close)
        nghttp2_session_callbacks_set_send_callback(callbacks, <void*>on_send)
        nghttp2_session_callbacks_set_send_data_callback(callbacks, <void*>on_send_data)
        nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, <void*>on_read_length)
        nghttp2_option_new(&option)
        nghttp2_option_set_no_auto_window_update(option, 1)
        nghttp2_option_set_no_closed_streams(option, 1)
        neptrio_raise_rate_limits(option)
        neptrio_take_spaces(option)
        cdef int rv = nghttp2_session_server_new2(&self.session, callbacks, <void*>self, option)
        nghttp2_option_del(option)
        nghttp2_session_callbacks_del(callbacks)
        if rv != 0:
            raise MemoryError
        settings[0].settings_id = NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS
        settings[0].value = limits.streams
        settings[1].settings_id = NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE
        settings[1].value = limits.stream_window
        settings[2].settings_id = NGHTTP2_SETTINGS_MAX_FRAME_SIZE
        settings[2].value = limits.frame_size
        settings[3].settings_id = NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE
        settings[3].value = MAX_HEADER_LIST
        nghttp2_submit_settings(self.session, NGHTTP2_FLAG_NONE, settings, 4)
        nghttp2_session_set_local_window_size(self.session, NGHTTP2_FLAG_NONE, 0, limits.connection_window)

    def __dealloc__(self):
        drop(&self.headers)
        if self.session != NULL:
            nghttp2_session_del(self.session)

    # ------------------------------------------------------------ input

    def receive(self, data not None, int64_t now_ns=0):
        # type: (Buffer, ...) -> None
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len and not self.dead:
                self.feed(<const uint8_t*>view.buf, view.len, now_ns)
        finally:
            PyBuffer_Release(&view)

    cdef int feed(self, const uint8_t* data, size_t size, int64_t now_ns) except -1:
        cdef ssize_t rv
        self.check_outside()
        self.follow(data, size, now_ns)
        self.inside = True
        rv = 0 if self.flooded else nghttp2_session_mem_recv(self.session, data, size)
        self.inside = False
        self.has_output = True
        if rv >= 0:
            self.endless()
            if nghttp2_session_get_outbound_queue_size(self.session) > MOST_QUEUED:
                self.flood("too many frames that it does not read")
        if rv < 0 or self.flooded:
            self.dead = True
            if self.failure is None:
                self.failure = nghttp2_strerror(<int>rv).decode()
            # gRPC's clients ask less often when they read this text, and only then
            if self.flooded and self.failure == "too_many_pings":
                nghttp2_submit_goaway(
                    self.session, NGHTTP2_FLAG_NONE, nghttp2_session_get_last_proc_stream_id(self.session),
                    _ENHANCE_YOUR_CALM, <const uint8_t*><const char*>TOO_MANY_PINGS, len(TOO_MANY_PINGS))
            else:
                nghttp2_session_terminate_session(
                    self.session, _ENHANCE_YOUR_CALM if self.flooded or rv == NGHTTP2_ERR_FLOODED else 1)
        elif not nghttp2_session_want_read(self.session):
            self.dead = True  # the library has queued a GOAWAY with an error
            if self.failure is None:
                self.failure = "protocol error"
        return 0

    def connection_lost(self):
        if self.session == NULL:
            return
        self.check_outside()
        self.dead = True
        for stream in list(self.streams.values()):
            self.reset_stream(stream, NGHTTP2_CANCEL)
        self.send_all()
        self.has_output = not self.out.empty()
        nghttp2_session_del(self.session)
        self.session = NULL
        self.streams.clear()
        self.open_stream = None  # it refers to the connection, which would live until the collector finds both

    cdef int check_outside(self) except -1:
        if self.inside:
            raise RuntimeError("an HTTP/2 session was entered from inside one of its callbacks")
        return 0

    cdef int send_all(self) except -1:
        """Has the library write what it wants to send into `out`."""
        cdef int rv
        if self.unsendable:
            return 0
        self.inside = True
        rv = nghttp2_session_send(self.session)
        self.inside = False
        if rv != 0:
            self.dead = self.unsendable = True
            self.failure = nghttp2_strerror(rv).decode()
        return 0

    # ------------------------------------------------------------ output

    def output_ready(self, Stream stream not None):
        cdef nghttp2_data_provider provider
        cdef nghttp2_nv[MAX_REPLY_HEADERS] nva
        cdef int n
        self.has_output = True
        if stream.ended or self.dead:
            return
        if not stream.headers_sent:
            stream.headers_sent = True
            if self.opening:
                self.streams[stream.stream_id] = stream    # it is lent now, and may yet fail to open
            if stream.trailers is not None and not stream.out_bytes:
                headers = stream.whole_head()
                if headers is not None:    # one HEADERS frame is the whole answer
                    n = reply_headers(nva, MAX_REPLY_HEADERS, headers)
                    nghttp2_submit_response(self.session, stream.stream_id, nva, n, NULL)
                    return
            headers = stream.head()
            n = reply_headers(nva, MAX_REPLY_HEADERS, headers)
            provider.source.ptr = <void*>stream
            provider.read_callback = <nghttp2_data_source_read_callback><void*>read_outbox  # called with the GIL held
            nghttp2_submit_response(self.session, stream.stream_id, nva, n, &provider)
        else:
            nghttp2_session_resume_data(self.session, stream.stream_id)

    def reset(self, Stream stream not None, int code=8):
        if self.session == NULL:
            return
        nghttp2_submit_rst_stream(self.session, NGHTTP2_FLAG_NONE, stream.stream_id, code)
        self.has_output = True

    def resume_input(self, Stream stream not None):
        stream.paused = False
        if stream.withheld and not stream.ended and self.session != NULL:
            nghttp2_session_consume_stream(self.session, stream.stream_id, stream.withheld)
            stream.withheld = 0
            self.has_output = True

    def release(self):
        self.holding = False
        if self.held_credit and not self.dead:
            nghttp2_session_consume_connection(self.session, self.held_credit)
            self.has_output = True
        self.held_credit = 0

    def ping(self):
        if self.session == NULL:
            return
        nghttp2_submit_ping(self.session, NGHTTP2_FLAG_NONE, NULL)
        self.has_output = True

    def start_drain(self):
        if not self.draining and not self.dead:
            self.draining = True
            nghttp2_submit_shutdown_notice(self.session)
            self.has_output = True

    @property
    def last_stream(self) -> int:
        if self.session == NULL:
            return 0
        return nghttp2_session_get_last_proc_stream_id(self.session)

    def finish_drain(self):
        if not self.dead:
            nghttp2_submit_goaway(
                self.session, NGHTTP2_FLAG_NONE, nghttp2_session_get_last_proc_stream_id(self.session),
                NGHTTP2_NO_ERROR, NULL, 0)
            self.has_output = True

    def terminate(self, int code):
        if self.session == NULL:
            return
        nghttp2_session_terminate_session(self.session, code)
        self.dead = True
        self.has_output = True

    @property
    def finished(self) -> bool:
        return (self.dead or (not nghttp2_session_want_read(self.session))) and not self.has_output

    def data_to_send(self) -> list:
        if not self.has_output:
            return []
        self.check_outside()
        self.has_output = False
        if self.session != NULL:
            self.send_all()
        return self.out.take()


# ---------------------------------------------------------------- nghttp2 callbacks

cdef int on_begin_frame(nghttp2_session* session, const nghttp2_frame_hd* head, void* user) noexcept:
    cdef Session self = <Session>user
    cdef Py_ssize_t size = head.length if head.type == NGHTTP2_DATA and not head.flags & NGHTTP2_FLAG_PADDED else 0
    self.account.frame_size = self.account.frame_left = size
    if head.type == NGHTTP2_PRIORITY:    # libraries without priorities (RFC 9113, 5.3) do not tell when it has come
        try:
            self.charge(1)
        except Exception:
            log.exception("a frame could not be charged")
        if self.flooded:
            return NGHTTP2_ERR_CALLBACK_FAILURE
    return 0


cdef int on_begin_headers(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    drop(&(<Session>user).headers)
    return 0


cdef int on_header(nghttp2_session* session, const nghttp2_frame* frame, nghttp2_rcbuf* name,
                   nghttp2_rcbuf* value, uint8_t flags, void* user) noexcept:
    cdef Session self = <Session>user
    if frame.headers.cat == NGHTTP2_HCAT_REQUEST and not collect(&self.headers, name, value):
        self.flooded = True
        return NGHTTP2_ERR_CALLBACK_FAILURE
    return 0


cdef _open(Session self, int32_t stream_id):
    cdef nghttp2_vec v
    cdef bytes path = b""
    if self.headers.path >= 0:
        v = nghttp2_rcbuf_get_buf(self.headers.values[self.headers.path])
        path = (<char*>v.base)[: v.len]
    self.opening = True
    try:
        stream = self.open_stream(self, stream_id, path, block_of(&self.headers))
    finally:
        self.opening = False
    (<Stream?>stream).opened(min(self.headers.bytes, self.headers.limit))
    if self.streams.setdefault(stream_id, stream) is not stream:
        raise RuntimeError("a stream that has begun to answer was replaced by another")
    return stream


cdef int on_frame_recv(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    cdef Session self = <Session>user
    cdef int32_t stream_id = frame.hd.stream_id
    cdef Stream stream
    cdef uint8_t kind = frame.hd.type
    try:
        if kind == NGHTTP2_PING:
            if frame.hd.flags & NGHTTP2_FLAG_ACK:
                self.pings_acked += 1
            elif not self.flood_budget.pinged(len(self.streams)):
                self.flood("too_many_pings")
        elif kind == NGHTTP2_RST_STREAM or kind == NGHTTP2_WINDOW_UPDATE:
            self.charge(1)
        elif kind == NGHTTP2_SETTINGS:
            self.charge(1 if frame.hd.flags & NGHTTP2_FLAG_ACK else 10)
        if self.flooded:
            return NGHTTP2_ERR_CALLBACK_FAILURE
        if frame.hd.type == NGHTTP2_HEADERS and frame.headers.cat == NGHTTP2_HCAT_REQUEST:
            stream = _open(self, stream_id)
        elif frame.hd.type != NGHTTP2_DATA and frame.hd.type != NGHTTP2_HEADERS:
            return 0
        else:
            stream = self.streams.get(stream_id)
        if stream is not None and frame.hd.flags & NGHTTP2_FLAG_END_STREAM and not stream.input_ended:
            stream.input_ended = True
            stream.end_of_input()
    except Exception:
        log.exception("stream %d failed", stream_id)
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream_id, NGHTTP2_INTERNAL_ERROR)
    return 0


cdef int on_data_chunk_recv(nghttp2_session* session, uint8_t flags, int32_t stream_id, const uint8_t* data,
                            size_t n, void* user) noexcept:
    cdef Session self = <Session>user
    cdef Stream stream
    cdef Account account = self.account
    account.frame_left -= n if n < <size_t>account.frame_left else account.frame_left
    if self.holding:
        self.held_credit += n
    else:
        nghttp2_session_consume_connection(session, n)
    try:
        stream = self.streams.get(stream_id)
        if stream is None or stream.ended:
            return 0
        if stream.access is not None:
            stream.access.bytes_in += n
        stream.feed(<const char*>data, n)
        if stream.lacks(LARGE):
            account.filling = stream
        elif account.filling is not None:
            account.filling = None
        if stream.paused:
            stream.withheld += n
        else:
            nghttp2_session_consume_stream(session, stream_id, n)
    except Exception:
        log.exception("stream %d failed", stream_id)
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream_id, NGHTTP2_INTERNAL_ERROR)
    return 0


cdef int on_stream_close(nghttp2_session* session, int32_t stream_id, uint32_t code, void* user) noexcept:
    cdef Session self = <Session>user
    cdef Stream stream = self.streams.pop(stream_id, None)
    if stream is not None and not stream.ended:
        if stream.trailers is not None and not stream.out_bytes and code == 0:
            self.work += 2
            stream.over()
        else:
            self.reset_stream(stream, code)
    return 0


cdef int on_frame_send(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    cdef Session self = <Session>user
    cdef Stream stream
    if frame.hd.type == NGHTTP2_DATA:
        self.work += 3
    elif frame.hd.type == NGHTTP2_HEADERS:
        self.flood_budget.strikes = 0
    else:
        return 0
    if frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
        stream = self.streams.get(frame.hd.stream_id)
        if stream is not None and not stream.input_ended:
            nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame.hd.stream_id, NGHTTP2_NO_ERROR)
    return 0


cdef ssize_t on_send(nghttp2_session* session, const uint8_t* data, size_t n, int flags, void* user) noexcept:
    cdef Session self = <Session>user
    try:
        self.out.put(<const char*>data, n)
    except MemoryError:
        return NGHTTP2_ERR_CALLBACK_FAILURE
    return n


cdef ssize_t on_read_length(nghttp2_session* session, uint8_t frame_type, int32_t stream_id,
                            int32_t session_window, int32_t stream_window, uint32_t max_frame,
                            void* user) noexcept:
    cdef ssize_t n = session_window if session_window < stream_window else stream_window
    if n > <ssize_t>max_frame:
        n = max_frame
    return n if n < 1048576 else 1048576


cdef ssize_t read_outbox(nghttp2_session* session, int32_t stream_id, uint8_t* buf, size_t length,
                         uint32_t* flags, nghttp2_data_source* source, void* user) noexcept:
    cdef Stream stream = <Stream>source.ptr     # rule 8
    cdef size_t n = stream.out_bytes
    cdef nghttp2_nv[MAX_REPLY_HEADERS] nva
    if stream.ended:    # given up: its outbox is empty because it was dropped, not because it was sent
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
    if n > length:
        n = length
    elif stream.trailers is not None:
        flags[0] |= NGHTTP2_DATA_FLAG_EOF
        try:
            if stream.trailers:
                flags[0] |= NGHTTP2_DATA_FLAG_NO_END_STREAM
            if stream.trailers and nghttp2_submit_trailer(session, stream_id, nva, reply_headers(nva, MAX_REPLY_HEADERS, stream.trailers)) != 0:
                return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
        except Exception:
            log.exception("stream %d failed", stream_id)
            return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
    elif n == 0:
        return NGHTTP2_ERR_DEFERRED
    flags[0] |= NGHTTP2_DATA_FLAG_NO_COPY
    return n


cdef int on_send_data(nghttp2_session* session, nghttp2_frame* frame, const uint8_t* head, size_t length,
                      nghttp2_data_source* source, void* user) noexcept:
    cdef Session self = <Session>user
    cdef Stream stream = <Stream>source.ptr     # rule 8
    try:
        self.out.put(<const char*>head, 9)
        self.out.move(stream, length)
    except Exception:    # a frame that is not whole: nothing can follow it
        log.exception("sending on stream %d failed", frame.hd.stream_id)
        return NGHTTP2_ERR_CALLBACK_FAILURE
    try:
        if stream.out_bytes == 0 and stream.trailers is None:
            stream.on_writable()
    except Exception:
        log.exception("stream %d failed", frame.hd.stream_id)
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame.hd.stream_id, NGHTTP2_INTERNAL_ERROR)
    return 0
