// Layer normalisation over the last axis with scale and shift; eps comes from the config.
#include "reduce.cuh"

__global__ void __launch_bounds__(256) layernorm(const float* x, const float* scale, const float* shift, float* y,
                                                 int columns, float eps)
{
    const float* row = x + (size_t)blockIdx.x * columns;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += row[i];
    const float mean = block_reduce(sum, Sum()) / columns;
    float square = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) square += (row[i] - mean) * (row[i] - mean);
    const float rstd = rsqrtf(block_reduce(square, Sum()) / columns + eps);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        y[(size_t)blockIdx.x * columns + i] = (row[i] - mean) * rstd * scale[i] + shift[i];
}
