// Half precision on the host: stored in 16 bits, computed in float, rounded to nearest even.
#pragma once
#include "neptrio_host.h"

struct __half {
    unsigned short bits;
    __half() = default;
    __half(float x);
    __half(double x) : __half((float)x) {}
    __half(int x) : __half((float)x) {}
    operator float() const;
};
typedef __half half;
struct __align__(4) __half2 { __half x, y; };
typedef __half2 half2;

static inline float __half2float(__half h) {
    const unsigned sign = (unsigned)(h.bits & 0x8000u) << 16, exponent = (h.bits >> 10) & 31u, m = h.bits & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | (m << 13));
    if (exponent) return __uint_as_float(sign | ((exponent + 112u) << 23) | (m << 13));
    const float small = (float)m * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -small : small;
}
static inline __half __float2half_rn(float x) {
    const unsigned u = __float_as_uint(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    __half h;
    if (magnitude > 0x7f800000u) h.bits = (unsigned short)(sign | 0x7fffu);
    else if (magnitude >= 0x477ff000u) h.bits = (unsigned short)(sign | 0x7c00u);
    else if (magnitude >= 0x38800000u)
        h.bits = (unsigned short)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
    else h.bits = (unsigned short)(sign | (unsigned)rintf(__uint_as_float(magnitude) * 16777216.0f));
    return h;
}
inline __half::__half(float x) { *this = __float2half_rn(x); }
inline __half::operator float() const { return __half2float(*this); }
static inline __half __float2half(float x) { return __float2half_rn(x); }
static inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
static inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
static inline __half2 make_half2(__half a, __half b) { return {a, b}; }
static inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
static inline __half __low2half(__half2 h) { return h.x; }
static inline __half __high2half(__half2 h) { return h.y; }
static inline __half __hadd(__half a, __half b) { return (float)a + (float)b; }
static inline __half __hsub(__half a, __half b) { return (float)a - (float)b; }
static inline __half __hmul(__half a, __half b) { return (float)a * (float)b; }
static inline __half __hdiv(__half a, __half b) { return (float)a / (float)b; }
static inline __half __hfma(__half a, __half b, __half c) { return fmaf((float)a, (float)b, (float)c); }
static inline __half __hmax(__half a, __half b) { return fmaxf((float)a, (float)b); }
static inline __half __hmin(__half a, __half b) { return fminf((float)a, (float)b); }
static inline __half __hneg(__half a) { return -(float)a; }
static inline __half hexp(__half a) { return expf((float)a); }
static inline __half hlog(__half a) { return logf((float)a); }
static inline __half hsqrt(__half a) { return sqrtf((float)a); }
static inline __half hrsqrt(__half a) { return 1.0f / sqrtf((float)a); }
static inline bool __hgt(__half a, __half b) { return (float)a > (float)b; }
static inline bool __hlt(__half a, __half b) { return (float)a < (float)b; }
static inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
static inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
static inline __half __ushort_as_half(unsigned short x) { __half h; h.bits = x; return h; }
static inline unsigned short __half_as_ushort(__half h) { return h.bits; }
#define NEPTRIO_HALF_OP(T, op)                                                                     \
    static inline T operator op(T a, T b) { return T((float)a op (float)b); }                      \
    static inline T& operator op##=(T& a, T b) { return a = a op b; }
NEPTRIO_HALF_OP(__half, +)
NEPTRIO_HALF_OP(__half, -)
NEPTRIO_HALF_OP(__half, *)
NEPTRIO_HALF_OP(__half, /)
