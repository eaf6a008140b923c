// Eight-bit floats times bfloat16, into both; the bytes of eight-bit floats are what the tensors hold.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

extern "C" __global__ void narrow(const __nv_fp8_e4m3* x, const __nv_bfloat16* w, __nv_fp8_e5m2* y, __nv_bfloat16* z, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float product = float(x[i]) * __bfloat162float(w[i]);
    y[i] = __nv_fp8_e5m2(product);
    z[i] = __float2bfloat16(product);
}
