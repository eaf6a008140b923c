/* A connection: its socket, what it has to send, and the slots whose requests are in flight. */
#include "loadgen.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

int ep, ending;
uint64_t next_sequence = 1;

void room(char **p, size_t *have, size_t want) {
    if (want <= *have) return;
    *have = want * 2 + 4096;
    *p = realloc(*p, *have);
    if (!*p) die("out of memory");
}

static void arm(conn *c) {
    uint32_t want = EPOLLIN | (c->out_at < c->out_n || c->lent_n ? EPOLLOUT : 0);
    if (want == c->armed) return;
    struct epoll_event ev = {.events = want, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &ev);
    c->armed = want;
}

/* bytes that the kernel took, 0 = no room now */
static size_t give(conn *c, const char *data, size_t n) {
    ssize_t sent = send(c->fd, data, n, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) die("send: %s", strerror(errno));
    return sent < 0 ? 0 : sent;
}

void flush_out(conn *c) {
    size_t n = 1;
    while (n && c->out_at < c->out_n) c->out_at += n = give(c, c->out + c->out_at, c->out_n - c->out_at);
    if (c->out_at == c->out_n) c->out_at = c->out_n = 0;
    while (n && c->lent_n) {
        n = give(c, c->lent, c->lent_n);
        c->lent += n;
        c->lent_n -= n;
    }
    arm(c);
}

void lend(conn *c, const char *data, size_t n) {
    if (c->lent_n) {
        put(c, data, n);
        return;
    }
    c->lent = data;
    c->lent_n = n;
}

void put(conn *c, const char *data, size_t n) {
    if (c->lent_n) {            /* keep the order */
        size_t lent_n = c->lent_n;
        c->lent_n = 0;
        put(c, c->lent, lent_n);
    }
    room(&c->out, &c->out_room, c->out_n + n);
    memcpy(c->out + c->out_n, data, n);
    c->out_n += n;
}

/* the next body of a slot, with its sequence id patched in */
int next_body(slot *s) {
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

uint64_t in_flight, room_since;

void push_start(slot *s, uint64_t start) {
    in_flight++;
    s->starts[(s->head + s->flying) % opt.depth] = start;
    s->flying++;
}

uint64_t pop_start(slot *s) {
    if (in_flight-- == (uint64_t)opt.connections * opt.streams * opt.depth) room_since = now_ns();
    uint64_t start = s->starts[s->head];
    s->head = (s->head + 1) % opt.depth;
    s->flying--;
    return start;
}

#define PORTS 20000             /* connections per source address */

void open_connection(conn *c, int number) {
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
