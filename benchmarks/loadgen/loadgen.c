/* A load generator for inference servers: HTTP/1.1, gRPC unary, gRPC bidirectional stream.
 *
 * One thread, epoll, prebuilt request bytes, so that the generator costs far less than what it
 * measures. Every answer is checked: its status, and that it contains the expected bytes.
 *
 *   closed loop  --rate 0   each of connections x streams x depth slots sends as soon as it has its answer
 *   open loop    --rate R   requests are due at fixed times; latency counts from the due time, so a
 *                           server that stalls is charged for everything that was due meanwhile, sent
 *                           or not: what was due before the end is sent and waited for after it, and
 *                           what is never answered counts with the time waited, and as a failure
 *
 * --idle N connections answer one request each before the measurement and are then kept open without
 * another; "idle N" is printed when they are, so that the server's memory can be looked at.
 *
 * Results are one JSON object on stdout. Latencies are kept in a histogram with 1/64 relative error.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <nghttp2/nghttp2.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { HTTP, UNARY, STREAM };

static struct {
    const char *host, *path, *content_type, *header_length;
    int port, mode, connections, streams, depth, cpu, sequence_length, idle;
    double duration, warmup, rate;
    char *body[3];              /* first, middle, last of a sequence; body[0] alone otherwise */
    size_t body_n[3];
    char *expect;
    size_t expect_n;
    long sequence_at[3];        /* where the 8 patchable bytes of the sequence id lie, -1 = nowhere */
    int trailing;
} opt;

static uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + ts.tv_nsec;
}

static void die(const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fputc('\n', stderr);
    exit(2);
}

/* ------------------------------------------------------------------ results */

#define BUCKETS (64 * 64)
static uint64_t histogram[BUCKETS], counted, sum_ns, max_ns, failures, mismatches;
static char first_failure[512];
static uint64_t t_begin, t_measure, t_end, unanswered;
static int preparing;           /* idle connections take their one request */

static int bucket(uint64_t v) {
    int e;
    if (v < 64) return (int)v;
    e = 63 - __builtin_clzll(v);
    return (e - 5) * 64 + (int)((v >> (e - 6)) & 63);
}

static uint64_t bucket_value(int b) {
    if (b < 64) return b;
    int e = b / 64 + 5;
    return (1ull << e) + ((uint64_t)(b % 64) << (e - 6)) + (1ull << (e - 7 < 0 ? 0 : e - 7));
}

static void record(uint64_t start) {
    uint64_t t = now_ns(), ns = t - start, at = opt.rate > 0 ? start : t;
    if (preparing || at < t_measure || at > t_end) return;
    histogram[bucket(ns)]++;
    counted++;
    sum_ns += ns;
    if (ns > max_ns) max_ns = ns;
}

static void failed(const char *what, const char *detail, size_t n) {
    if (!failures++) snprintf(first_failure, sizeof first_failure, "%s: %.*s", what, (int)(n > 300 ? 300 : n), detail);
}

static int contains(const char *data, size_t n) {
    static size_t usual;
    if (!opt.expect_n) return 1;
    if (usual + opt.expect_n <= n && !memcmp(data + usual, opt.expect, opt.expect_n)) return 1;
    char *at = memmem(data, n, opt.expect, opt.expect_n);
    if (!at) return 0;
    usual = at - data;
    return 1;
}

static void answer(uint64_t start, const char *data, size_t n) {
    if (contains(data, n)) record(start);
    else {
        if (!mismatches++) fprintf(stderr, "first mismatch (%zu bytes): %.200s\n", n, data);
    }
}

/* ------------------------------------------------------------------ open loop pacing */

static uint64_t due_count;      /* requests that have been started */
static double interval_ns;

static int may_start(uint64_t *start) {
    uint64_t t = now_ns();
    if (preparing) return 0;
    if (opt.rate <= 0) { *start = t; return t < t_end; }
    uint64_t due = t_begin + (uint64_t)(due_count * interval_ns);
    if (due > t || due >= t_end) return 0;
    due_count++;
    *start = due;
    return 1;
}

/* ------------------------------------------------------------------ connections */

typedef struct conn conn;

typedef struct {                /* one slot: a stream with `depth` requests in flight */
    conn *c;
    int32_t id;
    uint64_t *starts;           /* ring of start times, oldest first */
    int head, flying;
    char *in;
    size_t in_n, in_room;
    char *out;
    size_t out_at, out_n, out_room;
    int ok, step, open;
    uint64_t sequence;
} slot;

struct conn {
    int fd, connected;
    nghttp2_session *session;
    char *out;
    size_t out_at, out_n, out_room;
    char *in;
    size_t in_n, in_room;
    slot *slots;
    uint32_t armed;
};

static int ep, ending;         /* ending: streams are half-closed, as a client that is done does it */
static conn *conns;
static uint64_t next_sequence = 1;

static void room(char **p, size_t *have, size_t want) {
    if (want <= *have) return;
    *have = want * 2 + 4096;
    *p = realloc(*p, *have);
    if (!*p) die("out of memory");
}

static void arm(conn *c) {
    uint32_t want = EPOLLIN | (c->out_at < c->out_n ? EPOLLOUT : 0);
    if (want == c->armed) return;
    struct epoll_event ev = {.events = want, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &ev);
    c->armed = want;
}

static void flush_out(conn *c) {
    while (c->out_at < c->out_n) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_n - c->out_at, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN) break;
            die("send: %s", strerror(errno));
        }
        c->out_at += n;
    }
    if (c->out_at == c->out_n) c->out_at = c->out_n = 0;
    arm(c);
}

static void put(conn *c, const char *data, size_t n) {
    room(&c->out, &c->out_room, c->out_n + n);
    memcpy(c->out + c->out_n, data, n);
    c->out_n += n;
}

/* the next body of a slot, with its sequence id patched in */
static int next_body(slot *s) {
    int kind = 0;
    if (opt.sequence_length > 1) {
        if (s->step == 0) s->sequence = next_sequence++;
        kind = s->step == 0 ? 0 : s->step == opt.sequence_length - 1 ? 2 : 1;
        s->step = (s->step + 1) % opt.sequence_length;
        for (int i = 0; i < 7; i++)  /* varint groups; the ninth byte stays as it is */
            opt.body[kind][opt.sequence_at[kind] + i] = (char)(0x80 | ((s->sequence >> (7 * i)) & 0x7f));
    }
    return kind;
}

static void push_start(slot *s, uint64_t start) {
    s->starts[(s->head + s->flying) % opt.depth] = start;
    s->flying++;
}

static uint64_t pop_start(slot *s) {
    uint64_t start = s->starts[s->head];
    s->head = (s->head + 1) % opt.depth;
    s->flying--;
    return start;
}

/* ------------------------------------------------------------------ HTTP/1.1 */

static char http_head[2048];
static size_t http_head_n;

static void http_send(slot *s, uint64_t start) {
    conn *c = s->c;
    push_start(s, start);
    if (c->out_n == 0) {
        struct iovec v[2] = {{http_head, http_head_n}, {opt.body[0], opt.body_n[0]}};
        ssize_t n = writev(c->fd, v, 2);
        if (n < 0 && errno != EAGAIN) die("send: %s", strerror(errno));
        size_t done = n < 0 ? 0 : n;
        if (done == http_head_n + opt.body_n[0]) return;
        if (done < http_head_n) { put(c, http_head + done, http_head_n - done); done = http_head_n; }
        put(c, opt.body[0] + (done - http_head_n), opt.body_n[0] - (done - http_head_n));
    } else {
        put(c, http_head, http_head_n);
        put(c, opt.body[0], opt.body_n[0]);
    }
    flush_out(c);
}

/* a chunked body is joined in place once it is whole: returns where it ends in the input, -1 = not yet */
static ssize_t join_chunks(conn *c, size_t head, size_t *length) {
    for (int pass = 0; pass < 2; pass++) {
        size_t at = head, to = head;
        for (;;) {
            char *line = memmem(c->in + at, c->in_n - at, "\r\n", 2);
            if (!line) return -1;
            size_t n = strtoull(c->in + at, NULL, 16), data = line + 2 - c->in;
            if (c->in_n < data + n + 2) return -1;
            if (pass) memmove(c->in + to, c->in + data, n);
            to += n;
            at = data + n + 2;
            if (n) continue;
            *length = to - head;
            if (pass) return at;
            break;
        }
    }
    return -1;
}

static void http_input(conn *c) {
    slot *s = c->slots;
    for (;;) {
        char *end = memmem(c->in, c->in_n, "\r\n\r\n", 4);
        if (!end) return;
        size_t head = end + 4 - c->in;
        *end = 0;
        char *cl = strcasestr(c->in, "\r\ncontent-length:"), *te = strcasestr(c->in, "\r\ntransfer-encoding: chunked");
        size_t length = cl ? strtoull(cl + 17, NULL, 10) : 0;
        *end = '\r';
        if (te) {
            ssize_t whole = join_chunks(c, head, &length);
            if (whole < 0) return;
            memmove(c->in + head + length, c->in + whole, c->in_n - whole);
            c->in_n -= whole - head - length;
        }
        if (c->in_n < head + length) { room(&c->in, &c->in_room, head + length); return; }
        int status = atoi(c->in + 9);
        if (!s->flying) die("an answer that nobody asked for");
        uint64_t start = pop_start(s);
        if (status == 200) answer(start, c->in + head, length);
        else failed("HTTP status", c->in, c->in_n < 400 ? c->in_n : 400);
        memmove(c->in, c->in + head + length, c->in_n - head - length);
        c->in_n -= head + length;
        if (may_start(&start)) http_send(s, start);
        if (!c->in_n) return;
    }
}

/* ------------------------------------------------------------------ gRPC */

static ssize_t read_body(nghttp2_session *session, int32_t id, uint8_t *buf, size_t length, uint32_t *flags,
                         nghttp2_data_source *source, void *user) {
    slot *s = source->ptr;
    size_t n = s->out_n - s->out_at;
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

static void pump(conn *c) {
    const uint8_t *data;
    ssize_t n;
    while (c->out_n - c->out_at < (4 << 20) && (n = nghttp2_session_mem_send(c->session, &data)) > 0)
        put(c, (const char *)data, n);
    flush_out(c);
}

#define NV(n, v) {(uint8_t *)(n), (uint8_t *)(v), strlen(n), strlen(v), NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE}

static void queue_message(slot *s, uint64_t start) {
    int kind = next_body(s);
    size_t n = opt.body_n[kind];
    push_start(s, start);
    room(&s->out, &s->out_room, s->out_n + n + 5);
    char *p = s->out + s->out_n;
    p[0] = 0; p[1] = n >> 24; p[2] = n >> 16; p[3] = n >> 8; p[4] = n;
    memcpy(p + 5, opt.body[kind], n);
    s->out_n += n + 5;
}

static void grpc_send(slot *s, uint64_t start) {
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
    s->in_n = 0;
    s->open = 1;
    s->id = nghttp2_submit_request(c->session, NULL, nva, 7, &provider, s);
    if (s->id < 0) die("submit_request: %s", nghttp2_strerror(s->id));
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t id, const uint8_t *data, size_t n, void *user) {
    slot *s = nghttp2_session_get_stream_user_data(session, id);
    if (!s) return 0;
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
        if (may_start(&start)) grpc_send(s, start);
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
    else answer(start, s->in + 5, s->in_n > 5 ? s->in_n - 5 : 0);
    if (may_start(&start)) grpc_send(s, start);
    return 0;
}

static ssize_t frame_length(nghttp2_session *session, uint8_t type, int32_t id, int32_t connection_window,
                            int32_t stream_window, uint32_t max_frame, void *user) {
    ssize_t n = connection_window < stream_window ? connection_window : stream_window;
    return n < (ssize_t)max_frame ? n : (ssize_t)max_frame;
}

static void grpc_start(conn *c) {
    nghttp2_session_callbacks *callbacks;
    nghttp2_settings_entry settings[] = {{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 64 << 20},
                                         {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, 4 << 20},
                                         {NGHTTP2_SETTINGS_ENABLE_PUSH, 0}};
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close);
    nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, frame_length);
    nghttp2_session_client_new(&c->session, callbacks, c);
    nghttp2_session_callbacks_del(callbacks);
    nghttp2_submit_settings(c->session, NGHTTP2_FLAG_NONE, settings, 3);
    nghttp2_session_set_local_window_size(c->session, NGHTTP2_FLAG_NONE, 0, 256 << 20);
}

/* ------------------------------------------------------------------ the loop */

static void start_idle(conn *c) {
    uint64_t start;
    for (int i = 0; i < opt.streams; i++)
        while (c->slots[i].flying < opt.depth && may_start(&start)) {
            if (opt.mode == HTTP) http_send(&c->slots[i], start);
            else grpc_send(&c->slots[i], start);
        }
    if (opt.mode != HTTP) pump(c);
}

static void on_readable(conn *c) {
    static char buffer[1 << 20];
    for (;;) {
        ssize_t n;
        if (opt.mode == HTTP) {
            room(&c->in, &c->in_room, c->in_n + 65536);
            n = recv(c->fd, c->in + c->in_n, c->in_room - c->in_n, 0);
        } else
            n = recv(c->fd, buffer, sizeof buffer, 0);
        if (n < 0) {
            if (errno == EAGAIN) break;
            die("recv: %s", strerror(errno));
        }
        if (n == 0) die("the server closed a connection with %d requests open", c->slots[0].flying);
        if (opt.mode == HTTP) {
            c->in_n += n;
            http_input(c);
            if (c->in_n == 0) break;
        } else {
            ssize_t rv = nghttp2_session_mem_recv(c->session, (uint8_t *)buffer, n);
            if (rv < 0) die("HTTP/2: %s", nghttp2_strerror(rv));
            if (n < (ssize_t)sizeof buffer) break;
        }
    }
    if (opt.mode != HTTP) pump(c);
}

#define PORTS 20000             /* connections per source address */

static void open_connection(conn *c, int number) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(opt.port)};
    int one = 1;
    if (inet_pton(AF_INET, opt.host, &address.sin_addr) != 1) die("--host must be an IPv4 address, got %s", opt.host);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0) die("socket: %s", strerror(errno));
    if (number >= PORTS) {      /* one address has too few ports for all: 127.0.0.2, 127.0.0.3, ... */
        struct sockaddr_in source = {.sin_family = AF_INET};
        source.sin_addr.s_addr = htonl(0x7f000001u + number / PORTS);
        setsockopt(c->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
        if (bind(c->fd, (struct sockaddr *)&source, sizeof source)) die("bind: %s", strerror(errno));
    }
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect %s:%d: %s", opt.host, opt.port, strerror(errno));
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->slots = calloc(opt.streams, sizeof(slot));
    for (int i = 0; i < opt.streams; i++) {
        c->slots[i].c = c;
        c->slots[i].starts = calloc(opt.depth, sizeof(uint64_t));
    }
    c->armed = EPOLLIN;
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &ev);
    if (opt.mode != HTTP) grpc_start(c);
}

static char *load(const char *path, size_t *n) {
    int fd = open(path, O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st)) die("cannot read %s: %s", path, strerror(errno));
    char *data = malloc(st.st_size + 1);
    size_t at = 0;
    while (at < (size_t)st.st_size) {
        ssize_t got = read(fd, data + at, st.st_size - at);
        if (got <= 0) die("cannot read %s", path);
        at += got;
    }
    close(fd);
    *n = at;
    return data;
}

static uint64_t percentile(double q) {
    uint64_t want = (uint64_t)(q * counted), seen = 0;
    for (int i = 0; i < BUCKETS; i++)
        if ((seen += histogram[i]) > want) return bucket_value(i);
    return max_ns;
}

static void serve_events(int wait) {
    struct epoll_event events[256];
    int n = epoll_wait(ep, events, 256, wait);
    for (int i = 0; i < n; i++) {
        conn *c = events[i].data.ptr;
        if (events[i].events & EPOLLOUT) { flush_out(c); if (opt.mode != HTTP) pump(c); }
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(c);
    }
}

static void prepare_idle(void) {
    uint64_t limit = now_ns() + 120000000000ull;
    preparing = 1;
    for (int i = 0; i < opt.idle; i++) {
        conn *c = &conns[opt.connections + i];
        open_connection(c, opt.connections + i);
        if (opt.mode == HTTP) http_send(c->slots, now_ns());
        else { grpc_send(c->slots, now_ns()); pump(c); }
        while (c->slots->flying) {
            serve_events(1000);
            if (now_ns() > limit) die("only %d idle connections were answered in time", i);
        }
    }
    preparing = 0;
    printf("idle %d\n", opt.idle);
    fflush(stdout);
}

/* streams end as a client's do that is done: half-closed, and the status waited for */
static void end_streams(void) {
    uint64_t limit = now_ns() + 3000000000ull;
    int open = 1;
    ending = 1;
    for (int i = 0; i < opt.connections; i++) {
        for (int j = 0; j < opt.streams; j++)
            if (conns[i].slots[j].open) nghttp2_session_resume_data(conns[i].session, conns[i].slots[j].id);
        pump(&conns[i]);
    }
    while (open && now_ns() < limit) {
        serve_events(100);
        open = 0;
        for (int i = 0; i < opt.connections; i++)
            for (int j = 0; j < opt.streams; j++) open |= conns[i].slots[j].open;
    }
}

/* open loop: what nobody answered is charged with the time it was waited for */
static void charge_unanswered(void) {
    uint64_t t = now_ns();
    for (int i = 0; i < opt.connections; i++)
        for (int j = 0; j < opt.streams; j++)
            for (slot *s = &conns[i].slots[j]; s->flying; unanswered++) {
                uint64_t start = pop_start(s);
                if (opt.rate > 0) record(start);
            }
    for (; opt.rate > 0; unanswered++, due_count++) {
        uint64_t due = t_begin + (uint64_t)(due_count * interval_ns);
        if (due >= t_end || due > t) break;
        record(due);
    }
    if (unanswered) failed("requests were never answered", "", 0);
}

int main(int argc, char **argv) {
    opt.host = "127.0.0.1";
    opt.connections = opt.streams = opt.depth = 1;
    opt.duration = 3;
    opt.warmup = 0.5;
    opt.cpu = -1;
    opt.content_type = "application/json";
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *k = argv[i], *v = argv[i + 1];
        if (!strcmp(k, "--mode")) opt.mode = !strcmp(v, "http") ? HTTP : !strcmp(v, "unary") ? UNARY : STREAM;
        else if (!strcmp(k, "--host")) opt.host = v;
        else if (!strcmp(k, "--port")) opt.port = atoi(v);
        else if (!strcmp(k, "--path")) opt.path = v;
        else if (!strcmp(k, "--body")) opt.body[0] = load(v, &opt.body_n[0]);
        else if (!strcmp(k, "--body-middle")) opt.body[1] = load(v, &opt.body_n[1]);
        else if (!strcmp(k, "--body-last")) opt.body[2] = load(v, &opt.body_n[2]);
        else if (!strcmp(k, "--expect")) opt.expect = load(v, &opt.expect_n);
        else if (!strcmp(k, "--header-length")) opt.header_length = v;
        else if (!strcmp(k, "--connections")) opt.connections = atoi(v);
        else if (!strcmp(k, "--streams")) opt.streams = atoi(v);
        else if (!strcmp(k, "--depth")) opt.depth = atoi(v);
        else if (!strcmp(k, "--duration")) opt.duration = atof(v);
        else if (!strcmp(k, "--warmup")) opt.warmup = atof(v);
        else if (!strcmp(k, "--rate")) opt.rate = atof(v);
        else if (!strcmp(k, "--idle")) opt.idle = atoi(v);
        else if (!strcmp(k, "--cpu")) opt.cpu = atoi(v);
        else if (!strcmp(k, "--sequence-length")) opt.sequence_length = atoi(v);
        else if (!strcmp(k, "--first-sequence")) next_sequence = strtoull(v, NULL, 10);
        else die("unknown option %s", k);
    }
    if (!opt.path || !opt.port || !opt.body[0]) die("--port, --path and --body are needed");
    if (opt.mode == HTTP) opt.streams = 1;
    if (opt.sequence_length > 1) {
        /* the harness writes the id as the 9-byte varint of 0x0102030405060708 | 1 << 56 */
        static const unsigned char mark[7] = {0x88, 0x8e, 0x98, 0xa8, 0xc0, 0xe0, 0x80};
        for (int i = 0; i < 3; i++) {
            char *at = opt.body[i] ? memmem(opt.body[i], opt.body_n[i], mark, 5) : NULL;
            if (!at) die("no sequence mark in body %d", i);
            opt.sequence_at[i] = at - opt.body[i];
        }
    }
    if (opt.cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(opt.cpu, &set);
        sched_setaffinity(0, sizeof set, &set);
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    if ((rlim_t)(opt.connections + opt.idle) + 16 > files.rlim_cur)
        die("%d connections need more file descriptors than the limit of %ld", opt.connections + opt.idle, (long)files.rlim_cur);
    http_head_n = snprintf(http_head, sizeof http_head, "POST %s HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: %s\r\n%s%s%sContent-Length: %zu\r\n\r\n",
                           opt.path, opt.host, opt.port, opt.header_length ? "application/octet-stream" : "application/json",
                           opt.header_length ? "Inference-Header-Content-Length: " : "", opt.header_length ? opt.header_length : "",
                           opt.header_length ? "\r\n" : "", opt.body_n[0]);
    ep = epoll_create1(0);
    conns = calloc(opt.connections + opt.idle, sizeof(conn));
    for (int i = 0; i < opt.connections; i++) open_connection(&conns[i], i);
    if (opt.idle) prepare_idle();
    interval_ns = opt.rate > 0 ? 1e9 / opt.rate : 0;
    t_begin = now_ns();
    t_measure = t_begin + (uint64_t)(opt.warmup * 1e9);
    t_end = t_measure + (uint64_t)(opt.duration * 1e9);
    for (int i = 0; i < opt.connections; i++) start_idle(&conns[i]);
    struct rusage usage;
    uint64_t grace = t_end + 10000000000ull;
    int turn = 0;
    for (;;) {
        uint64_t t = now_ns();
        if (t >= t_end) {
            int flying = 0;
            for (int i = 0; i < opt.connections; i++)
                for (int j = 0; j < opt.streams; j++) flying += conns[i].slots[j].flying;
            int unsent = opt.rate > 0 && t_begin + (uint64_t)(due_count * interval_ns) < t_end;
            if ((!flying && !unsent) || t > grace) break;
        }
        int wait = 100;
        if (opt.rate > 0 && t < t_end) {
            uint64_t due = t_begin + (uint64_t)(due_count * interval_ns);
            wait = due > t ? (int)((due - t) / 1000000) : 0;
        }
        serve_events(wait);
        if (opt.rate > 0) /* due requests go to whichever connection has room, round robin */
            for (int i = 0; i < opt.connections; i++) start_idle(&conns[turn = (turn + 1) % opt.connections]);
    }
    charge_unanswered();
    if (opt.mode == STREAM) end_streams();
    getrusage(RUSAGE_SELF, &usage);
    double cpu = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
    printf("{\"requests\": %llu, \"seconds\": %.3f, \"per_second\": %.1f, \"failures\": %llu, \"mismatches\": %llu, \"unanswered\": %llu, "
           "\"mean_us\": %.2f, \"p50_us\": %.2f, \"p90_us\": %.2f, \"p99_us\": %.2f, \"p999_us\": %.2f, \"max_us\": %.2f, "
           "\"generator_cpu_s\": %.3f}\n",
           (unsigned long long)counted, opt.duration, counted / opt.duration, (unsigned long long)failures,
           (unsigned long long)mismatches, (unsigned long long)unanswered, counted ? sum_ns / 1e3 / counted : 0.0, percentile(.5) / 1e3, percentile(.9) / 1e3,
           percentile(.99) / 1e3, percentile(.999) / 1e3, max_ns / 1e3, cpu);
    if (first_failure[0]) fprintf(stderr, "first failure: %s\n", first_failure);
    return failures || mismatches || !counted;
}
