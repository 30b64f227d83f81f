// Decode attention over the paged cache: one query a sequence. It reads each key and value once and is bound by that, so
// - all query heads of a KV head share what is loaded,
// - a long sequence is cut into splits, which different CTAs work on; a split has a fixed size, so a sequence's sums are the
//   same whatever else is in the batch,
// - the CTA that ends last merges the splits, always in their order: who that is changes nothing.
// (Split-KV decoding and its merge are FlashDecoding's and FlashInfer's idea.)
//
// Within a CTA a few neighbouring lanes, a "team", hold one key: 16 bytes of it each.
#include "attention.h"

constexpr u32 DECODE_THREADS = 128;
constexpr u32 DECODE_WARPS = DECODE_THREADS / 32;
constexpr u32 MAX_SPLIT_TOKENS = 2048;

// HEADS: query heads taken at once. A team's softmax: for each of them the maximum, the sum, and the lane's part of the output.
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

    // Makes `next` the maximum that sum and output are relative to.
    DEVICE void raise(int h, float next) {
        const float shrink = exp2_fast(largest[h] - next);
        largest[h] = next;
        sum[h] *= shrink;
#pragma unroll
        for (int i = 0; i < N; ++i) out[h][i] *= shrink;
    }

    // Adds up the teams of a warp, of LANES lanes each.
    template <int LANES>
    DEVICE void merge_teams() {
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                raise(h, fmaxf(largest[h], __shfl_xor_sync(ALL_LANES, largest[h], offset)));
                sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], offset);
#pragma unroll
                for (int i = 0; i < N; ++i) out[h][i] += __shfl_xor_sync(ALL_LANES, out[h][i], offset);
            }
        }
    }
};

// One split of one sequence, for some query heads of one KV head.
struct Split {
    u32 sequence;
    u32 number;      // of the split within its sequence
    u32 partial;     // where its partial result belongs
    u32 row;         // of the query
    u32 begin, end;  // keys
    u32 first;       // the first split that the query sees anything of
    u32 count;       // splits from there on; none of them is empty unless the sequence is
    u32 kv_head;
    u32 head, heads;  // query heads

    template <int HEADS>
    static DEVICE Split of(const PagedDecodeParams& params, u32 item) {
        const AttentionParams& p = params.attention;
        const uint4 work = ((const uint4*)p.plan)[1 + item];
        Split s;
        s.sequence = work.x;
        s.number = work.y;
        s.partial = work.z;
        s.row = p.query_start[s.sequence];
        const u32 length = p.seq_lens[s.sequence], seen = length ? first_key(p, length - 1) : 0;
        s.begin = max(s.number * params.split_tokens, seen);
        s.end = min((s.number + 1) * params.split_tokens, length);
        s.first = seen / params.split_tokens;
        s.count = max((length + params.split_tokens - 1) / params.split_tokens, 1u) - s.first;
        const u32 group = p.q_heads / p.kv_heads, tiles = (group + HEADS - 1) / HEADS;
        s.kv_head = blockIdx.y / tiles;
        const u32 offset = blockIdx.y % tiles * HEADS;
        s.head = s.kv_head * group + offset;
        s.heads = min((u32)HEADS, group - offset);
        return s;
    }
};

// The softmax of a team over its keys of the split. `blocks` are the split's, in shared memory.
template <int D, int HEADS, int LANES, class T>
DEVICE void attend(const AttentionParams& p, const Split& s, const Cache<T>& k, const Cache<T>& v, u32 split_begin,
                   Softmax<HEADS, WIDE<T>>& softmax) {
    constexpr u32 N = WIDE<T>, TEAMS = 32 / LANES;
    // Keys that a lane has in flight.
    constexpr u32 DEPTH = HEADS > 4 ? 2 : 4;
    constexpr u32 STEP = DECODE_WARPS * TEAMS * DEPTH;
    const u32 part = lane_id() % LANES * N, team = lane_id() / LANES;
    const bool holds = part < D;

    float q[HEADS][N];
#pragma unroll
    for (u32 h = 0; h < HEADS; ++h) {
        Vec<T, N> x = {};
        if (holds && h < s.heads) x = load<N>((const T*)p.q + ((u64)s.row * p.q_heads + s.head + h) * D + part);
#pragma unroll
        for (u32 i = 0; i < N; ++i) q[h][i] = to_float(x.x[i]);
    }

    for (u32 step = s.begin / STEP * STEP; step < s.end; step += STEP) {
        Vec<T, N> keys[DEPTH], values[DEPTH];
        bool valid[DEPTH];
#pragma unroll
        for (u32 j = 0; j < DEPTH; ++j) {
            const u32 key = step + (warp_id() * DEPTH + j) * TEAMS + team;
            valid[j] = key >= s.begin && key < s.end;
            keys[j] = values[j] = Vec<T, N>();
            if (valid[j] && holds) {
                keys[j] = load_once(k.at(key - split_begin) + part);
                values[j] = load_once(v.at(key - split_begin) + part);
            }
        }
#pragma unroll
        for (u32 h = 0; h < HEADS; ++h) {
            float scores[DEPTH], next = softmax.largest[h];
#pragma unroll
            for (u32 j = 0; j < DEPTH; ++j) {
                float product = 0.0f;
#pragma unroll
                for (u32 i = 0; i < N; ++i) product += q[h][i] * to_float(keys[j].x[i]);
                product = warp_sum<LANES>(product);
                scores[j] = valid[j] ? score_of(p, product) : minus_infinity();
                next = fmaxf(next, scores[j]);
            }
            softmax.raise(h, next);
#pragma unroll
            for (u32 j = 0; j < DEPTH; ++j) {
                const float weight = exp2_fast(scores[j] - next);
                softmax.sum[h] += weight;
#pragma unroll
                for (u32 i = 0; i < N; ++i) softmax.out[h][i] += weight * to_float(values[j].x[i]);
            }
        }
    }
}

// Whether this CTA is the last of `count` to come here with the ticket; its threads then see what the others wrote.
DEVICE bool is_last(u32* ticket, u32 count, u32* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *flag = atomicAdd(ticket, 1u) == count - 1;
        // Nobody else comes: it is ready for the next launch.
        if (*flag) *ticket = 0;
    }
    __syncthreads();
    const bool last = *flag;
    __threadfence();
    return last;
}

// The output of head `head`, element `d`, from all splits of a sequence, in their order.
template <int D>
DEVICE float merged(const PagedDecodeParams& params, const Split& s, u32 head, u32 d) {
    const u64 heads = params.attention.q_heads;
    const u64 start = (u64)(s.partial - (s.number - s.first)) * heads + head;
    float largest = LOWEST, sum = 0.0f, out = 0.0f;
    for (u32 i = 0; i < s.count; ++i) {
        const u64 at = start + i * heads;
        const float next = fmaxf(largest, load_fresh(params.partial_sums + 2 * at));
        const float old = exp2_fast(largest - next), add = exp2_fast(load_fresh(params.partial_sums + 2 * at) - next);
        sum = sum * old + load_fresh(params.partial_sums + 2 * at + 1) * add;
        out = out * old + load_fresh(params.partial_out + at * D + d) * add;
        largest = next;
    }
    return sum > 0.0f ? out / sum : 0.0f;
}

// The CTA's warps, each of them with the same result in all of its teams.
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

    // Maximum, sum and output of element d of head h, over the warps in their order.
    DEVICE void merge(u32 h, u32 d, float& largest, float& sum, float& out) const {
        largest = LOWEST, sum = out = 0.0f;
        for (u32 w = 0; w < DECODE_WARPS; ++w) largest = fmaxf(largest, maxima[w * HEADS + h]);
        for (u32 w = 0; w < DECODE_WARPS; ++w) {
            const float weight = exp2_fast(maxima[w * HEADS + h] - largest);
            sum += sums[w * HEADS + h] * weight;
            out += outs[(w * HEADS + h) * D + d] * weight;
        }
    }
};

// Grid: (any number of CTAs, which share the plan's splits; KV heads by tiles of HEADS query heads).
template <class T, int D, int HEADS>
DEVICE void paged_decode(const PagedDecodeParams& params) {
    constexpr int N = WIDE<T>, LANES = D <= 8 * N ? 8 : D <= 16 * N ? 16 : 32;
    static_assert(sizeof(T) == 2 && D % N == 0 && D <= 32 * N, "heads of 16-bit elements that a warp can hold");
    SHARED_ARRAY(u32, blocks, MAX_SPLIT_TOKENS / KV_BLOCK);
    SHARED_ARRAY(float, outs, DECODE_WARPS * HEADS * D);
    SHARED_ARRAY(float, maxima, DECODE_WARPS * HEADS);
    SHARED_ARRAY(float, sums, DECODE_WARPS * HEADS);
    SHARED_ARRAY(u32, flag, 1);
    const AttentionParams& p = params.attention;
    WarpResults<D, HEADS> results{outs, maxima, sums};

    for (u32 item = blockIdx.x; item < p.plan[0]; item += gridDim.x) {
        const Split s = Split::of<HEADS>(params, item);
        if (s.number < s.first) continue;
        const u32 split_begin = s.number * params.split_tokens;
        const u32* table = p.block_table + (u64)s.sequence * p.table_stride + split_begin / KV_BLOCK;
        const u32 first_block = s.begin / KV_BLOCK - split_begin / KV_BLOCK;
        for (u32 i = first_block + threadIdx.x; split_begin + i * KV_BLOCK < s.end; i += DECODE_THREADS) blocks[i] = table[i];
        __syncthreads();

        Softmax<HEADS, N> softmax;
        const Cache<T> k(p, p.k_cache, blocks, s.kv_head, D), v(p, p.v_cache, blocks, s.kv_head, D);
        attend<D, HEADS, LANES>(p, s, k, v, split_begin, softmax);
        softmax.template merge_teams<LANES>();
        results.put(softmax);
        __syncthreads();

        T* const output = (T*)p.out + ((u64)s.row * p.q_heads + s.head) * D;
        for (u32 i = threadIdx.x; i < s.heads * D; i += DECODE_THREADS) {
            const u32 h = i / D, d = i % D;
            float largest, sum, out;
            results.merge(h, d, largest, sum, out);
            if (s.count == 1) {
                output[i] = from_float<T>(sum > 0.0f ? out / sum : 0.0f);
            } else {
                const u64 at = (u64)s.partial * p.q_heads + s.head + h;
                params.partial_out[at * D + d] = out;
                if (d == 0) params.partial_sums[2 * at] = largest, params.partial_sums[2 * at + 1] = sum;
            }
        }
        if (s.count > 1 && is_last(params.tickets + (u64)s.sequence * gridDim.y + blockIdx.y, s.count, flag)) {
            for (u32 i = threadIdx.x; i < s.heads * D; i += DECODE_THREADS) {
                output[i] = from_float<T>(merged<D>(params, s, s.head + i / D, i % D));
            }
        }
        __syncthreads();
    }
}
