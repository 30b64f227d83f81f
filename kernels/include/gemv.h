// The loop of the products that read every weight once without tensor cores. A warp computes two outputs of all rows. A lane
// accumulates its 16-byte pieces in order, then the lanes are added in one fixed order: a row's bits depend neither on the number
// of rows nor on the other rows.
//
// The first weights are on their way before the launch before has ended.
#pragma once
#define WAITS_ITSELF
#include "linear.h"

// Number of outputs of a warp.
constexpr u32 WARP_OUTPUTS = 2;

// AHEAD pieces of each of a warp's rows of the weight, which are on their way to registers or have arrived.
template <class T, u32 AHEAD>
struct WeightPieces {
    static constexpr u32 LANE = WIDE<T>, STEP = 32 * LANE, ALL = AHEAD * STEP;
    const T* rows[WARP_OUTPUTS];
    Vec<T, WIDE<T>> pieces[AHEAD][WARP_OUTPUTS];

    // Returns a lane's first input.
    static DEVICE u32 first() { return lane_id() * LANE; }

    // Starts to load a lane's pieces from the input k0 on.
    DEVICE void load_from(u32 k0, u32 k) {
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
            for (u32 j = 0; j < WARP_OUTPUTS; ++j)
                if (k0 + ahead * STEP < k) pieces[ahead][j] = load_weight(rows[j] + k0 + ahead * STEP);
    }

    // Adds the products of all inputs, of which the first pieces have been loaded. `input(i, k)` returns the address of the inputs
    // of row i from k on.
    template <int ROWS, class Input>
    DEVICE void multiply_all(float (&sums)[ROWS][WARP_OUTPUTS], u32 k, Input input) {
        multiply(sums, first(), k, input);
        for (u32 k0 = first() + ALL; k0 < k; k0 += ALL) {
            load_from(k0, k);
            multiply(sums, k0, k, input);
        }
    }

    // Adds the products of these pieces, from the input k0 on.
    template <int ROWS, class Input>
    DEVICE void multiply(float (&sums)[ROWS][WARP_OUTPUTS], u32 k0, u32 k, Input input) const {
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
            const u32 at = k0 + ahead * STEP;
            if (at >= k) break;
#pragma unroll
            for (u32 i = 0; i < ROWS; ++i) {
                const Vec<T, WIDE<T>> x = load<WIDE<T>>(input(i, at));
#pragma unroll
                for (u32 e = 0; e < LANE; ++e)
#pragma unroll
                    for (u32 j = 0; j < WARP_OUTPUTS; ++j)
                        sums[i][j] = fmaf(to_float(x.x[e]), to_float(pieces[ahead][j].x[e]), sums[i][j]);
            }
        }
    }
};
