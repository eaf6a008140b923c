// Sum of a row in two steps: partial sums through dynamic shared memory, then an atomic total.
extern "C" __global__ void partial(const float* x, float* sums, int columns)
{
    extern __shared__ float tile[];
    const int t = threadIdx.x;
    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + t; i < columns; i += gridDim.x * blockDim.x)
        sum += x[(size_t)blockIdx.y * columns + i];
    tile[t] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (t < half) tile[t] += tile[t + half];
        __syncthreads();
    }
    if (t == 0) sums[blockIdx.y * gridDim.x + blockIdx.x] = tile[0];
}

extern "C" __global__ void total(const float* sums, float* y, int parts, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * parts) atomicAdd(&y[i / parts], sums[i]);
}
