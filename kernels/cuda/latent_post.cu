// The operations of latent attention before attention itself, in one kernel: norm of the latent, rotary embedding of the
// queries and of the key that all heads share, write to the paged cache.
//
// A latent that is not finite is stored as 0, and the rotated key beside it as NaN, for the reason given in heads.h:
// the latent is also the value.
#include "rope.h"

constexpr u32 LATENT_POST_WARPS = 4;
constexpr u32 LATENT_POST_THREADS = 32 * LATENT_POST_WARPS;
constexpr u32 LATENT_POST_ELEMENTS = MAX_LATENT_SIZE / LATENT_POST_THREADS;

// Returns element `i` of the head `x` of the CTA's token after rotating its pair.
DEVICE float rotated(const LatentPostParams& p, const float* x, u32 i) {
    return rotated(p, x, i, [&] { return angle_of(p, blockIdx.x, i); });
}

// Rotates the last elements of a head of the queries, with one warp. `x` is shared memory of the warp, because the two
// elements of a pair may belong to different lanes.
template <class T>
DEVICE void rotate_query(const LatentPostParams& p, u32 head, float* x) {
    const u64 row = (u64)blockIdx.x * p.q_heads + head;
    const T* q = (const T*)p.q + (row + 1) * p.q_size - p.rotary_dim;
    T* out = (T*)p.out + row * (p.rank + p.rotary_dim) + p.rank;
    for (u32 i = lane_id(); i < p.rotary_dim; i += 32) x[i] = to_float(q[i]);
    __syncwarp();
    for (u32 i = lane_id(); i < p.rotary_dim; i += 32) out[i] = from_float<T>(rotated(p, x, i));
}

// Grid: (tokens, 1 + heads of q by LATENT_POST_WARPS). The first CTA of a token writes its row of the cache, of type C.
template <class T, class C = T>
DEVICE void latent_post(const LatentPostParams& p) {
    SHARED_ARRAY(float, row, MAX_LATENT_SIZE);
    SHARED_ARRAY(float, scratch, LATENT_POST_WARPS);
    const u32 token = blockIdx.x, size = p.rank + p.rotary_dim;
    if (blockIdx.y > 0) {
        const u32 head = (blockIdx.y - 1) * LATENT_POST_WARPS + warp_id();
        if (head < p.q_heads) rotate_query<T>(p, head, row + warp_id() * (MAX_LATENT_SIZE / LATENT_POST_WARPS));
        return;
    }
    const u32 slot = p.slots[token];
    if (slot == NO_SLOT) return;
    const T* kv = (const T*)p.kv + (u64)token * size;
    float squares = 0.0f;
    for (u32 c = threadIdx.x; c < size; c += LATENT_POST_THREADS) {
        row[c] = to_float(kv[c]);
        if (c < p.rank) squares = fmaf(row[c], row[c], squares);
    }
    // The barriers of the sum also make the row visible.
    const float inverse = rsqrtf(block_sum(squares, scratch) / p.rank + p.eps);
    C values[LATENT_POST_ELEMENTS];
    float spoilt = 0.0f;
#pragma unroll
    for (u32 e = 0; e < LATENT_POST_ELEMENTS; ++e) {
        const u32 c = threadIdx.x + e * LATENT_POST_THREADS;
        if (c >= size) break;
        const float value = c < p.rank ? row[c] * inverse * p.weight[c] : rotated(p, row + p.rank, c - p.rank);
        values[e] = cached<C>(value, p.scale);
        // What is not finite is so before it is rounded to e4m3, or after it is rounded to another type.
        if (!is_finite(value) || !is_finite(to_float(values[e]))) spoilt = 1.0f;
    }
    const bool is_spoilt = block_max(spoilt, scratch) > 0.0f;
    C* out = (C*)p.cache + slot / KV_BLOCK * p.block_stride + slot % KV_BLOCK * size;
#pragma unroll
    for (u32 e = 0; e < LATENT_POST_ELEMENTS; ++e) {
        const u32 c = threadIdx.x + e * LATENT_POST_THREADS;
        if (c >= size) break;
        out[c] = !is_spoilt ? values[e] : from_float<C>(c < p.rank ? 0.0f : __uint_as_float(0x7fffffffu));
    }
}
