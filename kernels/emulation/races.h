// Data races: accesses to the same bytes by two threads of a launch, one of them a write, that nothing orders. They are
// found by happens-before, as FastTrack and ThreadSanitizer do, so one schedule shows the races of all schedules in which
// each thread does the same.
//
// A library that finds races is compiled with EMU_RACES, and its kernels with -fsanitize=thread, whose calls before each
// load and store come here instead of to that sanitizer's own library. What the emulation does for a thread (ldmatrix,
// cp.async, atomics) is reported by hand.
//
// A thread has a time, which advances when others may learn of it, and knows of other threads up to some time. Threads
// learn
// - at __syncthreads, of all threads of the CTA;
// - at __syncwarp, of the lanes of its mask. Shuffles, votes, ldmatrix and mma order nothing, as CUDA says of them;
// - at a __threadfence after an atomic operation, of what other threads knew at their last __threadfence before an atomic
//   operation on the same address. Volatile accesses count as atomic loads and stores.
//
// A launch may begin before the one before has ended, so an access of global memory before wait_for_launch() is a race, unless it
// is a load of weights.
#pragma once
#include <utility>
#include <vector>

#include "gpu.h"

namespace emu::races {

enum class Access : u8 { READ, READ_ONLY, WRITE, ATOMIC_READ, ATOMIC_WRITE, ATOMIC };

// Up to which time threads are known: all threads of a CTA, and single ones.
struct Clock {
    std::vector<std::pair<u32, u32>> ctas, threads;

    void learn(const Clock& other);
    u32 of_cta(u32 cta) const;
    void clear() { ctas.clear(), threads.clear(); }
};

// A thread of the launch. The lanes of warp w have the numbers 32 * w .. 32 * w + 31.
struct Thread {
    static constexpr u32 NONE = ~0u;
    u32 number = NONE, cta = 0, time = 1;
    bool waited = false;  // for the launch before
    // Its local memory, which no other thread accesses.
    const void* stack = nullptr;
    size_t stack_bytes = 0;
    Clock known;
    // What its last fence has published, and what it has read but not fenced.
    Clock published, observed;

    u32 warp() const { return number / 32; }
    u32 lane() const { return number % 32; }
    bool knows(u32 other, u32 until) const;
};

// Memory of a CTA.
struct Shared {
    const unsigned char* start;
    size_t bytes;
    const char* name;
};

// Forgets the accesses of former launches. The memory of `quiet` is the emulation's own.
void begin_launch(u32 threads_per_cta, const void* params, size_t params_size, const void* quiet, size_t quiet_bytes);
void end_launch();
// Forgets what a former CTA has done in shared memory that is used again.
void begin_memory(const void* start, size_t bytes);
void begin_thread(Thread& thread, u32 cta, u32 index, const void* stack, size_t stack_bytes);
// Sets the thread that makes the accesses from here on.
void run(Thread* thread);

void join_cta(const std::vector<Thread*>& threads);
void join_lanes(const std::vector<Thread*>& lanes);
// A thread that has not waited for the launch before accesses only weights in global memory.
void access(const void* address, size_t bytes, Access kind, const void* site, bool of_weight = false);
void copy_begins(const void* shared, const void* global, size_t bytes, const void* site);
void copy_ends(const void* shared, const void* global, size_t bytes, const void* site);

// The arrays in the shared memory of the running thread's CTA; the scheduler's.
std::vector<Shared> shared_memory();

}  // namespace emu::races
