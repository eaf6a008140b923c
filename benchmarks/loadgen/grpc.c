/* gRPC over libnghttp2: unary calls, or streams with `depth` messages in flight each. */
#include "loadgen.h"

enum { PREFIX = 5, LARGE = 1 << 16 };   /* bytes; a message as large as LARGE is not copied */

static ssize_t read_body(nghttp2_session *session, int32_t id, uint8_t *buf, size_t length, uint32_t *flags,
                         nghttp2_data_source *source, void *user) {
    slot *s = source->ptr;
    size_t n = s->out_n - s->out_at;
    if (s->lent_n) {
        n = s->lent_n - s->out_at;
        *flags |= NGHTTP2_DATA_FLAG_NO_COPY;
        if (n > length) return length;
        *flags |= NGHTTP2_DATA_FLAG_EOF;
        return n;
    }
    if (!n && opt.mode == STREAM) {
        if (!ending) return NGHTTP2_ERR_DEFERRED;
        *flags |= NGHTTP2_DATA_FLAG_EOF;
        return 0;
    }
    if (n > length) n = length;
    memcpy(buf, s->out + s->out_at, n);
    s->out_at += n;
    if (s->out_at == s->out_n) {
        s->out_at = s->out_n = 0;
        if (opt.mode == UNARY) *flags |= NGHTTP2_DATA_FLAG_EOF;
    }
    return n;
}

/* the bytes before a message: not compressed, and how long it is */
static void put_prefix(char *p, size_t n) {
    p[0] = 0; p[1] = n >> 24; p[2] = n >> 16; p[3] = n >> 8; p[4] = n;
}

/* a frame of a message that is sent from where it lies */
static int send_data(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t length,
                     nghttp2_data_source *source, void *user) {
    slot *s = source->ptr;
    char prefix[PREFIX];
    put_prefix(prefix, s->lent_n - PREFIX);
    put(s->c, (const char *)head, 9);
    if (s->out_at < PREFIX) {
        size_t n = PREFIX - s->out_at < length ? PREFIX - s->out_at : length;
        put(s->c, prefix + s->out_at, n);
        s->out_at += n;
        length -= n;
    }
    if (length) lend(s->c, opt.body[0] + s->out_at - PREFIX, length);
    s->out_at += length;
    if (s->out_at == s->lent_n) s->out_at = s->lent_n = 0;
    return 0;
}

void pump(conn *c) {
    const uint8_t *data;
    ssize_t n;
    while (c->pending < (4 << 20) && (n = nghttp2_session_mem_send(c->session, &data)) > 0)
        put(c, (const char *)data, n);
    flush_out(c);
}

#define NV(n, v) {(uint8_t *)(n), (uint8_t *)(v), strlen(n), strlen(v), NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE}

static void queue_message(slot *s, uint64_t start) {
    int kind = next_body(s);
    size_t n = opt.body_n[kind];
    push_start(s, start);
    if (opt.mode == UNARY && opt.sequence_length <= 1 && n >= LARGE) {
        s->lent_n = n + PREFIX;
        s->out_at = 0;
        return;
    }
    room(&s->out, &s->out_room, s->out_n + n + PREFIX);
    put_prefix(s->out + s->out_n, n);
    memcpy(s->out + s->out_n + PREFIX, opt.body[kind], n);
    s->out_n += n + PREFIX;
}

void grpc_send(slot *s, uint64_t start) {
    conn *c = s->c;
    queue_message(s, start);
    if (opt.mode == STREAM && s->open) {
        nghttp2_session_resume_data(c->session, s->id);
        return;
    }
    static char authority[128];
    if (!authority[0]) snprintf(authority, sizeof authority, "%s:%d", opt.host, opt.port);
    nghttp2_nv nva[] = {NV(":method", "POST"), NV(":scheme", "http"), NV(":path", opt.path), NV(":authority", authority),
                        NV("te", "trailers"), NV("content-type", "application/grpc"),
                        NV("user-agent", "neptrio-loadgen")};
    nghttp2_data_provider provider = {.source.ptr = s, .read_callback = read_body};
    s->ok = 0;
    s->in_n = s->seen = 0;
    s->open = 1;
    s->id = nghttp2_submit_request(c->session, NULL, nva, 7, &provider, s);
    if (s->id < 0) die("submit_request: %s", nghttp2_strerror(s->id));
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t id, const uint8_t *data, size_t n, void *user) {
    slot *s = nghttp2_session_get_stream_user_data(session, id);
    if (!s) return 0;
    if (opt.mode == UNARY && opt.expect_n >= LARGE && !s->in_n && usual_is_known()) {
        ssize_t at = (ssize_t)s->seen - PREFIX;
        if (same_as_usual((const char *)data, at, n)) {
            s->seen += n;
            return 0;
        }
        room(&s->in, &s->in_room, s->seen);
        fill_as_usual(s->in + PREFIX, at);
        s->in_n = s->seen;
        s->seen = 0;
    }
    room(&s->in, &s->in_room, s->in_n + n);
    memcpy(s->in + s->in_n, data, n);
    s->in_n += n;
    if (opt.mode != STREAM) return 0;
    for (;;) {
        if (s->in_n < 5) return 0;
        uint8_t *p = (uint8_t *)s->in;
        size_t length = (size_t)p[1] << 24 | p[2] << 16 | p[3] << 8 | p[4];
        if (s->in_n < length + 5) { room(&s->in, &s->in_room, length + 5); return 0; }
        if (!s->flying) die("an answer that nobody asked for");
        uint64_t start = pop_start(s);
        if (length && p[5] == 0x0a) failed("stream error", s->in + 5, length);
        else answer(start, s->in + 5, length);
        memmove(s->in, s->in + length + 5, s->in_n - length - 5);
        s->in_n -= length + 5;
        if (may_start(s, &start)) grpc_send(s, start);
    }
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name, size_t name_n,
                     const uint8_t *value, size_t value_n, uint8_t flags, void *user) {
    slot *s = nghttp2_session_get_stream_user_data(session, frame->hd.stream_id);
    if (!s) return 0;
    if (name_n == 11 && !memcmp(name, "grpc-status", 11)) s->ok = value_n == 1 && value[0] == '0';
    if (name_n == 12 && !memcmp(name, "grpc-message", 12) && !s->ok) failed("gRPC status", (const char *)value, value_n);
    return 0;
}

static int on_close(nghttp2_session *session, int32_t id, uint32_t code, void *user) {
    slot *s = nghttp2_session_get_stream_user_data(session, id);
    uint64_t start;
    if (!s) return 0;
    s->open = 0;
    if (opt.mode == STREAM) {
        if (!ending || !s->ok) failed("the stream was closed", "", 0);
        s->flying = s->head = 0;
        return 0;
    }
    start = pop_start(s);
    if (!s->ok) failed("a call failed", "", 0);
    else if (s->seen) answer_as_usual(start, (ssize_t)s->seen - PREFIX);
    else answer(start, s->in + 5, s->in_n > 5 ? s->in_n - 5 : 0);
    if (may_start(s, &start)) grpc_send(s, start);
    return 0;
}

static ssize_t frame_length(nghttp2_session *session, uint8_t type, int32_t id, int32_t connection_window,
                            int32_t stream_window, uint32_t max_frame, void *user) {
    ssize_t n = connection_window < stream_window ? connection_window : stream_window;
    return n < (ssize_t)max_frame ? n : (ssize_t)max_frame;
}

void grpc_start(conn *c) {
    nghttp2_session_callbacks *callbacks;
    nghttp2_settings_entry settings[] = {{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 64 << 20},
                                         {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, 4 << 20},
                                         {NGHTTP2_SETTINGS_ENABLE_PUSH, 0}};
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
    nghttp2_session_callbacks_set_send_data_callback(callbacks, send_data);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close);
    nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, frame_length);
    nghttp2_session_client_new(&c->session, callbacks, c);
    nghttp2_session_callbacks_del(callbacks);
    nghttp2_submit_settings(c->session, NGHTTP2_FLAG_NONE, settings, 3);
    nghttp2_session_set_local_window_size(c->session, NGHTTP2_FLAG_NONE, 0, 256 << 20);
}

void grpc_input(conn *c, const uint8_t *data, size_t n) {
    ssize_t rv = nghttp2_session_mem_recv(c->session, data, n);
    if (rv < 0) die("HTTP/2: %s", nghttp2_strerror(rv));
}

/* the peer is told that no more messages come: read_body() says so when it is asked */
void grpc_half_close(slot *s) {
    nghttp2_session_resume_data(s->c->session, s->id);
}
