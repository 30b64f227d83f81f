// Dummy weights: values uniform around a mean that depend only on the tensor's seed and the element's index, so that
// they are the same in every run, on every device and on the host (octavo_ops::dummy, which explains why they have 16
// bits).
#include "gpu.h"

DEVICE u32 mix(u32 seed, u64 index) {
    u32 bits = (u32)index ^ (u32)(index >> 32) ^ seed;
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return bits ^ bits >> 16;
}

// Any grid is possible; a thread writes one element of each stretch that the grid covers. Stores are narrow, because a
// tensor may begin anywhere in a fused weight. The stores of a warp still fill whole transactions.
template <class T>
DEVICE void fill(const FillParams& p) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += step) {
        const float unit = (float)(short)(mix(p.seed, i) >> 16) * (1.0f / 32768.0f);
        ((T*)p.out)[i] = from_float<T>(p.centre + p.spread * unit);
    }
}
