// Threads of a block that wait for each other. Part of neptrio_host.h.
//
// The problem: at __syncthreads a thread must stop in the middle of the kernel until all the others have
// come as far. The choice: every thread of the block is a fiber, with a stack of its own, which runs until
// it waits; a scheduler on the calling thread resumes it when all have arrived.
//
// Rules:
//  1. A barrier lets go when every thread that has not returned stands at it; a warp operation
//     when every lane in its mask that has not returned stands at one with the same mask.
//     Anything else is a deadlock, reported as status 1, never a hang.
#pragma once

enum { NEPTRIO_OK = 0, NEPTRIO_DEADLOCK = 1, NEPTRIO_NO_STACKS = 2, NEPTRIO_TRAP = 3 };
enum { NEPTRIO_THREADS = 1024, NEPTRIO_STACK = 64 * 1024, NEPTRIO_GUARD = 4096, NEPTRIO_SHARED = 232448 };
alignas(256) static char neptrio_shared[NEPTRIO_SHARED];  // extern __shared__

namespace neptrio {
enum State : int { READY, AT_BARRIER, AT_WARP, DONE, FAILED };
struct Fiber {
#if defined(__x86_64__)
    void* sp;
#else
    ucontext_t context;
#endif
    State state;
    unsigned mask;
    int predicate;
    uint64_t given;  // to a warp operation
};
static Fiber fibers[NEPTRIO_THREADS];
static uint64_t exchanged[NEPTRIO_THREADS];  // what the lanes gave to the last warp operation
static neptrio_index3 place[NEPTRIO_THREADS];
static int current, threads;
static struct { int any, all, count; } votes;  // of the last barrier
static char* stacks;
static void (*body)();

#if defined(__x86_64__)
static void* scheduler;
asm(R"(
.text
.p2align 4
.local neptrio_switch
.type neptrio_switch,@function
neptrio_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size neptrio_switch,.-neptrio_switch
)");
extern "C" void neptrio_switch(void** save, void* load) __attribute__((visibility("hidden")));
static inline void resume(Fiber& f) { neptrio_switch(&scheduler, f.sp); }
static inline void leave(Fiber& f) { neptrio_switch(&f.sp, scheduler); }
#else
static ucontext_t scheduler;
static inline void resume(Fiber& f) { swapcontext(&scheduler, &f.context); }
static inline void leave(Fiber& f) { swapcontext(&f.context, &scheduler); }
#endif

static void begin() {
    body();
    fibers[current].state = DONE;
    leave(fibers[current]);
    __builtin_trap();
}

static void prepare(int t) {
    Fiber& f = fibers[t];
    char* low = stacks + (size_t)t * (NEPTRIO_STACK + NEPTRIO_GUARD) + NEPTRIO_GUARD;
    f.state = READY;
#if defined(__x86_64__)
    void** top = (void**)(low + NEPTRIO_STACK) - 2;
    *top = (void*)begin;  // the switch returns into it with the stack as a call would leave it
    for (int i = 1; i <= 6; i++) top[-i] = nullptr;
    f.sp = top - 6;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = low;
    f.context.uc_stack.ss_size = NEPTRIO_STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, begin, 0);
#endif
}

static bool have_stacks() {
    if (stacks) return true;
    const size_t one = NEPTRIO_STACK + NEPTRIO_GUARD, size = one * NEPTRIO_THREADS;
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    for (int t = 0; t < NEPTRIO_THREADS; t++) mprotect((char*)p + t * one, NEPTRIO_GUARD, PROT_NONE);
    stacks = (char*)p;
    return true;
}

static void wait(State state) {
    fibers[current].state = state;
    leave(fibers[current]);
}

// Runs the lanes of one warp until each has returned or stands at a barrier it cannot pass alone.
static bool run_warp(int first, int last, int& live) {
    for (;;) {
        for (int t = first; t < last; t++) {
            if (fibers[t].state != READY) continue;
            current = t;
            threadIdx = place[t];
            resume(fibers[t]);
            if (fibers[t].state == DONE) live--;
            if (fibers[t].state == FAILED) return false;
        }
        bool released = false;
        for (int t = first; t < last; t++) {
            if (fibers[t].state != AT_WARP) continue;
            const unsigned mask = fibers[t].mask;
            bool complete = (mask >> (t - first)) & 1u;  // a lane outside its own mask waits for ever
            for (int l = first; l < last; l++)
                if ((mask >> (l - first)) & 1u && fibers[l].state != DONE)
                    complete = complete && fibers[l].state == AT_WARP && fibers[l].mask == mask;
            if (!complete) continue;
            for (int l = first; l < last; l++)
                if ((mask >> (l - first)) & 1u && fibers[l].state == AT_WARP) {
                    exchanged[l] = fibers[l].given;
                    fibers[l].state = READY;
                }
            released = true;
        }
        if (!released) return true;
    }
}

static int run_block() {
    int live = threads;
    for (int t = 0; t < threads; t++) prepare(t);
    for (;;) {
        for (int w = 0; w < threads; w += 32)
            if (!run_warp(w, w + 32 < threads ? w + 32 : threads, live)) return NEPTRIO_TRAP;
        if (!live) return NEPTRIO_OK;
        int count = 0;
        for (int t = 0; t < threads; t++) {
            if (fibers[t].state == AT_WARP) return NEPTRIO_DEADLOCK;
            if (fibers[t].state == AT_BARRIER) count += fibers[t].predicate != 0;
        }
        votes.count = count;
        votes.any = count != 0;
        votes.all = count == live;
        for (int t = 0; t < threads; t++)
            if (fibers[t].state == AT_BARRIER) fibers[t].state = READY;
    }
}

static inline void barrier(int predicate) {
    fibers[current].predicate = predicate;
    wait(AT_BARRIER);
}

// Gives `value` to the lanes of `mask`; afterwards lane_value() reads what they gave.
static inline void exchange(unsigned mask, uint64_t value) {
    fibers[current].mask = mask;
    fibers[current].given = value;
    wait(AT_WARP);
}
static inline int lane() { return current & 31; }
static inline uint64_t lane_value(int l) { return exchanged[(current & ~31) + l]; }
static inline bool lane_in(unsigned mask, int l) { return ((mask >> l) & 1u) && (current & ~31) + l < threads; }
template <class T> static inline uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T> static inline T from_bits(uint64_t bits) {
    T value;
    memcpy((void*)&value, &bits, sizeof(T));
    return value;
}
template <class T> static inline T shuffle(unsigned mask, T value, int source, bool valid) {
    exchange(mask, to_bits(value));
    return valid ? from_bits<T>(lane_value(source)) : value;
}
}  // namespace neptrio
