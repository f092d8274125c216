// out[i, :] = x[rows[i * rows_stride], :], zeros where the index is negative.
//
// Rows move as CHUNK (the widest of uint4, uint2, unsigned int, unsigned short, unsigned char that divides a row and
// its start), so the kernel knows no dtype. threadIdx.y is a row of the block, threadIdx.x runs over the row's chunks.

#ifndef CHUNK
#define CHUNK uint4
#endif

extern "C" __global__ void gather(const CHUNK *__restrict__ x, CHUNK *__restrict__ out, const int *__restrict__ rows,
                                  long long count, long long rows_stride, long long x_stride, int chunks) {
    const long long step = (long long)gridDim.x * blockDim.y;
    for (long long i = (long long)blockIdx.x * blockDim.y + threadIdx.y; i < count; i += step) {
        const long long row = rows[i * rows_stride];
        const CHUNK *from = x + row * x_stride;
        CHUNK *to = out + i * chunks;
        for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
            CHUNK value = {};
            if (row >= 0) value = from[c];
            to[c] = value;
        }
    }
}
