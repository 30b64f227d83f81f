// Kernels for tests of the emulation, some of which are wrong on purpose.
#include "gpu.h"

// ------------------------------------------------------------------------------------------- defects

template <class T>
DEVICE void divergent_barrier_template(const GatherRowsParams&) {
    if (threadIdx.x != 40) __syncthreads();
    __syncwarp();
    if (threadIdx.x == 40) __shfl_sync(ALL_LANES, 0, 0);
}

template <class T>
DEVICE void partial_shuffle_template(const GatherRowsParams&) {
    if (threadIdx.x < 16) __shfl_xor_sync(ALL_LANES, 1.0f, 1);
}

template <class T>
DEVICE void foreign_mask_template(const GatherRowsParams&) {
    __shfl_xor_sync(0xffffu, 1.0f, 1);
}

template <class T>
DEVICE void two_operations_template(const GatherRowsParams&) {
    if (threadIdx.x < 16) {
        __ballot_sync(ALL_LANES, 1);
    } else {
        __syncwarp();
    }
}

template <class T>
DEVICE void reverse_without_barrier_template(const GatherRowsParams& p) {
    DYNAMIC_SHARED(memory);
    T* const shared = (T*)memory;
    shared[threadIdx.x] = ((const T*)p.input)[threadIdx.x];
    ((T*)p.out)[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

template <class T>
DEVICE void read_shared_template(const GatherRowsParams& p) {
    DYNAMIC_SHARED(memory);
    SHARED_ARRAY(T, fixed, 32);
    T* const out = (T*)p.out + blockIdx.x * 64;
    out[threadIdx.x] = ((T*)memory)[threadIdx.x];
    out[32 + threadIdx.x] = fixed[threadIdx.x];
    ((T*)memory)[threadIdx.x] = fixed[threadIdx.x] = 1.0f;
}

template <class T>
DEVICE void misaligned_template(const GatherRowsParams& p) {
    store((T*)p.out, load<4>((const T*)p.input + threadIdx.x));
}

// A warp loads 16 bytes per lane from shared memory: from rows of 64 bytes, then from rows of 80, which are in
// different banks.
template <class T>
DEVICE void strided_template(const GatherRowsParams& p) {
    DYNAMIC_SHARED(memory);
    const T* const shared = (const T*)memory;
    store((T*)p.out + threadIdx.x * 8, load<4>(shared + threadIdx.x * 16));
    store((T*)p.out + threadIdx.x * 8 + 4, load<4>(shared + threadIdx.x * 20));
}

// ------------------------------------------------------------------------------------------- correct kernels

template <class T>
DEVICE void reverse_with_barrier_template(const GatherRowsParams& p) {
    DYNAMIC_SHARED(memory);
    T* const shared = (T*)memory;
    shared[threadIdx.x] = ((const T*)p.input)[threadIdx.x];
    __syncthreads();
    ((T*)p.out)[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

template <class T>
DEVICE void sum_template(const GatherRowsParams& p) {
    SHARED_ARRAY(float, scratch, 32);
    float sum = block_sum(((const float*)p.input)[threadIdx.x], scratch);
    if (threadIdx.x == 0) ((float*)p.out)[0] = sum;
}

// Writes the number of tickets that are taken between two of a CTA.
template <class T>
DEVICE void take_tickets_template(const GatherRowsParams& p) {
    u32* const out = (u32*)p.out;
    u32 first = 0;
    if (threadIdx.x == 0) first = atomicAdd(out, 1u);
    __syncthreads();
    if (threadIdx.x == 0) ((float*)p.out)[1 + blockIdx.x] = (float)(atomicAdd(out, 1u) - first);
}

template <class T>
DEVICE void copy_in_background_template(const GatherRowsParams& p) {
    DYNAMIC_SHARED(memory);
    T* const shared = (T*)memory;
    const T* input = (const T*)p.input;
    T* out = (T*)p.out;
    const u32 at = threadIdx.x * 4;
    cp_async_16(shared + at, input + at);
    cp_async_commit();
    cp_async_16(shared + 128 + at, input + 128 + at, threadIdx.x < 16);
    cp_async_commit();
    __syncthreads();
    for (u32 i = 0; i < 4; ++i) out[at + i] = shared[at + i];
    cp_async_wait<1>();
    __syncthreads();
    for (u32 i = 0; i < 4; ++i) out[128 + at + i] = shared[at + i];
    cp_async_wait<0>();
    __syncthreads();
    for (u32 i = 0; i < 4; ++i) out[256 + at + i] = shared[128 + at + i];
}

// ------------------------------------------------------------------------------------------- matrix products

// The fragments follow the figures of the PTX ISA: a by rows, b by columns.
template <class T>
DEVICE void product_16x8x16(const GatherRowsParams& p) {
    const float* a = (const float*)p.input;
    const float* b = a + 16 * 16;
    const u32 g = lane_id() / 4, c = lane_id() % 4 * 2;
    u32 fa[4], fb[2];
    for (u32 i = 0; i < 4; ++i) {
        const float* pair = a + (g + i % 2 * 8) * 16 + c + i / 2 * 8;
        fa[i] = pack_pair<T>(pair[0], pair[1]);
    }
    for (u32 i = 0; i < 2; ++i) {
        const float* pair = b + g * 16 + c + i * 8;
        fb[i] = pack_pair<T>(pair[0], pair[1]);
    }
    float d[4] = {};
    mma_m16n8k16(d, fa, fb, T());
    for (u32 i = 0; i < 4; ++i) ((float*)p.out)[(g + i / 2 * 8) * 8 + c + i % 2] = d[i];
}
template <class T>
DEVICE void product_16x8x16_f16_template(const GatherRowsParams& p) {
    product_16x8x16<f16>(p);
}
template <class T>
DEVICE void product_16x8x16_bf16_template(const GatherRowsParams& p) {
    product_16x8x16<bf16>(p);
}

// The same in e4m3, of 32 inputs.
template <class T>
DEVICE void product_16x8x32_template(const GatherRowsParams& p) {
    const float* a = (const float*)p.input;
    const float* b = a + 16 * 32;
    const u32 g = lane_id() / 4, c = lane_id() % 4 * 4;
    auto quad = [](const float* x) { return to_e4m3_pair(x[0], x[1]) | (u32)to_e4m3_pair(x[2], x[3]) << 16; };
    u32 fa[4], fb[2];
    for (u32 i = 0; i < 4; ++i) fa[i] = quad(a + (g + i % 2 * 8) * 32 + c + i / 2 * 16);
    for (u32 i = 0; i < 2; ++i) fb[i] = quad(b + g * 32 + c + i * 16);
    float d[4];
    mma_m16n8k32_e4m3(d, fa, fb);
    for (u32 i = 0; i < 4; ++i) ((float*)p.out)[(g + i / 2 * 8) * 8 + lane_id() % 4 * 2 + i % 2] = d[i];
}

// Four products of 8x8x4, each of 32 numbers of a and 32 of b.
template <bool B_BY_ROWS>
DEVICE void products_8x8x4(const GatherRowsParams& p) {
    const u32 q = lane_id() / 4 % 4, high = lane_id() / 16, r = lane_id() % 4 + 4 * high;
    const float* a = (const float*)p.input + q * 64;
    const float* b = a + 32;
    const float* left = a + r * 4;
    const float* right = B_BY_ROWS ? b + lane_id() % 4 * 8 + 4 * high : b + r * 4;
    u32 fa[2], fb[2];
    for (u32 i = 0; i < 2; ++i) {
        fa[i] = pack_pair<f16>(left[2 * i], left[2 * i + 1]);
        fb[i] = pack_pair<f16>(right[2 * i], right[2 * i + 1]);
    }
    float d[8] = {};
    if (B_BY_ROWS) {
        mma_m8n8k4_row_row(d, fa, fb);
    } else {
        mma_m8n8k4_row_col(d, fa, fb);
    }
    for (u32 i = 0; i < 8; ++i) {
        const u32 row = lane_id() % 2 + (i & 2) + 4 * high, column = (i & 4) + (lane_id() & 2) + (i & 1);
        ((float*)p.out)[q * 64 + row * 8 + column] = d[i];
    }
}
template <class T>
DEVICE void products_8x8x4_columns_template(const GatherRowsParams& p) {
    products_8x8x4<false>(p);
}
template <class T>
DEVICE void products_8x8x4_rows_template(const GatherRowsParams& p) {
    products_8x8x4<true>(p);
}

// Loads the factors by ldmatrix from shared memory: b by columns, or by rows and transposed by the load.
template <bool B_BY_ROWS>
DEVICE void product_by_ldmatrix(const GatherRowsParams& p) {
    DYNAMIC_SHARED(memory);
    f16* const a = (f16*)memory;
    f16* const b = a + 16 * 16;
    for (u32 i = lane_id(); i < 16 * 16 + 16 * 8; i += 32) a[i] = to_f16(((const float*)p.input)[i]);
    __syncwarp();
    const u32 lane = lane_id();
    u32 fa[4], fb[4];
    ldmatrix_x4(fa, a + lane % 16 * 16 + lane / 16 * 8);
    // b consists of only two of the four matrices; the other lanes repeat them.
    if (B_BY_ROWS) {
        ldmatrix_x4_trans(fb, b + lane % 16 * 8);
    } else {
        ldmatrix_x4(fb, b + lane % 8 * 16 + lane / 8 % 2 * 8);
    }
    float d[4] = {};
    mma_m16n8k16(d, fa, fb, f16());
    for (u32 i = 0; i < 4; ++i) ((float*)p.out)[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
template <class T>
DEVICE void product_by_ldmatrix_template(const GatherRowsParams& p) {
    product_by_ldmatrix<false>(p);
}
template <class T>
DEVICE void product_by_ldmatrix_trans_template(const GatherRowsParams& p) {
    product_by_ldmatrix<true>(p);
}

// ------------------------------------------------------------------------------------------- arithmetic

// Computes a product and a sum apart, and at once.
template <class T>
DEVICE void product_and_sum_template(const GatherRowsParams& p) {
    const float* x = (const float*)p.input;
    float* out = (float*)p.out;
    out[0] = x[0] * x[1] + x[2];
    out[1] = fmaf(x[0], x[1], x[2]);
}

// ------------------------------------------------------------------------------------------- conversions

// Counts the finite values that change in a conversion to float and back, and the midpoints of neighbours that are
// rounded to the odd one.
template <class T>
DEVICE void count_wrong(float* changed, float* odd) {
    u32 wrong = 0, uneven = 0;
    for (u32 bits = lane_id(); bits < 0x7fffu; bits += 32) {
        const float value = to_float(T{(u16)bits}), next = to_float(T{(u16)(bits + 1)});
        if (value - value != 0.0f || next - next != 0.0f) continue;  // infinite or NaN
        wrong += from_float<T>(value).bits != bits || from_float<T>(-value).bits != (bits | 0x8000u);
        uneven += from_float<T>(0.5f * value + 0.5f * next).bits % 2 != 0;
    }
    wrong = (u32)warp_sum((float)wrong);
    uneven = (u32)warp_sum((float)uneven);
    if (lane_id() == 0) *changed = (float)wrong, *odd = (float)uneven;
}
template <class T>
DEVICE void round_trips_template(const GatherRowsParams& p) {
    float* out = (float*)p.out;
    count_wrong<f16>(out, out + 2);
    count_wrong<bf16>(out + 1, out + 3);
}
