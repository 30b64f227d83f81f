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
        u32 bytes;
        bool valid;
        bool done;
        const void* site;  // address of the instruction, for reports

        void perform() const;
    };
    std::vector<Copy> copies;
    std::vector<size_t> group_ends;
};

// Returns the queue of the running thread.
CopyQueue& copy_queue();

// Returns whether the next copy happens at once: never, or in random order by chance.
bool copies_at_once();

}  // namespace emu
