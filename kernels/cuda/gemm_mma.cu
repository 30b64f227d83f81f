// Dense matrix product on the tensor cores of sm_75 and later: 16-bit operands with f32 accumulation.
#include "tiles.h"

template <class T, class O, int BM, int BN, int WM, int WN, int STAGES>
DEVICE void gemm_mma(const LinearParams& p) {
    using Tile = MmaTile<T, BM, BN, WM, WN, STAGES>;
    DYNAMIC_SHARED(shared);
    const u32 m0 = blockIdx.x * BM, n0 = blockIdx.y * BN;
    Tile tile;
    tile.run((T*)shared, (p.k + STAGE_INPUTS - 1) / STAGE_INPUTS, [&](T* stage, u32 step) {
        const u32 k0 = step * STAGE_INPUTS;
        fill_stage<BM, Tile::THREADS>(stage, p.k, k0,
                                      [&](u32 r, bool& valid) { return row_of<T>(p.input, p.m, p.k, m0 + r, valid); });
        fill_stage<BN, Tile::THREADS>(stage + BM * STAGE_INPUTS, p.k, k0,
                                      [&](u32 r, bool& valid) { return row_of<T>(p.weight, p.n, p.k, n0 + r, valid); });
    });
    tile.template write<O>(p, n0, [&](u32 r) { return m0 + r; });
}
