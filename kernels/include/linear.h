// What the matrix products share: what becomes of a sum, and how the dense ones stage their operands.
#pragma once
#include "gpu.h"

// The result of one sum: P is LinearParams or QuantLinearParams.
template <class O, class P>
DEVICE float finished(const P& p, u32 row, u32 col, float sum) {
    float value = sum * p.scale;
    if (p.bias) value += p.bias[col];
    if (p.add) value += to_float(((const O*)p.add)[(u64)row * p.out_stride + col]);
    if (p.softcap != 0.0f) value = p.softcap * tanhf(value / p.softcap);
    return value;
}

template <class O, class P>
DEVICE void write_output(const P& p, u32 row, u32 col, float sum) {
    if (row < p.m && col < p.n) ((O*)p.out)[(u64)row * p.out_stride + col] = from_float<O>(finished<O>(p, row, col, sum));
}

// The sums that a warp's lanes have parts of: ROWS rows of OUTPUTS neighbouring columns from `n0` on. Each is written by one lane.
template <class O, u32 ROWS, u32 OUTPUTS, class P>
DEVICE void write_warp_sums(const P& p, u32 n0, const float (&sums)[ROWS][OUTPUTS]) {
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i)
#pragma unroll
        for (u32 j = 0; j < OUTPUTS; ++j) {
            float sum = warp_sum(sums[i][j]);
            if (lane_id() == (i * OUTPUTS + j) % 32) write_output<O>(p, i, n0 + j, sum);
        }
}

// The results of two neighbouring columns, in one store where they are aligned for it.
template <class O, class P>
DEVICE void write_output_pair(const P& p, u32 row, u32 col, float left, float right) {
    O* at = (O*)p.out + ((u64)row * p.out_stride + col);
    if (row < p.m && col + 1 < p.n && ((u64)at & (2 * sizeof(O) - 1)) == 0) {
        Vec<O, 2> pair;
        pair.x[0] = from_float<O>(finished<O>(p, row, col, left));
        pair.x[1] = from_float<O>(finished<O>(p, row, col + 1, right));
        store(at, pair);
    } else {
        write_output<O>(p, row, col, left);
        write_output<O>(p, row, col + 1, right);
    }
}

// ------------------------------------------------------------------------------------------- tiles of 16-bit elements

// Inputs that are staged at once: a row of a tile is 64 bytes, four pieces of 16.
constexpr u32 STAGE_INPUTS = 32;
constexpr u32 PIECES = STAGE_INPUTS / 8;

// Offset in elements of a piece of a row of a staged tile. Pieces change places with the row, so that the eight rows that are read
// together lie in different banks.
DEVICE u32 staged(u32 row, u32 piece) { return row * STAGE_INPUTS + (piece ^ (row / 2 % PIECES)) * 8; }
