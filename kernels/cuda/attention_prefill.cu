// Prefill attention over the paged cache, on the tensor cores of sm_75 and later: sequences of many queries, of any
// lengths, each at its offset in its sequence. The scheme is that of FlashAttention-2: a CTA holds 64 queries of one
// head, 16 per warp, and iterates over the keys in tiles; scores stay in registers. Keys of the next tile are copied
// while this tile's values are multiplied, and values while its keys are multiplied.
//
// Tiles of keys begin at multiples of their size, and a tile that a query does not see does not change its result,
// which is therefore the same, bit for bit, for any division of a sequence into chunks. Values must be finite: a NaN
// would also affect earlier queries of its tile (0 · NaN). qkv_post.cu ensures that.
//
// A cache in e4m3 (C) passes through registers on its way to shared memory, where it has the type of the queries.
//
// An instruction multiplies 16 elements of a head. A head whose SIZE is no multiple of that is padded to D elements in
// shared memory, where the padding is zero.
#include "attention.h"

constexpr u32 PREFILL_THREADS = 128;

// One warp's share: 16 queries. A lane's fragments hold the rows `lane / 4` and `lane / 4 + 8`.
template <class T, int SIZE>
struct PrefillWarp {
    static constexpr int D = (SIZE + 15) / 16 * 16;
    static constexpr u32 KEYS = D > 128 ? 32 : 64;  // keys of a tile
    static constexpr u32 STRIDE = D + 8;            // elements of a row in shared memory: rows begin in different banks
    // Queries of large heads do not fit into registers beside the output, so they stay in shared memory.
    static constexpr bool Q_IN_REGISTERS = D <= 128;

    u32 q[Q_IN_REGISTERS ? D / 16 : 1][4];
    float scores[KEYS / 8][4];
    float out[D / 8][4] = {};
    float largest[2] = {LOWEST, LOWEST};
    float sum[2] = {};  // this lane's columns only

    static DEVICE u32 query(u32 half) { return warp_id() * 16 + lane_id() / 4 + 8 * half; }

    DEVICE void load_queries(const T* input, u64 stride, u32 queries) {
#pragma unroll
        for (u32 k = 0; k < D / 16; ++k) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 row = query(i % 2), column = k * 16 + lane_id() % 4 * 2 + i / 2 * 8;
                q[k][i] = row < queries && column < SIZE ? *(const u32*)(input + row * stride + column) : 0;
            }
        }
    }

    // Computes scores = q · keysᵀ.
    DEVICE void multiply_keys(const T* keys, const T* queries) {
        const u32 lane = lane_id();
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; ++n) {
            for (u32 i = 0; i < 4; ++i) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (u32 k = 0; k < D / 16; ++k) {
            u32 a[4], b[4];
            if constexpr (Q_IN_REGISTERS) {
                for (u32 i = 0; i < 4; ++i) a[i] = q[k][i];
            } else {
                ldmatrix_x4(a, queries + (warp_id() * 16 + lane % 16) * STRIDE + k * 16 + lane / 16 * 8);
            }
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; ++n) {
                // These are two tiles of eight keys: the lower and the upper half of the 16 columns of each.
                ldmatrix_x4(b, keys + (n * 16 + lane % 8 + lane / 16 * 8) * STRIDE + k * 16 + lane / 8 % 2 * 8);
                mma_m16n8k16(scores[2 * n], a, b, T());
                mma_m16n8k16(scores[2 * n + 1], a, b + 2, T());
            }
        }
    }

    // Converts scores to weights relative to the new maximum, and rescales sum and output.
    DEVICE void soften(const AttentionParams& p, const PrefillTile& tile, u32 key) {
        score(p, scores);
        if (!tile.all_see(p, key, KEYS)) {
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    if (!tile.sees(p, query(i / 2), key + n * 8 + lane_id() % 4 * 2 + i % 2)) scores[n][i] = minus_infinity();
                }
            }
        }
        float next[2] = {largest[0], largest[1]};
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) next[i / 2] = fmaxf(next[i / 2], scores[n][i]);
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            next[half] = warp_max<4>(next[half]);
            const float shrink = exp2_fast(largest[half] - next[half]);
            largest[half] = next[half];
            sum[half] *= shrink;
#pragma unroll
            for (u32 n = 0; n < D / 8; ++n) {
                out[n][2 * half] *= shrink;
                out[n][2 * half + 1] *= shrink;
            }
        }
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                scores[n][i] = exp2_fast(scores[n][i] - largest[i / 2]);
                sum[i / 2] += scores[n][i];
            }
        }
    }

    // Computes out += weights · values. The layout of the scores in registers is that of a product's left factor.
    DEVICE void multiply_values(const T* values) {
        const u32 lane = lane_id();
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; ++k) {
            u32 a[4], b[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float* pair = &scores[2 * k + i / 2][i % 2 * 2];
                a[i] = pack_pair<T>(pair[0], pair[1]);
            }
#pragma unroll
            for (u32 n = 0; n < D / 16; ++n) {
                ldmatrix_x4_trans(b, values + (k * 16 + lane % 16) * STRIDE + n * 16 + lane / 16 * 8);
                mma_m16n8k16(out[2 * n], a, b, T());
                mma_m16n8k16(out[2 * n + 1], a, b + 2, T());
            }
        }
    }

    DEVICE void store_output(const AttentionParams& p, u32 head, T* output, u64 stride, u32 queries) const {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float inverse = share(p, head, largest[half], warp_sum<4>(sum[half]));
            if (query(half) >= queries) continue;
            T* row = output + query(half) * stride + lane_id() % 4 * 2;
#pragma unroll
            for (u32 n = 0; n < SIZE / 8; ++n) {
                *(u32*)(row + n * 8) = pack_pair<T>(out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse);
            }
        }
    }
};

// Grid: (the plan's tiles, q_heads).
template <class T, int SIZE, class C = T>
DEVICE void paged_prefill(const AttentionParams& p) {
    using Warp = PrefillWarp<T, SIZE>;
    constexpr int D = Warp::D;
    DYNAMIC_SHARED(memory);
    T* const keys = (T*)memory;
    T* const values = keys + Warp::KEYS * Warp::STRIDE;
    T* const queries = values + Warp::KEYS * Warp::STRIDE;  // for large heads only
    const PrefillTile tile(p, blockIdx.x);
    const u32 head = blockIdx.y, kv_head = head / (p.q_heads / p.kv_heads);
    const Cache<C> k(p, p.k_cache, tile.blocks, kv_head, SIZE), v(p, p.v_cache, tile.blocks, kv_head, SIZE);
    const u64 stride = (u64)p.q_heads * SIZE, at = tile.row * stride + head * SIZE;
    const T* q = (const T*)p.q + at;

    Warp warp;
    if constexpr (Warp::Q_IN_REGISTERS) {
        warp.load_queries(q, stride, tile.queries);
    } else {
        copy_rows_async<PREFILL_THREADS, PrefillTile::QUERIES, SIZE, D>(queries, 0, tile.queries, [&](u32 r) { return q + r * stride; });
    }
    const u32 begin = tile.first / Warp::KEYS * Warp::KEYS;
    const auto copy_tile = [&](T* shared, const Cache<C>& cache, u32 key) {
        // A tile beyond the last one is an empty group, because the waits below count groups.
        if (key >= tile.keys) return cp_async_commit();
        // Keys that no query sees are not read: they may belong to other sequences, and no weight removes a NaN.
        copy_rows_async<PREFILL_THREADS, Warp::KEYS, SIZE, D>(shared, tile.begin_in(key), tile.keys - key, [&](u32 r) { return cache.at(key + r); });
    };
    copy_tile(keys, k, begin);
    for (u32 key = begin; key < tile.keys; key += Warp::KEYS) {
        cp_async_wait<0>();
        __syncthreads();
        copy_tile(values, v, key);
        warp.multiply_keys(keys, queries);
        __syncthreads();
        copy_tile(keys, k, key + Warp::KEYS);
        warp.soften(p, tile, key);
        cp_async_wait<1>();
        __syncthreads();
        warp.multiply_values(values);
    }
    warp.store_output(p, head, (T*)p.out + at, stride, tile.queries);
}
