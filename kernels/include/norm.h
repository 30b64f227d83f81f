// The arithmetic of norms, shared by the kernel for rows and by the products that normalise their own input: both give the same
// bits.
#pragma once
#include "gpu.h"

// Number of threads that normalise a row. The order of its sum depends on it.
constexpr u32 NORM_THREADS = 256;

// Loads N floats of a weight, which are aligned to 16 bytes if there are four or more.
template <int N>
DEVICE void load_floats(float* out, const float* address) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            Vec<float, 4> x = load_weight(address + i);
            for (int j = 0; j < 4; ++j) out[i + j] = x.x[j];
        }
    } else {
        for (int i = 0; i < N; ++i) out[i] = address[i];
    }
}

// Adds the squares of adjacent elements to a thread's sum, in their order.
template <int N, class T>
DEVICE float add_squares(float sum, const Vec<T, N>& x) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float value = to_float(x.x[i]);
        sum = fmaf(value, value, sum);
    }
    return sum;
}

// Returns the factor of the elements of a row by its sum of squares.
DEVICE float inverse_root(float squares, u32 cols, float eps) { return rsqrtf(squares / cols + eps); }

// Returns an element after a norm; `centred` is the element without the mean.
DEVICE float normed(float centred, float inverse, float weight, float bias) { return fmaf(centred * inverse, weight, bias); }
