// CUDA C++ on a CPU: what a kernel source needs to compile with an ordinary C++17 compiler.
//
// The problem: a kernel is written for one thread of many, in a dialect of C++. The choice: the dialect's
// words are macros and functions here, the source is compiled as it stands, and a grid runs in one of two
// ways (neptrio_grid.h). This is the one header that goes in front of every source; its parts:
//   neptrio_vector.h   float4 and its like, dim3, threadIdx, blockIdx, blockDim, gridDim
//   neptrio_math.h     arithmetic, conversions and bit operations that CUDA adds to C++
//   neptrio_atomic.h   atomicAdd and its like
//   neptrio_fiber.h    threads of a block that wait for each other
//   neptrio_grid.h     running a grid; the entry points of an object
//   neptrio_warp.h     __syncthreads, shuffles, votes, reductions
//
// Rules:
//  1. Everything here is per shared object, and the server loads a private copy of the object for
//     each model instance: plain statics are safe, and the compiler sees that no pointer of the
//     kernel can reach them.
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

#include "neptrio_vector.h"
#include "neptrio_math.h"
#include "neptrio_atomic.h"
#include "neptrio_fiber.h"
#include "neptrio_grid.h"
#include "neptrio_warp.h"

// last, so that no header above sees it
#define __noinline__ __attribute__((noinline))
