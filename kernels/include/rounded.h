// Rounding of activations to 8 bits in blocks of 32, for products with weights whose codes are integers.
#pragma once
#include "gpu.h"

// Rounds N adjacent elements of each lane: 32 / N adjacent lanes have a block, which all or none of them call it for. `at` is the
// index of the lane's first element among those of all rows. A block with a value that is not finite gets a scale that is not
// finite and no codes.
template <int N>
DEVICE void round_block(const float (&x)[N], const RoundedRows& out, u64 at) {
    constexpr u32 LANES = 32 / N, BLOCK = ALL_LANES >> (32 - LANES);
    const u32 lanes = BLOCK << (lane_id() / LANES * LANES);
    // Magnitudes are compared as integers, in which NaN is the largest.
    u32 largest = 0;
#pragma unroll
    for (u32 e = 0; e < N; ++e) largest = max(largest, __float_as_uint(x[e]) & 0x7fffffffu);
#pragma unroll
    for (u32 i = 1; i < LANES; i *= 2) largest = max(largest, __shfl_xor_sync(lanes, largest, (int)i));
    const float magnitude = __uint_as_float(largest);
    const bool codable = largest != 0 && largest < 0x7f800000u;
    const float inverse = codable ? 127.0f / magnitude : 0.0f;
    int sum = 0;
    Vec<i8, N> codes;
#pragma unroll
    for (u32 e = 0; e < N; ++e) {
        // 127 / magnitude is infinite for the smallest numbers.
        int code = codable ? (int)fminf(fmaxf(rintf(x[e] * inverse), -127.0f), 127.0f) : 0;
        codes.x[e] = (i8)code;
        sum += code;
    }
#pragma unroll
    for (u32 i = 1; i < LANES; i *= 2) sum += __shfl_xor_sync(lanes, sum, (int)i);
    store(out.codes + at, codes);
    if (lane_id() % LANES == 0) {
        const float scale = magnitude / 127.0f;
        Vec<float, 2> scales;
        scales.x[0] = scale;
        scales.x[1] = scale * (float)sum;
        store(out.scales + at / 32 * 2, scales);
    }
}
