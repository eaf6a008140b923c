/* A connection: its socket, what it has to send, and the slots whose requests are in flight. */
#include "loadgen.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

int ep, ending;
uint64_t next_sequence = 1;

void room(char **p, size_t *have, size_t want) {
    if (want <= *have) return;
    *have = want * 2 + 4096;
    *p = realloc(*p, *have);
    if (!*p) die("out of memory");
}

static void arm(conn *c) {
    uint32_t want = EPOLLIN | (c->pending ? EPOLLOUT : 0);
    if (want == c->armed) return;
    struct epoll_event ev = {.events = want, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &ev);
    c->armed = want;
}

/* the kernel took so many bytes of what is to be sent */
static void consume(conn *c, size_t n) {
    c->pending -= n;
    while (n) {
        piece *p = &c->pieces[c->piece_at];
        size_t taken = n < p->n ? n : p->n;
        if (p->lent) p->lent += taken;
        else c->out_at += taken;
        n -= taken;
        p->n -= taken;
        if (!p->n) c->piece_at++;
    }
    if (!c->pending) c->out_at = c->out_n = c->piece_at = c->piece_n = 0;
}

void flush_out(conn *c) {
    struct iovec v[64];
    while (c->pending) {
        size_t own = c->out_at;
        int parts = 0;
        for (size_t i = c->piece_at; i < c->piece_n && parts < 64; i++, parts++) {
            piece *p = &c->pieces[i];
            v[parts].iov_base = p->lent ? (char *)p->lent : c->out + own;
            v[parts].iov_len = p->n;
            if (!p->lent) own += p->n;
        }
        ssize_t n = writev(c->fd, v, parts);
        if (n < 0 && errno != EAGAIN) die("send: %s", strerror(errno));
        if (n <= 0) break;
        consume(c, n);
    }
    arm(c);
}

static piece *add_piece(conn *c) {
    if (c->piece_n == c->piece_room) {
        c->piece_room = c->piece_room * 2 + 16;
        c->pieces = realloc(c->pieces, c->piece_room * sizeof(piece));
        if (!c->pieces) die("out of memory");
    }
    return &c->pieces[c->piece_n++];
}

void lend(conn *c, const char *data, size_t n) {
    *add_piece(c) = (piece){data, n};
    c->pending += n;
}

void put(conn *c, const char *data, size_t n) {
    room(&c->out, &c->out_room, c->out_n + n);
    memcpy(c->out + c->out_n, data, n);
    c->out_n += n;
    if (c->piece_at == c->piece_n || c->pieces[c->piece_n - 1].lent) *add_piece(c) = (piece){NULL, 0};
    c->pieces[c->piece_n - 1].n += n;
    c->pending += n;
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
    /* a machine's choice of BBR would pace what we send on loopback by timers, and measure itself */
    setsockopt(c->fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
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
