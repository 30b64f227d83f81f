// The operations after the fused qkv projection, in one kernel: split, RMS norm of q and k, rotary embedding, write to
// the paged cache.
#include "heads.h"

constexpr u32 QKV_POST_WARPS = 4;

// Each lane loads eight bytes, so that a head of 128 occupies every lane of its warp.
template <class O, class T>
DEVICE void post(const QkvPostParams& p, const Head<T>& head, O* out, float* x) {
    if (p.head_size % 4 == 0) {
        post_head<4>(p, head, p.head_size, LaterAngles<4>{p, head.token}, out, x);
    } else {
        post_head<1>(p, head, p.head_size, LaterAngles<1>{p, head.token}, out, x);
    }
}

// Grid: (tokens, heads of q, k and v by QKV_POST_WARPS). Each warp processes a head. C is the type of the cache.
template <class T, class C = T>
DEVICE void qkv_post(const QkvPostParams& p) {
    SHARED_ARRAY(float, heads, QKV_POST_WARPS * MAX_HEAD_SIZE);
    const u32 token = blockIdx.x, number = blockIdx.y * QKV_POST_WARPS + warp_id();
    if (number >= p.q_heads + 2 * p.kv_heads) return;
    const auto head = Head<T>::of(p, token, number);
    float* x = heads + warp_id() * MAX_HEAD_SIZE;
    if (number < p.q_heads) return post(p, head, (T*)p.q + ((u64)token * p.q_heads + number) * p.head_size, x);
    const u32 slot = p.slots[token];
    if (slot == NO_SLOT) return;
    post(p, head, (C*)(head.is_value ? p.v_cache : p.k_cache) + slot / KV_BLOCK * p.block_stride +
                      (slot % KV_BLOCK * p.kv_heads + head.number) * p.head_size, x);
}
