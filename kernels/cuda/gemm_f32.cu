// Dense matrix product in f32, for exactness and for checks, without tensor cores, which would round the operands.
//
// A CTA computes BM x BN outputs, a thread 4 x 4 of them. The sum of an output adds the inputs one by one from first to
// last.
#include "linear.h"

template <int BM, int BN>
DEVICE void gemm_f32(const LinearParams& p) {
    constexpr u32 BK = 16, THREADS = BM * BN / 16, ACROSS = BN / 4;
    // Tiles are staged with inputs as rows, so that a thread's four rows or columns are one load. The padding spreads
    // the stores over the banks.
    SHARED_ARRAY(float, a, BK * (BM + 4));
    SHARED_ARRAY(float, b, BK * (BN + 4));
    const u32 m0 = blockIdx.x * BM, n0 = blockIdx.y * BN;
    const u32 row = threadIdx.x / ACROSS * 4, col = threadIdx.x % ACROSS * 4;

    auto fill = [&](float* stage, u32 lines, const void* matrix, u32 rows, u32 row0, u32 k0) {
        for (u32 i = threadIdx.x; i < lines * (BK / 4); i += THREADS) {
            u32 line = i / (BK / 4), k = i % (BK / 4) * 4;
            Vec<float, 4> four = {};
            if (row0 + line < rows && k0 + k < p.k) four = load<4>((const float*)matrix + ((u64)(row0 + line) * p.k + k0 + k));
#pragma unroll
            for (u32 e = 0; e < 4; ++e) stage[(k + e) * (lines + 4) + line] = four.x[e];
        }
    };

    float sums[4][4] = {};
    for (u32 k0 = 0; k0 < p.k; k0 += BK) {
        fill(a, BM, p.input, p.m, m0, k0);
        fill(b, BN, p.weight, p.n, n0, k0);
        __syncthreads();
#pragma unroll
        for (u32 k = 0; k < BK; ++k) {
            Vec<float, 4> x = load<4>(a + k * (BM + 4) + row), y = load<4>(b + k * (BN + 4) + col);
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
#pragma unroll
                for (u32 j = 0; j < 4; ++j) sums[i][j] = fmaf(x.x[i], y.x[j], sums[i][j]);
        }
        __syncthreads();
    }
    write_pairs<float>(p, (float (&)[8][2])sums, [&](u32 i) { return make_uint2(m0 + row + i / 2, n0 + col + i % 2 * 2); });
}
