// y = gelu(alpha * x + b), with a grid-stride loop and a device function.
typedef float real;
__device__ __forceinline__ real gelu(real x)
{
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
}

extern "C" __global__ void affine_gelu(const real* __restrict__ x, const real* __restrict__ b, real* y,
                                       float alpha, long long n, int columns)
{
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        y[i] = gelu(alpha * x[i] + b[i % columns]);
}
