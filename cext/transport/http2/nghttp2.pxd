# The part of libnghttp2 that cext/transport/http2/nghttp2_session and cext/transport/http2/nghttp2_headers use, as the library declares it.
from libc.stdint cimport int32_t, uint8_t, uint32_t

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

    int NGHTTP2_NV_FLAG_NONE
    int NGHTTP2_DATA_FLAG_EOF
    int NGHTTP2_DATA_FLAG_NO_END_STREAM
    int NGHTTP2_DATA_FLAG_NO_COPY
    int NGHTTP2_FLAG_END_STREAM
    int NGHTTP2_FLAG_NONE
    int NGHTTP2_FLAG_ACK
    int NGHTTP2_FLAG_PADDED
    int NGHTTP2_HEADERS
    int NGHTTP2_DATA
    int NGHTTP2_PRIORITY
    int NGHTTP2_RST_STREAM
    int NGHTTP2_SETTINGS
    int NGHTTP2_PING
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

    int nghttp2_session_callbacks_new(nghttp2_session_callbacks**)
    void nghttp2_session_callbacks_del(nghttp2_session_callbacks*)
    void nghttp2_session_callbacks_set_on_begin_frame_callback(nghttp2_session_callbacks*, void*)
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
    size_t nghttp2_session_get_outbound_queue_size(nghttp2_session*)
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
    /* Our own limits decide when resets and refused streams are an attack; libraries that count the ones (1.57, and
       older ones with that fix) or the others too (newer ones: "glitches") are told to wait longer. The symbols are
       weak: older libraries lack them. */
    extern void nghttp2_option_set_stream_reset_rate_limit(nghttp2_option *, uint64_t, uint64_t)
        __attribute__((weak));
    extern void nghttp2_option_set_glitch_rate_limit(nghttp2_option *, uint64_t, uint64_t)
        __attribute__((weak));
    static inline void neptrio_raise_rate_limits(nghttp2_option *option) {
        if (nghttp2_option_set_stream_reset_rate_limit)
            nghttp2_option_set_stream_reset_rate_limit(option, 1u << 20, 1u << 16);
        if (nghttp2_option_set_glitch_rate_limit)
            nghttp2_option_set_glitch_rate_limit(option, 1u << 20, 1u << 16);
    }
    /* gRPC clients send metadata with spaces around its value, as it was given to them. Libraries from 1.50 on
       reset such a stream (RFC 9113, 8.2.1) unless they are told not to; older ones lack the symbol and take it. */
    extern void nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(nghttp2_option *, int)
        __attribute__((weak));
    static inline void neptrio_take_spaces(nghttp2_option *option) {
        if (nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation)
            nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(option, 1);
    }
    """
    void neptrio_raise_rate_limits(nghttp2_option*)
    void neptrio_take_spaces(nghttp2_option*)
