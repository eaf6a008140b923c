// C = A B with 16 x 16 tiles in shared memory; sizes need not be multiples of 16.
#define TILE 16

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k)
{
    __shared__ float as[TILE][TILE], bs[TILE][TILE + 1];
    const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    const float* left = a + (size_t)blockIdx.z * m * k;
    const float* right = b + (size_t)blockIdx.z * k * n;
    float sum = 0.0f;
    for (int at = 0; at < k; at += TILE) {
        const int x = at + threadIdx.x, y = at + threadIdx.y;
        as[threadIdx.y][threadIdx.x] = row < m && x < k ? left[row * k + x] : 0.0f;
        bs[threadIdx.y][threadIdx.x] = y < k && column < n ? right[y * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += as[threadIdx.y][i] * bs[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[((size_t)blockIdx.z * m + row) * n + column] = sum;
}
