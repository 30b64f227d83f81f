// Dense matrix product for at most ROWS rows: every weight is read once, in 16-byte loads, at the bandwidth of memory.
//
// A warp computes OUTPUTS adjacent outputs of all rows. A lane accumulates its 16-byte pieces in order, then the lanes
// are added in one fixed order: a row's bits depend neither on ROWS nor on the other rows.
#include "linear.h"

template <class T, class O, int ROWS>
DEVICE void gemv(const LinearParams& p) {
    constexpr u32 OUTPUTS = 2;
    // Number of weight loads in flight in each lane, for each output.
    constexpr u32 AHEAD = ROWS <= 4 ? 4 : 2;
    constexpr u32 LANE = WIDE<T>, STEP = 32 * LANE;
    const u32 n0 = (blockIdx.x * (blockDim.x / 32) + warp_id()) * OUTPUTS;
    if (n0 >= p.n) return;

    const T* weight[OUTPUTS];
#pragma unroll
    for (u32 j = 0; j < OUTPUTS; ++j) weight[j] = (const T*)p.weight + (u64)min(n0 + j, p.n - 1) * p.k;

    float sums[ROWS][OUTPUTS] = {};
    for (u32 k0 = lane_id() * LANE; k0 < p.k; k0 += AHEAD * STEP) {
        Vec<T, WIDE<T>> w[AHEAD][OUTPUTS];
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
            for (u32 j = 0; j < OUTPUTS; ++j)
                if (k0 + ahead * STEP < p.k) w[ahead][j] = load_once(weight[j] + k0 + ahead * STEP);
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
            const u32 k = k0 + ahead * STEP;
            if (k >= p.k) break;
#pragma unroll
            for (u32 i = 0; i < ROWS; ++i) {
                // Rows beyond the last are computed as the last one and not written.
                Vec<T, WIDE<T>> x = load<WIDE<T>>((const T*)p.input + (u64)min(i, p.m - 1) * p.k + k);
#pragma unroll
                for (u32 e = 0; e < LANE; ++e)
#pragma unroll
                    for (u32 j = 0; j < OUTPUTS; ++j)
                        sums[i][j] = fmaf(to_float(x.x[e]), to_float(w[ahead][j].x[e]), sums[i][j]);
            }
        }
    }
    write_warp_sums<O>(p, n0, sums);
}
