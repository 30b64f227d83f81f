/* The emulation as a library: what a test, or a stand-in for the CUDA driver, calls. */
#ifndef EMU_H
#define EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The kernels themselves are seen by nobody. */
#pragma GCC visibility push(default)

/* The order in which threads that could all go on do so, and CTAs run. */
enum { EMU_FORWARD = 0, EMU_REVERSE = 1, EMU_RANDOM = 2 };

/* Sets the order for the launches of the calling thread. `seed` is that of EMU_RANDOM. */
void emu_set_order(int order, uint64_t seed);

/* Whether the library holds the kernel `name` (0) or not (-1); if so, the size of its parameters and its threads. */
int emu_find(const char* name, size_t* params_size, uint32_t* threads);

/* Runs a kernel to its end on the calling thread. `grid` and `block` are three numbers each. 0, or -1 and emu_error(): a launch
 * that a device would refuse, or threads that wait for each other for ever. Any other defect of a kernel is what it is in
 * any C++ program. */
int emu_launch(const char* name, const uint32_t* grid, const uint32_t* block, uint32_t shared_bytes, const void* params,
               size_t params_size);

/* Whether launches of the calling thread count how they use the banks of shared memory, from now on. */
void emu_count_banks(int on);

/* What has been counted since the last call: `phases`, the parts that a warp's accesses by load, store, ldmatrix and cp.async fall
 * into, of 128 bytes at most, and `wavefronts`, the turns that they take. The difference is what bank conflicts cost. Lanes of a
 * warp are taken to make their accesses together, the first with the first, and so on. */
void emu_bank_wavefronts(uint64_t* phases, uint64_t* wavefronts);

/* What was wrong with the calling thread's last launch; valid until its next one. */
const char* emu_error(void);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
