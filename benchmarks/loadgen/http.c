/* HTTP/1.1: one request in flight per connection, its bytes prebuilt. */
#include "loadgen.h"

static char http_head[2048];
static size_t http_head_n;

void http_begin(void) {
    http_head_n = snprintf(http_head, sizeof http_head, "POST %s HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: %s\r\n%s%s%sContent-Length: %zu\r\n\r\n",
                           opt.path, opt.host, opt.port, opt.header_length ? "application/octet-stream" : "application/json",
                           opt.header_length ? "Inference-Header-Content-Length: " : "", opt.header_length ? opt.header_length : "",
                           opt.header_length ? "\r\n" : "", opt.body_n[0]);
}

void http_send(slot *s, uint64_t start) {
    conn *c = s->c;
    push_start(s, start);
    lend(c, http_head, http_head_n);
    lend(c, opt.body[0], opt.body_n[0]);
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

void http_input(conn *c) {
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
        if (may_start(s, &start)) http_send(s, start);
        if (!c->in_n) return;
    }
}
