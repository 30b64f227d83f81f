// Code shared by the kernels of decode attention: the splits of a sequence, and their merge by the CTA that ends last.
#pragma once
#include "attention.h"
#include "rounded.h"

constexpr u32 MAX_SPLIT_TOKENS = 2048;

// One split of one sequence, for some query heads of one KV head.
struct Split {
    u32 sequence;
    u32 number;      // index of the split within its sequence
    u32 partial;     // index of its partial result
    u32 row;         // row of the query
    u32 length;      // number of keys of the sequence
    u32 start;       // first key of the split, seen or not
    u32 begin, end;  // range of keys that are seen
    u32 first;       // first split of which the query sees any key
    u32 count;       // number of splits from there on; none of them is empty unless the sequence is
    u32 kv_head;
    u32 head, heads;  // first query head, and number of query heads

    template <int HEADS>
    static DEVICE Split of(const AttentionParams& p, u32 item) {
        const uint4 work = ((const uint4*)p.plan)[1 + item];
        Split s;
        s.sequence = work.x;
        s.number = work.y;
        s.partial = work.z;
        s.row = p.query_start[s.sequence];
        const u32 tokens = work.w;
        s.length = p.seq_lens[s.sequence];
        const u32 length = s.length, seen = length ? first_key(p, length - 1) : 0;
        s.start = s.number * tokens;
        s.begin = max(s.start, seen);
        s.end = min(s.start + tokens, length);
        s.first = seen / tokens;
        s.count = max((length + tokens - 1) / tokens, 1u) - s.first;
        const u32 group = p.q_heads / p.kv_heads, tiles = (group + HEADS - 1) / HEADS;
        s.kv_head = blockIdx.y / tiles;
        const u32 offset = blockIdx.y % tiles * HEADS;
        s.head = s.kv_head * group + offset;
        s.heads = min((u32)HEADS, group - offset);
        return s;
    }
};

// Number of adjacent elements of a head that one thread processes.
constexpr u32 QUAD = 4;

// Merged result of a sequence, or of a part of one: maximum and sum of a head, and QUAD elements of its output.
struct Merged {
    float largest = LOWEST, sum = 0.0f, out[QUAD] = {};

    // Adds the next part.
    DEVICE void add(float maximum, float weights, const Vec<float, QUAD>& part) {
        const float next = fmaxf(largest, maximum), old = exp2_fast(largest - next), scale = exp2_fast(maximum - next);
        largest = next;
        sum = fmaf(sum, old, weights * scale);
#pragma unroll
        for (u32 i = 0; i < QUAD; ++i) out[i] = fmaf(out[i], old, part.x[i] * scale);
    }

    // Writes the output of a query head, which is 0 if there is no key; NaN stays NaN. Returns what it has written.
    template <class T>
    DEVICE Vec<T, QUAD> write(const AttentionParams& p, u32 head, T* output) const {
        const float inverse = share(p, head, largest, sum);
        Vec<T, QUAD> result;
#pragma unroll
        for (u32 i = 0; i < QUAD; ++i) result.x[i] = from_float<T>(out[i] * inverse);
        store(output, result);
        return result;
    }
};

// Merges all splits of a sequence in order, for head `head` from element `d` of its D on.
template <int D>
DEVICE Merged merged_splits(const PagedDecodeParams& params, const Split& s, u32 head, u32 d) {
    // Number of splits that are loaded at once, because each alone would wait for memory.
    constexpr u32 AHEAD = 8;
    const u64 heads = params.attention.q_heads;
    const u64 start = (u64)(s.partial - (s.number - s.first)) * heads + head;
    Merged all;
    for (u32 first = 0; first < s.count; first += AHEAD) {
        Vec<float, 2> sums[AHEAD];
        Vec<float, QUAD> outs[AHEAD];
#pragma unroll
        for (u32 j = 0; j < AHEAD; ++j) {
            const u64 at = start + min(first + j, s.count - 1) * heads;
            sums[j] = load_fresh<2>(params.partial_sums + 2 * at);
            outs[j] = load_fresh<QUAD>(params.partial_out + at * D + d);
        }
#pragma unroll
        for (u32 j = 0; j < AHEAD; ++j) {
            if (first + j < s.count) all.add(sums[j].x[0], sums[j].x[1], outs[j]);
        }
    }
    return all;
}

// Writes the output of a query head, and rounds it if that is wanted. Eight adjacent lanes have a block of 32.
template <class T>
DEVICE void write_rounded(const PagedDecodeParams& params, const Merged& all, u32 head, T* output) {
    const Vec<T, QUAD> result = all.write(params.attention, head, output);
    if (params.rounded.codes == nullptr) return;
    float values[QUAD];
    widen(result, values);
    round_block(values, params.rounded, (u64)(output - (T*)params.attention.out));
}

// Writes the result of a split from element `i` of its heads on: the output if the sequence has no other splits, or a part of it.
// `output` is that of the split's first head.
template <int D, class T>
DEVICE void finish_split(const PagedDecodeParams& params, const Split& s, u32 i, const Merged& split, T* output) {
    const u32 head = s.head + i / D, d = i % D;
    if (s.count == 1) {
        write_rounded(params, split, head, output + i);
        return;
    }
    const u64 at = (u64)s.partial * params.attention.q_heads + head;
    Vec<float, QUAD> out;
    for (u32 e = 0; e < QUAD; ++e) out.x[e] = split.out[e];
    store(params.partial_out + at * D + d, out);
    if (d == 0) params.partial_sums[2 * at] = split.largest, params.partial_sums[2 * at + 1] = split.sum;
}

// Merges the splits of a sequence if there are several and this CTA ends last. All threads call it, after finish_split().
template <int D, u32 THREADS, class T>
DEVICE void merge_splits(const PagedDecodeParams& params, const Split& s, u32* flag, T* output) {
    if (s.count > 1 && is_last(params.tickets + (u64)s.sequence * gridDim.y + blockIdx.y, s.count, flag)) {
        for (u32 i = threadIdx.x * QUAD; i < s.heads * D; i += THREADS * QUAD) {
            const u32 head = s.head + i / D;
            write_rounded(params, merged_splits<D>(params, s, head, i % D), head, output + i);
        }
    }
}
