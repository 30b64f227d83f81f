// A stand-in for NVIDIA's driver and libraries, for tests on machines without a GPU: libcuda.so.1, libnvrtc.so.12 and
// libcublasLt.so.12 with the functions that the CUDA backend calls. Kernels run on the emulation. The declarations in
// this file are not part of NVIDIA's interface. They serve the other two libraries and tests, which find them by dlsym.
//
// The stand-in reproduces the behaviour that exposes mistakes. Work on a stream runs only when somebody waits for it,
// so results that are read too early are missing, and host memory, page-locked or not, that is overwritten too early is
// read with its new content. Memory is NaN until it is written. An allocation during a capture is an error, and so is a
// launch with the wrong number of threads, with more shared memory than was allowed, or of code for another chip. A launch that may
// begin early must follow a kernel, and begins after it all the same.
// Concurrent streams and time are not modelled.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

// Header before the object file in an emulated "cubin" or "PTX".
struct CodeHeader {
    char magic[16];  // CODE_MAGIC
    char chip[16];   // sm_89, or compute_70 for PTX
    uint64_t bytes;  // size of the object file that follows
};
constexpr char CODE_MAGIC[16] = "emulated cubin\n";

inline bool is_ptx(const char* chip) { return !strncmp(chip, "compute_", 8); }

// Returns 89 for sm_89 and for compute_89, and 0 for anything else.
inline int architecture_of(const char* chip) {
    const char* number = is_ptx(chip) ? chip + 8 : !strncmp(chip, "sm_", 3) ? chip + 3 : "";
    return atoi(number);
}

// Counts a call of a function of the other libraries. Returns the error with which it must fail, or 0.
API int standin_enter(const char* function);

// Runs `work` with `data` on a stream, in order, or records it during a capture. Afterwards `destroy` frees the data. Events tell that
// it takes this time.
API int standin_submit(void* stream, int (*work)(void*), void* data, void (*destroy)(void*), float milliseconds);

// Returns whether a whole range is device memory of one allocation.
API int standin_is_device_memory(uint64_t address, size_t bytes);

// Makes a call of `function` on this thread fail with `code` after `after` successful calls. If `sticky`, every later
// call fails in the same way, as after an error of a kernel, until standin_reset.
API void standin_fail(const char* function, unsigned after, int code, int sticky);

// Makes every call of `function` on this thread fail with `code`, until standin_reset, and nothing else.
API void standin_refuse(const char* function, int code);

// Returns ten times the compute capability of this thread's device; 0 without a context.
API int standin_capability();

// Gives the devices of this thread a clock, until standin_reset. Without one they tell that their times have no meaning.
API void standin_set_clock(int khz);

// Sets the CUDA version of this thread's driver, until standin_reset. 0 stands for that of the process.
API void standin_set_driver(int version);

// Sets the times that products of this thread take by the algorithms of cuBLASLt, in their order, until standin_reset.
API void standin_set_algorithm_times(const float* milliseconds, size_t count);

// Returns the time of a product by an algorithm, from 0: a millisecond unless it is set.
API float standin_algorithm_time(uint64_t algorithm);

// Resets the faults, the counts, the clock, the version and the times of this thread.
API void standin_reset();

// Returns the number of calls of a function by this thread since the last reset.
API uint64_t standin_calls(const char* function);

// Returns the number of bytes that this process has allocated on a device.
API uint64_t standin_memory_in_use(int device);
