// The operations after the fused qkv projection, in one kernel: split, RMS norm of q and k, rotary embedding, write to
// the paged cache.
//
// A value that is not finite is stored as 0, and its key as NaN. The tensor cores multiply a tile's values by the
// weights of all its queries, including the weight 0 of queries that do not see the key, and 0 · NaN is NaN: earlier
// tokens, whose blocks other sequences may share, would be corrupted. A score that is NaN affects only queries that see
// the key.
#include "rope.h"

constexpr u32 QKV_POST_WARPS = 4;
constexpr u32 MAX_HEAD_SIZE = 256;

// Returns the sum of squares of `cols` elements, computed by a warp.
template <int N, class T>
DEVICE float sum_of_squares(const T* x, u32 cols) {
    float sum = 0.0f;
    for (u32 c = lane_id() * N; c < cols; c += 32 * N) {
        Vec<T, N> v = load<N>(x + c);
#pragma unroll
        for (int i = 0; i < N; ++i) sum = fmaf(to_float(v.x[i]), to_float(v.x[i]), sum);
    }
    return warp_sum(sum);
}

// Returns whether all of `cols` elements are finite, computed by a warp.
template <int N, class T>
DEVICE bool are_finite(const T* x, u32 cols) {
    bool finite = true;
    for (u32 c = lane_id() * N; c < cols; c += 32 * N) {
        Vec<T, N> v = load<N>(x + c);
#pragma unroll
        for (int i = 0; i < N; ++i) finite &= is_finite(to_float(v.x[i]));
    }
    return __all_sync(ALL_LANES, finite);
}

template <class T>
struct Head {
    const T* part;        // the whole row of q, k or v
    u32 number, heads;    // index, and number of heads
    const float* weight;  // weight of its norm, or null
    bool rotate, is_value;
    const T* value;       // for a key: the head of its value; else null
    float scale;          // divisor of the results in e4m3
};

// Processes one head with one warp. `x` is shared memory of the warp, because the two elements of a pair may belong to
// different lanes. O is the type of the results.
template <int N, class O, class T>
DEVICE void post_head(const QkvPostParams& p, const Head<T>& head, O* out, float* x) {
    const T* input = head.part + head.number * p.head_size;
    const float* weight = head.weight;
    float inverse = 0.0f;
    if (weight) {
        const u32 cols = p.norm_whole_row ? head.heads * p.head_size : p.head_size;
        inverse = rsqrtf(sum_of_squares<N>(p.norm_whole_row ? head.part : input, cols) / cols + p.eps);
        if (p.norm_whole_row) weight += head.number * p.head_size;
    }
    const bool spoilt = head.value && !are_finite<N>(head.value, p.head_size);
    for (u32 c = lane_id() * N; c < p.head_size; c += 32 * N) {
        Vec<T, N> v = load<N>(input + c);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float value = to_float(v.x[i]);
            x[c + i] = weight ? value * inverse * (weight[c + i] + p.weight_offset) : value;
        }
    }
    __syncwarp();
    for (u32 c = lane_id() * N; c < p.head_size; c += 32 * N) {
        Vec<O, N> v;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float value = head.rotate ? rotated(p, x, c + i) : x[c + i];
            if (head.is_value && !is_finite(value)) value = 0.0f;
            v.x[i] = cached<O>(spoilt ? __uint_as_float(0x7fffffffu) : value, head.scale);
        }
        store(out + c, v);
    }
}

// Each lane loads eight bytes, so that a head of 128 occupies every lane of its warp.
template <class O, class T>
DEVICE void post(const QkvPostParams& p, const Head<T>& head, O* out, float* x) {
    if (p.head_size % 4 == 0) {
        post_head<4>(p, head, out, x);
    } else {
        post_head<1>(p, head, out, x);
    }
}

// Grid: (tokens, heads of q, k and v by QKV_POST_WARPS). Each warp processes a head. C is the type of the cache.
template <class T, class C = T>
DEVICE void qkv_post(const QkvPostParams& p) {
    SHARED_ARRAY(float, heads, QKV_POST_WARPS * MAX_HEAD_SIZE);
    const u32 token = blockIdx.x, number = blockIdx.y * QKV_POST_WARPS + warp_id();
    if (number >= p.q_heads + 2 * p.kv_heads) return;
    const bool is_q = number < p.q_heads, is_v = number >= p.q_heads + p.kv_heads;
    const u32 first = is_q ? 0 : is_v ? p.q_heads + p.kv_heads : p.q_heads;

    const u32 stride = p.q_heads + 2 * p.kv_heads;
    const T* part = (const T*)p.qkv + ((u64)token * stride + first) * p.head_size;
    const T* value = is_q || is_v ? nullptr : part + (p.kv_heads + number - first) * p.head_size;
    const float* weight = is_q ? p.q_weight : is_v ? nullptr : p.k_weight;
    const u32 count = is_q ? p.q_heads : p.kv_heads;
    const Head<T> head{part, number - first, count, weight, !is_v && p.cosine, is_v, value, is_v ? p.v_scale : p.k_scale};
    float* x = heads + warp_id() * MAX_HEAD_SIZE;
    if (is_q) return post(p, head, (T*)p.q + ((u64)token * p.q_heads + number) * p.head_size, x);
    const u32 slot = p.slots[token];
    if (slot == NO_SLOT) return;
    post(p, head, (C*)(is_v ? p.v_cache : p.k_cache) + slot / KV_BLOCK * p.block_stride +
                      (slot % KV_BLOCK * p.kv_heads + number - first) * p.head_size, x);
}
