"""Server-side HTTP/2 over libnghttp2, without I/O: bytes in -> calls on streams, replies -> bytes out.

The problem: at tens of thousands of calls a second every Python object per frame shows. The
choice: nghttp2 parses and frames; header blocks stay as nghttp2's shared buffers until somebody
asks for them; message bytes go from the receive buffer straight into the message; replies leave
through a no-copy data source, so a large tensor is referenced, not copied, until the socket
takes it.

Rules:
 1. Nothing here touches a socket. receive() takes bytes, data_to_send() returns buffers to be
    sent in order.
 2. The session calls a stream's methods only from inside receive() or data_to_send(); a stream
    that raises is reset, the session lives on.
 3. A stream is in `streams` from its headers to its close; on_reset is called iff it closes
    before its reply was complete.
 4. Connection flow-control credit is returned as bytes arrive, stream credit only while the
    stream is not paused: a slow call holds back its own sender, not its neighbours.
 5. A fatal protocol error queues a GOAWAY; `dead` is then true and the connection must be closed
    once the output is flushed.
 6. Frames that cost the peer little and us something (PING, SETTINGS, RST_STREAM, PRIORITY,
    WINDOW_UPDATE, empty DATA) are paid from a budget that work and time refill; who overdraws it
    is sent away with ENHANCE_YOUR_CALM. See neptrio.transport.http2_session.Nuisance.
 7. A reply that ends before its request did is followed by RST_STREAM(NO_ERROR): nobody sends
    the rest of a message that nobody reads.
"""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

from neptrio._cext.grpc_stream cimport Account, GrpcStream

import logging

log = logging.getLogger("neptrio.http2")


cdef extern from "<nghttp2/nghttp2.h>" nogil:
    ctypedef struct nghttp2_session:
        pass
    ctypedef struct nghttp2_session_callbacks:
        pass
    ctypedef struct nghttp2_option:
        pass
    ctypedef struct nghttp2_rcbuf:
        pass
    ctypedef struct nghttp2_vec:
        uint8_t* base
        size_t len
    ctypedef struct nghttp2_nv:
        uint8_t* name
        uint8_t* value
        size_t namelen
        size_t valuelen
        uint8_t flags
    ctypedef struct nghttp2_settings_entry:
        int32_t settings_id
        uint32_t value
    ctypedef union nghttp2_data_source:
        int fd
        void* ptr
    ctypedef struct nghttp2_frame_hd:
        size_t length
        int32_t stream_id
        uint8_t type
        uint8_t flags
    ctypedef struct nghttp2_headers:
        nghttp2_frame_hd hd
        int cat
    ctypedef struct nghttp2_data:
        nghttp2_frame_hd hd
        size_t padlen
    ctypedef union nghttp2_frame:
        nghttp2_frame_hd hd
        nghttp2_headers headers
        nghttp2_data data
    ctypedef ssize_t (*nghttp2_data_source_read_callback)(
        nghttp2_session*, int32_t, uint8_t*, size_t, uint32_t*, nghttp2_data_source*, void*) noexcept
    ctypedef struct nghttp2_data_provider:
        nghttp2_data_source source
        nghttp2_data_source_read_callback read_callback

    int NGHTTP2_NV_FLAG_NO_COPY_NAME
    int NGHTTP2_NV_FLAG_NO_COPY_VALUE
    int NGHTTP2_NV_FLAG_NONE
    int NGHTTP2_DATA_FLAG_EOF
    int NGHTTP2_DATA_FLAG_NO_END_STREAM
    int NGHTTP2_DATA_FLAG_NO_COPY
    int NGHTTP2_FLAG_END_STREAM
    int NGHTTP2_FLAG_NONE
    int NGHTTP2_FLAG_ACK
    int NGHTTP2_HEADERS
    int NGHTTP2_DATA
    int NGHTTP2_PRIORITY
    int NGHTTP2_RST_STREAM
    int NGHTTP2_SETTINGS
    int NGHTTP2_PING
    int NGHTTP2_GOAWAY
    int NGHTTP2_WINDOW_UPDATE
    int NGHTTP2_HCAT_REQUEST
    int NGHTTP2_ERR_DEFERRED
    int NGHTTP2_ERR_FLOODED
    int NGHTTP2_ERR_CALLBACK_FAILURE
    int NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
    int NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS
    int NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE
    int NGHTTP2_SETTINGS_MAX_FRAME_SIZE
    int NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE
    int NGHTTP2_NO_ERROR
    int NGHTTP2_CANCEL
    int NGHTTP2_INTERNAL_ERROR
    int NGHTTP2_ENHANCE_YOUR_CALM

    int nghttp2_session_callbacks_new(nghttp2_session_callbacks**)
    void nghttp2_session_callbacks_del(nghttp2_session_callbacks*)
    void nghttp2_session_callbacks_set_on_begin_headers_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_on_header_callback2(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_on_frame_recv_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_on_frame_send_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_on_data_chunk_recv_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_on_stream_close_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_send_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_send_data_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_data_source_read_length_callback(nghttp2_session_callbacks*, void*)
    int nghttp2_option_new(nghttp2_option**)
    void nghttp2_option_del(nghttp2_option*)
    void nghttp2_option_set_no_auto_window_update(nghttp2_option*, int)
    void nghttp2_option_set_no_closed_streams(nghttp2_option*, int)
    int nghttp2_session_server_new2(nghttp2_session**, nghttp2_session_callbacks*, void*, nghttp2_option*)
    void nghttp2_session_del(nghttp2_session*)
    ssize_t nghttp2_session_mem_recv(nghttp2_session*, const uint8_t*, size_t)
    int nghttp2_session_send(nghttp2_session*)
    int nghttp2_session_want_read(nghttp2_session*)
    int nghttp2_session_want_write(nghttp2_session*)
    int nghttp2_session_consume_connection(nghttp2_session*, size_t)
    int nghttp2_session_consume_stream(nghttp2_session*, int32_t, size_t)
    int nghttp2_session_resume_data(nghttp2_session*, int32_t)
    int nghttp2_session_terminate_session(nghttp2_session*, uint32_t)
    int nghttp2_session_set_local_window_size(nghttp2_session*, uint8_t, int32_t, int32_t)
    int32_t nghttp2_session_get_last_proc_stream_id(nghttp2_session*)
    int nghttp2_submit_settings(nghttp2_session*, uint8_t, nghttp2_settings_entry*, size_t)
    int nghttp2_submit_response(nghttp2_session*, int32_t, nghttp2_nv*, size_t, nghttp2_data_provider*)
    int nghttp2_submit_trailer(nghttp2_session*, int32_t, nghttp2_nv*, size_t)
    int nghttp2_submit_rst_stream(nghttp2_session*, uint8_t, int32_t, uint32_t)
    int nghttp2_submit_ping(nghttp2_session*, uint8_t, const uint8_t*)
    int nghttp2_submit_goaway(nghttp2_session*, uint8_t, int32_t, uint32_t, const uint8_t*, size_t)
    int nghttp2_submit_shutdown_notice(nghttp2_session*)
    nghttp2_vec nghttp2_rcbuf_get_buf(const nghttp2_rcbuf*)
    void nghttp2_rcbuf_incref(nghttp2_rcbuf*)
    void nghttp2_rcbuf_decref(nghttp2_rcbuf*)
    const char* nghttp2_strerror(int)

cdef extern from *:
    """
    #include <nghttp2/nghttp2.h>
    /* Our own budget decides when resets are an attack; libraries that count too (1.57, and older
       ones with that fix) are told to wait longer. The symbol is weak: older ones lack it. */
    extern void nghttp2_option_set_stream_reset_rate_limit(nghttp2_option *, uint64_t, uint64_t)
        __attribute__((weak));
    static void neptrio_raise_reset_limit(nghttp2_option *option) {
        if (nghttp2_option_set_stream_reset_rate_limit)
            nghttp2_option_set_stream_reset_rate_limit(option, 1u << 20, 1u << 16);
    }
    """
    void neptrio_raise_reset_limit(nghttp2_option*)

cdef enum:
    MAX_HEADERS = 128
    INLINE_SEGMENT = 16384       # longer pieces of a large buffer are sent from where they lie

from neptrio.transport.http2_limits import (
    CONNECTION_WINDOW,
    DEFAULT_WINDOW,
    ENHANCE_YOUR_CALM,
    FRAMELESS_BYTES,
    HEADER_BOMB,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST,
    Nuisance,
)

cdef Py_ssize_t _MAX_HEADER_LIST = MAX_HEADER_LIST
cdef Py_ssize_t _HEADER_BOMB = HEADER_BOMB
cdef Py_ssize_t _FRAMELESS_BYTES = FRAMELESS_BYTES
cdef int _ENHANCE_YOUR_CALM = ENHANCE_YOUR_CALM

cdef enum Problem:   # what is wrong with a request's headers, see transport.http2_limits
    FINE = 0
    METHOD = 1
    CONTENT_TYPE = 2
    TE = 3
    HEADERS_TOO_LARGE = 4


cdef class Session:
    """One HTTP/2 connection's state. `open_stream(session, stream_id, path, headers)` makes calls.

    `open_stream` returns a GrpcStream; `headers` is a callable that gives the request's header
    list, so calls that need none pay for none.
    """

    cdef nghttp2_session* session
    cdef object open_stream
    cdef readonly Account account
    cdef readonly object nuisance
    cdef readonly Py_ssize_t pings_acked
    cdef readonly dict streams
    cdef readonly bint dead
    cdef readonly str failure
    cdef readonly bint draining
    cdef char* out
    cdef Py_ssize_t out_n
    cdef Py_ssize_t out_room
    cdef list segments
    cdef nghttp2_rcbuf* names[MAX_HEADERS]
    cdef nghttp2_rcbuf* values[MAX_HEADERS]
    cdef int header_count
    cdef int path_index
    cdef Py_ssize_t header_bytes
    cdef Py_ssize_t frameless      # bytes received since the last whole frame
    cdef Py_ssize_t work           # DATA frames sent and calls ended since the last receive()
    cdef bint flooded
    cdef bint holding              # connection credit is withheld
    cdef Py_ssize_t held_credit
    cdef bint has_output

    def __cinit__(self):
        self.session = NULL
        self.out = NULL

    def __init__(self, open_stream, nuisance=None, *, int max_concurrent_streams=MAX_CONCURRENT_STREAMS):
        cdef nghttp2_session_callbacks* callbacks
        cdef nghttp2_option* option
        cdef nghttp2_settings_entry[4] settings
        self.open_stream = open_stream
        self.account = Account()
        self.nuisance = nuisance if nuisance is not None else Nuisance()
        self.streams = {}
        self.segments = []
        nghttp2_session_callbacks_new(&callbacks)
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
        neptrio_raise_reset_limit(option)
        cdef int rv = nghttp2_session_server_new2(&self.session, callbacks, <void*>self, option)
        nghttp2_option_del(option)
        nghttp2_session_callbacks_del(callbacks)
        if rv != 0:
            raise MemoryError
        settings[0].settings_id = NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS
        settings[0].value = max_concurrent_streams
        settings[1].settings_id = NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE
        settings[1].value = DEFAULT_WINDOW
        settings[2].settings_id = NGHTTP2_SETTINGS_MAX_FRAME_SIZE
        settings[2].value = MAX_FRAME_SIZE
        settings[3].settings_id = NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE
        settings[3].value = MAX_HEADER_LIST
        nghttp2_submit_settings(self.session, NGHTTP2_FLAG_NONE, settings, 4)
        nghttp2_session_set_local_window_size(self.session, NGHTTP2_FLAG_NONE, 0, CONNECTION_WINDOW)
        self.has_output = True

    def __dealloc__(self):
        self.drop_headers()
        if self.session != NULL:
            nghttp2_session_del(self.session)
        free(self.out)

    cdef void drop_headers(self) noexcept:
        cdef int i
        for i in range(self.header_count):
            nghttp2_rcbuf_decref(self.names[i])
            nghttp2_rcbuf_decref(self.values[i])
        self.header_count = 0
        self.header_bytes = 0
        self.path_index = -1

    # ------------------------------------------------------------ input

    def receive(self, const uint8_t[::1] data not None, int64_t now_ns=0):
        """Feeds bytes from the peer. Never raises: a protocol error makes the session `dead`."""
        cdef ssize_t rv
        if data.shape[0] == 0 or self.dead:
            return
        self.nuisance.refill(now_ns, self.work)
        self.work = 0
        self.frameless += data.shape[0]
        rv = nghttp2_session_mem_recv(self.session, &data[0], data.shape[0])
        self.has_output = True
        if rv >= 0 and self.frameless > _FRAMELESS_BYTES:  # a header block without end
            self.flooded = True
            self.failure = f"{self.frameless} bytes without a whole frame"
        if rv < 0 or self.flooded:
            self.dead = True
            if self.failure is None:
                self.failure = nghttp2_strerror(<int>rv).decode()
            nghttp2_session_terminate_session(
                self.session, _ENHANCE_YOUR_CALM if self.flooded or rv == NGHTTP2_ERR_FLOODED else 1)
        elif not nghttp2_session_want_read(self.session):
            self.dead = True  # the library has queued a GOAWAY with an error
            if self.failure is None:
                self.failure = "protocol error"

    def connection_lost(self):
        """The transport is gone: every open call is reset."""
        self.dead = True
        for stream in list(self.streams.values()):
            self._reset_stream(stream, 8)
        self.streams.clear()

    cdef _reset_stream(self, GrpcStream stream, int code):
        try:
            stream.reset_by_peer(code)
        except Exception:
            log.exception("on_reset of stream %d failed", stream.stream_id)

    cdef int charge(self, int cost) except -1:
        """Takes from the nuisance budget; the peer is sent away when it is used up."""
        if not self.nuisance.spend(cost):
            self.flooded = True
            self.failure = "too many control frames"
            return 1
        return 0

    # ------------------------------------------------------------ output

    def output_ready(self, GrpcStream stream not None):
        """A stream has something new to send: its headers, its data or its end."""
        cdef nghttp2_data_provider provider
        cdef nghttp2_nv[64] nva
        cdef int n
        self.has_output = True
        if stream.ended or self.dead:
            return
        if not stream.headers_sent:
            stream.headers_sent = True
            headers = stream.reply_headers
            if headers is None:
                headers = OK_HEADERS
            if stream.trailers is not None and not stream.out_bytes and stream.reply_headers is None:
                # trailers-only: one HEADERS frame ends the call; a refusal brings its own :status
                if stream.trailers[0][0] == b":status":
                    headers = stream.trailers
                else:
                    headers = OK_HEADERS + stream.trailers
                n = fill_nva(nva, headers)
                nghttp2_submit_response(self.session, stream.stream_id, nva, n, NULL)
                return
            n = fill_nva(nva, headers)
            provider.source.ptr = <void*>stream
            provider.read_callback = <nghttp2_data_source_read_callback>read_outbox
            nghttp2_submit_response(self.session, stream.stream_id, nva, n, &provider)
        else:
            nghttp2_session_resume_data(self.session, stream.stream_id)

    def reset(self, GrpcStream stream not None, int code=8):
        """Ends a call at once with RST_STREAM."""
        nghttp2_submit_rst_stream(self.session, NGHTTP2_FLAG_NONE, stream.stream_id, code)
        self.has_output = True

    def resume_input(self, GrpcStream stream not None):
        """Returns the flow-control credit that was withheld while the stream was paused."""
        stream.paused = False
        if stream.withheld and not stream.ended:
            nghttp2_session_consume_stream(self.session, stream.stream_id, stream.withheld)
            stream.withheld = 0
            self.has_output = True

    def hold(self):
        """Withholds the connection's flow-control credit: the peer gets no more than its window."""
        self.holding = True

    def release(self):
        """Ends hold() and returns the credit."""
        self.holding = False
        if self.held_credit and not self.dead:
            nghttp2_session_consume_connection(self.session, self.held_credit)
            self.has_output = True
        self.held_credit = 0

    def ping(self):
        """Queues a PING; `pings_acked` counts the answers."""
        nghttp2_submit_ping(self.session, NGHTTP2_FLAG_NONE, NULL)
        self.has_output = True

    def start_drain(self):
        """Tells the peer that no new calls are welcome; open ones go on."""
        if not self.draining and not self.dead:
            self.draining = True
            nghttp2_submit_shutdown_notice(self.session)
            self.has_output = True

    def finish_drain(self):
        """The final GOAWAY: calls after the last one seen are not looked at."""
        if not self.dead:
            nghttp2_submit_goaway(
                self.session, NGHTTP2_FLAG_NONE, nghttp2_session_get_last_proc_stream_id(self.session),
                NGHTTP2_NO_ERROR, NULL, 0)
            self.has_output = True

    def terminate(self, int code):
        """GOAWAY with an error code; the session is dead after its output is flushed."""
        nghttp2_session_terminate_session(self.session, code)
        self.dead = True
        self.has_output = True

    @property
    def wants_output(self) -> bool:
        """True when data_to_send() may have something."""
        return bool(self.has_output)

    @property
    def finished(self) -> bool:
        """True when neither side has anything left to say."""
        return (self.dead or (not nghttp2_session_want_read(self.session))) and not self.has_output

    cdef int put(self, const char* data, Py_ssize_t n) except -1:
        cdef char* grown
        cdef Py_ssize_t room
        if self.out_n + n > self.out_room:
            room = 2 * (self.out_n + n) + 4096
            grown = <char*>realloc(self.out, room)
            if grown == NULL:
                raise MemoryError
            self.out = grown
            self.out_room = room
        memcpy(self.out + self.out_n, data, n)
        self.out_n += n
        return 0

    def data_to_send(self) -> list:
        """Buffers to put on the wire in this order; empty when there is nothing to say."""
        cdef int rv = 0
        cdef list segments
        if not self.has_output:
            return []
        self.has_output = False
        rv = nghttp2_session_send(self.session)
        if rv != 0:
            self.dead = True
            self.failure = nghttp2_strerror(rv).decode()
        segments = self.segments
        if self.out_n:
            segments.append(self.out[: self.out_n])
            self.out_n = 0
            if self.out_room > 1 << 20:
                free(self.out)
                self.out = NULL
                self.out_room = 0
        self.segments = []
        return segments


cdef list OK_HEADERS = [
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
]


cdef int fill_nva(nghttp2_nv* nva, list headers) except -1:
    cdef int n = 0
    cdef bytes name, value
    for name, value in headers:
        if n == 64:
            break
        nva[n].name = <uint8_t*>name
        nva[n].namelen = len(name)
        nva[n].value = <uint8_t*>value
        nva[n].valuelen = len(value)
        nva[n].flags = NGHTTP2_NV_FLAG_NONE
        n += 1
    return n


cdef class HeaderBlock:
    """A request's headers, kept in nghttp2's buffers until they are read.

    `problem` says what makes it no gRPC request (http2_limits.PROBLEMS), 0 when it is one.
    """

    cdef nghttp2_rcbuf** names
    cdef nghttp2_rcbuf** values
    cdef int n
    cdef readonly int problem
    cdef readonly bint has_timeout
    cdef readonly bint has_custom      # metadata beyond what every gRPC client sends

    cdef int judge(self) noexcept:
        """Looks once at every header; so a call that needs none of them reads none again."""
        cdef int i, length
        cdef nghttp2_vec a, b
        cdef bint post = False, grpc = False, te = False
        cdef const char* name
        for i in range(self.n):
            a = nghttp2_rcbuf_get_buf(self.names[i])
            b = nghttp2_rcbuf_get_buf(self.values[i])
            name = <const char*>a.base
            length = <int>a.len
            if length == 7 and memcmp(name, b":method", 7) == 0:
                post = b.len == 4 and memcmp(b.base, b"POST", 4) == 0
            elif length == 12 and memcmp(name, b"content-type", 12) == 0:
                grpc = is_grpc(<const char*>b.base, b.len)
            elif length == 2 and memcmp(name, b"te", 2) == 0:
                te = b.len == 8 and memcmp(b.base, b"trailers", 8) == 0
            elif length == 12 and memcmp(name, b"grpc-timeout", 12) == 0:
                self.has_timeout = True
            elif not (name[0] == 58 or (length > 5 and memcmp(name, b"grpc-", 5) == 0)
                      or (length == 10 and memcmp(name, b"user-agent", 10) == 0)):
                self.has_custom = True
        if not post:
            return METHOD
        if not grpc:
            return CONTENT_TYPE
        return FINE if te else TE

    def __dealloc__(self):
        cdef int i
        for i in range(self.n):
            nghttp2_rcbuf_decref(self.names[i])
            nghttp2_rcbuf_decref(self.values[i])
        free(self.names)
        free(self.values)

    def __call__(self) -> list:
        """The headers as [(name, value)], pseudo-headers included."""
        cdef int i
        cdef nghttp2_vec a, b
        found = []
        for i in range(self.n):
            a = nghttp2_rcbuf_get_buf(self.names[i])
            b = nghttp2_rcbuf_get_buf(self.values[i])
            found.append(((<char*>a.base)[: a.len], (<char*>b.base)[: b.len]))
        return found

    def get(self, const uint8_t[::1] name not None):
        """The value of the first header of that name, or None."""
        cdef int i
        cdef nghttp2_vec a, b
        for i in range(self.n):
            a = nghttp2_rcbuf_get_buf(self.names[i])
            if a.len == <size_t>name.shape[0] and memcmp(a.base, &name[0], a.len) == 0:
                b = nghttp2_rcbuf_get_buf(self.values[i])
                return (<char*>b.base)[: b.len]
        return None


cdef bint is_grpc(const char* value, size_t n) noexcept:
    """application/grpc, alone or followed by +proto or parameters."""
    if n < 16 or memcmp(value, b"application/grpc", 16) != 0:
        return False
    if n == 16 or value[16] == 59:
        return True
    return n >= 22 and memcmp(value + 16, b"+proto", 6) == 0 and (n == 22 or value[22] == 59)


# ---------------------------------------------------------------- nghttp2 callbacks

cdef int on_begin_headers(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    (<Session>user).drop_headers()
    return 0


cdef int on_header(nghttp2_session* session, const nghttp2_frame* frame, nghttp2_rcbuf* name,
                   nghttp2_rcbuf* value, uint8_t flags, void* user) noexcept:
    cdef Session self = <Session>user
    cdef nghttp2_vec v
    cdef int i = self.header_count
    if frame.headers.cat != NGHTTP2_HCAT_REQUEST:
        return 0
    self.header_bytes += (<Py_ssize_t>nghttp2_rcbuf_get_buf(name).len
                          + <Py_ssize_t>nghttp2_rcbuf_get_buf(value).len + 32)
    if self.header_bytes > _HEADER_BOMB:
        self.flooded = True
        return NGHTTP2_ERR_CALLBACK_FAILURE
    if i == MAX_HEADERS or self.header_bytes > _MAX_HEADER_LIST:
        self.header_bytes += _MAX_HEADER_LIST  # counted on, no longer kept
        return 0
    nghttp2_rcbuf_incref(name)
    nghttp2_rcbuf_incref(value)
    self.names[i] = name
    self.values[i] = value
    self.header_count = i + 1
    v = nghttp2_rcbuf_get_buf(name)
    if v.len == 5 and memcmp(v.base, b":path", 5) == 0:
        self.path_index = i
    return 0


cdef _open(Session self, int32_t stream_id):
    cdef HeaderBlock block = HeaderBlock.__new__(HeaderBlock)
    cdef nghttp2_vec v
    cdef size_t size = self.header_count * sizeof(void*)
    cdef bytes path = b""
    block.names = <nghttp2_rcbuf**>malloc(size + 1)
    block.values = <nghttp2_rcbuf**>malloc(size + 1)
    if block.names == NULL or block.values == NULL:
        raise MemoryError
    if self.path_index >= 0:
        v = nghttp2_rcbuf_get_buf(self.values[self.path_index])
        path = (<char*>v.base)[: v.len]
    memcpy(block.names, self.names, size)
    memcpy(block.values, self.values, size)
    block.n = self.header_count
    self.header_count = 0
    block.problem = HEADERS_TOO_LARGE if self.header_bytes > _MAX_HEADER_LIST else block.judge()
    stream = self.open_stream(self, stream_id, path, block)
    self.streams[stream_id] = stream
    return stream


cdef int on_frame_recv(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    cdef Session self = <Session>user
    cdef int32_t stream_id = frame.hd.stream_id
    cdef GrpcStream stream
    cdef uint8_t kind = frame.hd.type
    self.frameless = 0
    try:
        if kind == NGHTTP2_PING:
            if frame.hd.flags & NGHTTP2_FLAG_ACK:
                self.pings_acked += 1
            elif not self.nuisance.pinged(len(self.streams)):
                self.flooded = True
                self.failure = "too_many_pings"
        elif kind == NGHTTP2_RST_STREAM or kind == NGHTTP2_PRIORITY or kind == NGHTTP2_WINDOW_UPDATE:
            self.charge(1)
        elif kind == NGHTTP2_SETTINGS:
            if not frame.hd.flags & NGHTTP2_FLAG_ACK:
                self.charge(10)
        elif kind == NGHTTP2_DATA and frame.hd.length == 0 and not frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
            self.charge(1)
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
            if stream.prefix_have and not stream.refused:
                stream.refuse(13, "the request ended in the middle of a message")
            elif not stream.refused:
                stream.on_half_close()
    except Exception:
        log.exception("stream %d failed", stream_id)
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream_id, NGHTTP2_INTERNAL_ERROR)
    return 0


cdef int on_data_chunk_recv(nghttp2_session* session, uint8_t flags, int32_t stream_id, const uint8_t* data,
                            size_t n, void* user) noexcept:
    cdef Session self = <Session>user
    cdef GrpcStream stream
    self.frameless = 0
    if self.holding:
        self.held_credit += n
    else:
        nghttp2_session_consume_connection(session, n)
    try:
        stream = self.streams.get(stream_id)
        if stream is None or stream.ended:
            return 0
        stream.feed(<const char*>data, n)
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
    cdef GrpcStream stream = self.streams.pop(stream_id, None)
    if stream is not None and not stream.ended:
        if stream.trailers is not None and not stream.out_bytes and code == 0:
            self.work += 2
            stream.ended = True
            stream.abandon()
        else:
            self._reset_stream(stream, code)
    return 0


cdef int on_frame_send(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    cdef Session self = <Session>user
    cdef GrpcStream stream
    if frame.hd.type == NGHTTP2_DATA:
        self.work += 3
    elif frame.hd.type == NGHTTP2_HEADERS:
        self.nuisance.strikes = 0
        if frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
            stream = self.streams.get(frame.hd.stream_id)
            if stream is not None and not stream.input_ended:
                nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame.hd.stream_id, NGHTTP2_NO_ERROR)
    return 0


cdef ssize_t on_send(nghttp2_session* session, const uint8_t* data, size_t n, int flags, void* user) noexcept:
    cdef Session self = <Session>user
    try:
        self.put(<const char*>data, n)
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
    cdef GrpcStream stream = <GrpcStream>source.ptr
    cdef size_t n = stream.out_bytes
    cdef nghttp2_nv[64] nva
    if n > length:
        n = length
    elif stream.trailers is not None:
        try:
            flags[0] |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM
            if nghttp2_submit_trailer(session, stream_id, nva, fill_nva(nva, stream.trailers)) != 0:
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
    cdef GrpcStream stream = <GrpcStream>source.ptr
    try:
        self.put(<const char*>head, 9)
        _send_outbox(self, stream, length)
        if stream.out_bytes == 0 and stream.trailers is None:
            stream.on_writable()
    except Exception:
        log.exception("sending on stream %d failed", frame.hd.stream_id)
        return NGHTTP2_ERR_CALLBACK_FAILURE
    return 0


cdef int _send_outbox(Session self, GrpcStream stream, Py_ssize_t left) except -1:
    """Moves `left` bytes from the stream's outbox to the output, small pieces by copy."""
    cdef Py_ssize_t n
    cdef const uint8_t[::1] view
    while left > 0:
        segment = stream.outbox[stream.out_first]
        view = segment
        n = view.shape[0] - stream.out_at
        if n > left:
            n = left
        if n < INLINE_SEGMENT:
            if n:
                self.put(<const char*>&view[stream.out_at], n)
        else:
            if self.out_n:
                self.segments.append(PyBytes_FromStringAndSize(self.out, self.out_n))
                self.out_n = 0
            self.segments.append(memoryview(segment)[stream.out_at : stream.out_at + n])
        left -= n
        stream.sent(n)
        stream.out_at += n
        if stream.out_at == view.shape[0]:
            stream.next_segment()
    return 0
