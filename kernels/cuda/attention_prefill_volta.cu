// Prefill attention on the tensor cores of Volta, in f16: the scheme of attention_prefill.cu with the instructions of
// sm_70. There is no cp.async (tiles pass through registers) and no ldmatrix (fragments are plain loads). m8n8k4 has
// different layouts for sums and factors, so weights pass through shared memory.
//
// One instruction computes four products of 8x8x4. Here they are the quarters of a 16x16x4: product q (lanes with lane
// / 4 % 4 == q) has the rows whose bit 2 is q / 2 and the columns whose bit 2 is q % 2. Eight lanes that load together
// then have eight adjacent rows, which are in different banks. With quarters that are halves of rows and columns, rows
// r and r + 8 would share a bank.
#include "attention.h"

constexpr u32 VOLTA_THREADS = 128;
constexpr u32 VOLTA_QUERIES = 64;  // rows of a tile, whose heads are one
constexpr u32 VOLTA_KEYS = 32;  // keys of a tile

// A head of SIZE elements is padded to D with zeros, as in attention_prefill.cu.
template <int SIZE>
struct VoltaWarp {
    static constexpr int D = (SIZE + 15) / 16 * 16;
    static constexpr u32 STRIDE = D + 8;           // elements of a row of queries, keys or values in shared memory
    static constexpr u32 WEIGHTS = VOLTA_KEYS + 8; // elements of a row of weights

    float scores[VOLTA_KEYS / 16][8];
    float out[D / 16][8] = {};
    float largest[2] = {LOWEST, LOWEST};
    float sum[2] = {};  // this lane's columns only

    // Row of the left factor, and column of the right one, whose fragment the lane holds.
    static DEVICE u32 left_row() { return lane_id() % 4 + lane_id() / 8 % 2 * 4 + lane_id() / 16 * 8; }
    static DEVICE u32 right_column() { return lane_id() % 8 + lane_id() / 16 * 8; }
    // Position of element i of a sum in its 16x16.
    static DEVICE u32 row(u32 i) { return lane_id() % 2 + (i & 2) + lane_id() / 8 % 2 * 4 + lane_id() / 16 * 8; }
    static DEVICE u32 column(u32 i) { return (i & 1) + (lane_id() & 6) + (i & 4) * 2; }
    static DEVICE u32 query(u32 i) { return warp_id() * 16 + row(i); }

    DEVICE void multiply_keys(const f16* queries, const f16* keys) {
#pragma unroll
        for (u32 n = 0; n < VOLTA_KEYS / 16; ++n) {
            for (u32 i = 0; i < 8; ++i) scores[n][i] = 0.0f;
        }
        const f16* left = queries + (warp_id() * 16 + left_row()) * STRIDE;
        const f16* right = keys + right_column() * STRIDE;
#pragma unroll
        for (u32 k = 0; k < D; k += 8) {
            const Vec<u32, 4> a = load<4>((const u32*)(left + k));
#pragma unroll
            for (u32 n = 0; n < VOLTA_KEYS / 16; ++n) {
                const Vec<u32, 4> b = load<4>((const u32*)(right + n * 16 * STRIDE + k));
                mma_m8n8k4_row_col(scores[n], a.x, b.x);
                mma_m8n8k4_row_col(scores[n], a.x + 2, b.x + 2);
            }
        }
    }

    // Converts scores to weights relative to the new maximum, and rescales sum and output. Lanes that differ only in
    // bits 1 and 2 of their number hold columns of the same rows: one for the elements i with bit 1 clear, one for
    // those with bit 1 set.
    DEVICE void soften(const AttentionParams& p, const PrefillTile& tile, u32 key) {
        score(p, scores);
        if (!tile.all_see(p, key, VOLTA_KEYS)) {
#pragma unroll
            for (u32 n = 0; n < VOLTA_KEYS / 16; ++n) {
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    if (!tile.sees(p, query(i), key + n * 16 + column(i))) scores[n][i] = minus_infinity();
                }
            }
        }
        float next[2] = {largest[0], largest[1]};
#pragma unroll
        for (u32 n = 0; n < VOLTA_KEYS / 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) next[i / 2 % 2] = fmaxf(next[i / 2 % 2], scores[n][i]);
        }
        float shrink[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            next[half] = fmaxf(next[half], __shfl_xor_sync(ALL_LANES, next[half], 2));
            next[half] = fmaxf(next[half], __shfl_xor_sync(ALL_LANES, next[half], 4));
            shrink[half] = exp2_fast(largest[half] - next[half]);
            largest[half] = next[half];
            sum[half] *= shrink[half];
        }
#pragma unroll
        for (u32 n = 0; n < D / 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) out[n][i] *= shrink[i / 2 % 2];
        }
#pragma unroll
        for (u32 n = 0; n < VOLTA_KEYS / 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                scores[n][i] = exp2_fast(scores[n][i] - largest[i / 2 % 2]);
                sum[i / 2 % 2] += scores[n][i];
            }
        }
    }

    // Computes out += weights · values. `weights` is shared memory of the warp.
    DEVICE void multiply_values(f16* weights, const f16* values) {
#pragma unroll
        for (u32 n = 0; n < VOLTA_KEYS / 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 8; i += 2) {
                Vec<u32, 1> pair = {pack_pair<f16>(scores[n][i], scores[n][i + 1])};
                store((u32*)(weights + row(i) * WEIGHTS + n * 16 + column(i)), pair);
            }
        }
        __syncwarp();
        const f16* left = weights + left_row() * WEIGHTS;
        const f16* right = values + lane_id() % 4 * STRIDE + right_column() / 4 * 4;
#pragma unroll
        for (u32 k = 0; k < VOLTA_KEYS; k += 4) {
            const Vec<u32, 2> a = load<2>((const u32*)(left + k));
#pragma unroll
            for (u32 n = 0; n < D / 16; ++n) {
                const Vec<u32, 2> b = load<2>((const u32*)(right + k * STRIDE + n * 16));
                mma_m8n8k4_row_row(out[n], a.x, b.x);
            }
        }
    }

    DEVICE void store_output(const AttentionParams& p, u32 head, f16* output, u64 stride, u32 queries) const {
        float inverse[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float total = sum[half];
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            total += __shfl_xor_sync(ALL_LANES, total, 4);
            inverse[half] = share(p, head, largest[half], total);
        }
#pragma unroll
        for (u32 n = 0; n < D / 16; ++n) {
#pragma unroll
            for (u32 i = 0; i < 8; i += 2) {
                if (query(i) >= queries || (D != SIZE && n * 16 + column(i) >= SIZE)) continue;
                const float scale = inverse[i / 2 % 2];
                *(u32*)(output + query(i) * stride + n * 16 + column(i)) =
                    pack_pair<f16>(out[n][i] * scale, out[n][i + 1] * scale);
            }
        }
    }
};

// Grid: (the plan's tiles, q_heads).
template <int SIZE, class C = f16>
DEVICE void paged_prefill_volta(const AttentionParams& p) {
    using Warp = VoltaWarp<SIZE>;
    constexpr int D = Warp::D;
    DYNAMIC_SHARED(memory);
    f16* const queries = (f16*)memory;
    f16* const keys = queries + VOLTA_QUERIES * Warp::STRIDE;
    f16* const values = keys + VOLTA_KEYS * Warp::STRIDE;
    f16* const weights = values + VOLTA_KEYS * Warp::STRIDE + warp_id() * 16 * Warp::WEIGHTS;
    const PrefillTile tile(p, blockIdx.x);
    const u32 head = blockIdx.y, kv_head = head / (p.q_heads / p.kv_heads);
    const Cache<C> k(p, p.k_cache, tile.blocks, kv_head, SIZE), v(p, p.v_cache, tile.blocks, kv_head, SIZE);
    const u64 stride = (u64)p.q_heads * SIZE, at = tile.row * stride + head * SIZE;
    const f16* q = (const f16*)p.q + at;

    copy_rows<VOLTA_THREADS, VOLTA_QUERIES, SIZE, D>(queries, 0, tile.queries, [&](u32 r) { return q + r * stride; });
    Warp warp;
    for (u32 key = tile.first / VOLTA_KEYS * VOLTA_KEYS; key < tile.keys; key += VOLTA_KEYS) {
        // Keys that no query sees are not read: they may belong to other sequences, and no weight removes a NaN.
        const u32 begin = tile.begin_in(key), end = tile.keys - key;
        copy_rows<VOLTA_THREADS, VOLTA_KEYS, SIZE, D>(keys, begin, end, [&](u32 r) { return k.at(key + r); });
        copy_rows<VOLTA_THREADS, VOLTA_KEYS, SIZE, D>(values, begin, end, [&](u32 r) { return v.at(key + r); });
        __syncthreads();
        warp.multiply_keys(queries, keys);
        warp.soften(p, tile, key);
        warp.multiply_values(weights, values);
        __syncthreads();
    }
    warp.store_output(p, head, (f16*)p.out + at, stride, tile.queries);
}
