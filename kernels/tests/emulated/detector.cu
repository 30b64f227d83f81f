// Kernels for tests of the detector of races. Each is right with the defect 0, and has a race with any other.
#include "gpu.h"

// The threads of a CTA exchange numbers through shared memory, twice.
template <u32 DEFECT>
DEVICE void exchange(const GatherRowsParams& p) {
    SHARED_ARRAY(float, shared, 64);
    const float* input = (const float*)p.input;
    float* out = (float*)p.out;
    const u32 other = 63 - threadIdx.x;
    shared[threadIdx.x] = input[threadIdx.x];
    if (DEFECT != 1) __syncthreads();
    out[threadIdx.x] = shared[other];
    if (DEFECT != 2) __syncthreads();
    shared[threadIdx.x] = 2.0f * input[threadIdx.x];
    __syncthreads();
    out[64 + threadIdx.x] = shared[other];
}

// The lanes of a warp do the same. A shuffle in the place of a barrier is a defect too: it orders no memory.
template <u32 DEFECT>
DEVICE void exchange_in_warps(const GatherRowsParams& p) {
    SHARED_ARRAY(float, shared, 64);
    float* out = (float*)p.out;
    const u32 other = threadIdx.x ^ 1;
    shared[threadIdx.x] = (float)threadIdx.x;
    if (DEFECT == 3) __shfl_xor_sync(ALL_LANES, 0, 1);
    if (DEFECT != 1 && DEFECT != 3) __syncwarp();
    out[threadIdx.x] = shared[other];
    if (DEFECT != 2) __syncwarp();
    shared[DEFECT == 4 ? threadIdx.x ^ 32 : threadIdx.x] = 1.0f;
}

// Adjacent halves of a word belong to different threads, until all have written.
template <u32 DEFECT>
DEVICE void halves(const GatherRowsParams& p) {
    SHARED_ARRAY(u16, shared, 64);
    u32* out = (u32*)p.out;
    shared[DEFECT == 1 ? threadIdx.x & ~1u : threadIdx.x] = 7;
    if (DEFECT != 2) __syncthreads();
    if (threadIdx.x < 32) out[threadIdx.x] = ((const u32*)shared)[threadIdx.x];
}

template <u32 DEFECT>
DEVICE void count(const GatherRowsParams& p) {
    SHARED_ARRAY(u32, counter, 1);
    if (threadIdx.x == 0) *counter = 0;
    if (DEFECT != 1) __syncthreads();
    if (DEFECT == 2) {
        *counter += 1;
    } else {
        atomicAdd(counter, 1u);
    }
    if (DEFECT != 3) __syncthreads();
    ((u32*)p.out)[threadIdx.x] = *counter;
}

// Copies in the background: the first half is waited for, then the second.
template <u32 DEFECT>
DEVICE void copy(const GatherRowsParams& p) {
    DYNAMIC_SHARED(memory);
    float* const shared = (float*)memory;
    const u32 at = threadIdx.x * 4;
    for (u32 half = 0; half < 2; ++half) {
        cp_async_16(shared + half * 256 + at, (const float*)p.input + at);
        cp_async_commit();
    }
    if (DEFECT != 1) cp_async_wait<1>();
    if (DEFECT != 2) __syncthreads();
    // The thread's own copies have not come either without a wait.
    ((float*)p.out)[threadIdx.x] = shared[DEFECT == 1 ? at : 255 - at];
    if (DEFECT != 3) cp_async_wait<0>();
    if (DEFECT != 4) __syncthreads();
    ((float*)p.out)[64 + threadIdx.x] = shared[256 + 255 - at];
    if (DEFECT == 5) shared[256 + at + 3] = 0.0f;
}

// Each CTA writes numbers, and the last one adds those of all.
template <u32 DEFECT>
DEVICE void add_all(const GatherRowsParams& p) {
    SHARED_ARRAY(u32, is_last, 1);
    uint4* const numbers = (uint4*)p.out + 1;
    u32* const ticket = (u32*)p.input;
    const u32 own = blockIdx.x * 64 + threadIdx.x;
    numbers[DEFECT == 1 ? threadIdx.x : own] = make_uint4(own, 0, 0, 0);
    if (DEFECT != 2) __syncthreads();
    if (threadIdx.x == 0) {
        if (DEFECT != 3) __threadfence();
        if (DEFECT == 4) {
            *is_last = (*ticket)++ == gridDim.x - 1;
        } else {
            *is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        }
        if (DEFECT != 5) __threadfence();
    }
    __syncthreads();
    if (!*is_last || threadIdx.x != 1) return;
    u32 sum = 0;
    for (u32 i = 0; i < gridDim.x * 64; ++i) sum += (DEFECT == 6 ? load_once(numbers + i) : load_fresh(numbers + i)).x;
    *(u32*)p.out = sum;
}

// The first CTA hands a number to the second by a flag, if it is early enough.
template <u32 DEFECT>
DEVICE void hand_over(const GatherRowsParams& p) {
    if (threadIdx.x != 0) return;
    u32 *const number = (u32*)p.out, *const flag = number + 1;
    volatile u32* const seen = flag;
    if (blockIdx.x == 0) {
        *number = 5;
        if (DEFECT != 1) __threadfence();
        if (DEFECT == 2) {
            *flag = 1;
        } else {
            *seen = 1;
        }
        return;
    }
    u32 value;
    if (DEFECT == 3) {
        value = *flag;
    } else {
        value = *seen;
    }
    if (value != 1) return;
    if (DEFECT != 4) __threadfence();
    number[2] = *number;
}
