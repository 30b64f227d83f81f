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
#include "races.h"

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

// Stacks begin at pages. The top of each lies elsewhere in its page than that of the next, because a cache has few places for
// equal offsets.
constexpr size_t STACK_BYTES = 144 << 10;
constexpr size_t COLOURS = 32, COLOUR_BYTES = 7 * 64;
// Limits of one CTA on an H100.
constexpr size_t MAX_SHARED_BYTES = 227 << 10;
constexpr u32 MAX_THREADS = 1024;
// Unused bytes between arrays in shared memory, for the address sanitizer.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t GAP = 32;
#else
constexpr size_t GAP = 0;
#endif

struct Cta;
struct Warp;

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    Dim3 thread;
    u32 lane = 0;
    bool waited = false;  // for the launch before
    Warp* warp = nullptr;
    CopyQueue copies;
    // Accesses to shared memory, if they are counted.
    std::vector<std::pair<const void*, u32>> accesses;
    races::Thread race;
};

// The masks have one bit per lane.
struct Warp {
    Cta* cta = nullptr;
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

// Shared memory begins at a page, so that no two CTAs share one.
struct FreeMemory {
    void operator()(unsigned char* memory) const { free(memory); }
};
using Memory = std::unique_ptr<unsigned char, FreeMemory>;
constexpr size_t MEMORY_BYTES = 228 << 10;
Memory allocate() { return Memory(static_cast<unsigned char*>(aligned_alloc(4096, MEMORY_BYTES))); }

// A place for a CTA that runs, with its memory and fibers. If no thread is alive, it is free.
struct Cta {
    Dim3 block;
    u64 number = 0;
    std::vector<Warp> warps;
    u32 ready_warps = 0;
    u32 alive = 0;
    u32 at_barrier = 0;
    std::vector<std::unique_ptr<Fiber>> fibers;
    Memory dynamic_shared = allocate(), static_shared = allocate();

    ~Cta() {
        for (auto& fiber : fibers) {
            ASAN_UNPOISON_MEMORY_REGION(fiber->stack, STACK_BYTES);
            munmap(fiber->stack, STACK_BYTES);
        }
        ASAN_UNPOISON_MEMORY_REGION(dynamic_shared.get(), MEMORY_BYTES);
        ASAN_UNPOISON_MEMORY_REGION(static_shared.get(), MEMORY_BYTES);
    }
};

// An array in the shared memory of each CTA of the launch.
struct StaticArray {
    const char *key, *name;
    size_t offset, bytes;
};

struct Machine {
    Builtins builtins;
    const Kernel* kernel = nullptr;
    const void* params = nullptr;
    u32 dynamic_bytes = 0;

    std::vector<std::unique_ptr<Cta>> ctas;
    size_t resident = 1;  // number of CTAs that run at once
    Fiber* running = nullptr;
    void* launcher_stack_pointer = nullptr;

    std::vector<StaticArray> static_arrays;
    size_t static_bytes = 0;

    u64 phases = 0, wavefronts = 0;

    int order = EMU_FORWARD;
    u64 random_state = 1;
    std::string error;

    u64 random() {  // xorshift64
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        return random_state ^= random_state << 17;
    }
};

// A thread has one machine, so that a function need look it up once only.
[[gnu::const, gnu::noinline]] Machine& machine() {
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
        u32 skip = (u32)(m.random() >> 33) % (u32)__builtin_popcount(mask);
        return (u32)__builtin_ctz(__builtin_ia32_pdep_si(1u << skip, mask));
    }
    u32 after = previous < 31 ? mask & ~0u << (previous + 1) : 0;
    return (u32)__builtin_ctz(after ? after : mask);
}

// Returns to the launcher. The running fiber is never resumed.
[[noreturn]] void abandon(Machine& m) {
    if constexpr (FINDS_RACES) races::run(nullptr);
    emu_switch_stack(&m.running->stack_pointer, m.launcher_stack_pointer);
    __builtin_unreachable();
}

[[noreturn]] void deadlock(Machine& m) {
    char line[160];
    m.error = "deadlock: a barrier that not all threads reach, or a warp operation that not all lanes of its mask reach";
    for (const Warp& warp : m.running->warp->cta->warps) {
        if (!warp.alive) continue;
        snprintf(line, sizeof line, "\n  warp %u: alive %08x, at __syncthreads %08x, in a warp operation %08x", warp.index,
                 warp.alive, warp.at_barrier, warp.arrived);
        m.error += line;
        if (warp.arrived) m.error += std::string(" (") + warp.names[__builtin_ctz(warp.arrived)] + ")";
    }
    abandon(m);
}

// Releases all threads after every live one has reached the barrier.
void open_barrier(Cta& cta) {
    cta.at_barrier = 0;
    std::vector<races::Thread*> threads;
    for (Warp& warp : cta.warps) {
        warp.ready = warp.at_barrier;
        warp.at_barrier = 0;
        if (warp.ready) cta.ready_warps |= 1u << warp.index;
        if constexpr (FINDS_RACES) {
            for (u32 rest = warp.ready; rest; rest &= rest - 1) threads.push_back(&warp.lanes[__builtin_ctz(rest)]->race);
        }
    }
    if constexpr (FINDS_RACES) races::join_cta(threads);
}

// Makes a fiber the running one. The caller switches to its stack.
void set_running(Machine& m, Fiber* fiber) {
    m.running = fiber;
    m.builtins.thread = fiber->thread;
    m.builtins.block = fiber->warp->cta->block;
    if constexpr (FINDS_RACES) races::run(&fiber->race);
}

// Returns a fiber of a CTA with a thread that is ready: in random order any, otherwise of the first such CTA.
Fiber* choose_fiber(Machine& m) {
    u32 live = 0;
    for (u32 c = 0; c < m.ctas.size(); ++c) live |= (u32)(m.ctas[c]->alive > 0) << c;
    Cta& cta = *m.ctas[choose(m, live, 31)];
    Warp& warp = cta.warps[choose(m, cta.ready_warps, 31)];
    return warp.lanes[choose(m, warp.ready, 31)];
}

// Yields to a thread that is ready, and returns when this one is chosen again. This one may itself be ready or not.
__attribute__((noinline)) void give_way(Machine& m) {
    Fiber* self = m.running;
    Warp* warp = self->warp;
    Cta& cta = *warp->cta;
    if (!warp->ready) cta.ready_warps &= ~(1u << warp->index);
    if (!cta.ready_warps) {
        if (cta.alive == 0) abandon(m);
        if (cta.at_barrier != cta.alive) deadlock(m);
        open_barrier(cta);
    }
    Fiber* next;
    if (m.order == EMU_RANDOM) {
        // Every warp of every CTA may overtake every other.
        next = choose_fiber(m);
    } else {
        // The current warp continues if it can, which is good for caches.
        if (!warp->ready) warp = &cta.warps[choose(m, cta.ready_warps, warp->index)];
        next = warp->lanes[choose(m, warp->ready, warp == self->warp ? self->lane : 31)];
    }
    if (next == self) return;
    set_running(m, next);
    emu_switch_stack(&self->stack_pointer, next->stack_pointer);
}

// First function of every fiber. It never returns, because there is no caller.
void run_thread() {
    Machine& m = machine();
    m.kernel->run(m.params);
    Fiber* self = m.running;
    if (!self->waited) fail("a thread ends that has not waited for the launch before");
    u32 bit = 1u << self->lane;
    self->warp->alive &= ~bit;
    self->warp->ready &= ~bit;
    self->warp->cta->alive -= 1;
    give_way(m);
    __builtin_unreachable();
}

void prepare_fiber(Machine& m, Cta& cta, u32 number) {
    while (cta.fibers.size() <= number) {
        auto fiber = std::make_unique<Fiber>();
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) abort();
        fiber->stack = static_cast<char*>(stack);
        cta.fibers.push_back(std::move(fiber));
    }
    Fiber& fiber = *cta.fibers[number];
    const Dim3& size = m.builtins.block_size;
    fiber.thread = {number % size.x, number / size.x % size.y, number / (size.x * size.y)};
    fiber.lane = number % 32;
    fiber.waited = false;
    fiber.warp = &cta.warps[number / 32];
    fiber.warp->lanes[fiber.lane] = &fiber;
    fiber.copies.copies.clear();
    fiber.copies.group_ends.clear();
    fiber.accesses.clear();
    if constexpr (FINDS_RACES) races::begin_thread(fiber.race, (u32)cta.number, number, fiber.stack, STACK_BYTES);
    // The functions in which the fiber was when its last CTA ended never returned, so the sanitizer still guards their
    // variables.
    ASAN_UNPOISON_MEMORY_REGION(fiber.stack, STACK_BYTES);
    // The stack looks as if run_thread had been called and switched away from at once: a null return address that
    // aligns the stack as the ABI requires at a function's entry, the address at which to continue, and six registers.
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - 64 - number % COLOURS * COLOUR_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(run_thread);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
}

void begin_block(Machine& m, Cta& cta, u64 number) {
    const Dim3 &size = m.builtins.block_size, &grid = m.builtins.grid_size;
    const u32 threads = size.x * size.y * size.z;
    cta.number = number;
    cta.block = {(u32)(number % grid.x), (u32)(number / grid.x % grid.y), (u32)(number / grid.x / grid.y)};
    ASAN_UNPOISON_MEMORY_REGION(cta.dynamic_shared.get(), m.dynamic_bytes);
    ASAN_POISON_MEMORY_REGION(cta.dynamic_shared.get() + m.dynamic_bytes, MEMORY_BYTES - m.dynamic_bytes);
    memset(cta.dynamic_shared.get(), 0xff, m.dynamic_bytes);
    ASAN_POISON_MEMORY_REGION(cta.static_shared.get(), MEMORY_BYTES);
    for (const StaticArray& array : m.static_arrays) {
        ASAN_UNPOISON_MEMORY_REGION(cta.static_shared.get() + array.offset, array.bytes);
        memset(cta.static_shared.get() + array.offset, 0xff, array.bytes);
    }
    if constexpr (FINDS_RACES) {
        races::begin_memory(cta.dynamic_shared.get(), MEMORY_BYTES);
        races::begin_memory(cta.static_shared.get(), MEMORY_BYTES);
    }

    cta.warps.assign((threads + 31) / 32, Warp());
    cta.ready_warps = 0;
    for (u32 w = 0; w < cta.warps.size(); ++w) {
        u32 lanes = threads - 32 * w;
        cta.warps[w].cta = &cta;
        cta.warps[w].index = w;
        cta.warps[w].alive = cta.warps[w].ready = lanes >= 32 ? ~0u : (1u << lanes) - 1;
        cta.ready_warps |= 1u << w;
    }
    for (u32 number = 0; number < threads; ++number) prepare_fiber(m, cta, number);
    cta.alive = threads;
    cta.at_barrier = 0;
}

// Counts the accesses of a CTA that has ended: the first of every lane of a warp together, then the second, ...
void count_warps(const Cta& cta) {
    for (const Warp& warp : cta.warps) {
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

// Returns the index of the CTA that begins as number `turn`.
u64 block_at(Machine& m, u64 turn, u64 blocks, u64 stride) {
    if (m.order == EMU_REVERSE) return blocks - 1 - turn;
    return m.order == EMU_RANDOM ? (u64)((unsigned __int128)turn * stride % blocks) : turn;
}

u64 common_divisor(u64 a, u64 b) { return b == 0 ? a : common_divisor(b, a % b); }

// Runs all CTAs, until one fails.
void run_grid(Machine& m) {
    const Dim3& grid = m.builtins.grid_size;
    const u64 blocks = (u64)grid.x * grid.y * grid.z;
    // Multiples of a number without a common divisor with the number of CTAs visit each CTA once.
    u64 stride = m.order == EMU_RANDOM ? m.random() % blocks + 1 : 1;
    while (common_divisor(stride, blocks) != 1) ++stride;
    for (auto& cta : m.ctas) cta->alive = 0;
    while (m.ctas.size() < std::min<u64>(m.resident, blocks)) m.ctas.push_back(std::make_unique<Cta>());
    for (u64 turn = 0, ended = 0; ended < blocks && m.error.empty();) {
        for (size_t c = 0; c < m.resident && turn < blocks; ++c) {
            if (m.ctas[c]->alive == 0) begin_block(m, *m.ctas[c], block_at(m, turn++, blocks, stride));
        }
        // Control returns when a CTA has ended or failed.
        set_running(m, choose_fiber(m));
        emu_switch_stack(&m.launcher_stack_pointer, m.running->stack_pointer);
        if (counts_banks) count_warps(*m.running->warp->cta);
        ++ended;
    }
}

}  // namespace

thread_local bool counts_banks = false;

void count_access(const void* address, u32 bytes) {
    Machine& m = machine();
    const auto within = [&](const void* memory, size_t size) {
        return (uintptr_t)address - (uintptr_t)memory < size;
    };
    const Cta& cta = *m.running->warp->cta;
    if (within(cta.dynamic_shared.get(), MEMORY_BYTES) || within(cta.static_shared.get(), MEMORY_BYTES)) m.running->accesses.push_back({address, bytes});
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
unsigned char* dynamic_shared() { return machine().running->warp->cta->dynamic_shared.get(); }
bool copies_at_once() { return machine().order == EMU_RANDOM && machine().random() >> 63 != 0; }

void* shared_array(const char* key, const char* name, size_t bytes) {
    Machine& m = machine();
    unsigned char* const memory = m.running->warp->cta->static_shared.get();
    for (const StaticArray& array : m.static_arrays)
        if (array.key == key) return memory + array.offset;
    const size_t offset = (m.static_bytes + 15) / 16 * 16;
    m.static_bytes = offset + bytes + GAP;
    if (m.static_bytes > MAX_SHARED_BYTES) fail("more shared memory than any chip has");
    m.static_arrays.push_back({key, name, offset, bytes});
    for (const auto& cta : m.ctas) {
        ASAN_UNPOISON_MEMORY_REGION(cta->static_shared.get() + offset, bytes);
        memset(cta->static_shared.get() + offset, 0xff, bytes);
    }
    return memory + offset;
}

void order_lanes(const Offer*, u32 mask) {
    if constexpr (FINDS_RACES) {
        std::vector<races::Thread*> lanes;
        for (u32 rest = mask; rest; rest &= rest - 1)
            lanes.push_back(&machine().running->warp->lanes[__builtin_ctz(rest)]->race);
        races::join_lanes(lanes);
    }
}

std::vector<races::Shared> races::shared_memory() {
    const Machine& m = machine();
    const Cta& cta = *m.running->warp->cta;
    std::vector<Shared> all = {{cta.dynamic_shared.get(), m.dynamic_bytes, "the dynamic part"}};
    for (const StaticArray& array : m.static_arrays) all.push_back({cta.static_shared.get() + array.offset, array.bytes, array.name});
    return all;
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
    self->warp->cta->at_barrier += 1;
    give_way(m);
}

void warp_operation(u32 mask, const Offer& offer, Operation operation, const char* name) {
    Machine& m = machine();
    Fiber* self = m.running;
    Warp& warp = *self->warp;
    u32 bit = 1u << self->lane;
    if (!(mask & bit)) fail("a lane takes part in a warp operation whose mask it is not in");
    warp.offers[self->lane] = offer;
    warp.operations[self->lane] = operation;
    warp.names[self->lane] = name;
    warp.arrived |= bit;
    if ((warp.arrived & mask) != mask) {
        warp.ready &= ~bit;
        give_way(m);
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

void wait_for_launch() {
    Fiber* self = machine().running;
    self->waited = true;
    self->race.waited = true;
}

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
    m.params = params;
    m.dynamic_bytes = shared_bytes;
    m.static_arrays.clear();
    m.static_bytes = 0;
    m.resident = m.order == EMU_RANDOM ? 2 + m.random() % 3 : 1;
    m.builtins.block_size = {block[0], block[1], block[2]};
    m.builtins.grid_size = {grid[0], grid[1], grid[2]};
    if constexpr (FINDS_RACES) races::begin_launch(block[0] * block[1] * block[2], params, params_size, &m, sizeof m);
    run_grid(m);
    if constexpr (FINDS_RACES) races::end_launch();
    if (m.error.empty()) return 0;
    const Dim3& at = m.builtins.block;
    m.error = std::string(name) + ", CTA " + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z) + ": " +
              m.error;
    return -1;
}

void emu_count_banks(int on) { counts_banks = on != 0; }

void emu_bank_wavefronts(uint64_t* phases, uint64_t* wavefronts) {
    Machine& m = machine();
    *phases = std::exchange(m.phases, 0);
    *wavefronts = std::exchange(m.wavefronts, 0);
}

const char* emu_error(void) { return machine().error.c_str(); }
}
