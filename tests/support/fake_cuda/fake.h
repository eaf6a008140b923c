/* A CUDA driver on host memory, for tests.
 *
 * The problem: code that talks to a GPU goes wrong where a CPU is kind: a device pointer that is
 * read by the host, a copy that nobody waited for, memory used after it was given back in another
 * stream, an error that poisons the context, a handle that leaks. The choice: a libcuda.so.1 that
 * is unkind in just these places and deterministic, so that each of them is a failed test.
 *
 * Rules:
 *  1. Device addresses lie in a range that no process can touch; the memory behind them has a
 *     second address that only this library knows. A host access dies with SIGSEGV.
 *  2. Addresses are never given out twice, what is freed can't be touched any more, and new memory
 *     is full of 0xCD.
 *  3. Queued work runs as late as possible: when somebody waits for it (mode LAZY, the default), in
 *     an order drawn from a seed that streams and events allow (mode RANDOM), or at once (EAGER).
 *     Everything runs on the thread that waits, under one lock.
 *  4. Copies from and to pinned host memory are queued; pageable memory is read before the call
 *     returns and written before it returns, as in CUDA.
 *  5. Kernels are host code (backends/kernel/host_compiler.py makes it). A fault inside one, a pointer that
 *     is not to live device memory, and injected errors are errors of the context that stay until
 *     the process ends: neither a reset nor giving the context back heals them. A reset is a
 *     VIOLATION, because other libraries of the process use the primary context too.
 *  6. Everything is counted in a file that the test maps (COUNTERS); what is wrong by CUDA's rules,
 *     even where a driver would let it pass, is a VIOLATION and is told on stderr.
 *  7. A kernel that hangs (HANG_KERNEL) never ends. A call that waits for it does not return, as
 *     with a device, and is told as a VIOLATION.
 *  8. A call on the process's first thread, which is the server's loop, and a call while the thread
 *     has Python's GIL are VIOLATIONs (unless MAIN_THREAD allows the first).
 *  9. The journal has a line for each call that queues work in a stream or learns of its end: the
 *     call, the stream's number (in order of creation), and bytes or the event's number. A query has
 *     a line, `ended`, when the answer is yes for the first time. `pin` has the bytes, `access` a pool's device and who may
 *     reach it, `init` what CUDA_DEVICE_MAX_CONNECTIONS says.
 * 10. While a graph is recorded some calls that have nothing to do with it (allocations, queries and waits, modules) are
 *     refused and end the recording: on the thread that records, and in the mode GLOBAL on every thread that has not
 *     said that it takes no notice (cuThreadExchangeStreamCaptureMode).
 * 11. A process that was forked from one that had started the driver has none: every call of its is refused.
 * 12. A handle that was opened is opened again at the same address, and closed as often.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long Ptr; /* CUdeviceptr */

enum { /* CUresult, as far as it is used here */
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    ASSERT = 710,
    LAUNCH_FAILED = 719,
    COOPERATIVE_TOO_LARGE = 720,
    ALREADY_REGISTERED = 712,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_ISOLATION = 905,
    CAPTURE_WRONG_THREAD = 908,
};

/* The file that a test maps: 64-bit numbers by index. tests/support/gpu.py has the same list. */
enum {
    LIVE_ALLOCATIONS, LIVE_BYTES, LIVE_PINNED, LIVE_STREAMS, LIVE_EVENTS, LIVE_MODULES, LIVE_GRAPHS,
    LIVE_EXECS, LIVE_POOLS, LIVE_CONTEXTS, LIVE_IPC,
    HTOD, DTOH, DTOD, PEER, HTOD_BYTES, DTOH_BYTES, DTOD_BYTES, LAUNCHES, GRAPH_LAUNCHES, MEMSETS,
    RESETS, VIOLATIONS, ALLOCATIONS, TRIMS, COOPERATIVE, CLUSTERS, PINNED_BYTES, QUERIES, ELAPSED,
    FAIL_ALLOCATION = 40, /* n: the n-th allocation from now fails with out of memory */
    FAIL_LAUNCH,          /* n: the n-th launch call from now fails ... */
    FAIL_LAUNCH_WITH,     /* ... with this error */
    FAULT_KERNEL,         /* n: the n-th kernel to run from now ends ... */
    FAULT_KERNEL_WITH,    /* ... with this error, which stays */
    FAIL_LOAD,            /* n: the n-th module load from now fails as an invalid image */
    FAIL_PINNED,          /* n: the n-th pinned allocation from now fails with out of memory */
    MODE,                 /* 0 LAZY, 1 EAGER, 2.. RANDOM with this seed */
    MEMORY,               /* bytes of each device, 0: 1 GiB */
    KERNEL_NS, HTOD_NS, DTOH_NS, /* at least so long takes each */
    HANG_KERNEL,          /* n: the n-th kernel to run from now never ends */
    MAIN_THREAD,          /* 1: the process's first thread may call the driver */
    REGISTERS,            /* of each thread of every kernel, 0: few */
    PIN_NS, PIN_LIMIT,    /* what pinning takes; the most bytes that can be pinned, 0: no limit */
    FAIL_TIMES,           /* so many allocations in a row fail when FAIL_ALLOCATION strikes, 0: one */
    NO_PEERS,             /* 1: no device can reach another's memory */
    HOLD,                 /* 1: no kernel begins, 2: no copy */
    SPOIL,                /* n: the n-th recording from now is ended by another thread's call, as by cuCtxSynchronize */
    JOURNAL,              /* 1: calls are written to the file's name with .journal (rule 9) */
    NUMBERS = 64
};

typedef struct Context {
    int device;
    int retained;
    int sticky;
    struct Stream* legacy;
} Context;

typedef struct Allocation {
    Ptr address;
    size_t size, reserved;
    Context* context; /* NULL: a pool's */
    struct Pool* pool;
    int device, ready, ipc, fd;
    int opened, owner; /* of another process's memory: how often it was opened, and whose it is */
    uint64_t inode;
    struct Allocation* next;
} Allocation;

typedef struct Pool {
    int device, doomed, gone;
    size_t used, high, threshold;
    unsigned peers; /* devices that may reach its memory, as bits */
    struct Pool* next;
} Pool;

typedef struct Op Op;
typedef struct Graph Graph;
typedef struct Event Event;

typedef struct Stream {
    Context* context;
    Op *head, *tail;
    uint64_t issued, done;
    int hung, blocking, number;
    Graph* capturing;
    pthread_t capturer;
    int mode, spoilt; /* of the recording: who must not make unsafe calls meanwhile (rule 10), and whether one did */
    struct Stream* next;
} Stream;

struct Event {
    Context* context;
    Stream* stream;
    uint64_t position; /* in the stream: what was issued before the record, and the record */
    uint64_t version, reached;
    double ns;
    int timing, number;
    uint64_t told; /* the version whose end is in the journal */
    struct Event* next;
};

typedef struct Function Function;

enum { COPY_HTOD, COPY_DTOH, COPY_DTOD, MEMSET, LAUNCH, RECORD, WAIT, FREE, ALLOC, GRAPH };

struct Op {
    int kind;
    uint64_t position;
    Ptr to, from;
    void *host, *owned; /* `owned` is freed with the operation */
    size_t size;
    int value;
    Function* function;
    unsigned grid[3], block[3], shared;
    Event* event;
    uint64_t version;
    Stream* on;
    Graph* graph;
    Op* next;
};

struct Graph {
    Op *head, *tail;
    Context* context;
};

typedef struct Module {
    void* object;
    Context* context;
    Function* functions;
    int count;
} Module;

struct Function {
    Module* module;
    char name[128];
    int (*entry)(void**, const unsigned*, const unsigned*);
    int count, size[64], pointer[64];
    int dynamic; /* bytes of dynamic shared memory it may be launched with */
};

extern _Atomic int64_t* numbers; /* several processes count in it */
extern pthread_mutex_t lock; /* recursive; every function of the driver holds it */
extern Context contexts[8];
extern int device_count;
extern Stream* streams;

#define ENTER locked held __attribute__((cleanup(leave), unused)) = enter(__func__)
typedef int locked;
locked enter(const char* function);
void check_caller(const char* function);
void leave(locked*);

Context* current(void);
int ready(Context* context);             /* 0, or the error of a call in that context */
int violation(int result, const char* format, ...);
void journal(const char* format, ...);
int due(int which);                      /* counts an injection down; 1 when it strikes */

Allocation* find(Ptr address);
void* behind(Ptr address, size_t size);  /* the memory of live, ready device memory, or NULL */
int is_device(const void* pointer);
int is_pinned(const void* pointer, size_t size);
void release(Allocation* allocation);
void forget_memory(Context* context);
void forget_pools(int device);
int cuDeviceTotalMem(size_t* bytes, int device);

void progress(void);                     /* what MODE lets run now */
int synchronize(Context* context);         /* waits for everything, for ever if something hangs */
void forget_streams(Context* context);
int push(Stream* stream, Op op);
void drop(Op* op);
int usable(Stream* stream);              /* 0, or the error of a call with that stream */
int unsafe(const char* function);        /* 0, or the error of a call while somebody records a graph (rule 10) */
void pause_ns(int64_t ns);

int run_function(Function* function, Op* op);
void forget_modules(Context* context);
