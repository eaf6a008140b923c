// One thread per element.
extern "C" __global__ void add_sub(const int* a, const int* b, int* sum, int* difference, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        sum[i] = a[i] + b[i];
        difference[i] = a[i] - b[i];
    }
}
