// What follows the fused qkv projection, in one kernel: split, RMS norm of q and k, rotary embedding, write to the paged cache.
//
// A value that is not finite is kept as 0, and its key as NaN. The tensor cores multiply a tile's values by the weights of all of its
// queries, the weight 0 of those that do not see the key among them, and no weight makes a NaN vanish: tokens before it, whose
// blocks other sequences may share, would be spoilt. A score that is NaN spoils those that see the key, and nobody else.
#include "gpu.h"

constexpr u32 QKV_POST_WARPS = 4;
constexpr u32 MAX_HEAD_SIZE = 256;

// The sum of squares of `cols` elements, by a warp.
template <int N, class T>
DEVICE float sum_of_squares(const T* x, u32 cols) {
    float sum = 0.0f;
    for (u32 c = lane_id() * N; c < cols; c += 32 * N) {
        Vec<T, N> v = load<N>(x + c);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += to_float(v.x[i]) * to_float(v.x[i]);
    }
    return warp_sum(sum);
}

// Element `i` of the head `x` after its pair has been turned by the angle of the token's position in the pair's stream.
DEVICE float rotated(const QkvPostParams& p, const float* x, u32 i) {
    if (i >= p.rotary_dim) return x[i];
    const u32 half = p.rotary_dim / 2;
    const bool first = p.rope_interleaved ? i % 2 == 0 : i < half;
    const u32 step = p.rope_interleaved ? 1 : half;
    const float left = first ? x[i] : x[i - step], right = first ? x[i + step] : x[i];
    const u32 pair = p.rope_interleaved ? i / 2 : first ? i : i - half;
    const u32 stream = p.streams ? p.streams[pair] : 0;
    const u64 angle = (u64)p.positions[stream * p.position_stride + blockIdx.x] * half + pair;
    const float c = p.cosine[angle], s = p.sine[angle];
    return first ? left * c - right * s : right * c + left * s;
}

DEVICE bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// Whether all of `cols` elements are finite, by a warp.
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
    T* out;
    const T* part;        // the whole row of q, k or v
    u32 number, heads;    // which it is of how many
    const float* weight;  // of its norm, or null
    bool rotate, is_value;
    const T* value;       // of a key: the head that goes with it; else null
};

// One head by one warp. `x` is shared memory of the warp, because the two elements of a pair may belong to different lanes.
template <int N, class T>
DEVICE void post_head(const QkvPostParams& p, const Head<T>& head, float* x) {
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
        Vec<T, N> v;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float value = head.rotate ? rotated(p, x, c + i) : x[c + i];
            if (head.is_value && !is_finite(value)) value = 0.0f;
            v.x[i] = from_float<T>(spoilt ? __uint_as_float(0x7fffffffu) : value);
        }
        store(head.out + c, v);
    }
}

// Grid: (tokens, heads of q, k and v by QKV_POST_WARPS). A warp a head.
template <class T>
DEVICE void qkv_post(const QkvPostParams& p) {
    SHARED_ARRAY(float, heads, QKV_POST_WARPS * MAX_HEAD_SIZE);
    const u32 token = blockIdx.x, number = blockIdx.y * QKV_POST_WARPS + warp_id();
    if (number >= p.q_heads + 2 * p.kv_heads) return;
    const bool is_q = number < p.q_heads, is_v = number >= p.q_heads + p.kv_heads;
    const u32 first = is_q ? 0 : is_v ? p.q_heads + p.kv_heads : p.q_heads;

    T* out;
    if (is_q) {
        out = (T*)p.q + ((u64)token * p.q_heads + number) * p.head_size;
    } else {
        const u32 slot = p.slots[token];
        if (slot == NO_SLOT) return;
        out = (T*)(is_v ? p.v_cache : p.k_cache) + slot / KV_BLOCK * p.block_stride +
              (slot % KV_BLOCK * p.kv_heads + number - first) * p.head_size;
    }
    const u32 stride = p.q_heads + 2 * p.kv_heads;
    const T* part = (const T*)p.qkv + ((u64)token * stride + first) * p.head_size;
    const T* value = is_q || is_v ? nullptr : part + (p.kv_heads + number - first) * p.head_size;
    const float* weight = is_q ? p.q_weight : is_v ? nullptr : p.k_weight;
    const Head<T> head{out, part, number - first, is_q ? p.q_heads : p.kv_heads, weight, !is_v && p.cosine, is_v, value};
    float* x = heads + warp_id() * MAX_HEAD_SIZE;
    // Eight bytes a lane: a head of 128 keeps every lane of its warp busy.
    if (p.head_size % 4 == 0) {
        post_head<4>(p, head, x);
    } else {
        post_head<1>(p, head, x);
    }
}
