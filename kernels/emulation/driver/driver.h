// A stand-in for NVIDIA's driver and libraries, for tests on machines without a GPU: libcuda.so.1, libnvrtc.so.12 and
// libcublasLt.so.12 with the functions that the CUDA backend calls. Kernels run on the emulation. What this file declares is
// beside NVIDIA's interface: for the other two libraries, and for tests, which find it by dlsym.
//
// Faithful where a mistake would show: work on a stream waits until somebody waits for it, so results that are read too early
// are not there and host memory, page-locked or not, that is overwritten too early is seen overwritten; memory is NaN until
// written; an allocation during a capture is an error; a launch with the wrong number of threads, with more shared memory than was
// allowed, or of code for another chip, is one too. Not modelled: more than one stream at a time, and time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

// What precedes the object file in an emulated "cubin" or "PTX".
struct CodeHeader {
    char magic[16];  // CODE_MAGIC
    char chip[16];   // sm_89, or compute_70 for PTX
    uint64_t bytes;  // of the object file that follows
};
constexpr char CODE_MAGIC[16] = "emulated cubin\n";

inline bool is_ptx(const char* chip) { return !strncmp(chip, "compute_", 8); }

// 89 of sm_89 and of compute_89; 0 of anything else.
inline int architecture_of(const char* chip) {
    const char* number = is_ptx(chip) ? chip + 8 : !strncmp(chip, "sm_", 3) ? chip + 3 : "";
    return atoi(number);
}

// Counts a call of a function of the other libraries; the error that it is to fail with, or 0.
API int standin_enter(const char* function);

// Runs `work` with `data` on a stream, in its order, or records it during a capture; then `destroy` frees the data.
API int standin_submit(void* stream, int (*work)(void*), void* data, void (*destroy)(void*));

// Whether all of a range is device memory of one allocation.
API int standin_is_device_memory(uint64_t address, size_t bytes);

// Lets the call of `function` after the next `after` calls fail with `code`, on this thread. If `sticky`, every later
// call fails likewise, as after an error of a kernel, until standin_reset.
API void standin_fail(const char* function, unsigned after, int code, int sticky);

// Forgets faults and counts of this thread.
API void standin_reset();

// Calls of a function by this thread since the last reset.
API uint64_t standin_calls(const char* function);

// Bytes that this process holds on a device.
API uint64_t standin_memory_in_use(int device);
