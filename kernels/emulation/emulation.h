// Runs CUDA C++ kernels on a CPU: gpu.h includes this file when the compiler is not NVRTC. Each thread of a CTA is a
// fiber of the caller's thread; in random order, a few CTAs run at once. A fiber yields only where CUDA threads wait for
// each other: at barriers and at warp operations, which the last lane to arrive executes for all. Operations that no
// barrier orders therefore happen in the scheduler's order, and tests use several orders (emu_set_order).
//
// Vector accesses must be aligned, and accesses to shared memory can be counted by banks (emu_count_banks). Libraries
// compiled with EMU_RACES and -fsanitize=thread end a launch at a data race (races.h). The emulation does not model time
// or the tensor cores' rounding of sums.
#pragma once
// The C library's declarations alone, because <cmath> takes longer to compile than most kernels' sources.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "params.h"

#define DEVICE inline __attribute__((always_inline))

// ------------------------------------------------------------------------------------------- the machine

namespace emu {

struct Dim3 {
    u32 x = 1, y = 1, z = 1;
};

// Built-in variables of the running thread.
struct Builtins {
    Dim3 thread, block, block_size, grid_size;
};
[[gnu::const]] Builtins& builtins();

// A lane's input to an operation of its warp: addresses of its operand and its result, and two numbers.
struct Offer {
    const void* operand;
    void* result;
    int first, second;
};

// Executes an operation for the lanes of `mask`, whose offers are at their lane numbers.
using Operation = void (*)(const Offer* offers, u32 mask);

void barrier();
// Returns when all lanes of `mask` have called it and the operation is complete.
void warp_operation(u32 mask, const Offer& offer, Operation operation, const char* name);

// Ends the launch with an error. Does not return.
[[noreturn]] void fail(const char* what);

// Whether accesses to shared memory are counted. Every lane then reports its own accesses in order.
extern thread_local bool counts_banks;
void count_access(const void* address, u32 bytes);
// Counts the accesses of a warp in one instruction: that of lane i at addresses[i], or null.
void count_accesses(const void* const* addresses, u32 bytes);

// Shared memory of the running thread's CTA, which is NaN at its start. An array is known by the address of its key.
unsigned char* dynamic_shared();
void* shared_array(const char* key, const char* name, size_t bytes);

// What only a library that finds races is told.
#ifdef EMU_RACES
constexpr bool FINDS_RACES = true;
// The compiler does not report the accesses of such a function.
#define EMU_UNREPORTED __attribute__((noinline, no_sanitize("thread")))
#else
constexpr bool FINDS_RACES = false;
#define EMU_UNREPORTED
#endif
void atomic_access(const void* address, u32 bytes, const void* site);
// A load by a path that does not see stores of the same launch (ld.global.nc).
void read_only_access(const void* address, u32 bytes);
// A load of weights by the same path, which a thread may do before wait_for_launch().
void weight_access(const void* address, u32 bytes);
void fence();
// The operation of __syncwarp.
void order_lanes(const Offer* offers, u32 mask);

struct Kernel {
    const char* name;
    void (*run)(const void* params);
    size_t params_size;
    u32 threads;
    const Kernel* next;
    Kernel(const char* name, void (*run)(const void*), size_t params_size, u32 threads);
};

}  // namespace emu

#define SHARED_ARRAY(TYPE, NAME, COUNT) \
    static const char NAME##_key = 0;   \
    TYPE* const NAME = static_cast<TYPE*>(emu::shared_array(&NAME##_key, #NAME, sizeof(TYPE) * (COUNT)))
#define DYNAMIC_SHARED(NAME) unsigned char* const NAME = emu::dynamic_shared()

#define KERNEL(NAME, THREADS, PARAMS, ...)                                                             \
    static void NAME(const void* params) {                                                             \
        BEGIN_KERNEL();                                                                                \
        __VA_ARGS__(*static_cast<const PARAMS*>(params));                                              \
    }                                                                                                  \
    static const emu::Kernel NAME##_kernel(#NAME, NAME, sizeof(PARAMS), THREADS);
#define KERNEL_RESIDENT(NAME, THREADS, CTAS, PARAMS, ...) KERNEL(NAME, THREADS, PARAMS, __VA_ARGS__)

// ------------------------------------------------------------------------------------------- CUDA's names

#define threadIdx (emu::builtins().thread)
#define blockIdx (emu::builtins().block)
#define blockDim (emu::builtins().block_size)
#define gridDim (emu::builtins().grid_size)

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline int __float_as_int(float value) { return (int)__float_as_uint(value); }
inline float __int_as_float(int bits) { return __uint_as_float((u32)bits); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((u32)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
template <class T>
DEVICE T __ldg(const T* address) {
    if constexpr (emu::FINDS_RACES) emu::read_only_access(address, sizeof *address);
    return *address;
}
template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}

inline void __syncthreads() { emu::barrier(); }
inline void __syncwarp(u32 mask = 0xffffffffu) {
    emu::warp_operation(mask, {}, emu::order_lanes, "__syncwarp");
}
inline void __threadfence() {
    if constexpr (emu::FINDS_RACES) emu::fence();
}

namespace emu {

// Each lane of `mask` receives the operand of lane `first`, of `second` bytes.
void exchange(const Offer* offers, u32 mask);
void ballot(const Offer* offers, u32 mask);

template <class T>
inline T shuffle(u32 mask, const T& value, int source) {
    T result;
    warp_operation(mask, {&value, &result, source, (int)sizeof(T)}, exchange, "__shfl_sync");
    return result;
}

inline int this_lane() {
    const Builtins& b = builtins();
    return (int)((b.thread.x + b.block_size.x * (b.thread.y + b.block_size.y * b.thread.z)) % 32);
}

}  // namespace emu

// Groups of `width` lanes shuffle among themselves. A lane whose source is outside its group keeps its own value.
template <class T>
inline T __shfl_sync(u32 mask, T value, int lane, int width = 32) {
    int group = emu::this_lane() & ~(width - 1);
    return emu::shuffle(mask, value, group + (lane & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T value, int bits, int width = 32) {
    int self = emu::this_lane(), source = self ^ bits, group = self & ~(width - 1);
    return emu::shuffle(mask, value, source < group + width ? source : self);
}
template <class T>
inline T __shfl_up_sync(u32 mask, T value, int delta, int width = 32) {
    int self = emu::this_lane(), source = self - delta, group = self & ~(width - 1);
    return emu::shuffle(mask, value, source >= group ? source : self);
}
template <class T>
inline T __shfl_down_sync(u32 mask, T value, int delta, int width = 32) {
    int self = emu::this_lane(), source = self + delta, group = self & ~(width - 1);
    return emu::shuffle(mask, value, source < group + width ? source : self);
}
inline u32 __ballot_sync(u32 mask, int predicate) {
    u32 result;
    emu::warp_operation(mask, {nullptr, &result, predicate != 0, 0}, emu::ballot, "__ballot_sync");
    return result;
}
inline int __any_sync(u32 mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(u32 mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

namespace emu {

// A launch runs on one CPU thread and yields nowhere in here.
template <class T, class F>
EMU_UNREPORTED inline T atomically(T* address, F change) {
    if constexpr (FINDS_RACES) atomic_access(address, sizeof *address, __builtin_return_address(0));
    const T old = *address;
    *address = change(old);
    return old;
}

}  // namespace emu

template <class T>
DEVICE T atomicAdd(T* address, T value) {
    static_assert(std::is_integral_v<T>, "sums of floats would depend on who comes first");
    return emu::atomically(address, [=](T old) { return (T)(old + value); });
}
template <class T>
DEVICE T atomicExch(T* address, T value) {
    return emu::atomically(address, [=](T) { return value; });
}
template <class T>
DEVICE T atomicOr(T* address, T value) {
    return emu::atomically(address, [=](T old) { return (T)(old | value); });
}
template <class T>
DEVICE T atomicMax(T* address, T value) {
    return emu::atomically(address, [=](T old) { return max(old, value); });
}
template <class T>
DEVICE T atomicMin(T* address, T value) {
    return emu::atomically(address, [=](T old) { return min(old, value); });
}

// ------------------------------------------------------------------------------------------- gpu.h's wrappers

inline float to_float(f16 value) {
    _Float16 number;
    memcpy(&number, &value, sizeof number);
    return (float)number;
}
inline f16 to_f16(float value) {
    _Float16 number = (_Float16)value;
    f16 result;
    memcpy(&result, &number, sizeof number);
    return result;
}
inline bf16 to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    return {value != value ? (u16)0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline u32 pack_pair(float low, float high, f16) { return (u32)to_f16(low).bits | (u32)to_f16(high).bits << 16; }
inline u32 pack_pair(float low, float high, bf16) { return (u32)to_bf16(low).bits | (u32)to_bf16(high).bits << 16; }
inline float exp2_fast(float x) { return exp2f(x); }
inline u32 opaque(u32 number) { return number; }
template <class T>
T* one_address(T* shared) {
    return shared;
}
inline float reciprocal_fast(float x) { return 1.0f / x; }
// x86 permits misaligned accesses, and the sanitizers run only the small tests, so alignment is checked here.
inline void check_access(const void* address, u32 bytes) {
    if ((uintptr_t)address % bytes != 0) emu::fail("a load or store at an address that is no multiple of its size");
    if (!emu::FINDS_RACES && emu::counts_banks) emu::count_access(address, bytes);
}
DEVICE uint4 load_once(const uint4* address) {
    check_access(address, sizeof *address);
    return __ldg(address);
}
DEVICE uint4 load_once_if(const uint4* address, bool valid) { return valid ? load_once(address) : uint4{0, 0, 0, 0}; }
DEVICE uint2 load_once_if(const uint2* address, bool valid) {
    if (valid) check_access(address, sizeof *address);
    return valid ? __ldg(address) : uint2{0, 0};
}
EMU_UNREPORTED inline uint4 unreported(const uint4* address) { return *address; }
DEVICE uint4 load_weight(const uint4* address) {
    check_access(address, sizeof *address);
    if constexpr (emu::FINDS_RACES) emu::weight_access(address, sizeof *address);
    return unreported(address);
}
inline uint2 load_fresh(const uint2* address) {
    check_access(address, sizeof *address);
    return *address;
}
inline uint4 load_fresh(const uint4* address) {
    check_access(address, sizeof *address);
    return *address;
}
// The launch before has ended when one begins here. Every thread must wait for it all the same, and a library that finds races
// checks what a thread does before.
inline void allow_next_launch() {}
void wait_for_launch();
inline int dot4(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int8_t)(a >> i) * (int8_t)(b >> i);
    return sum;
}

template <class T>
inline u32 subtract_pairs_of(u32 a, u32 b) {
    float results[2];
    for (int i = 0; i < 2; ++i) {
        T x, y;
        x.bits = (u16)(a >> 16 * i), y.bits = (u16)(b >> 16 * i);
        results[i] = to_float(x) - to_float(y);
    }
    return pack_pair(results[0], results[1], T());
}
float to_float(bf16 value);
inline u32 subtract_pairs(u32 a, u32 b, f16) { return subtract_pairs_of<f16>(a, b); }
inline u32 subtract_pairs(u32 a, u32 b, bf16) { return subtract_pairs_of<bf16>(a, b); }

inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 32; i += 8) result |= (u32)(bytes >> (selector >> i / 2 & 7) * 8 & 0xff) << i;
    return result;
}

// The copy happens at the wait, and the former content is cleared before: a kernel that reads too early reads NaN. In
// random order, some copies happen at once.
void cp_async_16(void* shared, const void* global, bool valid = true);
void cp_async_commit();
namespace emu {
void wait_for_copies(size_t pending);
void begin_copy(void* shared, const void* global, u32 bytes, bool valid, const void* site);
}
// The site is that of the caller, because the wrapper is a part of it.
template <u32 BYTES>
[[gnu::noinline]] void cp_async_few(void* shared, const void* global) {
    emu::begin_copy(shared, global, BYTES, true, __builtin_return_address(0));
}
template <int PENDING>
inline void cp_async_wait() {
    emu::wait_for_copies(PENDING);
}

void ldmatrix_x4(u32* result, const void* row);
void ldmatrix_x4_trans(u32* result, const void* row);
void mma_m16n8k16(float* d, const u32* a, const u32* b, f16);
void mma_m16n8k16(float* d, const u32* a, const u32* b, bf16);
void mma_m16n8k4_tf32(float* d, const u32* a, const u32* b);
void mma_m16n8k32_e4m3(float* d, const u32* a, const u32* b);
u16 to_e4m3_pair(float low, float high);
void mma_m8n8k4_row_col(float* d, const u32* a, const u32* b);
void mma_m8n8k4_row_row(float* d, const u32* a, const u32* b);
