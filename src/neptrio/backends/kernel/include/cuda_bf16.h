// bfloat16 on the host: stored in 16 bits, computed in float, rounded to nearest even.
#pragma once
#include "cuda_fp16.h"

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        const unsigned u = __float_as_uint(x);
        bits = (unsigned short)(x != x ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
    __nv_bfloat16(double x) : __nv_bfloat16((float)x) {}
    __nv_bfloat16(int x) : __nv_bfloat16((float)x) {}
    operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
typedef __nv_bfloat16 nv_bfloat16;
struct __align__(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __nv_bfloat162 nv_bfloat162;
static inline float __bfloat162float(__nv_bfloat16 x) { return x; }
static inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
NEPTRIO_HALF_OP(__nv_bfloat16, +)
NEPTRIO_HALF_OP(__nv_bfloat16, -)
NEPTRIO_HALF_OP(__nv_bfloat16, *)
NEPTRIO_HALF_OP(__nv_bfloat16, /)
