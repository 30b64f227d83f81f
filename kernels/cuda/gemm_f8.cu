// Rounding of activations to e4m3, also for cuBLASLt, the scales of a product of codes, and the product with a weight in e4m3 on the
// tensor cores of sm_89 and sm_120. A row of activations
// has one scale, a row of the weight one for each group of 32 inputs. An instruction multiplies one group, and its exact
// sums are added in f32 after the weight's scale, so the short accumulators of these tensor cores hold 32 products at most.
#include "quant.h"
#include "tiles.h"

// ------------------------------------------------------------------------------------------- activations

constexpr float MOST = 448.0f;
// The least scale, as vLLM rounds.
constexpr float LEAST_SCALE = 1.0f / (MOST * 512.0f);

// A CTA rounds a row to e4m3, with the scale that maps its largest magnitude to the largest number. A row with a value
// that is not finite gets a scale that is not finite and no codes.
template <class T>
DEVICE void quantize_f8(const QuantizeParams& p) {
    SHARED_ARRAY(float, scratch, 32);
    const T* const input = (const T*)p.input + (u64)blockIdx.x * p.k;
    float largest = 0.0f;
    bool finite = true;
    for (u32 k = threadIdx.x * WIDE<T>; k < p.k; k += blockDim.x * WIDE<T>) {
        const Vec<T, WIDE<T>> x = load<WIDE<T>>(input + k);
#pragma unroll
        for (u32 e = 0; e < WIDE<T>; ++e) {
            const float magnitude = fabsf(to_float(x.x[e]));
            // NaN is no maximum, and compares false.
            finite = finite && magnitude < __uint_as_float(0x7f800000u);
            largest = fmaxf(largest, magnitude);
        }
    }
    largest = block_max(finite ? largest : __uint_as_float(0x7f800000u), scratch);
    const bool codable = largest < __uint_as_float(0x7f800000u);
    const float scale = codable ? fmaxf(largest / MOST, LEAST_SCALE) : __uint_as_float(0x7fffffffu);
    const float inverse = 1.0f / scale;
    for (u32 k = threadIdx.x * WIDE<T>; k < p.k; k += blockDim.x * WIDE<T>) {
        const Vec<T, WIDE<T>> x = load<WIDE<T>>(input + k);
        Vec<u16, WIDE<T> / 2> codes;
#pragma unroll
        for (u32 e = 0; e < WIDE<T> / 2; ++e) {
            const float low = to_float(x.x[e * 2]) * inverse, high = to_float(x.x[e * 2 + 1]) * inverse;
            codes.x[e] = codable ? to_e4m3_pair(low, high) : (u16)0;
        }
        store((u16*)(p.codes + (u64)blockIdx.x * p.k + k), codes);
    }
    if (threadIdx.x == 0) p.scales[blockIdx.x] = scale;
}

// The same with a scale for a group of 128 elements, also for a shorter one at the end of a row. Grid: rows, parts of a row. A
// thread reads 16 bytes and writes 8 codes; sixteen threads have a group, whose scale follows that of the row before.
template <class T>
DEVICE void quantize_f8_groups(const QuantizeParams& p) {
    constexpr u32 EACH = 8, THREADS = 128 / EACH;
    const u32 k = (blockIdx.y * blockDim.x + threadIdx.x) * EACH, row = blockIdx.x;
    // Lanes beyond the row take part in the shuffles.
    const bool valid = k < p.k;
    const u64 at = (u64)row * p.k + k;
    Vec<T, EACH> x = {};
    if (valid) x = load<EACH>((const T*)p.input + at);
    // Magnitudes are compared as integers, in which NaN is the largest.
    u32 largest = 0;
#pragma unroll
    for (u32 e = 0; e < EACH; ++e) largest = max(largest, __float_as_uint(to_float(x.x[e])) & 0x7fffffffu);
#pragma unroll
    for (u32 lanes = 1; lanes < THREADS; lanes *= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
    const bool codable = largest < 0x7f800000u;
    const float scale = codable ? fmaxf(__uint_as_float(largest) / MOST, LEAST_SCALE) : __uint_as_float(0x7fffffffu);
    if (!valid) return;
    Vec<u16, EACH / 2> codes;
#pragma unroll
    for (u32 e = 0; e < EACH / 2; ++e)
        codes.x[e] = codable ? to_e4m3_pair(to_float(x.x[e * 2]) / scale, to_float(x.x[e * 2 + 1]) / scale) : (u16)0;
    store((u16*)(p.codes + at), codes);
    if (threadIdx.x % THREADS == 0) p.scales[(u64)(k / 128) * p.stride + row] = scale;
}

// Finishes a product whose sums are those of codes: multiplies each with the scales of its row and of the weight's row. Grid: rows,
// parts of a row. A thread has a column, so a warp reads 128 adjacent bytes of sums and of the weight's scales.
template <class O>
DEVICE void scale_f8(const QuantLinearParams& p) {
    const u32 row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= p.n) return;
    const float sum = ((const float*)p.input)[(u64)row * p.n + column];
    write_output<O>(p, row, column, sum * p.scales[row] * ((const float*)p.weight.scales)[column]);
}

// ------------------------------------------------------------------------------------------- product

// Two codes, the element of a staged row.
struct CodePair {
    u16 bits;
};

// Adds the products of groups with the scales of the weight.
template <u32 TILES_N>
struct ScaledProduct {
    const float* scales;  // [n, groups]
    u32 first;            // the lane's first column
    u32 n, groups;
    float scale[TILES_N][2];

    // The loads take as long as those of the fragments, from lines that hold the scales of many groups.
    DEVICE void begin(u32 group) {
#pragma unroll
        for (u32 j = 0; j < TILES_N; ++j)
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                // Columns beyond the last are computed as the last one and not written; groups beyond it are zeros.
                const u32 row = min(first + j * 8 + e, n - 1);
                scale[j][e] = scales[row * groups + min(group, groups - 1)];
            }
    }

    DEVICE void add(float (&sum)[4], const u32* a, const u32* b, u32 j) {
        float part[4];
        mma_m16n8k32_e4m3(part, a, b);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sum[i] = fmaf(part[i], scale[j][i % 2], sum[i]);
    }
};

template <class O, int BM, int BN, int WM, int WN, int STAGES>
DEVICE void gemm_f8(const QuantLinearParams& p) {
    using Tile = MmaTile<CodePair, BM, BN, WM, WN, STAGES>;
    DYNAMIC_SHARED(shared);
    const u32 m0 = blockIdx.x * BM, n0 = blockIdx.y * BN, pairs = p.k / 2, lane = lane_id();
    // Row r of a matrix of `rows` rows, or its first.
    auto row_of = [&](const void* matrix, u32 rows, u32 r, bool& valid) {
        valid = valid && r < rows;
        return (const CodePair*)matrix + (valid ? (u64)r * pairs : 0);
    };
    Tile tile;
    ScaledProduct<Tile::TILES_N> product{(const float*)p.weight.deltas, n0 + tile.warp_n + lane % 4 * 2, p.n, p.k / 32, {}};
    auto fill = [&](CodePair* stage, u32 step) {
        const u32 k0 = step * STAGE_INPUTS;
        fill_stage<BM, Tile::THREADS>(stage, pairs, k0, [&](u32 r, bool& valid) { return row_of(p.input, p.m, m0 + r, valid); });
        fill_stage<BN, Tile::THREADS>(stage + BM * STAGE_INPUTS, pairs, k0,
                                      [&](u32 r, bool& valid) { return row_of(p.weight.codes, p.n, n0 + r, valid); });
    };
    tile.run((CodePair*)shared, (pairs + STAGE_INPUTS - 1) / STAGE_INPUTS, fill, product);
#pragma unroll
    for (u32 i = 0; i < Tile::TILES_M; ++i)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float scale = p.scales[min(m0 + tile.warp_m + i * 16 + half * 8 + lane / 4, p.m - 1)];
#pragma unroll
            for (u32 j = 0; j < Tile::TILES_N; ++j)
#pragma unroll
                for (u32 e = 0; e < 2; ++e) tile.sums[i][j][half * 2 + e] *= scale;
        }
    tile.template write<O>(p, n0, [&](u32 r) { return m0 + r; });
}
