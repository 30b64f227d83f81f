// Dense matrix product for at most ROWS rows: every weight is read once, in 16-byte loads, at the bandwidth of memory.
#include "gemv.h"

template <class T, class O, int ROWS>
DEVICE void gemv(const LinearParams& p) {
    using Pieces = WeightPieces<T, (ROWS <= 4 ? 4 : 2)>;
    const u32 n0 = (blockIdx.x * (blockDim.x / 32) + warp_id()) * WARP_OUTPUTS;
    // Rows beyond the last are computed as the last one and not written.
    const auto input = [&](u32 i, u32 k) { return (const T*)p.input + (u64)min(i, p.m - 1) * p.k + k; };
    Pieces weight;
#pragma unroll
    for (u32 j = 0; j < WARP_OUTPUTS; ++j) weight.rows[j] = (const T*)p.weight + (u64)min(n0 + j, p.n - 1) * p.k;
    float sums[ROWS][WARP_OUTPUTS] = {};
    if constexpr (ROWS <= 4) {
        if (n0 < p.n) weight.load_from(Pieces::first(), p.k);
        wait_for_launch();
        if (n0 >= p.n) return;
        weight.multiply_all(sums, p.k, input);
    } else {
        // More rows need the registers of the first weights.
        wait_for_launch();
        if (n0 >= p.n) return;
        for (u32 k0 = Pieces::first(); k0 < p.k; k0 += Pieces::ALL) {
            weight.load_from(k0, p.k);
            weight.multiply(sums, k0, p.k, input);
        }
    }
    write_warp_sums<O>(p, n0, sums);
}
