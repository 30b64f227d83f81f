// Dense product for at most ROWS rows on the tensor cores of sm_80 and later: every weight is read once, at the bandwidth of
// memory, with few instructions.
//
// The operands are swapped: outputs are the rows of a tile, and the rows of the input are its columns, of which an instruction
// multiplies eight. CTAs share the inputs of an output in equal parts. The sum of a part adds its inputs in steps of 16 from first
// to last, and the parts are added in their order, so a row's bits depend neither on ROWS nor on the other rows.
#include "skinny.h"
#include "tiles.h"

// Number of outputs of a CTA.
constexpr u32 SKINNY_OUTPUTS = 128;

// Grid: (tiles of SKINNY_OUTPUTS outputs, parts of `steps` stages of inputs).
template <class T, class O, int ROWS, int STAGES>
DEVICE void gemm_skinny(const SkinnyLinearParams& params) {
    using Tile = MmaTile<T, SKINNY_OUTPUTS, ROWS, 32, ROWS, STAGES>;
    constexpr u32 TILES = Tile::TILES_M * Tile::TILES_N;
    DYNAMIC_SHARED(shared);
    SHARED_ARRAY(u32, flag, 1);
    const LinearParams& p = params.linear;
    const u32 n0 = blockIdx.x * SKINNY_OUTPUTS, first = blockIdx.y * params.steps;
    const u32 steps = min(params.steps, (p.k + STAGE_INPUTS - 1) / STAGE_INPUTS - first);
    Tile tile;
    tile.run((T*)shared, steps, [&](T* stage, u32 step) {
        const u32 k0 = (first + step) * STAGE_INPUTS;
        fill_stage<SKINNY_OUTPUTS, Tile::THREADS>(
            stage, p.k, k0, [&](u32 r, bool& valid) { return row_of<T>(p.weight, p.n, p.k, n0 + output_of(r), valid); });
        fill_stage<ROWS, Tile::THREADS>(stage + SKINNY_OUTPUTS * STAGE_INPUTS, p.k, k0,
                                        [&](u32 r, bool& valid) { return row_of<T>(p.input, p.m, p.k, r, valid); });
    });
    float(&sums)[TILES][4] = (float(&)[TILES][4])tile.sums;
    if (gridDim.y > 1 && !add_parts<Tile::THREADS>(params, sums, flag)) return;

    float pairs[TILES * 2][2];
#pragma unroll
    for (u32 i = 0; i < TILES * 2; ++i) pairs[i][0] = sums[i / 2][i % 2], pairs[i][1] = sums[i / 2][i % 2 + 2];
    write_pairs<O>(p, pairs, [&](u32 i) {
        const u32 at = i / 2, row = at % Tile::TILES_N * 8 + lane_id() % 4 * 2 + i % 2;
        return make_uint2(row, n0 + tile.warp_m + at / Tile::TILES_N * 16 + lane_id() / 4 * 2);
    });
}
