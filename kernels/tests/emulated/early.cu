// A kernel that begins before the launch before has ended, for tests of the detector of races. It is right with the defect 0.
#define WAITS_ITSELF
#include "gpu.h"

template <u32 DEFECT>
DEVICE void begin_early(const GatherRowsParams& p) {
    DYNAMIC_SHARED(memory);
    u32* const shared = (u32*)memory;
    const u32* const input = (const u32*)p.input;
    u32* const out = (u32*)p.out;
    const uint4 weight = load_weight((const uint4*)p.input + threadIdx.x);
    shared[threadIdx.x] = weight.x;
    if (DEFECT == 1) shared[threadIdx.x] += input[threadIdx.x];
    if (DEFECT == 2) shared[threadIdx.x] += load_once((const uint4*)input + threadIdx.x).x;
    if (DEFECT == 3) out[threadIdx.x] = 0;
    if (DEFECT == 4) cp_async_16(shared + 64 + threadIdx.x * 4, input + threadIdx.x * 4);
    if (DEFECT == 5 && threadIdx.x == 63) return;
    if (DEFECT != 6) wait_for_launch();
    out[threadIdx.x] = shared[threadIdx.x] + input[threadIdx.x];
}
