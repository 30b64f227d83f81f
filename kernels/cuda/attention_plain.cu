// Attention for every element type and head size, for decode and prefill: one CTA per query and head, with products in
// f32. It serves f32 and head sizes that the tensor-core kernels do not support.
#include "attention.h"

constexpr u32 PLAIN_THREADS = 128;

// Returns the sequence of a row of q: the last one that starts at or before it.
DEVICE u32 sequence_of(const AttentionParams& p, u32 row) {
    u32 low = 0, high = p.sequences;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (p.query_start[middle] <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Grid: (tokens, q_heads). Keys are processed PLAIN_THREADS at a time: each thread computes the score of one key, then
// accumulates its output elements over all of them. Maximum, sum and output are carried along and rescaled when the
// maximum grows.
// C is the type of the cache. A thread accumulates ELEMENTS output elements, so heads have up to ELEMENTS * PLAIN_THREADS.
template <class T, int ELEMENTS, class C = T>
DEVICE void paged_attention(const AttentionParams& p) {
    SHARED_ARRAY(float, query, ELEMENTS * PLAIN_THREADS);
    SHARED_ARRAY(float, weights, PLAIN_THREADS);
    SHARED_ARRAY(float, scratch, 32);
    const u32 row = blockIdx.x, head = blockIdx.y, thread = threadIdx.x, size = p.head_size;
    const u32 sequence = sequence_of(p, row);
    const u32 length = p.seq_lens[sequence], later = p.query_start[sequence + 1] - row;
    const u32 last = last_seen(p, length - later, length);
    const u32 keys = length < later ? 0 : min(seen_end(p, row, last), length);
    const u32 first = keys ? first_key(p, last) : 0;
    const u32 kv_head = head / (p.q_heads / p.kv_heads);
    const u32* blocks = blocks_of(p, sequence);
    const Cache<C> k(p, p.k_cache, blocks, kv_head, size), v(p, p.v_cache, blocks, kv_head, size);

    const u64 at = ((u64)row * p.q_heads + head) * size;
    for (u32 i = thread; i < size; i += PLAIN_THREADS) query[i] = to_float(((const T*)p.q)[at + i]);
    __syncthreads();

    float largest = LOWEST, sum = 0.0f, out[ELEMENTS] = {};
    for (u32 start = first; start < keys; start += PLAIN_THREADS) {
        const u32 key = start + thread;
        float score = minus_infinity();
        if (key < keys) {
            const C* vector = k.at(key);
            float product = 0.0f;
            for (u32 i = 0; i < size; ++i) product = fmaf(query[i], to_float(vector[i]), product);
            score = p.softcap > 0.0f ? capped(p, product) : scaled(p, product);
        }
        const float next = fmaxf(largest, block_max(score, scratch));
        const float shrink = exp2_fast(largest - next), weight = exp2_fast(score - next);
        largest = next;
        sum = fmaf(sum, shrink, weight);
        weights[thread] = weight;
        __syncthreads();
        const u32 count = min(PLAIN_THREADS, keys - start);
        for (u32 e = 0; e < ELEMENTS; ++e) {
            const u32 element = thread + e * PLAIN_THREADS;
            if (element >= p.value_size) break;
            out[e] *= shrink;
            for (u32 i = 0; i < count; ++i) out[e] = fmaf(weights[i], to_float(v.at(start + i)[element]), out[e]);
        }
        // The barriers of the next block_max precede the next write of weights.
    }
    sum = block_sum(sum, scratch);
    const float inverse = share(p, head, largest, sum);
    T* output = (T*)p.out + ((u64)row * p.q_heads + head) * p.value_size;
    for (u32 e = 0; e < ELEMENTS; ++e) {
        const u32 element = thread + e * PLAIN_THREADS;
        if (element < p.value_size) output[element] = from_float<T>(out[e] * inverse);
    }
}
