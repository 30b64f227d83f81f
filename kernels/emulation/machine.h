// Internals of the emulation shared by the scheduler and the instructions.
#pragma once
#include <vector>

#include "gpu.h"

namespace emu {

// A thread's cp.async operations: pending copies in order, and the end of each group.
struct CopyQueue {
    struct Copy {
        void* shared;
        const void* global;
        bool valid;
    };
    std::vector<Copy> copies;
    std::vector<size_t> group_ends;
};

// Returns the queue of the running thread.
CopyQueue& copy_queue();

}  // namespace emu
