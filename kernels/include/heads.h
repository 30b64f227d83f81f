// Split, RMS norm and rotary embedding of the heads of q, k and v, shared by the kernel for any rows and by decode attention that
// completes its own heads: both give the same bits.
//
// A value that is not finite is stored as 0, and its key as NaN. The tensor cores multiply a tile's values by the
// weights of all its queries, including the weight 0 of queries that do not see the key, and 0 · NaN is NaN: earlier
// tokens, whose blocks other sequences may share, would be corrupted. A score that is NaN affects only queries that see
// the key.
#pragma once
#include "rope.h"

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

// A head of q, k or v of a token.
template <class T>
struct Head {
    u32 token;
    const T* part;        // the whole row of q, k or v
    u32 number, heads;    // index, and number of heads
    const float* weight;  // weight of its norm, or null
    bool rotate, is_value;
    const T* value;       // for a key: the head of its value; else null
    float scale;          // divisor of the results in e4m3

    // Returns head `number` of those of q, k and v.
    static DEVICE Head of(const QkvPostParams& p, u32 token, u32 number) {
        const bool is_q = number < p.q_heads, is_v = number >= p.q_heads + p.kv_heads;
        const u32 first = is_q ? 0 : is_v ? p.q_heads + p.kv_heads : p.q_heads;
        const u32 stride = p.q_heads + 2 * p.kv_heads;
        const T* part = (const T*)p.qkv + ((u64)token * stride + first) * p.head_size;
        const T* value = is_q || is_v ? nullptr : part + (p.kv_heads + number - first) * p.head_size;
        const float* weight = is_q ? p.q_weight : is_v ? nullptr : p.k_weight;
        const u32 count = is_q ? p.q_heads : p.kv_heads;
        const float scale = is_v ? p.v_scale : p.k_scale;
        return {token, part, number - first, count, weight, !is_v && p.cosine, is_v, value, scale};
    }
};

// Angles of the pairs of a lane's elements of a head, loaded when they are needed.
template <int N>
struct LaterAngles {
    const QkvPostParams& p;
    u32 token;

    // Returns the angle of element `c`, which is element `i` of the lane's piece `j`.
    DEVICE Angle of(u32, u32, u32 c) const { return angle_of(p, token, c); }
};

// The same of heads of SIZE elements, loaded at once before other loads wait for their use.
template <int N, u32 SIZE>
struct EarlyAngles {
    static constexpr u32 PIECES = (SIZE + 32 * N - 1) / (32 * N);
    Angle angles[PIECES][N];

    DEVICE EarlyAngles(const QkvPostParams& p, u32 token) {
        if (!p.cosine) return;
#pragma unroll
        for (u32 j = 0; j < PIECES; ++j) {
#pragma unroll
            for (u32 i = 0; i < N; ++i) {
                const u32 c = (lane_id() + j * 32) * N + i;
                if (c < p.rotary_dim) angles[j][i] = angle_of(p, token, c);
            }
        }
    }

    DEVICE Angle of(u32 j, u32 i, u32) const { return angles[j][i]; }
};

// Completes one head of `size` elements with one warp. `x` is shared memory of the warp, because the two elements of a pair may
// belong to different lanes. O is the type of the results.
template <int N, class O, class T, class Angles>
DEVICE void post_head(const QkvPostParams& p, const Head<T>& head, u32 size, const Angles& angles, O* out, float* x) {
    const T* input = head.part + head.number * size;
    const float* weight = head.weight;
    float inverse = 0.0f;
    if (weight) {
        const u32 cols = p.norm_whole_row ? head.heads * size : size;
        inverse = rsqrtf(sum_of_squares<N>(p.norm_whole_row ? head.part : input, cols) / cols + p.eps);
        if (p.norm_whole_row) weight += head.number * size;
    }
    const bool spoilt = head.value && !are_finite<N>(head.value, size);
    for (u32 c = lane_id() * N; c < size; c += 32 * N) {
        Vec<T, N> v = load<N>(input + c);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float value = to_float(v.x[i]);
            x[c + i] = weight ? value * inverse * (weight[c + i] + p.weight_offset) : value;
        }
    }
    __syncwarp();
    u32 piece = 0;
    for (u32 c = lane_id() * N; c < size; c += 32 * N, ++piece) {
        Vec<O, N> v;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float value = head.rotate ? rotated(p, x, c + i, [&] { return angles.of(piece, i, c + i); }) : x[c + i];
            if (head.is_value && !is_finite(value)) value = 0.0f;
            v.x[i] = cached<O>(spoilt ? __uint_as_float(0x7fffffffu) : value, head.scale);
        }
        store(out + c, v);
    }
}
