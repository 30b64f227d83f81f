// Latent attention over the paged cache, for decode and prefill, on the tensor cores of sm_80 and later. The cache has one
// row of SIZE elements per token, which is the key of all query heads and whose first RANK elements are their value, so a
// tile of rows is copied once and multiplied twice.
//
// A CTA holds 16 adjacent rows of q, each a query head of a token, and iterates over the keys in tiles. For the scores, a
// warp has eight of the tile's keys; for the output, which is too wide for one warp, RANK / 4 of the columns. Between the
// two, the scores pass through shared memory, and every warp computes the weights of all rows. Rows of the next tile are
// copied while this one is multiplied.
//
// Tiles of keys begin at multiples of their size, and a tile that a query does not see does not change its result. Latents
// must be finite, as in attention_prefill.cu; latent_post.cu ensures that.
#include "splits.h"

constexpr u32 LATENT_WARPS = 4, LATENT_THREADS = 32 * LATENT_WARPS;
constexpr u32 LATENT_ROWS = 16;
constexpr u32 LATENT_KEYS = 8 * LATENT_WARPS;  // keys of a tile
constexpr u32 SCORES_STRIDE = LATENT_KEYS + 8;

// One warp's share of 16 rows. A lane's fragments hold the rows `lane / 4` and `lane / 4 + 8`.
template <class T, int RANK, int SIZE>
struct LatentWarp {
    static constexpr u32 STRIDE = SIZE + 8;  // elements of a row in shared memory: rows begin in different banks
    static constexpr u32 COLUMNS = RANK / LATENT_WARPS;
    static_assert(SIZE % 32 == 0 && COLUMNS % 16 == 0, "products are of whole instructions");

    float scores[LATENT_KEYS / 8][4];
    float out[COLUMNS / 8][4] = {};
    float largest[2] = {LOWEST, LOWEST};
    float sum[2] = {};  // this lane's keys only

    static DEVICE u32 row(u32 half) { return lane_id() / 4 + 8 * half; }

    // Writes the products of all rows and the warp's keys. Four sums alternate, because an instruction waits for the
    // one that wrote its sum.
    static DEVICE void multiply_keys(const T* queries, const T* keys, float* products) {
        const u32 lane = lane_id();
        float sums[4][4] = {};
#pragma unroll
        for (u32 k = 0; k < SIZE; k += 32) {
            u32 a[4], b[4];
            ldmatrix_x4(b, keys + (warp_id() * 8 + lane % 8) * STRIDE + k + lane / 8 * 8);
            ldmatrix_x4(a, queries + lane % 16 * STRIDE + k + lane / 16 * 8);
            mma_m16n8k16(sums[k / 32 % 2 * 2], a, b, T());
            ldmatrix_x4(a, queries + lane % 16 * STRIDE + k + 16 + lane / 16 * 8);
            mma_m16n8k16(sums[k / 32 % 2 * 2 + 1], a, b + 2, T());
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            Vec<float, 2> pair;
            for (u32 i = 0; i < 2; ++i) {
                const u32 at = 2 * half + i;
                pair.x[i] = sums[0][at] + sums[1][at] + (sums[2][at] + sums[3][at]);
            }
            store(products + row(half) * SCORES_STRIDE + warp_id() * 8 + lane % 4 * 2, pair);
        }
    }

    // Converts products to weights relative to the new maximum, and rescales sum and output. `sees(row, key)` returns
    // whether a row sees the key of the tile, unless all see all.
    template <class Sees>
    DEVICE void soften(const AttentionParams& p, const float* products, bool all_see, Sees sees) {
#pragma unroll
        for (u32 n = 0; n < LATENT_KEYS / 8; ++n) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const Vec<float, 2> pair = load<2>(products + row(half) * SCORES_STRIDE + n * 8 + lane_id() % 4 * 2);
                scores[n][2 * half] = pair.x[0];
                scores[n][2 * half + 1] = pair.x[1];
            }
        }
        score(p, scores);
        if (!all_see) {
#pragma unroll
            for (u32 n = 0; n < LATENT_KEYS / 8; ++n) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    if (!sees(row(i / 2), n * 8 + lane_id() % 4 * 2 + i % 2)) scores[n][i] = minus_infinity();
                }
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float next = largest[half];
#pragma unroll
            for (u32 n = 0; n < LATENT_KEYS / 8; ++n) next = fmaxf(next, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            next = warp_max<4>(next);
            const float shrink = exp2_fast(largest[half] - next);
            largest[half] = next;
            sum[half] *= shrink;
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 8; ++n) {
                out[n][2 * half] *= shrink;
                out[n][2 * half + 1] *= shrink;
            }
#pragma unroll
            for (u32 n = 0; n < LATENT_KEYS / 8; ++n) {
#pragma unroll
                for (u32 i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2_fast(scores[n][i] - next);
                    sum[half] += scores[n][i];
                }
            }
        }
    }

    // Computes out += weights · latents, for the warp's columns.
    DEVICE void multiply_latents(const T* keys) {
        const u32 lane = lane_id();
#pragma unroll
        for (u32 k = 0; k < LATENT_KEYS / 16; ++k) {
            u32 a[4], b[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float* pair = &scores[2 * k + i / 2][i % 2 * 2];
                a[i] = pack_pair<T>(pair[0], pair[1]);
            }
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 16; ++n) {
                ldmatrix_x4_trans(b, keys + (k * 16 + lane % 16) * STRIDE + warp_id() * COLUMNS + n * 16 + lane / 16 * 8);
                mma_m16n8k16(out[2 * n], a, b, T());
                mma_m16n8k16(out[2 * n + 1], a, b + 2, T());
            }
        }
    }

    // Adds the lanes' sums, so that each has that of all keys.
    DEVICE void finish() {
        for (u32 half = 0; half < 2; ++half) sum[half] = warp_sum<4>(sum[half]);
    }

    // Writes the output of the first `rows` rows, RANK elements each. `head(row)` returns the query head of a row.
    template <class Head>
    DEVICE void store_output(const AttentionParams& p, T* output, u32 rows, Head head) const {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            if (row(half) >= rows) continue;
            const float inverse = share(p, head(row(half)), largest[half], sum[half]);
            T* at = output + (u64)row(half) * RANK + warp_id() * COLUMNS + lane_id() % 4 * 2;
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 8; ++n) {
                *(u32*)(at + n * 8) = pack_pair<T>(out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse);
            }
        }
    }
};

// Shared memory of a CTA: the queries, two tiles of keys and the products of one.
template <class T, int SIZE>
struct LatentMemory {
    static constexpr u32 STRIDE = SIZE + 8;
    T* queries;
    T* keys;
    float* products;

    DEVICE LatentMemory(void* memory)
        : queries((T*)memory),
          keys(queries + LATENT_ROWS * STRIDE),
          products((float*)(keys + 2 * LATENT_KEYS * STRIDE)) {}

    DEVICE T* tile(u32 index) const { return keys + index % 2 * LATENT_KEYS * STRIDE; }
};

// Attends from `rows` rows of q to the keys begin .. end of a sequence with these blocks. C is the type of the cache.
template <class C, class T, int RANK, int SIZE, class AllSee, class Sees>
DEVICE void attend_latents(const AttentionParams& p, const LatentMemory<T, SIZE>& memory, const T* q, u32 rows,
                           const u32* blocks, u32 begin, u32 end, LatentWarp<T, RANK, SIZE>& warp, AllSee all_see, Sees sees) {
    using Warp = LatentWarp<T, RANK, SIZE>;
    const Cache<C> cache(p, p.k_cache, blocks, 0, SIZE);
    // The rows of another CTA's work may still be read.
    __syncthreads();
    copy_rows_async<LATENT_THREADS, LATENT_ROWS, SIZE, SIZE>(memory.queries, 0, rows, [&](u32 r) { return q + (u64)r * SIZE; });
    const u32 first = begin / LATENT_KEYS;
    const auto copy_tile = [&](u32 tile) {
        const u32 key = tile * LATENT_KEYS;
        if (key >= end) return cp_async_commit();
        // Rows that no query sees are not read: they may belong to other sequences, and no weight removes a NaN.
        copy_rows_async<LATENT_THREADS, LATENT_KEYS, SIZE, SIZE>(
            memory.tile(tile), begin > key ? begin - key : 0, end - key, [&](u32 r) { return cache.at(key + r); });
    };
    copy_tile(first);
    for (u32 tile = first; tile * LATENT_KEYS < end; ++tile) {
        cp_async_wait<0>();
        __syncthreads();
        copy_tile(tile + 1);
        Warp::multiply_keys(memory.queries, memory.tile(tile), memory.products);
        __syncthreads();
        const u32 key = tile * LATENT_KEYS;
        warp.soften(p, memory.products, all_see(key), [&](u32 row, u32 offset) { return sees(row, key + offset); });
        warp.multiply_latents(memory.tile(tile));
    }
    cp_async_wait<0>();
    warp.finish();
}

// Grid: (the plan's tiles, groups of LATENT_ROWS rows of q of a tile).
template <class T, int RANK, int SIZE, class C = T>
DEVICE void latent_prefill(const AttentionParams& p) {
    DYNAMIC_SHARED(shared);
    const LatentMemory<T, SIZE> memory(shared);
    const PrefillTile tile(p, blockIdx.x);
    // Rows of the tile: the heads of its first query, then those of the next.
    const u32 from = blockIdx.y * LATENT_ROWS, all = tile.queries * p.q_heads;
    if (from >= all) return;
    const u32 rows = min(LATENT_ROWS, all - from);
    const u32 first = from / p.q_heads, last = (from + rows - 1) / p.q_heads;
    const u32 begin = first_key(p, tile.position + first), end = tile.keys ? min(tile.position + last + 1, tile.keys) : 0;
    const auto all_see = [&](u32 key) {
        return key + LATENT_KEYS <= tile.position + first + 1 && key >= first_key(p, tile.position + last);
    };
    const auto sees = [&](u32 row, u32 key) { return tile.sees(p, (from + row) / p.q_heads, key); };
    LatentWarp<T, RANK, SIZE> warp;
    const u64 at = (u64)tile.row * p.q_heads + from;
    attend_latents<C>(p, memory, (const T*)p.q + at * SIZE, rows, tile.blocks, begin, end, warp, all_see, sees);
    warp.store_output(p, (T*)p.out + at * RANK, rows, [&](u32 row) { return (from + row) % p.q_heads; });
}

// Grid: (any number of CTAs, which share the plan's splits; groups of LATENT_ROWS query heads).
template <class T, int RANK, int SIZE, class C = T>
DEVICE void latent_decode(const PagedDecodeParams& params) {
    DYNAMIC_SHARED(shared);
    SHARED_ARRAY(u32, flag, 1);
    const LatentMemory<T, SIZE> memory(shared);
    const AttentionParams& p = params.attention;
    for (u32 item = blockIdx.x; item < p.plan[0]; item += gridDim.x) {
        const Split s = Split::of<LATENT_ROWS>(p, item);
        if (s.number < s.first) continue;
        const u32* blocks = blocks_of(p, s.sequence);
        const auto all_see = [&](u32 key) { return key >= s.begin && key + LATENT_KEYS <= s.end; };
        const auto sees = [&](u32, u32 key) { return key >= s.begin && key < s.end; };
        LatentWarp<T, RANK, SIZE> warp;
        const u64 at = (u64)s.row * p.q_heads + s.head;
        attend_latents<C>(p, memory, (const T*)p.q + at * SIZE, s.heads, blocks, s.begin, s.end, warp, all_see, sees);
        if (s.count == 1) {
            warp.store_output(p, (T*)p.out + at * RANK, s.heads, [&](u32 row) { return s.head + row; });
            continue;
        }
        const u64 partial = (u64)s.partial * p.q_heads + s.head;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = warp.row(half);
            if (row >= s.heads) continue;
            float* out = params.partial_out + (partial + row) * RANK + warp_id() * warp.COLUMNS + lane_id() % 4 * 2;
#pragma unroll
            for (u32 n = 0; n < warp.COLUMNS / 8; ++n) {
                Vec<float, 2> pair;
                pair.x[0] = warp.out[n][2 * half];
                pair.x[1] = warp.out[n][2 * half + 1];
                store(out + n * 8, pair);
            }
            if (threadIdx.x < 32 && lane_id() % 4 == 0) {
                params.partial_sums[2 * (partial + row)] = warp.largest[half];
                params.partial_sums[2 * (partial + row) + 1] = warp.sum[half];
            }
        }
        if (is_last(params.tickets + (u64)s.sequence * gridDim.y + blockIdx.y, s.count, flag)) {
            T* const output = (T*)p.out + at * RANK;
            for (u32 i = threadIdx.x * QUAD; i < s.heads * RANK; i += LATENT_THREADS * QUAD) {
                const u32 head = s.head + i / RANK;
                merged_splits<RANK>(params, s, head, i % RANK).write(p, head, output + i);
            }
        }
    }
}
