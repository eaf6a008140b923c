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
"""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

from neptrio._cext.grpc_stream cimport GrpcStream

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
    int NGHTTP2_HEADERS
    int NGHTTP2_DATA
    int NGHTTP2_HCAT_REQUEST
    int NGHTTP2_ERR_DEFERRED
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
    void nghttp2_session_callbacks_set_on_data_chunk_recv_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_on_stream_close_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_send_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_send_data_callback(nghttp2_session_callbacks*, void*)
    void nghttp2_session_callbacks_set_data_source_read_length_callback(nghttp2_session_callbacks*, void*)
    int nghttp2_option_new(nghttp2_option**)
    void nghttp2_option_del(nghttp2_option*)
    void nghttp2_option_set_no_auto_window_update(nghttp2_option*, int)
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

cdef enum:
    MAX_HEADERS = 128
    INLINE_SEGMENT = 16384       # longer pieces of a large buffer are sent from where they lie

DEFAULT_WINDOW = 4 << 20         # stream window: one round trip per 4 MiB of tensor
CONNECTION_WINDOW = 64 << 20
MAX_FRAME_SIZE = 1 << 20
MAX_HEADER_LIST = 64 << 10


cdef class Session:
    """One HTTP/2 connection's state. `open_stream(session, stream_id, path, headers)` makes calls.

    `open_stream` returns a GrpcStream; `headers` is a callable that gives the request's header
    list, so calls that need none pay for none.
    """

    cdef nghttp2_session* session
    cdef object open_stream
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
    cdef bint has_output

    def __cinit__(self):
        self.session = NULL
        self.out = NULL

    def __init__(self, open_stream, *, int max_concurrent_streams=2048):
        cdef nghttp2_session_callbacks* callbacks
        cdef nghttp2_option* option
        cdef nghttp2_settings_entry[4] settings
        self.open_stream = open_stream
        self.streams = {}
        self.segments = []
        nghttp2_session_callbacks_new(&callbacks)
        nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, <void*>on_begin_headers)
        nghttp2_session_callbacks_set_on_header_callback2(callbacks, <void*>on_header)
        nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, <void*>on_frame_recv)
        nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, <void*>on_data_chunk_recv)
        nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, <void*>on_stream_close)
        nghttp2_session_callbacks_set_send_callback(callbacks, <void*>on_send)
        nghttp2_session_callbacks_set_send_data_callback(callbacks, <void*>on_send_data)
        nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, <void*>on_read_length)
        nghttp2_option_new(&option)
        nghttp2_option_set_no_auto_window_update(option, 1)
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
        self.path_index = -1

    # ------------------------------------------------------------ input

    def receive(self, const uint8_t[::1] data not None):
        """Feeds bytes from the peer. Never raises: a protocol error makes the session `dead`."""
        cdef ssize_t rv
        if data.shape[0] == 0 or self.dead:
            return
        rv = nghttp2_session_mem_recv(self.session, &data[0], data.shape[0])
        self.has_output = True
        if rv < 0:
            self.dead = True
            self.failure = nghttp2_strerror(<int>rv).decode()
            nghttp2_session_terminate_session(self.session, 1)

    def connection_lost(self):
        """The transport is gone: every open call is reset."""
        self.dead = True
        for stream in list(self.streams.values()):
            self._reset_stream(stream, 8)
        self.streams.clear()

    cdef _reset_stream(self, GrpcStream stream, int code):
        if not stream.ended:
            stream.ended = True
            stream.outbox = []
            stream.out_bytes = 0
            try:
                stream.on_reset(code)
            except Exception:
                log.exception("on_reset of stream %d failed", stream.stream_id)

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
            if stream.trailers is not None and not stream.outbox and stream.reply_headers is None:
                headers = OK_HEADERS + stream.trailers  # trailers-only: one HEADERS frame ends the call
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

    def ping(self):
        """Queues a PING."""
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
        return self.has_output

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
    """A request's headers, kept in nghttp2's buffers until they are read."""

    cdef nghttp2_rcbuf** names
    cdef nghttp2_rcbuf** values
    cdef int n

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
    if i == MAX_HEADERS:
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
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
    stream = self.open_stream(self, stream_id, path, block)
    self.streams[stream_id] = stream
    return stream


cdef int on_frame_recv(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    cdef Session self = <Session>user
    cdef int32_t stream_id = frame.hd.stream_id
    cdef GrpcStream stream
    try:
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
            stream.ended = True
        else:
            self._reset_stream(stream, code)
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
        stream.out_bytes -= n
        stream.out_at += n
        if stream.out_at == view.shape[0]:
            stream.next_segment()
    return 0
