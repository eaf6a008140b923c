// Vector types, and where a thread is in its grid. Part of neptrio_host.h.
#pragma once

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
