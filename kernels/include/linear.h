// Code shared by the matrix products: the epilogue of a sum, and the staging of operands of the dense products.
#pragma once
#include "gpu.h"

// Returns one sum after the epilogue without the cap; P is LinearParams or QuantLinearParams.
template <class O, class P>
DEVICE float added(const P& p, u32 row, u32 col, float sum) {
    float value = sum * p.scale;
    if (p.bias) value = fmaf(p.bias[col], p.scale, value);
    if (p.add) value += to_float(((const O*)p.add)[(u64)row * p.out_stride + col]);
    return value;
}

template <class P>
DEVICE float capped(const P& p, float value) {
    return p.softcap * tanhf(value / p.softcap);
}

template <class O, class P>
DEVICE void write_output(const P& p, u32 row, u32 col, float sum) {
    if (row >= p.m || col >= p.n) return;
    const float value = added<O>(p, row, col, sum);
    ((O*)p.out)[(u64)row * p.out_stride + col] = from_float<O>(p.softcap != 0.0f ? capped(p, value) : value);
}

// Writes sums of which the lanes of a warp hold parts: ROWS rows of OUTPUTS adjacent columns from `n0` on. Each sum is
// written by one lane.
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

// Writes two adjacent columns, in one store if they are aligned for it.
template <class O, class P>
DEVICE void write_pair(const P& p, u32 row, u32 col, const float* pair) {
    if (row >= p.m || col >= p.n) return;
    O* at = (O*)p.out + ((u64)row * p.out_stride + col);
    Vec<O, 2> both;
    both.x[0] = from_float<O>(pair[0]);
    both.x[1] = from_float<O>(pair[1]);
    if (col + 1 < p.n && ((u64)at & (2 * sizeof(O) - 1)) == 0) {
        store(at, both);
    } else {
        at[0] = both.x[0];
        if (col + 1 < p.n) at[1] = both.x[1];
    }
}

// Writes a thread's sums: N pairs of adjacent columns, pair i at place(i) = {row, column}. The cap is tested once: a
// tanh at each sum would make the code at the end of the tile exceed the instruction cache.
template <class O, u32 N, class P, class Place>
DEVICE void write_pairs(const P& p, float (&sums)[N][2], Place place) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        const uint2 at = place(i);
#pragma unroll
        for (u32 e = 0; e < 2; ++e)
            if (at.x < p.m && at.y + e < p.n) sums[i][e] = added<O>(p, at.x, at.y + e, sums[i][e]);
    }
    if (p.softcap != 0.0f) {
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) sums[i][e] = capped(p, sums[i][e]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < N; ++i) write_pair<O>(p, place(i).x, place(i).y, sums[i]);
}

// ------------------------------------------------------------------------------------------- tiles of 16-bit elements

// Number of inputs that are staged at once: a row of a tile has 64 bytes, four pieces of 16.
constexpr u32 STAGE_INPUTS = 32;
constexpr u32 PIECES = STAGE_INPUTS / 8;

// Returns the offset in elements of a piece of a row of a staged tile. The order of pieces depends on the row, so that
// eight rows that are read together are in different banks.
DEVICE u32 staged(u32 row, u32 piece) { return row * STAGE_INPUTS + (piece ^ (row / 2 % PIECES)) * 8; }
