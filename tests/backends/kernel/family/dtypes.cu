// One kernel per element size; also barriers with votes, warp votes, and half precision.
#include <cuda_fp16.h>

extern "C" __global__ void halves(const __half* x, __half* y, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __float2half(__half2float(x[i]) * 2.0f);
}

extern "C" __global__ void votes(const int* x, int* y, int n)
{
    const int t = threadIdx.x;
    const int mine = t < n ? x[t] : 0;
    const unsigned ballot = __ballot_sync(0xffffffffu, mine > 0);
    const int count = __syncthreads_count(mine > 0);
    const int any = __any_sync(0xffffffffu, mine > 100), all = __all_sync(0xffffffffu, mine >= 0);
    if (t < n) y[t] = __popc(ballot) * 1000000 + count * 1000 + any * 10 + all;
}
