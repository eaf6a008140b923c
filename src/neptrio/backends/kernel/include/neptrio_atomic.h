// Atomic operations. Part of neptrio_host.h.
//
// Rules:
//  1. Threads of a block never run at the same time, and blocks run one after the other (neptrio_grid.h), so
//     atomics are plain operations.
#pragma once

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
