// Eight-bit floats on the host: stored in 8 bits, computed in float, rounded to nearest even, and beyond the largest
// number that one instead of infinity, as CUDA's types do by default.
#pragma once
#include "cuda_bf16.h"

typedef unsigned char __nv_fp8_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

// both kinds of number: bits of the mantissa, bias of the exponent, and the code of the largest finite number
#define NEPTRIO_FP8_KIND(kind) \
    const int mantissa = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15; \
    const unsigned most = kind == __NV_E4M3 ? 0x7eu : 0x7bu;

static inline float neptrio_from_fp8(__nv_fp8_storage_t code, __nv_fp8_interpretation_t kind) {
    NEPTRIO_FP8_KIND(kind)
    const unsigned magnitude = code & 0x7fu, fraction = magnitude & ((1u << mantissa) - 1u);
    const int exponent = (int)(magnitude >> mantissa);
    float value;
    if (magnitude > most) value = __uint_as_float(kind == __NV_E5M2 && fraction == 0 ? 0x7f800000u : 0x7fffffffu);
    else if (exponent) value = ldexpf((float)(fraction + (1u << mantissa)), exponent - bias - mantissa);
    else value = ldexpf((float)fraction, 1 - bias - mantissa);
    return code & 0x80u ? -value : value;
}

static inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, __nv_saturation_t saturate,
                                                        __nv_fp8_interpretation_t kind) {
    NEPTRIO_FP8_KIND(kind)
    if (x != x) return 0x7fu;
    const unsigned sign = __builtin_signbit(x) ? 0x80u : 0u;
    const double magnitude = fabs(x);
    const unsigned beyond = saturate == __NV_SATFINITE ? most : kind == __NV_E5M2 ? 0x7cu : 0x7fu;
    if (magnitude > 1e6) return (unsigned char)(sign | beyond);
    int exponent = magnitude > 0.0 ? ilogb(magnitude) : 1 - bias;
    if (exponent < 1 - bias) exponent = 1 - bias;  // below the smallest normal number steps do not become smaller
    const unsigned steps = (unsigned)rint(ldexp(magnitude, mantissa - exponent));
    // a carry out of the mantissa is one more in the exponent, and a number without the leading bit has exponent 0
    const unsigned code = ((unsigned)(exponent + bias - 1) << mantissa) + steps;
    return (unsigned char)(sign | (code > most ? beyond : code));
}
static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturate,
                                                       __nv_fp8_interpretation_t kind) {
    return __nv_cvt_double_to_fp8((double)x, saturate, kind);
}

#define NEPTRIO_FP8_TYPE(name, kind) \
    struct name { \
        __nv_fp8_storage_t __x; \
        name() = default; \
        explicit name(float x) : __x(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind)) {} \
        explicit name(double x) : __x(__nv_cvt_double_to_fp8(x, __NV_SATFINITE, kind)) {} \
        explicit name(int x) : name((float)x) {} \
        explicit name(__half x) : name((float)x) {} \
        explicit name(__nv_bfloat16 x) : name((float)x) {} \
        explicit operator float() const { return neptrio_from_fp8(__x, kind); } \
        explicit operator double() const { return (double)(float)*this; } \
        explicit operator __half() const { return __half((float)*this); } \
        explicit operator __nv_bfloat16() const { return __nv_bfloat16((float)*this); } \
    };
NEPTRIO_FP8_TYPE(__nv_fp8_e4m3, __NV_E4M3)
NEPTRIO_FP8_TYPE(__nv_fp8_e5m2, __NV_E5M2)
#undef NEPTRIO_FP8_TYPE
#undef NEPTRIO_FP8_KIND
