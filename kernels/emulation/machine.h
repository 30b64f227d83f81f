// Inside the emulation: what the scheduler and the instructions share.
#pragma once
#include <vector>

#include "gpu.h"

namespace emu {

// A thread's cp.async: copies not yet done, in order, and where each group of them ends.
struct CopyQueue {
    struct Copy {
        void* shared;
        const void* global;
        bool valid;
    };
    std::vector<Copy> copies;
    std::vector<size_t> group_ends;
};

// That of the thread that runs.
CopyQueue& copy_queue();

}  // namespace emu
