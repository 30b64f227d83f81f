// Code shared by the kernels that write the cache: the rotary embedding.
#pragma once
#include "gpu.h"

// Cosine and sine of the angle of a pair.
struct Angle {
    float cosine, sine;
};

// Returns the angle of the pair of a rotated element `i` of a head: that of the token's position in the pair's stream. P is
// QkvPostParams or LatentPostParams.
template <class P>
DEVICE Angle angle_of(const P& p, u32 token, u32 i) {
    const u32 half = p.rotary_dim / 2;
    const u32 pair = p.rope_interleaved ? i / 2 : i < half ? i : i - half;
    const u32 stream = p.streams ? p.streams[pair] : 0;
    const u64 at = (u64)p.positions[stream * p.position_stride + token] * half + pair;
    return {p.cosine[at], p.sine[at]};
}

// Returns element `i` of the head `x` after rotating its pair by the angle that `angle` returns for it.
template <class P, class A>
DEVICE float rotated(const P& p, const float* x, u32 i, A angle) {
    if (i >= p.rotary_dim) return x[i];
    const u32 half = p.rotary_dim / 2;
    const bool first = p.rope_interleaved ? i % 2 == 0 : i < half;
    const u32 step = p.rope_interleaved ? 1 : half;
    const float left = first ? x[i] : x[i - step], right = first ? x[i + step] : x[i];
    const Angle a = angle();
    return first ? fmaf(left, a.cosine, -right * a.sine) : fmaf(right, a.cosine, left * a.sine);
}

DEVICE bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// Returns an element of the cache. In e4m3, it is divided by a scale.
template <class C>
DEVICE C cached(float value, float scale) {
    if constexpr (sizeof(C) == sizeof(e4m3)) value /= scale;
    return from_float<C>(value);
}
