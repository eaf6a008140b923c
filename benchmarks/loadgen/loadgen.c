/* A load generator for inference servers: HTTP/1.1, gRPC unary, gRPC bidirectional stream.
 *
 * One thread, epoll, prebuilt request bytes, so that the generator costs far less than what it
 * measures. Every answer is checked: its status, and that it contains the expected bytes.
 *
 *   closed loop  --rate 0   each of connections x streams x depth slots sends as soon as it has its answer
 *   open loop    --rate R   requests are due at fixed times; latency counts from the due time, so a
 *                           server that stalls is charged for everything that was due meanwhile, sent
 *                           or not: what was due before the end is sent and waited for after it, and
 *                           what is never answered counts with the time waited, and as a failure;
 *                           late_* says how much of that is ours: the time from when a request was
 *                           due and there was room for it to when we sent it
 *
 * With a core of its own (--cpu) it sleeps only when nothing came for 200 us: what its own wake-ups cost,
 * about as much on a virtual machine, is not the server's. Without one it sleeps at once, for the server
 * may need the core.
 *
 * --idle N connections answer one request each before the measurement and are then kept open without
 * another; "idle N" is printed when they are, so that the server's memory can be looked at.
 *
 * Results are one JSON object on stdout. Latencies are kept in a histogram with 1/64 relative error.
 */
#include "loadgen.h"

#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

struct options opt;
static conn *conns;
static uint64_t t_event; /* when something came last */
static const uint64_t AWAKE_NS = 200000;

void die(const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fputc('\n', stderr);
    exit(2);
}

/* ------------------------------------------------------------------ open loop pacing */

static uint64_t due_count;      /* requests that have been started */
static double interval_ns;

int may_start(slot *s, uint64_t *start) {
    uint64_t t = now_ns();
    if (preparing) return 0;
    if (t >= t_end && s->step) { *start = t; return 1; } /* sequences are ended, or their slots stay taken */
    if (opt.rate <= 0) { *start = t; return t < t_end; }
    uint64_t due = t_begin + (uint64_t)(due_count * interval_ns);
    if (due > t || due >= t_end) return 0;
    due_count++;
    record_late(t - (due > room_since ? due : room_since));
    *start = due;
    return 1;
}

/* how long we could run and did not, in ms so far: other processes had our core */
static double waited_ms(void) {
    char text[128] = "";
    unsigned long long ran, waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "r");
    if (file && fgets(text, sizeof text, file)) sscanf(text, "%llu %llu", &ran, &waited);
    if (file) fclose(file);
    return waited / 1e6;
}

/* ------------------------------------------------------------------ the loop */

static void start_idle(conn *c) {
    uint64_t start;
    for (int i = 0; i < opt.streams; i++)
        while (c->slots[i].flying < opt.depth && may_start(&c->slots[i], &start)) {
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
            grpc_input(c, (uint8_t *)buffer, n);
            if (n < (ssize_t)sizeof buffer) break;
        }
    }
    if (opt.mode != HTTP) pump(c);
}

static void serve_events(int wait) {
    struct epoll_event events[256];
    int n = epoll_wait(ep, events, 256, wait);
    if (n > 0) t_event = now_ns();
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
            if (conns[i].slots[j].open) grpc_half_close(&conns[i].slots[j]);
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
    http_begin();
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
    double waited = waited_ms();
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
        int wait = opt.cpu >= 0 && t - t_event < AWAKE_NS ? 0 : 100;
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
    return report(&(generator_use){cpu, waited_ms() - waited, usage.ru_nivcsw});
}
