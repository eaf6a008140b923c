// CUDA C++ on a CPU: what a kernel source needs to compile with an ordinary C++17 compiler.
//
// The problem: a kernel is written for one thread of many. The choice: two ways to run a block.
//   loop   kernels that never wait for another thread: a plain loop over threadIdx around the
//          inlined kernel, which the compiler can vectorise;
//   fibers kernels with __syncthreads or warp operations: every thread of the block has a stack
//          of its own and runs until it waits; a scheduler resumes them when all have arrived.
// Blocks run one after the other on the calling thread.
//
// Rules:
//  1. Everything here is per shared object, and the server loads a private copy of the object for
//     each model instance: plain statics are safe, and the compiler sees that no pointer of the
//     kernel can reach them.
//  2. threadIdx and its like are set before a thread runs or resumes and never in between.
//  3. A barrier lets go when every thread that has not returned stands at it; a warp operation
//     when every lane in its mask that has not returned stands at one with the same mask.
//     Anything else is a deadlock, reported as status 1, never a hang.
//  4. Threads of a block never run at the same time, so atomics are plain operations.
#pragma once
#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __NEPTRIO_HOST__ 1
#define __global__ inline __attribute__((always_inline))
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))

// ---------------------------------------------------------------- coordinates

// What blockIdx.x * blockDim.x + threadIdx.x goes through: a non-negative number below 2^31 (the
// launch checks that), kept in an int so that the compiler knows it never wraps and may vectorise.
// It converts to unsigned, CUDA's type, for every other operation.
struct neptrio_offset {
    int v;
    constexpr operator unsigned() const { return (unsigned)v; }
};
struct neptrio_index {
    int v;
    constexpr operator unsigned() const { return (unsigned)v; }
};
#define NEPTRIO_OP constexpr inline __attribute__((always_inline)) neptrio_offset
NEPTRIO_OP operator*(neptrio_index a, neptrio_index b) { return {a.v * b.v}; }
NEPTRIO_OP operator+(neptrio_index a, neptrio_index b) { return {a.v + b.v}; }
NEPTRIO_OP operator+(neptrio_offset a, neptrio_index b) { return {a.v + b.v}; }
NEPTRIO_OP operator+(neptrio_index a, neptrio_offset b) { return {a.v + b.v}; }

#define NEPTRIO_VECTOR(T, N)                                                                       \
    struct N##1 { T x; };                                                                          \
    struct __align__(2 * sizeof(T)) N##2 { T x, y; };                                              \
    struct N##3 { T x, y, z; };                                                                    \
    struct __align__(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N##4 { T x, y, z, w; };              \
    static inline N##1 make_##N##1(T x) { return {x}; }                                            \
    static inline N##2 make_##N##2(T x, T y) { return {x, y}; }                                    \
    static inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }                            \
    static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
typedef unsigned char uchar;
typedef long long longlong;
typedef unsigned long long ulonglong;
NEPTRIO_VECTOR(signed char, char)
NEPTRIO_VECTOR(unsigned char, uchar)
NEPTRIO_VECTOR(short, short)
NEPTRIO_VECTOR(unsigned short, ushort)
NEPTRIO_VECTOR(int, int)
NEPTRIO_VECTOR(unsigned int, uint)
NEPTRIO_VECTOR(long, long)
NEPTRIO_VECTOR(unsigned long, ulong)
NEPTRIO_VECTOR(long long, longlong)
NEPTRIO_VECTOR(unsigned long long, ulonglong)
NEPTRIO_VECTOR(float, float)
NEPTRIO_VECTOR(double, double)
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct neptrio_index3 {
    neptrio_index x, y, z;
    operator dim3() const { return dim3(x, y, z); }
    operator uint3() const { return uint3{x, y, z}; }
};
static neptrio_index3 threadIdx, blockIdx, blockDim, gridDim;
static constexpr int warpSize = 32;

// ---------------------------------------------------------------- arithmetic

#define NEPTRIO_MINMAX(R, A, B)                                                                    \
    static inline constexpr R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }                  \
    static inline constexpr R max(A a, B b) { return (R)a < (R)b ? (R)b : (R)a; }
NEPTRIO_MINMAX(int, int, int)
NEPTRIO_MINMAX(unsigned, unsigned, unsigned)
NEPTRIO_MINMAX(unsigned, int, unsigned)
NEPTRIO_MINMAX(unsigned, unsigned, int)
NEPTRIO_MINMAX(long, long, long)
NEPTRIO_MINMAX(unsigned long, unsigned long, unsigned long)
NEPTRIO_MINMAX(long long, long long, long long)
NEPTRIO_MINMAX(unsigned long long, unsigned long long, unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

#define NEPTRIO_F1(name, call) static inline float name(float x) { return call; }
#define NEPTRIO_F2(name, call) static inline float name(float x, float y) { return call; }
NEPTRIO_F1(rsqrtf, 1.0f / sqrtf(x))
NEPTRIO_F1(__frsqrt_rn, 1.0f / sqrtf(x))
NEPTRIO_F1(__frcp_rn, 1.0f / x)
NEPTRIO_F1(__fsqrt_rn, sqrtf(x))
#define __expf(x) expf((x))
#define __exp10f(x) powf(10.0f, (x))
#define __logf(x) logf((x))
#define __log2f(x) log2f((x))
#define __log10f(x) log10f((x))
#define __sinf(x) sinf((x))
#define __cosf(x) cosf((x))
#define __tanf(x) tanf((x))
NEPTRIO_F1(__saturatef, x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : (x == x ? x : 0.0f))
NEPTRIO_F1(normcdff, 0.5f * erfcf(-x * 0.70710678118654752f))
NEPTRIO_F1(sinpif, sinf(x * 3.14159265358979324f))
NEPTRIO_F1(cospif, cosf(x * 3.14159265358979324f))
NEPTRIO_F2(__fdividef, x / y)
NEPTRIO_F2(__fdiv_rn, x / y)
NEPTRIO_F2(__fadd_rn, x + y)
NEPTRIO_F2(__fsub_rn, x - y)
NEPTRIO_F2(__fmul_rn, x * y)
#define __powf(x, y) powf((x), (y))
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
#define __sincosf(x, s, c) sincosf((x), (s), (c))

template <class To, class From> static inline To neptrio_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &value, sizeof(to));
    return to;
}
static inline int __float_as_int(float x) { return neptrio_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return neptrio_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return neptrio_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return neptrio_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return neptrio_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return neptrio_bits<double>(x); }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline int __float2int_ru(float x) { return (int)ceilf(x); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __double2float_rn(double x) { return (float)x; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= ((x >> i) & 1u) << (31 - i);
    return r;
}
static inline int __mul24(int a, int b) { return a * b; }
static inline unsigned __umul24(unsigned a, unsigned b) { return a * b; }
static inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) {}
#define CUDART_INF_F (__builtin_inff())
#define CUDART_NAN_F (__builtin_nanf(""))
#define CUDART_PI_F 3.141592654f
#define CUDART_INF (__builtin_inf())
#define CUDART_PI 3.1415926535897931e+0

// ---------------------------------------------------------------- atomics (rule 4)

#define NEPTRIO_ATOMIC(name, expression)                                                           \
    template <class T, class V> static inline T name(T* p, V given) {                              \
        const T old = *p, v = (T)given;                                                            \
        (void)v;                                                                                   \
        *p = (T)(expression);                                                                      \
        return old;                                                                                \
    }                                                                                              \
    template <class T, class V> static inline T name##_block(T* p, V v) { return name(p, v); }     \
    template <class T, class V> static inline T name##_system(T* p, V v) { return name(p, v); }
NEPTRIO_ATOMIC(atomicAdd, old + v)
NEPTRIO_ATOMIC(atomicSub, old - v)
NEPTRIO_ATOMIC(atomicExch, v)
NEPTRIO_ATOMIC(atomicMin, v < old ? v : old)
NEPTRIO_ATOMIC(atomicMax, old < v ? v : old)
NEPTRIO_ATOMIC(atomicAnd, old & v)
NEPTRIO_ATOMIC(atomicOr, old | v)
NEPTRIO_ATOMIC(atomicXor, old ^ v)
NEPTRIO_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
NEPTRIO_ATOMIC(atomicDec, (old == 0 || old > v) ? v : old - 1)
template <class T, class C, class V> static inline T atomicCAS(T* p, C compare, V value) {
    const T old = *p;
    if (old == (T)compare) *p = (T)value;
    return old;
}

// ---------------------------------------------------------------- fibers

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

// ---------------------------------------------------------------- running a grid

template <auto F> struct Kernel;
template <class... P, void (*F)(P...)> struct Kernel<F> {
    using Indices = std::index_sequence_for<P...>;

    static inline __attribute__((always_inline)) void loop(const unsigned* g, const unsigned* b, P... p) {
        const int bx = (int)b[0], by = (int)b[1], bz = (int)b[2];
        for (int z = 0; z < (int)g[2]; z++)
            for (int y = 0; y < (int)g[1]; y++)
                for (int x = 0; x < (int)g[0]; x++) {
                    blockIdx = {{x}, {y}, {z}};
                    for (int tz = 0; tz < bz; tz++)
                        for (int ty = 0; ty < by; ty++) {
                            threadIdx.z.v = tz;
                            threadIdx.y.v = ty;
                            for (int tx = 0; tx < bx; tx++) {
                                threadIdx.x.v = tx;
                                F(p...);
                            }
                        }
                }
    }

    template <size_t... I>
    static inline __attribute__((always_inline)) void start(void** a, const unsigned* g, const unsigned* b,
                                                            std::index_sequence<I...>) {
        loop(g, b, *(std::remove_cv_t<P>*)a[I]...);
    }

    static inline __attribute__((always_inline)) int run_loop(void** a, const unsigned* g, const unsigned* b) {
        gridDim = {{(int)g[0]}, {(int)g[1]}, {(int)g[2]}};
        blockDim = {{(int)b[0]}, {(int)b[1]}, {(int)b[2]}};
        start(a, g, b, Indices());
        return NEPTRIO_OK;
    }

    static inline void** arguments;
    template <size_t... I> static inline void call(std::index_sequence<I...>) {
        F(*(std::remove_cv_t<P>*)arguments[I]...);
    }
    static void one() { call(Indices()); }

    static int run_fibers(void** a, const unsigned* g, const unsigned* b) {
        if (!have_stacks()) return NEPTRIO_NO_STACKS;
        gridDim = {{(int)g[0]}, {(int)g[1]}, {(int)g[2]}};
        blockDim = {{(int)b[0]}, {(int)b[1]}, {(int)b[2]}};
        arguments = a;
        body = one;
        threads = (int)(b[0] * b[1] * b[2]);
        int t = 0;
        for (int z = 0; z < (int)b[2]; z++)
            for (int y = 0; y < (int)b[1]; y++)
                for (int x = 0; x < (int)b[0]; x++) place[t++] = {{x}, {y}, {z}};
        for (int z = 0; z < (int)g[2]; z++)
            for (int y = 0; y < (int)g[1]; y++)
                for (int x = 0; x < (int)g[0]; x++) {
                    blockIdx = {{x}, {y}, {z}};
                    const int status = run_block();
                    if (status) return status;
                }
        return NEPTRIO_OK;
    }
};
}  // namespace neptrio

#define NEPTRIO_EXPORT extern "C" __attribute__((visibility("default")))
#define NEPTRIO_LOOP(name)                                                                         \
    NEPTRIO_EXPORT int neptrio_run_##name(void** a, const unsigned* g, const unsigned* b) {        \
        return neptrio::Kernel<&name>::run_loop(a, g, b);                                          \
    }
#define NEPTRIO_FIBERS(name)                                                                       \
    NEPTRIO_EXPORT int neptrio_run_##name(void** a, const unsigned* g, const unsigned* b) {        \
        return neptrio::Kernel<&name>::run_fibers(a, g, b);                                        \
    }
// Gives the stacks back before the object is closed.
NEPTRIO_EXPORT void neptrio_close() {
    if (neptrio::stacks)
        munmap(neptrio::stacks, (size_t)(NEPTRIO_STACK + NEPTRIO_GUARD) * NEPTRIO_THREADS);
    neptrio::stacks = nullptr;
}

// ---------------------------------------------------------------- barriers and warp operations

static inline void __syncthreads() { neptrio::barrier(0); }
static inline int __syncthreads_count(int p) { neptrio::barrier(p); return neptrio::votes.count; }
static inline int __syncthreads_and(int p) { neptrio::barrier(p); return neptrio::votes.all; }
static inline int __syncthreads_or(int p) { neptrio::barrier(p); return neptrio::votes.any; }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { neptrio::exchange(mask, 0); }
static inline unsigned __activemask() {
    unsigned mask = 0;
    for (int l = 0; l < 32; l++)
        if (neptrio::lane_in(~0u, l) && neptrio::fibers[(neptrio::current & ~31) + l].state != neptrio::DONE)
            mask |= 1u << l;
    return mask;
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int base = neptrio::lane() & ~(width - 1);
    return neptrio::shuffle(mask, value, base + (source & (width - 1)), true);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int l = neptrio::lane(), source = l - (int)delta;
    return neptrio::shuffle(mask, value, source, source >= (l & ~(width - 1)));
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int l = neptrio::lane(), source = l + (int)delta;
    return neptrio::shuffle(mask, value, source, source < (l & ~(width - 1)) + width);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const int l = neptrio::lane(), source = l ^ lanes;
    return neptrio::shuffle(mask, value, source, source < (l & ~(width - 1)) + width);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    neptrio::exchange(mask, predicate != 0);
    unsigned votes = 0;
    for (int l = 0; l < 32; l++)
        if (neptrio::lane_in(mask, l) && neptrio::lane_value(l)) votes |= 1u << l;
    return votes;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
#define NEPTRIO_REDUCE(name, expression)                                                           \
    template <class T> static inline T __reduce_##name##_sync(unsigned mask, T value) {            \
        neptrio::exchange(mask, neptrio::to_bits(value));                                          \
        bool first = true;                                                                         \
        T a = value;                                                                               \
        for (int l = 0; l < 32; l++) {                                                             \
            if (!neptrio::lane_in(mask, l)) continue;                                              \
            const T b = neptrio::from_bits<T>(neptrio::lane_value(l));                             \
            a = first ? b : (expression);                                                          \
            first = false;                                                                         \
        }                                                                                          \
        return a;                                                                                  \
    }
NEPTRIO_REDUCE(add, a + b)
NEPTRIO_REDUCE(min, b < a ? b : a)
NEPTRIO_REDUCE(max, a < b ? b : a)
NEPTRIO_REDUCE(and, a & b)
NEPTRIO_REDUCE(or, a | b)
NEPTRIO_REDUCE(xor, a ^ b)
static inline void __trap() { neptrio::wait(neptrio::FAILED); }
#undef assert
#define assert(condition) ((condition) ? (void)0 : __trap())
#define __noinline__ __attribute__((noinline))
