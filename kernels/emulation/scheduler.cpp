// The machine: fibers, their scheduler and launches.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emu.h"
#include "machine.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

// Saves the callee-saved registers on the current stack, stores its pointer, and switches to the stack of another
// fiber. The ABI preserves nothing else across a call.
#if defined(__x86_64__)
extern "C" void emu_switch_stack(void** save, void* load);
asm(R"(
    .pushsection .text
    .local emu_switch_stack
    .type emu_switch_stack, @function
emu_switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size emu_switch_stack, .-emu_switch_stack
    .popsection
)");
#else
#error "the emulation switches stacks on x86-64 only"
#endif

namespace emu {
namespace {

constexpr size_t STACK_BYTES = 128 << 10;
// Limits of one CTA on an H100.
constexpr size_t MAX_SHARED_BYTES = 227 << 10;
constexpr u32 MAX_THREADS = 1024;

struct Warp;

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    Dim3 thread;
    u32 lane = 0;
    Warp* warp = nullptr;
    CopyQueue copies;
    // Accesses to shared memory, if they are counted.
    std::vector<std::pair<const void*, u32>> accesses;
};

// The masks have one bit per lane.
struct Warp {
    u32 index = 0;
    u32 alive = 0;       // has not returned
    u32 ready = 0;       // can continue
    u32 at_barrier = 0;  // waits for the CTA
    u32 arrived = 0;     // waits for lanes of its warp
    Offer offers[32];
    Operation operations[32];
    const char* names[32];
    Fiber* lanes[32];
};

struct Machine {
    Builtins builtins;
    const Kernel* kernel = nullptr;
    const void* params = nullptr;

    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    u32 ready_warps = 0;
    u32 alive = 0;
    u32 at_barrier = 0;
    Fiber* running = nullptr;
    void* launcher_stack_pointer = nullptr;

    unsigned char* dynamic_shared = nullptr;
    std::vector<std::pair<void*, size_t>> static_shared;

    u64 phases = 0, wavefronts = 0;

    int order = EMU_FORWARD;
    u64 random_state = 1;
    std::string error;

    ~Machine() {
        for (auto& fiber : fibers) {
            ASAN_UNPOISON_MEMORY_REGION(fiber->stack, STACK_BYTES);
            munmap(fiber->stack, STACK_BYTES);
        }
        free(dynamic_shared);
    }

    u64 random() {  // xorshift64
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        return random_state ^= random_state << 17;
    }
};

Machine& machine() {
    static thread_local Machine instance;
    return instance;
}

const Kernel*& kernels() {
    static const Kernel* first = nullptr;
    return first;
}

// Returns one of the set bits, according to the order of the launch; in forward order the next after `previous`.
u32 choose(Machine& m, u32 mask, u32 previous) {
    if (m.order == EMU_REVERSE) return 31 - (u32)__builtin_clz(mask);
    if (m.order == EMU_RANDOM) {
        for (u32 skip = (u32)((m.random() >> 33) % (u32)__builtin_popcount(mask)); skip > 0; --skip) mask &= mask - 1;
        return (u32)__builtin_ctz(mask);
    }
    u32 after = previous < 31 ? mask & ~0u << (previous + 1) : 0;
    return (u32)__builtin_ctz(after ? after : mask);
}

// Leaves the launch. Its fibers are never resumed.
[[noreturn]] void abandon(Machine& m) {
    emu_switch_stack(&m.running->stack_pointer, m.launcher_stack_pointer);
    __builtin_unreachable();
}

[[noreturn]] void deadlock(Machine& m) {
    char line[160];
    m.error = "deadlock: a barrier that not all threads reach, or a warp operation that not all lanes of its mask reach";
    for (const Warp& warp : m.warps) {
        if (!warp.alive) continue;
        snprintf(line, sizeof line, "\n  warp %u: alive %08x, at __syncthreads %08x, in a warp operation %08x", warp.index,
                 warp.alive, warp.at_barrier, warp.arrived);
        m.error += line;
        if (warp.arrived) m.error += std::string(" (") + warp.names[__builtin_ctz(warp.arrived)] + ")";
    }
    abandon(m);
}

// Releases all threads after every live one has reached the barrier.
void open_barrier(Machine& m) {
    m.at_barrier = 0;
    for (Warp& warp : m.warps) {
        warp.ready = warp.at_barrier;
        warp.at_barrier = 0;
        if (warp.ready) m.ready_warps |= 1u << warp.index;
    }
}

// Yields to a thread that is ready, and returns when this one is chosen again. This one may itself be ready or not.
__attribute__((noinline)) void give_way() {
    Machine& m = machine();
    Fiber* self = m.running;
    Warp* warp = self->warp;
    if (!warp->ready) m.ready_warps &= ~(1u << warp->index);
    if (!m.ready_warps) {
        if (m.alive == 0) abandon(m);  // the CTA has ended
        if (m.at_barrier != m.alive) deadlock(m);
        open_barrier(m);
    }
    // The current warp continues if it can, which is good for caches. In random order every warp may overtake every
    // other.
    if (!warp->ready || m.order == EMU_RANDOM) warp = &m.warps[choose(m, m.ready_warps, warp->index)];
    Fiber* next = warp->lanes[choose(m, warp->ready, warp == self->warp ? self->lane : 31)];
    if (next == self) return;
    m.running = next;
    m.builtins.thread = next->thread;
    emu_switch_stack(&self->stack_pointer, next->stack_pointer);
}

// First function of every fiber. It never returns, because there is no caller.
void run_thread() {
    Machine& m = machine();
    m.kernel->run(m.params);
    Fiber* self = m.running;
    u32 bit = 1u << self->lane;
    self->warp->alive &= ~bit;
    self->warp->ready &= ~bit;
    m.alive -= 1;
    give_way();
    __builtin_unreachable();
}

void prepare_fiber(Machine& m, u32 number) {
    while (m.fibers.size() <= number) {
        auto fiber = std::make_unique<Fiber>();
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) abort();
        fiber->stack = static_cast<char*>(stack);
        m.fibers.push_back(std::move(fiber));
    }
    Fiber& fiber = *m.fibers[number];
    const Dim3& size = m.builtins.block_size;
    fiber.thread = {number % size.x, number / size.x % size.y, number / (size.x * size.y)};
    fiber.lane = number % 32;
    fiber.warp = &m.warps[number / 32];
    fiber.warp->lanes[fiber.lane] = &fiber;
    fiber.copies.copies.clear();
    fiber.copies.group_ends.clear();
    fiber.accesses.clear();
    // The functions in which the fiber was when its last CTA ended never returned, so the sanitizer still guards their
    // variables.
    ASAN_UNPOISON_MEMORY_REGION(fiber.stack, STACK_BYTES);
    // The stack looks as if run_thread had been called and switched away from at once: a null return address that
    // aligns the stack as the ABI requires at a function's entry, the address at which to continue, and six registers.
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(run_thread);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
}

void run_block(Machine& m, u32 shared_bytes) {
    const Dim3& size = m.builtins.block_size;
    u32 threads = size.x * size.y * size.z;
    memset(m.dynamic_shared, 0xff, shared_bytes);
    for (auto [memory, bytes] : m.static_shared) memset(memory, 0xff, bytes);

    m.warps.assign((threads + 31) / 32, Warp());
    m.ready_warps = 0;
    for (u32 w = 0; w < m.warps.size(); ++w) {
        u32 lanes = threads - 32 * w;
        m.warps[w].index = w;
        m.warps[w].alive = m.warps[w].ready = lanes >= 32 ? ~0u : (1u << lanes) - 1;
        m.ready_warps |= 1u << w;
    }
    for (u32 number = 0; number < threads; ++number) prepare_fiber(m, number);
    m.alive = threads;
    m.at_barrier = 0;

    Warp& first = m.warps[choose(m, m.ready_warps, 31)];
    m.running = first.lanes[choose(m, first.ready, 31)];
    m.builtins.thread = m.running->thread;
    emu_switch_stack(&m.launcher_stack_pointer, m.running->stack_pointer);
}

// Counts the accesses of a CTA that has ended: the first of every lane of a warp together, then the second, ...
void count_warps(Machine& m) {
    for (const Warp& warp : m.warps) {
        for (size_t number = 0;; ++number) {
            const void* addresses[32] = {};
            u32 bytes = 0;
            for (u32 lane = 0; lane < 32; ++lane) {
                if (!warp.lanes[lane] || number >= warp.lanes[lane]->accesses.size()) continue;
                const auto [address, size] = warp.lanes[lane]->accesses[number];
                addresses[lane] = address;
                bytes = std::max(bytes, size);
            }
            if (bytes == 0) break;
            count_accesses(addresses, bytes);
        }
    }
}

// Returns the reason why a device would refuse the launch, or null.
const char* refuse(const Kernel* kernel, const u32* grid, const u32* block, u32 shared_bytes, size_t params_size) {
    if (!kernel) return "no such kernel";
    if (params_size != kernel->params_size) return "parameters of another size";
    if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535) return "a grid that no device takes";
    u64 threads = (u64)block[0] * block[1] * block[2];
    if (threads == 0 || threads > kernel->threads || threads > MAX_THREADS) return "more threads than the kernel is compiled for";
    if (shared_bytes > MAX_SHARED_BYTES) return "more shared memory than any chip has";
    return nullptr;
}

const Kernel* find(const char* name) {
    for (const Kernel* kernel = kernels(); kernel; kernel = kernel->next) {
        if (strcmp(kernel->name, name) == 0) return kernel;
    }
    return nullptr;
}

// Returns the index of the CTA that runs as number `turn`.
u64 block_at(Machine& m, u64 turn, u64 blocks, u64 stride) {
    if (m.order == EMU_REVERSE) return blocks - 1 - turn;
    return m.order == EMU_RANDOM ? (u64)((unsigned __int128)turn * stride % blocks) : turn;
}

u64 common_divisor(u64 a, u64 b) { return b == 0 ? a : common_divisor(b, a % b); }

}  // namespace

thread_local bool counts_banks = false;

void count_access(const void* address, u32 bytes) {
    Machine& m = machine();
    const auto within = [&](const void* memory, size_t size) {
        return (uintptr_t)address - (uintptr_t)memory < size;
    };
    bool shared = within(m.dynamic_shared, MAX_SHARED_BYTES);
    for (auto [memory, size] : m.static_shared) shared |= within(memory, size);
    if (shared) m.running->accesses.push_back({address, bytes});
}

// Shared memory has 32 banks of four bytes. It delivers 128 bytes per turn: accesses of 16 bytes by eight lanes, of
// eight bytes by sixteen. A phase takes as many turns as there are different words in one bank.
void count_accesses(const void* const* addresses, u32 bytes) {
    Machine& m = machine();
    const u32 lanes = bytes > 4 ? 128 / bytes : 32;
    for (u32 first = 0; first < 32; first += lanes) {
        std::vector<uintptr_t> banks[32];
        size_t turns = 0;
        for (u32 lane = first; lane < first + lanes; ++lane) {
            if (!addresses[lane]) continue;
            const uintptr_t start = (uintptr_t)addresses[lane] / 4, end = ((uintptr_t)addresses[lane] + bytes - 1) / 4;
            for (uintptr_t word = start; word <= end; ++word) {
                auto& bank = banks[word % 32];
                if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
                turns = std::max(turns, bank.size());
            }
        }
        m.phases += turns > 0;
        m.wavefronts += turns;
    }
}

Builtins& builtins() { return machine().builtins; }
CopyQueue& copy_queue() { return machine().running->copies; }
unsigned char* dynamic_shared() { return machine().dynamic_shared; }

void poison_each_block(void* memory, size_t bytes) {
    machine().static_shared.push_back({memory, bytes});
    memset(memory, 0xff, bytes);
}

Kernel::Kernel(const char* name, void (*run)(const void*), size_t params_size, u32 threads)
    : name(name), run(run), params_size(params_size), threads(threads), next(kernels()) {
    kernels() = this;
}

void fail(const char* what) {
    machine().error = what;
    abandon(machine());
}

void barrier() {
    Machine& m = machine();
    Fiber* self = m.running;
    u32 bit = 1u << self->lane;
    self->warp->ready &= ~bit;
    self->warp->at_barrier |= bit;
    m.at_barrier += 1;
    give_way();
}

void warp_operation(u32 mask, const Offer& offer, Operation operation, const char* name) {
    Fiber* self = machine().running;
    Warp& warp = *self->warp;
    u32 bit = 1u << self->lane;
    if (!(mask & bit)) fail("a lane takes part in a warp operation whose mask it is not in");
    warp.offers[self->lane] = offer;
    warp.operations[self->lane] = operation;
    warp.names[self->lane] = name;
    warp.arrived |= bit;
    if ((warp.arrived & mask) != mask) {
        warp.ready &= ~bit;
        give_way();
        return;
    }
    for (u32 rest = mask; rest; rest &= rest - 1) {
        if (warp.operations[__builtin_ctz(rest)] != operation) fail("lanes of one mask meet in different warp operations");
    }
    operation(warp.offers, mask);
    warp.arrived &= ~mask;
    warp.ready |= mask;
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_set_order(int order, uint64_t seed) {
    machine().order = order;
    machine().random_state = seed | 1;
}

int emu_find(const char* name, size_t* params_size, uint32_t* threads) {
    const Kernel* kernel = find(name);
    if (!kernel) return -1;
    *params_size = kernel->params_size;
    *threads = kernel->threads;
    return 0;
}

int emu_launch(const char* name, const uint32_t* grid, const uint32_t* block, uint32_t shared_bytes, const void* params,
               size_t params_size) {
    Machine& m = machine();
    m.error.clear();
    m.kernel = find(name);
    if (const char* reason = refuse(m.kernel, grid, block, shared_bytes, params_size)) {
        m.error = std::string(name) + ": " + reason;
        return -1;
    }
    if (!m.dynamic_shared) m.dynamic_shared = static_cast<unsigned char*>(aligned_alloc(1024, MAX_SHARED_BYTES));
    ASAN_UNPOISON_MEMORY_REGION(m.dynamic_shared, shared_bytes);
    ASAN_POISON_MEMORY_REGION(m.dynamic_shared + shared_bytes, MAX_SHARED_BYTES - shared_bytes);
    m.params = params;
    m.builtins.block_size = {block[0], block[1], block[2]};
    m.builtins.grid_size = {grid[0], grid[1], grid[2]};

    u64 blocks = (u64)grid[0] * grid[1] * grid[2];
    // Multiples of a number without a common divisor with the number of CTAs visit each CTA once.
    u64 stride = m.order == EMU_RANDOM ? m.random() % blocks + 1 : 1;
    while (common_divisor(stride, blocks) != 1) ++stride;
    for (u64 turn = 0; turn < blocks; ++turn) {
        u64 b = block_at(m, turn, blocks, stride);
        m.builtins.block = {(u32)(b % grid[0]), (u32)(b / grid[0] % grid[1]), (u32)(b / grid[0] / grid[1])};
        run_block(m, shared_bytes);
        if (counts_banks) count_warps(m);
        if (m.error.empty()) continue;
        const Dim3& at = m.builtins.block;
        m.error = std::string(name) + ", CTA " + std::to_string(at.x) + "," + std::to_string(at.y) + "," +
                  std::to_string(at.z) + ": " + m.error;
        return -1;
    }
    return 0;
}

void emu_count_banks(int on) { counts_banks = on != 0; }

void emu_bank_wavefronts(uint64_t* phases, uint64_t* wavefronts) {
    Machine& m = machine();
    *phases = std::exchange(m.phases, 0);
    *wavefronts = std::exchange(m.wavefronts, 0);
}

const char* emu_error(void) { return machine().error.c_str(); }
}
