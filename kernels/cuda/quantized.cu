// Quantised weights: their product with 8-bit activations (MMVQ, for few rows), and their dequantisation.
#include "activation.h"
#include "linear.h"
#include "quant.h"
#include "rounded.h"

// ------------------------------------------------------------------------------------------- products

// A thread rounds 8 adjacent elements.
template <class T>
DEVICE void quantize_activations(const QuantizeParams& p) {
    const u32 k = (blockIdx.y * blockDim.x + threadIdx.x) * 8, row = blockIdx.x;
    if (k >= p.k) return;
    const u64 at = (u64)row * p.k + k;
    float x[8];
#pragma unroll
    for (u32 part = 0; part < 8; part += WIDE<T>) {
        Vec<T, WIDE<T>> values = load<WIDE<T>>((const T*)p.input + at + part);
#pragma unroll
        for (u32 e = 0; e < WIDE<T>; ++e) x[part + e] = to_float(values.x[e]);
    }
    round_block(x, {p.codes, p.scales}, at);
}

// Adds the contribution of a group of 32 inputs to the sum of an output.
template <class F>
DEVICE float accumulate(const QuantGroup<8>& group, const int* x, float scale, float scaled_sum, float sum) {
    int low = 0, high = 0;
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
        low = dot4(group.q[w], x[w], low);
        high = dot4(group.q[w + 4], x[w + 4], high);
    }
    if (F::SCALES == 1) {
        sum = fmaf(group.scale[0] * scale, (float)(low + high), sum);
    } else {
        sum = fmaf(group.scale[0] * scale, (float)low, sum);
        sum = fmaf(group.scale[1] * scale, (float)high, sum);
    }
    if (F::MINS == 1) sum = fmaf(group.min[0], scaled_sum, sum);
    if (F::MINS == 2) {
        // The stored sum covers all 32 inputs, so that of the first half is computed here.
        int first = 0;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) first = dot4(0x01010101, x[w], first);
        const float scaled_first = scale * (float)first;
        sum = fmaf(group.min[0], scaled_first, sum);
        sum = fmaf(group.min[1], scaled_sum - scaled_first, sum);
    }
    return sum;
}

// Number of outputs that a warp computes at once.
constexpr u32 OUTPUTS = 2;

// Computes a warp's outputs of all rows; `output(j)` is the row of the weight of its j-th. A lane accumulates its groups in order,
// then the lanes are added in one fixed order: a row's bits depend neither on ROWS nor on the other rows. The sums are those of a
// lane.
template <class F, int ROWS, class Output>
DEVICE void sum_rounded(const QuantLinearParams& p, Output output, float (&sums)[ROWS][OUTPUTS]) {
    const u32 groups = p.k / 32;
    // With many rows, one group is enough work for an iteration.
#pragma unroll(ROWS <= 2 ? 2 : 1)
    for (u32 at = lane_id(); at < groups; at += 32) {
        QuantGroup<8> weight[OUTPUTS];
#pragma unroll
        for (u32 j = 0; j < OUTPUTS; ++j) weight[j] = read_group<F, 8>(p.weight, GroupAt(output(j), groups, at));
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            // Rows beyond the last are computed as the last one and not written.
            const u64 group = (u64)min((u32)i, p.m - 1) * groups + at;
            Vec<int, 4> low = load<4>((const int*)p.input + group * 8), high = load<4>((const int*)p.input + group * 8 + 4);
            const int x[8] = {low.x[0], low.x[1], low.x[2], low.x[3], high.x[0], high.x[1], high.x[2], high.x[3]};
            Vec<float, 2> scales = load<2>(p.scales + group * 2);
#pragma unroll
            for (u32 j = 0; j < OUTPUTS; ++j) sums[i][j] = accumulate<F>(weight[j], x, scales.x[0], scales.x[1], sums[i][j]);
        }
    }
}

// Multiplies with the rows of the weight that CTA number `cta` has, two adjacent ones for each warp.
template <class F, class O, int ROWS>
DEVICE void multiply_rounded(const QuantLinearParams& p, u32 cta) {
    const u32 n0 = (cta * (blockDim.x / 32) + warp_id()) * OUTPUTS;
    if (n0 >= p.n) return;
    float sums[ROWS][OUTPUTS] = {};
    sum_rounded<F, ROWS>(p, [&](u32 j) { return min(n0 + j, p.n - 1); }, sums);
    write_warp_sums<O>(p, n0, sums);
}

// Grid: CTAs of 8 outputs.
template <class F, class O, int ROWS>
DEVICE void mmvq(const QuantLinearParams& p) {
    multiply_rounded<F, O, ROWS>(p, blockIdx.x);
}

// Multiplies with two weights of different formats. Grid: the CTAs of the first, then those of the second.
template <class F, class G, class O, int ROWS>
DEVICE void mmvq_pair(const QuantPairParams& p) {
    const u32 outputs = blockDim.x / 32 * OUTPUTS, ctas = (p.first.n + outputs - 1) / outputs;
    if (blockIdx.x < ctas) {
        multiply_rounded<F, O, ROWS>(p.first, blockIdx.x);
    } else {
        multiply_rounded<G, O, ROWS>(p.second, blockIdx.x - ctas);
    }
}

// Number of columns of a CTA of mmvq_glu: those of a block of the rounded output.
constexpr u32 GLU_COLUMNS = 32;

DEVICE float gate_of(const QuantGluParams& p, float gate) {
    return p.gelu_tanh ? activate<GELU_TANH>(gate) : activate<SILU>(gate);
}

// Multiplies with a weight whose rows are those of gates, then those of ups, and applies the gated activation. The result is also
// written rounded. Warps take turns at columns, of which they compute gate and up, rounded as if they had been stored.
template <class F, class T, int ROWS>
DEVICE void mmvq_glu(const QuantGluParams& params) {
    SHARED_ARRAY(float, results, ROWS * GLU_COLUMNS);
    const QuantLinearParams& p = params.product;
    const u32 cols = p.n / 2, first = blockIdx.x * GLU_COLUMNS;
    for (u32 c = warp_id(); c < GLU_COLUMNS; c += blockDim.x / 32) {
        float sums[ROWS][OUTPUTS] = {};
        sum_rounded<F, ROWS>(p, [&](u32 j) { return first + c + j * cols; }, sums);
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            const float gate = warp_sum(sums[i][0]), up = warp_sum(sums[i][1]);
            if (lane_id() == i) {
                const T rounded = from_float<T>(added<T>(p, i, first + c, gate));
                const T factor = from_float<T>(added<T>(p, i, first + c + cols, up));
                results[i * GLU_COLUMNS + c] = gate_of(params, to_float(rounded)) * to_float(factor);
            }
        }
    }
    __syncthreads();
    for (u32 row = warp_id(); row < min((u32)ROWS, p.m); row += blockDim.x / 32) {
        const u64 at = (u64)row * cols + first + lane_id();
        const T result = from_float<T>(results[row * GLU_COLUMNS + lane_id()]);
        const float value[1] = {to_float(result)};
        ((T*)p.out)[at] = result;
        round_block(value, params.rounded, at);
    }
}

// The same with activations that are not rounded, for weights whose codes are floating-point numbers.
template <class F, class T, class O, int ROWS>
DEVICE void gemv_quant(const QuantLinearParams& p) {
    constexpr u32 OUTPUTS = 2;
    const u32 n0 = (blockIdx.x * (blockDim.x / 32) + warp_id()) * OUTPUTS;
    if (n0 >= p.n) return;
    const u32 groups = p.k / 32;
    float sums[ROWS][OUTPUTS] = {};
    for (u32 at = lane_id(); at < groups; at += 32) {
        const NumberGroup<F, 8> weight[OUTPUTS] = {
            read_group<F, 8>(p.weight, GroupAt(n0, groups, at)),
            read_group<F, 8>(p.weight, GroupAt(min(n0 + 1, p.n - 1), groups, at))};
#pragma unroll
        for (u32 word = 0; word < 8; ++word) {
            float values[OUTPUTS][4];
#pragma unroll
            for (u32 j = 0; j < OUTPUTS; ++j) weight[j].values(word, values[j]);
#pragma unroll
            for (u32 i = 0; i < ROWS; ++i) {
                // Rows beyond the last are computed as the last one and not written.
                const Vec<T, 4> x = load<4>((const T*)p.input + ((u64)min(i, p.m - 1) * groups + at) * 32 + word * 4);
#pragma unroll
                for (u32 e = 0; e < 4; ++e)
#pragma unroll
                    for (u32 j = 0; j < OUTPUTS; ++j) sums[i][j] = fmaf(to_float(x.x[e]), values[j][e], sums[i][j]);
            }
        }
    }
    write_warp_sums<O>(p, n0, sums);
}

// ------------------------------------------------------------------------------------------- dequantisation

// A thread writes 32 adjacent values.
template <class F, class T>
DEVICE void dequantize(const DequantizeParams& p) {
    const u32 groups = p.k / 32, at = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
    if (at >= groups) return;
    const u64 from = p.row_ids ? token_row(p.row_ids, p.drawn, row, p.n) : row;
    const auto group = read_group<F, 8>(p.weight, GroupAt(from, groups, at));
    T* out = (T*)p.out + ((u64)row * groups + at) * 32;
#pragma unroll
    for (u32 e = 0; e < 32; e += WIDE<T>) {
        Vec<T, WIDE<T>> rounded;
#pragma unroll
        for (u32 word = 0; word < WIDE<T> / 4; ++word) {
            float values[4];
            group.values(e / 4 + word, values);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) rounded.x[word * 4 + i] = from_float<T>(values[i] * p.scale);
        }
        store(out + e, rounded);
    }
}
