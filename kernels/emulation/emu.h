/* Interface of the emulation as a library, for tests and for a stand-in for the CUDA driver. */
#ifndef EMU_H
#define EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Only these functions are exported; the kernels themselves are hidden. */
#pragma GCC visibility push(default)

/* Order in which ready threads and CTAs run. */
enum { EMU_FORWARD = 0, EMU_REVERSE = 1, EMU_RANDOM = 2 };

/* Sets the order for the launches of the calling thread. `seed` applies to EMU_RANDOM. */
void emu_set_order(int order, uint64_t seed);

/* Returns 0 and sets the size of its parameters and its number of threads if the library contains the kernel `name`, else -1. */
int emu_find(const char* name, size_t* params_size, uint32_t* threads);

/* Runs a kernel to its end on the calling thread. `grid` and `block` are three numbers each. Returns 0, or -1 and sets emu_error()
 * if a device would refuse the launch, if threads deadlock, or at a race in a library that finds races. Any other defect of a kernel has the effect that it has in any C++
 * program. */
int emu_launch(const char* name, const uint32_t* grid, const uint32_t* block, uint32_t shared_bytes, const void* params,
               size_t params_size);

/* Turns counting of the bank use of the calling thread's launches in shared memory on or off. */
void emu_count_banks(int on);

/* Returns the counts since the last call. `phases` is the number of parts of at most 128 bytes into which a warp's accesses by load,
 * store, ldmatrix and cp.async are divided, `wavefronts` the number of turns that they take. The difference is the cost of bank
 * conflicts. The lanes of a warp are assumed to make their accesses together, the first with the first, and so on. */
void emu_bank_wavefronts(uint64_t* phases, uint64_t* wavefronts);

/* Returns the error of the calling thread's last launch, valid until its next one. */
const char* emu_error(void);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
