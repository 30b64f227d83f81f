// Products of many rows with the weights of experts, on the tensor cores of sm_75 and later: 16-bit activations with f32
// accumulation. Grid: tiles, outputs, parts of a tile.
#include "experts.h"
#include "quant.h"
#include "tiles.h"

// Multiplies the pairs of a tile with rows of a weight. `fill(stage, step, tile)` writes the rows of the weight to a stage.
template <class Tile, class T, u32 BM, u32 BN, class Fill>
DEVICE void multiply_pairs(const ExpertLinearParams& p, Fill fill) {
    SHARED_ARRAY(u32, pairs, BM);
    const ExpertTile own(p, BM);
    if (own.count == 0) return;
    for (u32 r = threadIdx.x; r < BM; r += Tile::THREADS) pairs[r] = own.pair(p, r);
    __syncthreads();

    DYNAMIC_SHARED(shared);
    Tile tile;
    tile.run((T*)shared, (p.k + STAGE_INPUTS - 1) / STAGE_INPUTS, [&](T* stage, u32 step) {
        fill_stage<BM, Tile::THREADS>(stage, p.k, step * STAGE_INPUTS, [&](u32 r, bool& valid) {
            valid = valid && r < own.count;
            return (const T*)p.input + (u64)(pairs[r] / p.share) * p.input_stride;
        });
        fill(stage + BM * STAGE_INPUTS, step, own);
    });
    tile.template write<T>(own.template output<T>(p), blockIdx.y * BN,
                           [&](u32 r) { return r < own.count ? pairs[r] : ExpertTile::NO_PAIR; });
}

template <class T, int BM, int BN, int WM, int WN, int STAGES>
DEVICE void expert_mma(const ExpertLinearParams& p) {
    using Tile = MmaTile<T, BM, BN, WM, WN, STAGES>;
    const u32 n0 = blockIdx.y * BN;
    multiply_pairs<Tile, T, BM, BN>(p, [&](T* stage, u32 step, const ExpertTile& own) {
        fill_stage<BN, Tile::THREADS>(stage, p.k, step * STAGE_INPUTS, [&](u32 r, bool& valid) {
            valid = valid && n0 + r < p.n;
            return (const T*)p.weight + ((u64)own.expert * p.n + (valid ? n0 + r : 0)) * p.k;
        });
    });
}

// The same with a quantised weight, whose values are rounded to the type of the activations. A stage has one group of
// each row. Four threads decode a group; its codes are read a step before.
template <class F, class T, int BM, int BN, int WM, int WN, int STAGES>
DEVICE void expert_mma_quant(const ExpertLinearParams& p) {
    using Tile = MmaTile<T, BM, BN, WM, WN, STAGES>;
    constexpr u32 PARTS = 4, EACH = BN * PARTS / Tile::THREADS;
    static_assert(STAGE_INPUTS == 32 && BN * PARTS % Tile::THREADS == 0, "threads decode equally many parts of groups");
    const u32 groups = p.k / 32, part = threadIdx.x % PARTS, line = threadIdx.x / PARTS;
    decltype(read_group<F, 2>(p.quant, GroupAt(0, 0, 0))) held[EACH];
    auto read = [&](u32 step, const ExpertTile& own) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            // Rows beyond the last are read as the last one and not written.
            const u32 row = min(blockIdx.y * BN + line + i * (Tile::THREADS / PARTS), p.n - 1);
            held[i] = read_group<F, 2>(p.quant, GroupAt((u64)own.expert * p.n + row, groups, step), part);
        }
    };
    multiply_pairs<Tile, T, BM, BN>(p, [&](T* stage, u32 step, const ExpertTile& own) {
        if (step == 0) read(0, own);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 row = line + i * (Tile::THREADS / PARTS);
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                float values[4];
                held[i].values(half, values);
                Vec<T, 4> rounded;
#pragma unroll
                for (u32 e = 0; e < 4; ++e) rounded.x[e] = from_float<T>(values[e]);
                store(stage + staged(row, half * 2 + part / 2) + part % 2 * 4, rounded);
            }
        }
        if (step + 1 < groups) read(step + 1, own);
    });
}
