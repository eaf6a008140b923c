// Barriers and warp operations: what a thread that is a fiber says to the others. Part of neptrio_host.h.
#pragma once

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
