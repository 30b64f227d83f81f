// Decode attention over the paged cache, with one query per sequence, on the tensor cores of sm_80 and later. It reads each
// key and value once, and memory bandwidth limits its speed. Therefore
// - all query heads of a KV head share the loaded data: they are the rows of an instruction's tile;
// - a long sequence is divided into splits, which different CTAs process; their size depends only on the sequence's
//   length, so its sums are the same in every batch;
// - the CTA that ends last merges the splits in order, so it does not matter which one that is. (Split-KV decoding and
//   its merge come from FlashDecoding and FlashInfer.)
//
// A tile is the keys and values of a KV block. Each warp has every WARPS-th tile of a split and a ring of stages of its own,
// so warps wait for each other only where their results are merged. Until then they copy tiles of the next split.
//
// Scores are the product of queries and keys, and the output is transposed: the product of values and weights. The scores of
// a lane are then in the place of the weights that it multiplies. Values must be finite, because keys that are not seen have
// the weight 0; heads.h ensures that.
//
// In steps of few rows, the kernel also does what qkv_post.cu does, with the same bits: each CTA completes the queries of its split,
// and the CTAs of the split that has the query's own token complete its key and value. No CTA reads those from the cache: they put
// them into the tile, and the CTA of the first heads writes them.
//
// A cache in e4m3 is widened to f16, which has all its numbers, on its way from shared memory to the tensor cores.
#include "heads.h"
#include "splits.h"

// Types of fragments, by those of activations and of the cache.
template <class T, class C>
struct Fragments {
    using type = T;
};
template <class T>
struct Fragments<T, e4m3> {
    using type = f16;
};

// Whether f16 lacks numbers of a type.
template <class T>
constexpr bool EXCEEDS_F16 = false;
template <>
constexpr bool EXCEEDS_F16<bf16> = true;

// A tile in shared memory: rows of keys, then rows of values.
template <int D, class C>
struct Tile {
    static constexpr u32 PIECE = WIDE<C>;      // elements that are copied at once
    static constexpr u32 STRIDE = D + PIECE;   // elements of a row: rows begin in different banks
    static constexpr u32 SIZE = 2 * KV_BLOCK * STRIDE;

    C* keys;

    DEVICE C* values() const { return keys + KV_BLOCK * STRIDE; }

    // Starts the copy of the rows low .. high of a block to it; the other rows become zeros. `offset` is that of the block's
    // first row in the cache. Most tiles have all rows, so that the lanes need not look at each.
    DEVICE void copy(const AttentionParams& p, u64 offset, u32 low, u32 high) const {
        if (low == 0 && high >= KV_BLOCK) {
            copy(p, offset, [](u32) { return true; });
        } else {
            copy(p, offset, [&](u32 row) { return row >= low && row < high; });
        }
    }

    template <class IsRead>
    DEVICE void copy(const AttentionParams& p, u64 offset, IsRead is_read) const {
        constexpr u32 EACH = D / PIECE, COPIES = KV_BLOCK * EACH / 32;
        static_assert(KV_BLOCK * EACH % 32 == 0, "lanes copy equally many pieces");
        const u32 stride = p.kv_heads * D;
        if constexpr (32 % EACH == 0) {
            // The rows of a lane are equally far apart.
            constexpr u32 ROWS = 32 / EACH;
            const u32 first = lane_id() / EACH, column = lane_id() % EACH * PIECE, from = first * stride + column;
            const C *k = (const C*)p.k_cache + (offset + from), *v = (const C*)p.v_cache + (offset + from);
            C* const to = keys + first * STRIDE + column;
#pragma unroll
            for (u32 i = 0; i < COPIES; ++i, k += ROWS * stride, v += ROWS * stride) {
                cp_async_16(to + i * ROWS * STRIDE, k, is_read(first + i * ROWS));
                cp_async_16(to + (i * ROWS + KV_BLOCK) * STRIDE, v, is_read(first + i * ROWS));
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < COPIES; ++i) {
                const u32 at = i * 32 + lane_id(), row = at / EACH, column = at % EACH * PIECE, to = row * STRIDE + column;
                const u64 from = offset + row * stride + column;
                cp_async_16(keys + to, (const C*)p.k_cache + from, is_read(row));
                cp_async_16(values() + to, (const C*)p.v_cache + from, is_read(row));
            }
        }
    }
};

// Returns the first of the CTA's splits from `item` on of which the query sees any key, or a number that is no split's. With
// a window most splits have none, so the lanes look at 32 of them at once.
template <int HEADS>
DEVICE u32 next_seen(const AttentionParams& p, u32 item) {
    const u32 splits = p.plan[0];
    while (p.window && item < splits) {
        const u32 own = item + lane_id() * gridDim.x;
        bool is_seen = false;
        if (own < splits) {
            const Split s = Split::of<HEADS>(p, own);
            is_seen = s.number >= s.first;
        }
        const u32 seen = __ballot_sync(ALL_LANES, is_seen);
        if (seen) return item + (__ffs((int)seen) - 1) * gridDim.x;
        item += 32 * gridDim.x;
    }
    return item;
}

// The tiles of a warp in all splits of its CTA, of which it copies the next while it multiplies one. Those of a FUSED kernel have
// zeros in the place of the last key.
template <int D, int HEADS, class C, int WARPS, int STAGES, bool FUSED>
struct Tiles {
    const AttentionParams& p;
    C* const ring;
    u32 next_stage = 0;       // stage to which the next tile is copied; free until then
    u32 item;                 // split of the next tile
    u32 key, begin = 0, end;  // first key of the next tile, and range of keys of its split that are seen
    u32 stored;               // end of those that the cache has
    const u32* blocks;        // blocks of its sequence
    u32 block;                // its own
    u32 column;               // first element of the KV head in a row of the cache

    DEVICE Tiles(const AttentionParams& p, void* memory)
        : p(p), ring((C*)memory + warp_id() * STAGES * Tile<D, C>::SIZE), item(blockIdx.x) {
        find();
        for (u32 i = 0; i < STAGES - 1; ++i) copy_next();
    }

    DEVICE Tile<D, C> at(u32 stage) const { return {ring + stage * Tile<D, C>::SIZE}; }

    // Returns the first key of the warp's first tile of a split.
    static DEVICE u32 first_of(const Split& s) { return s.begin / KV_BLOCK * KV_BLOCK + warp_id() * KV_BLOCK; }

    // Finds the first tile of the splits from `item` on.
    DEVICE void find() {
        while ((item = next_seen<HEADS>(p, item)) < p.plan[0]) {
            const Split s = Split::of<HEADS>(p, item);
            key = first_of(s), begin = s.begin, end = s.end;
            stored = FUSED ? min(end, s.length - 1) : end;
            if (key >= end) {
                item += gridDim.x;
                continue;
            }
            column = s.kv_head * D;
            blocks = blocks_of(p, s.sequence);
            block = blocks[key / KV_BLOCK];
            return;
        }
        key = end = 0;
    }

    // Starts the copy of the next tile. It is a group even if there is none, because waits count groups.
    DEVICE void copy_next() {
        if (key < end) {
            at(next_stage).copy(p, (u64)block * p.block_stride + column, begin > key ? begin - key : 0, stored - key);
            key += WARPS * KV_BLOCK;
            if (key < end) {
                block = blocks[key / KV_BLOCK];
            } else {
                item += gridDim.x;
                find();
            }
        }
        cp_async_commit();
        next_stage = following(next_stage);
    }

    static DEVICE u32 following(u32 stage) { return stage + 1 < STAGES ? stage + 1 : 0; }
};

// One warp's softmax. A lane's fragments of queries and scores are of the heads `lane / 4` and, with 16 heads,
// `lane / 4 + 8`; those of the output are of the heads `lane % 4 * 2`, the next, and eight more. Heads are in halves of eight.
template <class T, int D, int HEADS, class C>
struct DecodeWarp {
    using E = typename Fragments<T, C>::type;
    static constexpr u32 HALVES = HEADS / 8, STRIDE = Tile<D, C>::STRIDE;
    static constexpr bool IS_NARROW = sizeof(C) == 1;
    static_assert(sizeof(T) == 2 && D % 32 == 0 && HEADS % 8 == 0 && HEADS <= 16, "products are of whole instructions");

    u32 q[D / 16][4];
    float factor[HALVES];  // of products with keys in e4m3
    float out[HALVES][D / 16][4] = {};
    float largest[HALVES], sum[HALVES] = {};  // the sum is that of the lane's keys only

    // Loads the queries of `heads` heads, which are `stride` elements apart. The elements of a row in e4m3 are in another order, in which a lane has four adjacent
    // ones of every 16.
    DEVICE void load_queries(const T* queries, u32 stride, u32 heads) {
        const u32 part = lane_id() % 4 * (IS_NARROW ? 4 : 2), next = IS_NARROW ? 2 : 8;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 head = lane_id() / 4 + 8 * half;
#pragma unroll
            for (u32 i = 0; i < D / 8; ++i) {
                const T* at = queries + head * stride + i / 2 * 16 + part + i % 2 * next;
                q[i / 2][half + i % 2 * 2] = half < HALVES && head < heads ? *(const u32*)at : 0;
            }
            if (half < HALVES) {
                largest[half] = LOWEST;
                if constexpr (IS_NARROW) convert_queries(half);
            }
        }
    }

    // Converts the queries of one half to f16. Those in bf16 are multiplied by a power of two that brings the largest of a head
    // into the range of f16.
    DEVICE void convert_queries(u32 half) {
        factor[half] = E4M3_FACTOR;
        if constexpr (EXCEEDS_F16<T>) {
            float most = 0.0f;
#pragma unroll
            for (u32 i = 0; i < D / 8; ++i) {
                const Vec<T, 2> pair = {q[i / 2][half + i % 2 * 2]};
                most = fmaxf(most, fmaxf(fabsf(to_float(pair.x[0])), fabsf(to_float(pair.x[1]))));
            }
            // The largest becomes a number from 2^13 to 2^14. An exponent of f32 has a bias of 127.
            const int exponent = min(13 + 127 - (int)(__float_as_uint(warp_max<4>(most)) >> 23), 126);
            const float scale = __uint_as_float((u32)(127 + exponent) << 23);
            factor[half] *= __uint_as_float((u32)(127 - exponent) << 23);
#pragma unroll
            for (u32 i = 0; i < D / 8; ++i) {
                u32& registers = q[i / 2][half + i % 2 * 2];
                const Vec<T, 2> pair = {registers};
                registers = pack_pair<E>(to_float(pair.x[0]) * scale, to_float(pair.x[1]) * scale);
            }
        }
    }

    // Computes scores = q · keysᵀ. Of each half a lane has two of the first eight keys and two of the others.
    DEVICE void multiply_keys(const C* keys, float (&scores)[HALVES][4]) const {
        const u32 lane = lane_id();
        float sums[2][4] = {};
        if constexpr (IS_NARROW) {
#pragma unroll
            for (u32 k = 0; k < D / 16; k += 2) {
                u32 codes[4];
                ldmatrix_x4(codes, keys + lane % 16 * STRIDE + k * 16 + lane / 16 * 16);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 b[2] = {e4m3_pair<0, 1>(codes[i]), e4m3_pair<2, 3>(codes[i])};
                    mma_m16n8k16(sums[i % 2], q[k + i / 2], b, E());
                }
            }
        } else {
#pragma unroll
            for (u32 k = 0; k < D / 16; ++k) {
                u32 b[4];
                ldmatrix_x4(b, keys + (lane % 8 + lane / 16 * 8) * STRIDE + k * 16 + lane / 8 % 2 * 8);
                mma_m16n8k16(sums[0], q[k], b, E());
                mma_m16n8k16(sums[1], q[k], b + 2, E());
            }
        }
#pragma unroll
        for (u32 half = 0; half < HALVES; ++half) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                scores[half][i] = sums[i / 2][2 * half + i % 2];
                if constexpr (IS_NARROW) scores[half][i] *= factor[half];
            }
        }
    }

    // Converts scores to weights relative to the new maximum, and rescales sum and output. The keys begin .. end of the tile
    // are seen.
    DEVICE void soften(const AttentionParams& p, float (&scores)[HALVES][4], u32 begin, u32 end) {
        score(p, scores);
        if (begin > 0 || end < KV_BLOCK) {
#pragma unroll
            for (u32 i = 0; i < HALVES * 4; ++i) {
                const u32 key = lane_id() % 4 * 2 + i % 2 + i / 2 % 2 * 8;
                if (key < begin || key >= end) scores[i / 4][i % 4] = minus_infinity();
            }
        }
#pragma unroll
        for (u32 half = 0; half < HALVES; ++half) {
            float(&s)[4] = scores[half];
            const float next = warp_max<4>(fmaxf(largest[half], fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]))));
            const float shrink = exp2_fast(largest[half] - next);
            largest[half] = next;
#pragma unroll
            for (u32 i = 0; i < 4; ++i) s[i] = exp2_fast(s[i] - next);
            sum[half] = fmaf(sum[half], shrink, (s[0] + s[1]) + (s[2] + s[3]));
            float shrinks[2];
#pragma unroll
            for (u32 i = 0; i < 2; ++i) shrinks[i] = __shfl_sync(ALL_LANES, shrink, (int)(lane_id() % 4 * 8 + i * 4));
#pragma unroll
            for (u32 i = 0; i < D / 4; ++i) out[half][i / 4][i % 4] *= shrinks[i % 2];
        }
    }

    // Computes outᵀ += valuesᵀ · weightsᵀ.
    DEVICE void multiply_values(const C* values, const float (&weights)[HALVES][4]) {
        const u32 lane = lane_id();
        u32 b[HALVES][2];
#pragma unroll
        for (u32 i = 0; i < HALVES * 2; ++i) {
            const float* const pair = &weights[i / 2][i % 2 * 2];
            b[i / 2][i % 2] = pack_pair<E>(pair[0], pair[1]);
        }
        if constexpr (IS_NARROW) {
#pragma unroll
            for (u32 m = 0; m < D / 16; m += 2) {
                // A register has two adjacent elements of a key and the same of the next key.
                u32 codes[4];
                ldmatrix_x4_trans(codes, values + lane % 16 * STRIDE + m * 16 + lane / 16 * 16);
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    const u32 low = codes[2 * i], high = codes[2 * i + 1];
                    const u32 a[4] = {e4m3_pair<0, 2>(low), e4m3_pair<1, 3>(low), e4m3_pair<0, 2>(high), e4m3_pair<1, 3>(high)};
#pragma unroll
                    for (u32 half = 0; half < HALVES; ++half) mma_m16n8k16(out[half][m + i], a, b[half], E());
                }
            }
        } else {
#pragma unroll
            for (u32 m = 0; m < D / 16; ++m) {
                u32 a[4];
                ldmatrix_x4_trans(a, values + (lane % 8 + lane / 16 * 8) * STRIDE + m * 16 + lane / 8 % 2 * 8);
#pragma unroll
                for (u32 half = 0; half < HALVES; ++half) mma_m16n8k16(out[half][m], a, b[half], E());
            }
        }
    }

    // Writes the output of eight heads, `stride` elements each.
    DEVICE void put(float* outs, u32 half, u32 stride) const {
        float* const at = outs + lane_id() % 4 * 2 * stride;
        const u32 group = lane_id() / 4;
#pragma unroll
        for (u32 m = 0; m < D / 16; ++m) {
#pragma unroll
            for (u32 head = 0; head < 2; ++head) {
                Vec<float, 2> pair;
                for (u32 i = 0; i < 2; ++i) pair.x[i] = out[half][m][head + 2 * i];
                float* const row = at + head * stride + m * 16;
                if constexpr (IS_NARROW) {
                    // The elements are adjacent, because their order is that of the codes.
                    for (u32 i = 0; i < 2; ++i) pair.x[i] *= E4M3_FACTOR;
                    store(row + 2 * group, pair);
                } else {
                    row[group] = pair.x[0], row[group + 8] = pair.x[1];
                }
            }
        }
    }
};

// Results of the CTA's warps, for eight heads at a time. The output of a warp is in the stage that is free.
template <int D, int HEADS, class C, int WARPS, int STAGES>
struct WarpResults {
    static constexpr u32 STRIDE = D + 4, STAGE = Tile<D, C>::SIZE * sizeof(C);
    static_assert(8 * STRIDE * sizeof(float) <= STAGE, "outputs fit into a stage");
    unsigned char* memory;  // shared: the rings of all warps
    float *maxima, *sums;   // shared: [WARPS, HEADS]
    u32* stages;            // shared: [WARPS]

    DEVICE float* outs(u32 warp, u32 stage) const { return (float*)(memory + (warp * STAGES + stage) * STAGE); }

    template <class T>
    DEVICE void put(const DecodeWarp<T, D, HEADS, C>& warp, u32 stage, u32 half) const {
        const float sum = warp_sum<4>(warp.sum[half]);
        if (lane_id() % 4 == 0) {
            const u32 at = warp_id() * HEADS + half * 8 + lane_id() / 4;
            maxima[at] = warp.largest[half], sums[at] = sum;
        }
        if (lane_id() == 0) stages[warp_id()] = stage;
        warp.put(outs(warp_id(), stage), half, STRIDE);
    }

    // Merges the warps in order, for head h of all from element d on.
    DEVICE Merged merge(u32 h, u32 d) const {
        Merged all;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) {
            // The bound holds for a number that is read too early too, of which the detector of races then reports.
            const float* const out = outs(w, min(stages[w], STAGES - 1u));
            all.add(maxima[w * HEADS + h], sums[w * HEADS + h], load<QUAD>(out + h % 8 * STRIDE + d));
        }
        return all;
    }
};

// The heads of a split that its CTA completes itself, in shared memory: the queries, then the key and the value of the last token.
template <class T, int D, int HEADS, class C, int WARPS>
struct OwnHeads {
    // Elements of a row: rows begin in different banks.
    static constexpr u32 STRIDE = D + 8, SIZE = (HEADS + 2) * STRIDE;
    T* rows;

    DEVICE C* key() const { return (C*)(rows + HEADS * STRIDE); }
    DEVICE C* value() const { return (C*)(rows + (HEADS + 1) * STRIDE); }

    // Completes the queries of a split, and the key and the value of the last token if the split has it. The warps take turns; `x`
    // is shared memory of the warp.
    DEVICE void complete(const QkvPostParams& p, const Split& s, bool has_last, float* x) const {
        const EarlyAngles<4, D> angles(p, s.row);
        const u32 beside = has_last ? 2 : 0;
        for (u32 i = warp_id(); i < beside + s.heads; i += WARPS) {
            const bool is_q = i >= beside;
            const u32 number = is_q ? s.head + i - beside : p.q_heads + i * p.kv_heads + s.kv_head;
            const auto head = Head<T>::of(p, s.row, number);
            T* const out = rows + (is_q ? i - beside : HEADS + i) * STRIDE;
            if constexpr (sizeof(C) == sizeof(T)) {
                post_head<4>(p, head, D, angles, out, x);
            } else if (is_q) {
                post_head<4>(p, head, D, angles, out, x);
            } else {
                post_head<4>(p, head, D, angles, (C*)out, x);
            }
            // All lanes have read what the next head takes the place of.
            __syncwarp();
        }
        __syncthreads();
    }

    // Puts the last token's key and value into row `row` of a tile, with one warp, and writes them to the cache if `writes`.
    DEVICE void put(const QkvPostParams& p, const Split& s, const Tile<D, C>& tile, u32 row, bool writes) const {
        constexpr u32 PIECE = Tile<D, C>::PIECE, EACH = D / PIECE;
        const u32 slot = writes ? p.slots[s.row] : NO_SLOT;
        const u64 at = slot / KV_BLOCK * p.block_stride + (slot % KV_BLOCK * p.kv_heads + s.kv_head) * D;
#pragma unroll
        for (u32 i = lane_id(); i < 2 * EACH; i += 32) {
            const bool is_key = i < EACH;
            const u32 c = i % EACH * PIECE;
            const auto piece = load<PIECE>((is_key ? key() : value()) + c);
            store((is_key ? tile.keys : tile.values()) + row * Tile<D, C>::STRIDE + c, piece);
            if (slot != NO_SLOT) store((C*)(is_key ? p.k_cache : p.v_cache) + at + c, piece);
        }
        __syncwarp();
    }
};

// Runs decode attention, which completes the heads itself if it is FUSED.
template <class T, int D, int HEADS, int WARPS, int STAGES, class C, bool FUSED>
DEVICE void decode(const PagedDecodeParams& params, const QkvPostParams* post) {
    using Own = OwnHeads<T, D, HEADS, C, WARPS>;
    constexpr u32 THREADS = WARPS * 32;
    DYNAMIC_SHARED(memory);
    SHARED_ARRAY(float, maxima, WARPS * HEADS);
    SHARED_ARRAY(float, sums, WARPS * HEADS);
    SHARED_ARRAY(u32, stages, WARPS);
    SHARED_ARRAY(u32, flag, 1);
    SHARED_ARRAY(T, own_rows, FUSED ? Own::SIZE : 1);
    const AttentionParams& p = params.attention;
    const Own own{own_rows};
    const WarpResults<D, HEADS, C, WARPS, STAGES> results{memory, maxima, sums, stages};

    Tiles<D, HEADS, C, WARPS, STAGES, FUSED> tiles(p, memory);
    u32 stage = 0;
    for (u32 item = blockIdx.x; (item = next_seen<HEADS>(p, item)) < p.plan[0]; item += gridDim.x) {
        const Split s = Split::of<HEADS>(p, item);
        const u64 row = (u64)s.row * p.q_heads + s.head;
        const bool has_last = FUSED && s.begin < s.end && s.end == s.length;
        DecodeWarp<T, D, HEADS, C> warp;
        if constexpr (FUSED) {
            own.complete(*post, s, has_last, (float*)tiles.at(tiles.next_stage).keys);
            warp.load_queries(own.rows, Own::STRIDE, s.heads);
        } else {
            warp.load_queries((const T*)p.q + row * D, D, s.heads);
        }
        for (u32 key = tiles.first_of(s); key < s.end; key += WARPS * KV_BLOCK) {
            cp_async_wait<STAGES - 2>();
            // After this, the tile is complete for all lanes, and all have left the stage that is filled next.
            __syncwarp();
            tiles.copy_next();
            const Tile<D, C> tile = tiles.at(stage);
            if (has_last && key + KV_BLOCK >= s.end) {
                own.put(*post, s, tile, s.end - 1 - key, s.head == s.kv_head * (p.q_heads / p.kv_heads));
            }
            float scores[HEADS / 8][4];
            warp.multiply_keys(tile.keys, scores);
            warp.soften(p, scores, s.begin > key ? s.begin - key : 0, s.end - key);
            warp.multiply_values(tile.values(), scores);
            stage = tiles.following(stage);
        }
        T* const output = (T*)p.out + row * D;
#pragma unroll
        for (u32 half = 0; half < HEADS / 8; ++half) {
            // All lanes have left the stage that is free.
            __syncwarp();
            results.put(warp, tiles.next_stage, half);
            __syncthreads();
            for (u32 i = half * 8 * D + threadIdx.x * QUAD; i < min(s.heads, half * 8 + 8) * D; i += THREADS * QUAD) {
                finish_split<D>(params, s, i, results.merge(i / D, i % D), output);
            }
            __syncthreads();
        }
        merge_splits<D, THREADS>(params, s, flag, output);
    }
}

// Grid: (any number of CTAs, which share the plan's splits; KV heads by tiles of HEADS query heads).
template <class T, int D, int HEADS, int WARPS, int STAGES, class C = T>
DEVICE void paged_decode(const PagedDecodeParams& params) {
    decode<T, D, HEADS, WARPS, STAGES, C, false>(params, nullptr);
}

// Does the same after it has completed the heads. Grid: that of paged_decode.
template <class T, int D, int HEADS, int WARPS, int STAGES, class C = T>
DEVICE void paged_decode_fused(const FusedDecodeParams& params) {
    decode<T, D, HEADS, WARPS, STAGES, C, true>(params.decode, &params.post);
}
