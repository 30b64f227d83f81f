// Decode attention over the paged cache in f16, with one query per sequence, on the CUDA cores of chips before sm_80. It reads
// each key and value once, and memory bandwidth limits its speed. Therefore
// - all query heads of a KV head share the loaded data;
// - a long sequence is divided into splits, which different CTAs process; their size depends only on the sequence's
//   length, so its sums are the same in every batch;
// - the CTA that ends last merges the splits in order, so it does not matter which one that is. (Split-KV decoding and
//   its merge come from FlashDecoding and FlashInfer.)
//
// Within a CTA a few adjacent lanes, a "team", process one key, eight elements each. C is the type of the cache.
#include "splits.h"

constexpr u32 DECODE_THREADS = 128;
constexpr u32 DECODE_WARPS = DECODE_THREADS / 32;

// HEADS is the number of query heads processed at once. The softmax of a team holds the maximum, the sum and the lane's
// part of the output for each of them.
template <int HEADS, int N>
struct Softmax {
    float largest[HEADS], sum[HEADS], out[HEADS][N];

    DEVICE Softmax() {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            largest[h] = LOWEST;
            sum[h] = 0.0f;
            for (int i = 0; i < N; ++i) out[h][i] = 0.0f;
        }
    }

    // Raises the maximum, relative to which sum and output are stored, to `next`. Returns the factor of the sum, which the caller
    // applies.
    DEVICE float raise(int h, float next) {
        const float shrink = exp2_fast(largest[h] - next);
        largest[h] = next;
#pragma unroll
        for (int i = 0; i < N; ++i) out[h][i] *= shrink;
        return shrink;
    }

    // Merges the teams of a warp, of LANES lanes each.
    template <int LANES>
    DEVICE void merge_teams() {
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                sum[h] *= raise(h, fmaxf(largest[h], __shfl_xor_sync(ALL_LANES, largest[h], offset)));
                sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], offset);
#pragma unroll
                for (int i = 0; i < N; ++i) out[h][i] += __shfl_xor_sync(ALL_LANES, out[h][i], offset);
            }
        }
    }
};

// Computes the softmax of a team over its keys of the split. `blocks` are those of the split, in shared memory.
template <int D, int HEADS, int LANES, class C>
DEVICE void attend(const AttentionParams& p, const Split& s, const Cache<C>& k, const Cache<C>& v,
                   Softmax<HEADS, WIDE<f16>>& softmax) {
    constexpr u32 N = WIDE<f16>, TEAMS = 32 / LANES;
    // Number of keys that a lane has in flight: as many bytes for caches of all types.
    constexpr u32 DEPTH = (HEADS > 4 ? 2 : 4) * (sizeof(f16) / sizeof(C));
    constexpr u32 STEP = DECODE_WARPS * TEAMS * DEPTH;
    const u32 part = lane_id() % LANES * N, team = lane_id() / LANES;
    const bool holds = part < D;

    float q[HEADS][N];
#pragma unroll
    for (u32 h = 0; h < HEADS; ++h) {
        Vec<f16, N> x = {};
        if (holds && h < s.heads) x = load<N>((const f16*)p.q + ((u64)s.row * p.q_heads + s.head + h) * D + part);
#pragma unroll
        for (u32 i = 0; i < N; ++i) q[h][i] = to_float(x.x[i]);
    }

    for (u32 step = s.begin / STEP * STEP; step < s.end; step += STEP) {
        Vec<C, N> keys[DEPTH], values[DEPTH];
        bool valid[DEPTH];
#pragma unroll
        for (u32 j = 0; j < DEPTH; ++j) {
            const u32 key = step + (warp_id() * DEPTH + j) * TEAMS + team;
            valid[j] = key >= s.begin && key < s.end;
            // An invalid key is not read, but its address is looked up.
            const u32 at = min(max(key, s.begin), s.end - 1) - s.start;
            keys[j] = load_once_if<N>(k.at(at) + part, valid[j] && holds);
            values[j] = load_once_if<N>(v.at(at) + part, valid[j] && holds);
        }
        float scores[HEADS][DEPTH];
#pragma unroll
        for (u32 j = 0; j < DEPTH; ++j) {
            float elements[N];
            widen(keys[j], elements);
#pragma unroll
            for (u32 h = 0; h < HEADS; ++h) {
                float product = 0.0f;
#pragma unroll
                for (u32 i = 0; i < N; ++i) product = fmaf(q[h][i], elements[i], product);
                scores[h][j] = warp_sum<LANES>(product);
            }
        }
        score(p, scores);
#pragma unroll
        for (u32 h = 0; h < HEADS; ++h) {
            float next = softmax.largest[h];
#pragma unroll
            for (u32 j = 0; j < DEPTH; ++j) {
                scores[h][j] = valid[j] ? scores[h][j] : minus_infinity();
                next = fmaxf(next, scores[h][j]);
            }
            float weights = scores[h][0] = exp2_fast(scores[h][0] - next);
#pragma unroll
            for (u32 j = 1; j < DEPTH; ++j) weights += scores[h][j] = exp2_fast(scores[h][j] - next);
            softmax.sum[h] = fmaf(softmax.sum[h], softmax.raise(h, next), weights);
        }
#pragma unroll
        for (u32 j = 0; j < DEPTH; ++j) {
            float elements[N];
            widen(values[j], elements);
#pragma unroll
            for (u32 i = 0; i < N; ++i) {
#pragma unroll
                for (u32 h = 0; h < HEADS; ++h) softmax.out[h][i] = fmaf(scores[h][j], elements[i], softmax.out[h][i]);
            }
        }
    }
}

// Results of the CTA's warps, each of which has the same result in all of its teams.
template <int D, int HEADS>
struct WarpResults {
    float *outs, *maxima, *sums;  // shared: [DECODE_WARPS, HEADS, D], and [DECODE_WARPS, HEADS] twice

    template <int N>
    DEVICE void put(const Softmax<HEADS, N>& softmax) {
        const u32 part = lane_id() * N;
#pragma unroll
        for (u32 h = 0; h < HEADS; ++h) {
            const u32 at = warp_id() * HEADS + h;
            if (lane_id() == 0) maxima[at] = softmax.largest[h], sums[at] = softmax.sum[h];
            if (part < D) {
                for (u32 i = 0; i < N; ++i) outs[at * D + part + i] = softmax.out[h][i];
            }
        }
    }

    // Merges the warps in order, for head h from element d on.
    DEVICE Merged merge(u32 h, u32 d) const {
        Merged all;
#pragma unroll
        for (u32 w = 0; w < DECODE_WARPS; ++w) {
            const u32 at = w * HEADS + h;
            all.add(maxima[at], sums[at], load<QUAD>(outs + at * D + d));
        }
        return all;
    }
};

// Grid: (any number of CTAs, which share the plan's splits; KV heads by tiles of HEADS query heads).
template <int D, int HEADS, class C = f16>
DEVICE void paged_decode_volta(const PagedDecodeParams& params) {
    constexpr int N = WIDE<f16>, LANES = D <= 8 * N ? 8 : D <= 16 * N ? 16 : 32;
    static_assert(D % N == 0 && D <= 32 * N, "heads that a warp can hold");
    SHARED_ARRAY(u32, blocks, MAX_SPLIT_TOKENS / KV_BLOCK);
    SHARED_ARRAY(float, outs, DECODE_WARPS * HEADS * D);
    SHARED_ARRAY(float, maxima, DECODE_WARPS * HEADS);
    SHARED_ARRAY(float, sums, DECODE_WARPS * HEADS);
    SHARED_ARRAY(u32, flag, 1);
    const AttentionParams& p = params.attention;
    WarpResults<D, HEADS> results{outs, maxima, sums};

    for (u32 item = blockIdx.x; item < p.plan[0]; item += gridDim.x) {
        const Split s = Split::of<HEADS>(p, item);
        if (s.number < s.first) continue;
        const u32* table = blocks_of(p, s.sequence) + s.start / KV_BLOCK;
        const u32 first_block = (s.begin - s.start) / KV_BLOCK;
        for (u32 i = first_block + threadIdx.x; s.start + i * KV_BLOCK < s.end; i += DECODE_THREADS) blocks[i] = table[i];
        __syncthreads();

        Softmax<HEADS, N> softmax;
        const Cache<C> k(p, p.k_cache, blocks, s.kv_head, D), v(p, p.v_cache, blocks, s.kv_head, D);
        attend<D, HEADS, LANES>(p, s, k, v, softmax);
        softmax.template merge_teams<LANES>();
        results.put(softmax);
        __syncthreads();

        f16* const output = (f16*)p.out + ((u64)s.row * p.q_heads + s.head) * D;
        for (u32 i = threadIdx.x * QUAD; i < s.heads * D; i += DECODE_THREADS * QUAD) {
            finish_split<D>(params, s, i, results.merge(i / D, i % D), output);
        }
        merge_splits<D, DECODE_THREADS>(params, s, flag, output);
        __syncthreads();
    }
}
