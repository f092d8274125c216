// sum[rows[i * rows_stride], :] += product[i, :], nothing where the index is negative.
//
// PRODUCT is what the matrix product wrote, SUM the wider type that adds (float for halves). Within one tap no row
// occurs twice, and taps are launched one after another: no atomics, and the same bits in every run. Each thread moves
// WIDTH neighbouring channels.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef PRODUCT
#define PRODUCT float
#endif
#ifndef SUM
#define SUM float
#endif
#ifndef WIDTH
#define WIDTH 4
#endif

template <typename T> struct alignas(sizeof(T) * WIDTH) Pack {
    T lane[WIDTH];
};

extern "C" __global__ void scatter_add(const PRODUCT *__restrict__ product, SUM *__restrict__ sum,
                                       const int *__restrict__ rows, long long count, long long rows_stride,
                                       int channels) {
    const int packs = channels / WIDTH;
    const long long step = (long long)gridDim.x * blockDim.y;
    for (long long i = (long long)blockIdx.x * blockDim.y + threadIdx.y; i < count; i += step) {
        const long long row = rows[i * rows_stride];
        if (row < 0) continue;
        const Pack<PRODUCT> *from = reinterpret_cast<const Pack<PRODUCT> *>(product + i * channels);
        Pack<SUM> *to = reinterpret_cast<Pack<SUM> *>(sum + row * channels);
        for (int c = threadIdx.x; c < packs; c += blockDim.x) {
            const Pack<PRODUCT> add = from[c];
            Pack<SUM> value = to[c];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) value.lane[k] += static_cast<SUM>(add.lane[k]);
            to[c] = value;
        }
    }
}
