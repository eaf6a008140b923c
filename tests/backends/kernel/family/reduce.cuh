#pragma once
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define FULL 0xffffffffu

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
    static __device__ float zero() { return 0.0f; }
};
struct Largest {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
    static __device__ float zero() { return -INFINITY; }
};

template <class Op> __device__ float block_reduce(float value, Op op)
{
    __shared__ float parts[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int offset = 16; offset > 0; offset /= 2) value = op(value, __shfl_down_sync(FULL, value, offset));
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    const int warps = (blockDim.x + 31) / 32;
    value = lane < warps ? parts[lane] : Op::zero();
    for (int offset = 16; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(FULL, value, offset));
    __syncthreads();
    return value;
}
