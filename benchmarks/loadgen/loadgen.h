/* What the files of the load generator share: options, connections and their slots, results. */
#define _GNU_SOURCE
#include <errno.h>
#include <nghttp2/nghttp2.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HTTP, UNARY, STREAM };

struct options {
    const char *host, *path, *content_type, *header_length;
    int port, mode, connections, streams, depth, cpu, sequence_length, idle;
    double duration, warmup, rate;
    char *body[3];              /* first, middle, last of a sequence; body[0] alone otherwise */
    size_t body_n[3];
    char *expect;
    size_t expect_n;
    long sequence_at[3];        /* where the 8 patchable bytes of the sequence id lie, -1 = nowhere */
    int trailing;
};
extern struct options opt;

static inline uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + ts.tv_nsec;
}

void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* ------------------------------------------------------------------ results: results.c */

extern uint64_t t_begin, t_measure, t_end;          /* of the run; what is due outside is not recorded */
extern uint64_t unanswered;
extern int preparing;                               /* idle connections take their one request */
void record(uint64_t start);                        /* an answer, by when its request started */
void answer(uint64_t start, const char *data, size_t n);    /* the same, once it is what was expected */
/* a large answer need not be kept: once it is known where the expected bytes usually are, its parts are compared as
 * they come (`at`: the bytes before `data`), and rebuilt if one of them differs */
int usual_is_known(void);
int same_as_usual(const char *data, ssize_t at, ssize_t n);
void fill_as_usual(char *data, ssize_t n);          /* n bytes that were the same; zeros where nothing is expected */
void answer_as_usual(uint64_t start, ssize_t n);    /* all n bytes were the same */
void failed(const char *what, const char *detail, size_t n);
void record_late(uint64_t ns);                      /* how long after it was due a request was sent, by our own fault */
typedef struct { double cpu_s, waited_ms; long preempted; } generator_use;
int report(const generator_use *use);               /* prints the JSON object; the exit status */

/* ------------------------------------------------------------------ connections: connection.c */

typedef struct conn conn;

typedef struct {                /* one slot: a stream with `depth` requests in flight */
    conn *c;
    int32_t id;
    uint64_t *starts;           /* ring of start times, oldest first */
    int head, flying;
    char *in;
    size_t in_n, in_room;
    size_t seen;                /* bytes of a large answer that were the same as usual and are not in `in` */
    char *out;
    size_t out_at, out_n, out_room;
    size_t lent_n;              /* of a large message, sent from opt.body[0]: out_at says how far; 0 = none */
    int ok, step, open;
    uint64_t sequence;
} slot;

typedef struct {
    const char *lent;           /* NULL: the next bytes of conn.out */
    size_t n;
} piece;

struct conn {
    int fd, connected;
    nghttp2_session *session;
    char *out;                  /* the bytes of the pieces that are our own, in order */
    size_t out_at, out_n, out_room;
    piece *pieces;              /* what is to be sent: large bodies are sent from where they lie */
    size_t piece_at, piece_n, piece_room, pending;
    char *in;
    size_t in_n, in_room;
    slot *slots;
    uint32_t armed;
};

extern int ep, ending;          /* ending: streams are half-closed, as a client that is done does it */
extern uint64_t next_sequence;
void room(char **p, size_t *have, size_t want);
void put(conn *c, const char *data, size_t n);
void lend(conn *c, const char *data, size_t n);     /* like put(), for what stays as it is until it is sent */
void flush_out(conn *c);
void open_connection(conn *c, int number);
int next_body(slot *s);
void push_start(slot *s, uint64_t start);
uint64_t pop_start(slot *s);
extern uint64_t in_flight, room_since;              /* requests under way; since when a slot is free */

/* ------------------------------------------------------------------ pacing: loadgen.c */

int may_start(slot *s, uint64_t *start);            /* whether a request of this slot is due, and since when */

/* ------------------------------------------------------------------ protocols: http.c, grpc.c */

void http_begin(void);                              /* once, when the options are known */
void http_send(slot *s, uint64_t start);
void http_input(conn *c);
void grpc_start(conn *c);
void grpc_send(slot *s, uint64_t start);
void grpc_input(conn *c, const uint8_t *data, size_t n);
void grpc_half_close(slot *s);
void pump(conn *c);
