// Softmax over the last axis: one block per row, shuffles inside a warp, shared memory between them.
#include "reduce.cuh"

extern "C" __global__ void softmax(const float* x, float* y, int columns)
{
    const float* row = x + (size_t)blockIdx.x * columns;
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) largest = fmaxf(largest, row[i]);
    largest = block_reduce(largest, Largest());
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += expf(row[i] - largest);
    sum = block_reduce(sum, Sum());
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        y[(size_t)blockIdx.x * columns + i] = expf(row[i] - largest) / sum;
}
