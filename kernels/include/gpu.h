// The only header that a kernel includes. Under NVRTC it wraps the PTX that kernels use and needs no other file. Under
// g++ it includes the emulation, which implements CUDA's own names (threadIdx, __syncthreads, __shfl_xor_sync, ...) and
// the same wrappers on a CPU. The shared part follows the two halves.
//
// Rules for kernels: they include only this header, declare shared memory through SHARED_ARRAY and DYNAMIC_SHARED, leave
// PTX to this file, and call fmaf where a product and a sum are rounded once, because no compiler contracts others.
//
// From sm_90 on, a launch may begin while the one before it ends. Every kernel waits for that one, so whatever was launched earlier
// has ended too. The entry point waits before it runs the template. A file that defines WAITS_ITSELF before it includes this one
// calls wait_for_launch() in each thread: before it, a thread may load weights by load_weight, and accesses no other global memory.
#pragma once
#include "params.h"

// IEEE half precision and bfloat16: 16 bits that are converted for computation.
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};
// Eight bits in a KV cache: four of the exponent with a bias of 7, three of the mantissa. The largest number is 448, and all
// seven bits set are NaN.
struct e4m3 {
    u8 bits;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
// ldmatrix, m16n8k16 and copies to shared memory are available. sm_75 has them for f16: two instructions of half the depth take the
// place of m16n8k16, and copies are complete when they are started. The emulation has all of them.
#define HAS_SM75 1
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
// 8-bit floating-point numbers are converted and multiplied, from sm_90 to sm_103 by half-precision products that the
// compiler makes of them. The emulation has them.
#define HAS_SM89 1
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 750
// m8n8k4, the tensor-core instruction of Volta, is used. On later chips, it is a function of many instructions.
#define HAS_SM70_MMA 1
#endif

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__

// Shared memory of a size known at compile time.
#define SHARED_ARRAY(TYPE, NAME, COUNT) __shared__ __align__(16) TYPE NAME[COUNT]

// Shared memory of the size given at the launch, as bytes.
#define DYNAMIC_SHARED(NAME) extern __shared__ __align__(128) unsigned char NAME[]

// Defines an instance: the entry point NAME, launched with THREADS threads and one PARAMS, which runs the template
// given last.
#define KERNEL(NAME, THREADS, PARAMS, ...) ENTRY_POINT(NAME, __launch_bounds__(THREADS), PARAMS, __VA_ARGS__)
// Defines an instance of which a multiprocessor holds at least CTAS at once: it may use the registers available to
// each.
#define KERNEL_RESIDENT(NAME, THREADS, CTAS, PARAMS, ...) \
    ENTRY_POINT(NAME, __launch_bounds__(THREADS, CTAS), PARAMS, __VA_ARGS__)
#define ENTRY_POINT(NAME, BOUNDS, PARAMS, ...)                                              \
    extern "C" __global__ void BOUNDS NAME(const __grid_constant__ PARAMS params) {         \
        BEGIN_KERNEL();                                                                     \
        __VA_ARGS__(params);                                                                \
    }

// Lets the next launch begin as soon as all CTAs of this one have begun. It waits for the end of this one itself.
DEVICE void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the launch before has ended and its writes are visible; at once if this one has not begun early.
DEVICE void wait_for_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE float to_float(f16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

DEVICE f16 to_f16(float value) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

DEVICE bf16 to_bf16(float value) {
    bf16 result;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    // This rounds to nearest even: a carry out of the lower half rounds up. NaN would overflow to infinity.
    u32 bits = __float_as_uint(value);
    result.bits = value != value ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
    return result;
}

// Returns two elements in one register, the first in the lower half.
DEVICE u32 pack_pair(float low, float high, f16) {
#if __CUDA_ARCH__ >= 800
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    return (u32)to_f16(low).bits | (u32)to_f16(high).bits << 16;
#endif
}

DEVICE u32 pack_pair(float low, float high, bf16) {
#if __CUDA_ARCH__ >= 800
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    return (u32)to_bf16(low).bits | (u32)to_bf16(high).bits << 16;
#endif
}

// Returns 2^x to within two units in the last place; results below the normal range are 0.
DEVICE float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Returns 1 / x to within one unit in the last place, 0 for infinity.
DEVICE float reciprocal_fast(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Returns sum + a·b over four signed bytes.
DEVICE int dot4(int a, int b, int sum) {
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

// Returns four of the eight bytes of a and b, chosen by the four nibbles of the selector, each at most 7.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}

// Loads 16 bytes that are read once (weights and the cache), bypassing the first-level cache.
DEVICE uint4 load_once(const uint4* address) {
    uint4 result;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
                 : "l"(address));
    return result;
}

// Does the same for weights, which no launch writes.
DEVICE uint4 load_weight(const uint4* address) { return load_once(address); }

// Does the same as load_once, or returns zeros if not `valid`, without a branch, so that later loads need not wait for it.
DEVICE uint4 load_once_if(const uint4* address, bool valid) {
    uint4 result = {0, 0, 0, 0};
    asm volatile("{ .reg .pred valid; setp.ne.u32 valid, %5, 0;\n"
                 "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(result.x), "+r"(result.y), "+r"(result.z), "+r"(result.w)
                 : "l"(address), "r"((u32)valid));
    return result;
}

DEVICE uint2 load_once_if(const uint2* address, bool valid) {
    uint2 result = {0, 0};
    asm volatile("{ .reg .pred valid; setp.ne.u32 valid, %3, 0;\n"
                 "@valid ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2]; }"
                 : "+r"(result.x), "+r"(result.y)
                 : "l"(address), "r"((u32)valid));
    return result;
}

// Loads data that another CTA of this launch may have written, bypassing the first-level cache, which does not see
// other CTAs' stores.
DEVICE uint2 load_fresh(const uint2* address) {
    uint2 result;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(result.x), "=r"(result.y) : "l"(address) : "memory");
    return result;
}
DEVICE uint4 load_fresh(const uint4* address) {
    uint4 result;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
                 : "l"(address)
                 : "memory");
    return result;
}

#if __CUDA_ARCH__ >= 890
#define HAS_E4M3 1
// Returns two e4m3 numbers as f16, the first in the lower half.
DEVICE u32 e4m3_to_f16(u16 codes) {
    u32 result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(codes));
    return result;
}
#endif

// The emulation checks a vector access here: its alignment, and the banks of shared memory.
DEVICE void check_access(const void*, u32) {}

#ifdef HAS_SM75
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Returns a number of which the compiler knows nothing, so that it computes what follows from it where it is needed, and not
// before a loop, in registers that the loop needs.
DEVICE u32 opaque(u32 number) {
    asm volatile("" : "+r"(number));
    return number;
}

// Returns the pointer to shared memory as one number, so that a constant offset from it is a part of an instruction. The compiler
// would rather add up the terms of each address.
template <class T>
DEVICE T* one_address(T* shared) {
    return (T*)__cvta_shared_to_generic(opaque(shared_address(shared)));
}

// Starts copying 16 bytes to shared memory, or zeros if not `valid`. They are available after a cp_async_wait and a
// barrier. The second-level cache fetches the whole line of 128 bytes, which a next stage reads, in one access of memory.
DEVICE void cp_async_16(void* shared, const void* global, bool valid = true) {
#if __CUDA_ARCH__ < 800
    *(uint4*)shared = valid ? *(const uint4*)global : make_uint4(0, 0, 0, 0);
#else
    u32 bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
#endif
}

// Does the same with 4 or 8 bytes, in the first-level cache too.
template <u32 BYTES>
DEVICE void cp_async_few(void* shared, const void* global) {
    static_assert(BYTES == 4 || BYTES == 8, "16 bytes have their own");
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES) : "memory");
#endif
}

// Ends a group of copies.
DEVICE void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's groups are incomplete.
template <int PENDING>
DEVICE void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Loads four 8x8 matrices of 16-bit elements: lane 8i + r passes the address of row r of matrix i (16 bytes, aligned to
// 16) and receives in result[i] the elements (lane / 4, 2 * (lane % 4) and the next) of matrix i.
DEVICE void ldmatrix_x4(u32* result, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Does the same with each matrix transposed.
DEVICE void ldmatrix_x4_trans(u32* result, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Computes d += a·b for a 16x16 (row-major), b 16x8 (column-major), d 16x8 in f32. With g = lane / 4 and
// c = 2 * (lane % 4), a lane has
//   a[0], a[1]: (g, c), (g + 8, c) and the element to the right; a[2], a[3]: the same 8 columns on
//   b[0], b[1]: (c, g), (c + 8, g) and the element below
//   d[0], d[1]: (g, c), (g, c + 1); d[2], d[3]: the same 8 rows down
#if __CUDA_ARCH__ < 800
DEVICE void mma_m16n8k16(float* d, const u32* a, const u32* b, f16) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[half * 2]), "r"(a[half * 2 + 1]), "r"(b[half]));
}
#else
#define MMA_M16N8K16(TYPE)                                                                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "     \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                                          \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
DEVICE void mma_m16n8k16(float* d, const u32* a, const u32* b, f16) { MMA_M16N8K16("f16"); }
DEVICE void mma_m16n8k16(float* d, const u32* a, const u32* b, bf16) { MMA_M16N8K16("bf16"); }
#undef MMA_M16N8K16

// Computes d += a·b for a 16x4, b 4x8 in f32, of which the lower 13 bits do not count, d 16x8. With g = lane / 4 and c = lane % 4, a
// lane has a[0], a[1]: (g, c), (g + 8, c); b[0]: (c, g); d like mma_m16n8k16.
DEVICE void mma_m16n8k4_tf32(float* d, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// Returns the differences of two pairs of numbers, rounded.
DEVICE u32 subtract_pairs(u32 a, u32 b, f16) {
    u32 result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
DEVICE u32 subtract_pairs(u32 a, u32 b, bf16) {
    u32 result;
    // A product with -1 that is added: sm_80 has no instruction for the difference.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return result;
}
#endif
#endif  // HAS_SM75

#ifdef HAS_SM89
// Computes d = a·b for a 16x32 (row-major), b 32x8 (column-major) in e4m3, d 16x8 in f32. The fragments are those of
// mma_m16n8k16 with two numbers in the place of each.
DEVICE void mma_m16n8k32_e4m3(float* d, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %10, %10, %10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// Returns two floats in e4m3, the first in the lower byte: the nearest number, of two equally near ones the even one, and
// ±448 for larger ones.
DEVICE u16 to_e4m3_pair(float low, float high) {
    u16 result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
    return result;
}
#endif  // HAS_SM89

#ifdef HAS_SM70_MMA
// Computes four independent products at once, d += a·b for a 8x4, b 4x8, d 8x8, in f16 with f32 sums. The eight lanes
// 4q .. 4q + 3 and 4q + 16 .. 4q + 19 compute product q. With r = lane % 4 + 4 * (lane / 16), a lane has
//   a[0], a[1]: row r of a
//   b[0], b[1]: column r of b (row_col), or of row lane % 4 the columns 4 * (lane / 16) .. + 3 (row_row)
//   d[i]: (lane % 2 + i & 2 + 4 * (lane / 16), i & 4 + lane & 2 + i & 1)
#define MMA_M8N8K4(LAYOUT)                                                                                              \
    asm volatile("mma.sync.aligned.m8n8k4." LAYOUT ".f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, "      \
                 "{%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"                                                        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])       \
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]))
DEVICE void mma_m8n8k4_row_col(float* d, const u32* a, const u32* b) { MMA_M8N8K4("row.col"); }
DEVICE void mma_m8n8k4_row_row(float* d, const u32* a, const u32* b) { MMA_M8N8K4("row.row"); }
#undef MMA_M8N8K4
#endif  // HAS_SM70_MMA

#else
#include "emulation.h"
#endif  // __CUDACC__

#ifdef WAITS_ITSELF
#define BEGIN_KERNEL() allow_next_launch()
#else
#define BEGIN_KERNEL() allow_next_launch(), wait_for_launch()
#endif

// ------------------------------------------------------------------------------------------- shared by both

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.44269504088896340736f;
// Initial value of a maximum: finite, so that no difference of two of them is NaN.
constexpr float LOWEST = -1e30f;

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp2_fast(-LOG2_E * x)); }

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(bf16 value) { return __uint_as_float((u32)value.bits << 16); }

template <class T>
struct Convert;
template <>
struct Convert<float> {
    static DEVICE float from(float value) { return value; }
};
template <>
struct Convert<f16> {
    static DEVICE f16 from(float value) { return to_f16(value); }
};
template <>
struct Convert<bf16> {
    static DEVICE bf16 from(float value) { return to_bf16(value); }
};

// Rounds a float to T.
template <class T>
DEVICE T from_float(float value) {
    return Convert<T>::from(value);
}

// Returns two floats as T in one register, the first in the lower half.
template <class T>
DEVICE u32 pack_pair(float low, float high) {
    return pack_pair(low, high, T());
}

// Registers that hold this number of bytes.
template <int BYTES>
struct Registers;
template <>
struct Registers<1> {
    using type = u8;
};
template <>
struct Registers<2> {
    using type = u16;
};
template <>
struct Registers<4> {
    using type = u32;
};
template <>
struct Registers<8> {
    using type = uint2;
};
template <>
struct Registers<16> {
    using type = uint4;
};

// N adjacent elements that are loaded and stored at once. Their address must be a multiple of their size.
template <class T, int N>
union Vec {
    typename Registers<N * sizeof(T)>::type registers;
    T x[N];
};

// Number of elements in 16 bytes, the widest load.
template <class T>
constexpr int WIDE = 16 / sizeof(T);

template <int N, class T>
DEVICE Vec<T, N> load(const T* address) {
    Vec<T, N> result;
    check_access(address, sizeof result);
    result.registers = *(const decltype(result.registers)*)address;
    return result;
}

template <int N, class T>
DEVICE void store(T* address, const Vec<T, N>& value) {
    check_access(address, sizeof value);
    *(decltype(value.registers)*)address = value.registers;
}

// Loads 16 bytes that are read once.
template <class T>
DEVICE Vec<T, WIDE<T>> load_once(const T* address) {
    Vec<T, WIDE<T>> result;
    result.registers = load_once((const uint4*)address);
    return result;
}

// Loads 16 bytes of weights, which no launch writes.
template <class T>
DEVICE Vec<T, WIDE<T>> load_weight(const T* address) {
    Vec<T, WIDE<T>> result;
    result.registers = load_weight((const uint4*)address);
    return result;
}

// Loads N adjacent elements that another CTA of this launch may have written.
template <int N, class T>
DEVICE Vec<T, N> load_fresh(const T* address) {
    Vec<T, N> result;
    result.registers = load_fresh((const decltype(result.registers)*)address);
    return result;
}

// Loads N adjacent elements that are read once, or zeros if not `valid`.
template <int N, class T>
DEVICE Vec<T, N> load_once_if(const T* address, bool valid) {
    Vec<T, N> result;
    result.registers = load_once_if((const decltype(result.registers)*)address, valid);
    return result;
}

// Returns the e4m3 numbers in the bytes A and B of `codes` as f16 in one register, that of A in the lower half, both over
// E4M3_FACTOR. NaN stays NaN.
#ifdef HAS_E4M3
constexpr float E4M3_FACTOR = 1.0f;
#else
constexpr float E4M3_FACTOR = 256.0f;
#endif
template <u32 A, u32 B>
DEVICE u32 e4m3_pair(u32 codes) {
#ifdef HAS_E4M3
    if (A % 2 == 0 && B == A + 1) return e4m3_to_f16((u16)(codes >> 8 * A));
    return e4m3_to_f16((u16)permute_bytes(codes, 0, 0x4400 | B << 4 | A));
#else
    // Two codes in the upper bytes of halves. As f16, whose exponent is five bits with a bias of 15, the bits are the
    // value over 256.
    const u32 upper = permute_bytes(codes, 0, 0x0404 | B << 12 | A << 4);
    const u32 magnitudes = (upper & 0x7f007f00) >> 1;
    // All seven bits set have a carry into the first bit of the exponent, which makes them NaN.
    return (upper & 0x80008000) | magnitudes | ((magnitudes + 0x00800080) & 0x40004000);
#endif
}

// Decodes four e4m3 numbers.
DEVICE void widen_e4m3(u32 codes, float (&out)[4]) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        Vec<f16, 2> pair;
        pair.registers = i ? e4m3_pair<2, 3>(codes) : e4m3_pair<0, 1>(codes);
        out[i * 2] = to_float(pair.x[0]) * E4M3_FACTOR;
        out[i * 2 + 1] = to_float(pair.x[1]) * E4M3_FACTOR;
    }
}

DEVICE float to_float(e4m3 value) {
    float four[4];
    widen_e4m3(value.bits, four);
    return four[0];
}

// Rounds to e4m3, ties to even. Numbers beyond the largest become the largest, and NaN stays NaN.
template <>
struct Convert<e4m3> {
    static DEVICE e4m3 from(float value) {
        const float magnitude = fminf(fabsf(value), 448.0f);
        const u32 bits = __float_as_uint(magnitude);
        u32 code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
        // The codes up to the least normal number are multiples of 1/512.
        if (magnitude < 1.0f / 64.0f) code = (u32)rintf(magnitude * 512.0f);
        if (value != value) code = 0x7f;
        e4m3 result;
        result.bits = (u8)((__float_as_uint(value) >> 24 & 0x80) | code);
        return result;
    }
};

// Converts adjacent elements to f32.
template <int N, class T>
DEVICE void widen(const Vec<T, N>& from, float (&to)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) to[i] = to_float(from.x[i]);
}

DEVICE void widen(const Vec<e4m3, 8>& from, float (&to)[8]) {
    float four[2][4];
    widen_e4m3(from.registers.x, four[0]);
    widen_e4m3(from.registers.y, four[1]);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) to[i] = four[i / 4][i % 4];
}

// Converts adjacent elements to another type.
template <class T, int N>
DEVICE Vec<T, N> convert(const Vec<T, N>& from) {
    return from;
}
template <class T, int N>
DEVICE Vec<T, N> convert(const Vec<e4m3, N>& from) {
    float values[N];
    widen(from, values);
    Vec<T, N> result;
#pragma unroll
    for (u32 i = 0; i < N; ++i) result.x[i] = from_float<T>(values[i]);
    return result;
}

// Returns the row of an embedding table of `rows` rows for the token at `at`. The result of a failed draw is out of
// range; the host detects that from the same number.
DEVICE u32 token_row(const u32* ids, const u32* drawn, u32 at, u32 rows) {
    const u32 id = ids[at];
    const u32 row = id & DRAWN_TOKEN ? drawn[id & ~DRAWN_TOKEN] : id;
    return row < rows ? row : 0;
}

DEVICE u32 lane_id() { return threadIdx.x % 32; }
DEVICE u32 warp_id() { return threadIdx.x / 32; }

// Sum and maximum over groups of LANES adjacent lanes: the same value in each lane, in one fixed order.
template <int LANES = 32>
DEVICE float warp_sum(float value) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

template <int LANES = 32>
DEVICE float warp_max(float value) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// Sums and maximum over a CTA of whole warps: the same values in each thread, in one fixed order. `scratch` is shared
// memory, N numbers per warp, and is free again on return.
template <int N>
DEVICE void block_sums(float (&values)[N], float* scratch) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        values[i] = warp_sum(values[i]);
        if (lane_id() == 0) scratch[warp_id() * N + i] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        values[i] = 0.0f;
        for (u32 warp = 0; warp < blockDim.x / 32; ++warp) values[i] += scratch[warp * N + i];
    }
    __syncthreads();
}

DEVICE float block_sum(float value, float* scratch) {
    float values[1] = {value};
    block_sums(values, scratch);
    return values[0];
}

DEVICE float block_max(float value, float* scratch) {
    value = warp_max(value);
    if (lane_id() == 0) scratch[warp_id()] = value;
    __syncthreads();
    float result = scratch[0];
    for (u32 warp = 1; warp < blockDim.x / 32; ++warp) result = fmaxf(result, scratch[warp]);
    __syncthreads();
    return result;
}

// Returns whether this CTA is the last of `count` to arrive with the ticket; its threads then see the data of the
// others by load_fresh. The fences of one thread are sufficient for a CTA, because they also order the writes that a
// barrier has put before them.
DEVICE bool is_last(u32* ticket, u32 count, u32* flag) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const bool is_last = atomicAdd(ticket, 1u) == count - 1;
        *flag = is_last;
        if (is_last) {
            __threadfence();
            // No other CTA follows, so the ticket is reset for the next launch.
            *ticket = 0;
        }
    }
    __syncthreads();
    return *flag;
}
