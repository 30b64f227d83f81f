// Activations, of a gate or alone.
#pragma once
#include "gpu.h"

enum Activation { SILU, GELU, GELU_TANH, TANH, CLAMPED_SWIGLU };

template <Activation KIND>
DEVICE float activate(float x) {
    static_assert(KIND != CLAMPED_SWIGLU, "it needs a gate");
    if constexpr (KIND == SILU) return x * sigmoid(x);
    if constexpr (KIND == TANH) return tanhf(x);
    // 1 + erf would cancel below 0.
    if constexpr (KIND == GELU) return 0.5f * x * erfcf(-0.70710678118654752440f * x);
    // ½ (1 + tanh u) is the sigmoid of 2u; here u = √(2/π) (x + 0.044715 x³).
    return x * sigmoid(1.59576912160573071176f * fmaf(0.044715f * x * x, x, x));
}
