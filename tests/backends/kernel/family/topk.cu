// The k largest of each row with their indices, ties to the smaller index: k rounds of a block-wide
// search that skips what was taken before.
extern "C" __global__ void topk(const float* x, float* values, int* indices, int columns, int k)
{
    __shared__ float best[256];
    __shared__ int where[256];
    const float* row = x + (size_t)blockIdx.x * columns;
    const int t = threadIdx.x;
    float last = 0.0f;
    int last_at = -1;
    for (int round = 0; round < k; round++) {
        int at = -1;
        for (int i = t; i < columns; i += blockDim.x) {
            const bool taken = last_at >= 0 && (row[i] > last || (row[i] == last && i <= last_at));
            if (!taken && (at < 0 || row[i] > row[at])) at = i;
        }
        where[t] = at;
        best[t] = at < 0 ? 0.0f : row[at];
        __syncthreads();
        for (int half = blockDim.x / 2; half > 0; half /= 2) {
            if (t < half && where[t + half] >= 0 &&
                (where[t] < 0 || best[t + half] > best[t] || (best[t + half] == best[t] && where[t + half] < where[t]))) {
                best[t] = best[t + half];
                where[t] = where[t + half];
            }
            __syncthreads();
        }
        last = best[0];
        last_at = where[0];
        if (t == 0) {
            values[(size_t)blockIdx.x * k + round] = last;
            indices[(size_t)blockIdx.x * k + round] = last_at;
        }
        __syncthreads();
    }
}
