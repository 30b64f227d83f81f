// Quantised weights: their product with 8-bit activations (MMVQ, for few rows), and their dequantisation.
#include "linear.h"
#include "quant.h"

// ------------------------------------------------------------------------------------------- products

// A thread rounds 8 adjacent elements, four threads a block of 32. A block with a value that is not finite gets a scale
// that is not finite and no codes.
template <class T>
DEVICE void quantize_activations(const QuantizeParams& p) {
    const u32 k = (blockIdx.y * blockDim.x + threadIdx.x) * 8, row = blockIdx.x;
    // The four lanes of one block are either all within k or all beyond; those beyond take part in the shuffles.
    const bool valid = k < p.k;
    const u64 at = (u64)row * p.k + k;
    float x[8];
#pragma unroll
    for (u32 part = 0; part < 8; part += WIDE<T>) {
        Vec<T, WIDE<T>> values = {};
        if (valid) values = load<WIDE<T>>((const T*)p.input + at + part);
#pragma unroll
        for (u32 e = 0; e < WIDE<T>; ++e) x[part + e] = to_float(values.x[e]);
    }
    // Magnitudes are compared as integers, in which NaN is the largest.
    u32 largest = 0;
#pragma unroll
    for (u32 e = 0; e < 8; ++e) largest = max(largest, __float_as_uint(x[e]) & 0x7fffffffu);
    largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    const float magnitude = __uint_as_float(largest);
    const bool codable = largest != 0 && largest < 0x7f800000u;
    const float inverse = codable ? 127.0f / magnitude : 0.0f;
    int sum = 0;
    Vec<i8, 8> codes;
#pragma unroll
    for (u32 e = 0; e < 8; ++e) {
        // 127 / magnitude is infinite for the smallest numbers.
        int code = codable ? (int)fminf(fmaxf(rintf(x[e] * inverse), -127.0f), 127.0f) : 0;
        codes.x[e] = (i8)code;
        sum += code;
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    if (!valid) return;
    store(p.codes + at, codes);
    if (threadIdx.x % 4 == 0) {
        const float scale = magnitude / 127.0f;
        Vec<float, 2> scales;
        scales.x[0] = scale;
        scales.x[1] = scale * (float)sum;
        store(p.scales + at / 32 * 2, scales);
    }
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

// A warp computes OUTPUTS adjacent outputs of all rows. A lane accumulates its groups in order, then the lanes are
// added in one fixed order: a row's bits depend neither on ROWS nor on the other rows.
template <class F, class O, int ROWS>
DEVICE void mmvq(const QuantLinearParams& p) {
    constexpr u32 OUTPUTS = 2;
    const u32 n0 = (blockIdx.x * (blockDim.x / 32) + warp_id()) * OUTPUTS;
    if (n0 >= p.n) return;
    const u32 groups = p.k / 32;
    float sums[ROWS][OUTPUTS] = {};
    // With many rows, one group is enough work for an iteration.
#pragma unroll(ROWS <= 2 ? 2 : 1)
    for (u32 at = lane_id(); at < groups; at += 32) {
        QuantGroup<8> weight[OUTPUTS];
#pragma unroll
        for (u32 j = 0; j < OUTPUTS; ++j) weight[j] = F::template read<8>(p.weight, GroupAt(min(n0 + j, p.n - 1), groups, at));
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
    write_warp_sums<O>(p, n0, sums);
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
            F::template read<8>(p.weight, GroupAt(n0, groups, at)),
            F::template read<8>(p.weight, GroupAt(min(n0 + 1, p.n - 1), groups, at))};
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
    const auto group = F::template read<8>(p.weight, GroupAt(from, groups, at));
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
