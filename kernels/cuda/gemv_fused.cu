// Dense product for at most ROWS rows, together with what comes before and after it: the RMS norm of its input, and the gated
// activation of its output. One launch takes the place of three, with the same bits: every value that the others would store is
// rounded as they round it.
//
// A CTA normalises all rows once, in shared memory. Its warps then take turns at pairs of outputs, which are adjacent or the gate
// and the up of one output of the activation. The first weights are on their way before the norm.
#include "gemv.h"
#include "activation.h"
#include "norm.h"

// What a pair of outputs becomes: two outputs, or one by an activation.
enum Pairs { PLAIN, PAIR_SILU, PAIR_GELU, PAIR_GELU_TANH };

DEVICE float activate_gate(u32 kind, float gate) {
    if (kind == PAIR_SILU) return activate<SILU>(gate);
    return kind == PAIR_GELU ? activate<GELU>(gate) : activate<GELU_TANH>(gate);
}

// Writes ROWS rows of the input, normalised if there is a norm, to shared memory. Rows beyond the last are computed as the last one
// and their outputs are not written.
template <class T, int ROWS>
DEVICE void stage_rows(const FusedLinearParams& params, T* rows, float* scratch) {
    constexpr u32 N = WIDE<T>;
    // Number of pieces of a row and of the norm's weight that a thread loads at once.
    constexpr u32 AHEAD = 2;
    const LinearParams& p = params.linear;
    const u32 first = threadIdx.x * N, step = NORM_THREADS * N;
    float weight[AHEAD][N];
    const auto load_scales = [&](u32 c) {
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead)
            if (c + ahead * step < p.k) load_floats<N>(weight[ahead], params.norm_weight + c + ahead * step);
    };
    if (params.norm_weight) load_scales(first);
    wait_for_launch();
    float sums[ROWS] = {};
    for (u32 c0 = first; c0 < p.k; c0 += AHEAD * step) {
        Vec<T, N> x[AHEAD][ROWS];
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
            for (u32 i = 0; i < ROWS; ++i)
                if (c0 + ahead * step < p.k)
                    x[ahead][i] = load<N>((const T*)p.input + (u64)min(i, p.m - 1) * p.k + c0 + ahead * step);
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
            const u32 c = c0 + ahead * step;
            if (c >= p.k) break;
#pragma unroll
            for (u32 i = 0; i < ROWS; ++i) {
                sums[i] = add_squares(sums[i], x[ahead][i]);
                store(rows + i * p.k + c, x[ahead][i]);
            }
        }
    }
    if (params.norm_weight) {
        block_sums(sums, scratch);
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) sums[i] = inverse_root(sums[i], p.k, params.eps);
        // Each thread reads back only its own elements.
        for (u32 c0 = first; c0 < p.k; c0 += AHEAD * step) {
            if (c0 != first) load_scales(c0);
#pragma unroll
            for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
                const u32 c = c0 + ahead * step;
                if (c >= p.k) break;
#pragma unroll
                for (u32 i = 0; i < ROWS; ++i) {
                    Vec<T, N> y = load<N>(rows + i * p.k + c);
#pragma unroll
                    for (u32 e = 0; e < N; ++e) {
                        const float scale = weight[ahead][e] + params.weight_offset;
                        y.x[e] = from_float<T>(normed(to_float(y.x[e]), sums[i], scale, 0.0f));
                    }
                    store(rows + i * p.k + c, y);
                }
            }
        }
    }
    __syncthreads();
}

// Writes the activation of the sums of gate and up, of which the lanes of a warp hold parts. Each row is written by one lane.
template <class T, u32 ROWS>
DEVICE void write_activated(const FusedLinearParams& params, u32 column, const float (&sums)[ROWS][WARP_OUTPUTS]) {
    const LinearParams& p = params.linear;
    const u32 row = lane_id();
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
        const float of_gate = warp_sum(sums[i][0]), of_up = warp_sum(sums[i][1]);
        if (row == i) gate = of_gate, up = of_up;
    }
    if (row >= min((u32)ROWS, p.m)) return;
    gate = to_float(from_float<T>(added<T>(p, row, column, gate)));
    up = to_float(from_float<T>(added<T>(p, row, column + p.n / 2, up)));
    ((T*)p.out)[(u64)row * p.out_stride + column] = from_float<T>(activate_gate(params.pairs, gate) * up);
}

// Grid: any number of CTAs, which take turns at pairs of outputs. Dynamic shared memory: ROWS rows of the input.
template <class T, class O, int ROWS>
DEVICE void gemv_fused(const FusedLinearParams& params) {
    DYNAMIC_SHARED(shared);
    SHARED_ARRAY(float, scratch, ROWS * NORM_THREADS / 32);
    using Pieces = WeightPieces<T, 4>;
    const LinearParams& p = params.linear;
    const T* const rows = (const T*)shared;
    const bool is_activated = params.pairs != PLAIN;
    const u32 pairs = (p.n + 1) / 2, step = gridDim.x * (NORM_THREADS / 32);
    Pieces weight;
    const auto begin = [&](u32 pair) {
        const u32 first = is_activated ? pair : 2 * pair, second = is_activated ? pair + pairs : min(first + 1, p.n - 1);
        weight.rows[0] = (const T*)p.weight + (u64)first * p.k;
        weight.rows[1] = (const T*)p.weight + (u64)second * p.k;
        weight.load_from(Pieces::first(), p.k);
    };
    u32 pair = blockIdx.x * (NORM_THREADS / 32) + warp_id();
    if (pair < pairs) begin(pair);
    stage_rows<T, ROWS>(params, (T*)shared, scratch);

    while (pair < pairs) {
        float sums[ROWS][WARP_OUTPUTS] = {};
        weight.multiply_all(sums, p.k, [&](u32 i, u32 k) { return rows + i * p.k + k; });
        const u32 of = pair;
        pair += step;
        if (pair < pairs) begin(pair);
        if (is_activated) {
            if constexpr (sizeof(O) == sizeof(T)) write_activated<T>(params, of, sums);
        } else {
            write_warp_sums<O>(p, 2 * of, sums);
        }
    }
}
