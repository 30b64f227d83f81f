// Code shared by the products of few rows on tensor cores, whose tiles have outputs as rows and whose inputs are divided among CTAs.
#pragma once
#include "gpu.h"

// Returns the output of row r of the weight's part of a stage. The rows are in an order that gives a thread the sums of two
// adjacent outputs: those of rows g and g + 8 of a tile of 16.
DEVICE u32 output_of(u32 r) { return r / 16 * 16 + r % 8 * 2 + r / 8 % 2; }

// Adds the sums of the CTAs that share an output, in the order of their inputs. Returns whether this CTA is the last to arrive,
// which alone has the results. P is SkinnyLinearParams or SkinnyQuantParams.
template <u32 THREADS, u32 N, class P>
DEVICE bool add_parts(const P& params, float (&sums)[N][4], u32* flag) {
    // Number of parts that are loaded at once, because each alone would wait for memory.
    constexpr u32 AHEAD = N < 8 ? 8 / N : 1;
    const u32 parts = gridDim.y;
    auto place = [&](u32 part, u32 i) {
        return params.partial + ((((u64)blockIdx.x * parts + part) * N + i) * THREADS + threadIdx.x) * 4;
    };
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        Vec<float, 4> four;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) four.x[e] = sums[i][e], sums[i][e] = 0.0f;
        store(place(blockIdx.y, i), four);
    }
    if (!is_last(params.tickets + blockIdx.x, parts, flag)) return false;
    for (u32 first = 0; first < parts; first += AHEAD) {
        Vec<float, 4> loaded[AHEAD][N];
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
            for (u32 i = 0; i < N; ++i) loaded[ahead][i] = load_fresh<4>(place(min(first + ahead, parts - 1), i));
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
            if (first + ahead >= parts) break;
#pragma unroll
            for (u32 i = 0; i < N; ++i)
#pragma unroll
                for (u32 e = 0; e < 4; ++e) sums[i][e] += loaded[ahead][i].x[e];
        }
    }
    return true;
}
