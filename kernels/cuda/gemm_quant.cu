// Product of 16-bit activations with a quantised weight, on the tensor cores of sm_80 and later. It is for more rows
// than MMVQ supports and too few to dequantise the weight first, of a matrix or of an expert. Activations are not rounded;
// a weight's value is rounded to their type.
//
// A CTA computes TILES_M * 16 rows of 16 outputs. Its warps take turns at pairs of groups of 32 inputs, and their sums
// are added in order at the end, so a row's bits depend neither on TILES_M nor on the other rows. A lane builds its own
// fragments, weights from codes and activations from memory. The assignment of a group's elements to the inputs of an
// instruction is arbitrary if it is the same for both, so a lane takes the two words of four elements whose codes are
// in one word of the plane.
#include "experts.h"
#include "linear.h"
#include "quant.h"

constexpr u32 WARPS = 8, TILES_N = 2, OUTPUTS = TILES_N * 8;

// Computes OUTPUTS outputs from row `n0` on of `n` rows of a weight, of which the first is row `weight_row`. The rows of a
// lane's fragments are eight apart; `offset(i)` returns the number of elements before the i-th. `write(r, column, sum)`
// gets the sums, by row and column of the tile.
template <class F, class T, int TILES_M, class Offset, class Write>
DEVICE void multiply_groups(const QuantWeight& weight, u64 weight_row, u32 n0, u32 n, u32 groups, const T* input,
                            Offset offset, Write write) {
    constexpr u32 SLOTS = TILES_M * TILES_N * 4;
    SHARED_ARRAY(float, partial, WARPS * SLOTS * 32);
    const u32 lane = lane_id(), line = lane / 4, part = lane % 4;
    input += part * 4;

    float sums[TILES_M][TILES_N][4] = {};
    for (u32 pair = warp_id(); pair * 2 < groups; pair += WARPS) {
#pragma unroll
        for (u32 second = 0; second < 2; ++second) {
            const u32 at = pair * 2 + second;
            if (at >= groups) continue;
            // Fragments of each half of the group, in the column layout of the instruction.
            u32 b[TILES_N][2][2];
#pragma unroll
            for (u32 j = 0; j < TILES_N; ++j) {
                const u32 row = min(n0 + j * 8 + line, n - 1);
                const auto group = read_group<F, 2>(weight, GroupAt(weight_row + row, groups, at), part);
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    float values[4];
                    group.values(half, values);
#pragma unroll
                    for (u32 i = 0; i < 2; ++i) b[j][half][i] = pack_pair<T>(values[i * 2], values[i * 2 + 1]);
                }
            }
#pragma unroll
            for (u32 i = 0; i < TILES_M; ++i) {
                const T* upper = input + (offset(i * 2) + at * 32);
                const T* lower = input + (offset(i * 2 + 1) + at * 32);
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const uint2 x = load<4>(upper + half * 16).registers, y = load<4>(lower + half * 16).registers;
                    const u32 a[4] = {x.x, y.x, x.y, y.y};
#pragma unroll
                    for (u32 j = 0; j < TILES_N; ++j) mma_m16n8k16(sums[i][j], a, b[j][half], T());
                }
            }
        }
    }

#pragma unroll
    for (u32 slot = 0; slot < SLOTS; ++slot)
        partial[(warp_id() * SLOTS + slot) * 32 + lane] = sums[slot / 4 / TILES_N][slot / 4 % TILES_N][slot % 4];
    __syncthreads();
    for (u32 at = threadIdx.x; at < SLOTS * 32; at += blockDim.x) {
        const u32 slot = at / 32, of = at % 32;
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < WARPS; ++warp) sum += partial[(warp * SLOTS + slot) * 32 + of];
        write(slot / 4 / TILES_N * 16 + slot % 4 / 2 * 8 + of / 4, slot / 4 % TILES_N * 8 + of % 4 * 2 + slot % 2, sum);
    }
}

template <class F, class T, class O, int TILES_M>
DEVICE void gemm_quant(const QuantLinearParams& p) {
    const u32 m0 = blockIdx.y * TILES_M * 16, n0 = blockIdx.x * OUTPUTS;
    multiply_groups<F, T, TILES_M>(
        p.weight, 0, n0, p.n, p.k / 32, (const T*)p.input,
        // Rows beyond the last are computed as the last one and not written.
        [&](u32 i) { return (u64)min(m0 + i * 8 + lane_id() / 4, p.m - 1) * p.k; },
        [&](u32 row, u32 column, float sum) { write_output<O>(p, m0 + row, n0 + column, sum); });
}

// The same for the pairs of an expert. Grid: tiles, outputs, parts of a tile.
template <class F, class T, int TILES_M>
DEVICE void expert_gemm_quant(const ExpertLinearParams& p) {
    const ExpertTile own(p, TILES_M * 16);
    if (own.count == 0) return;
    const u32 n0 = blockIdx.y * OUTPUTS, groups = p.k / 32;
    u32 rows[TILES_M * 2];
#pragma unroll
    for (u32 i = 0; i < TILES_M * 2; ++i) rows[i] = own.pair(p, i * 8 + lane_id() / 4) / p.share;
    const LinearParams output = own.template output<T>(p);
    multiply_groups<F, T, TILES_M>(
        p.quant, (u64)own.expert * p.n, n0, p.n, groups, (const T*)p.input,
        [&](u32 i) { return (u64)rows[i] * p.input_stride; },
        [&](u32 row, u32 column, float sum) {
            if (row < own.count) write_output<T>(output, own.pair(p, row), n0 + column, sum);
        });
}
