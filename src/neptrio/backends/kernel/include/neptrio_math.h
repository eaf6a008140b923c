// Arithmetic, conversions and bit operations that CUDA adds to C++. Part of neptrio_host.h.
//
// The fast variants (__expf) are the exact ones of the C library here: a result may be closer than a GPU's.
#pragma once

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
// Newer C libraries declare functions of these names, and neither can be declared again nor overloaded.
#define rsqrt neptrio_rsqrt
#define rsqrtf neptrio_rsqrtf
#define sinpif neptrio_sinpif
#define cospif neptrio_cospif
#define normcdf neptrio_normcdf
#define normcdff neptrio_normcdff
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
