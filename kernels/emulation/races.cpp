// The detector of data races. What has been done to a byte is kept per word of four bytes, and per byte for words of
// which a part has been accessed.
#include "races.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

// Start of this library, from which reports count the addresses of instructions.
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));

namespace emu::races {
namespace {

constexpr size_t WORD = 4, PAGE = 4096, WORDS = PAGE / WORD;

// Lanes of a warp that have read at the same time.
struct Readers {
    u32 warp = Thread::NONE, time = 0, lanes = 0, site = 0;
    bool atomic = false;
};

struct Write {
    u32 thread = Thread::NONE, time = 0, site = 0;
};

// The last write that is not atomic, the last one since that is, and the reads since that may be unordered with a next
// write. Atomic operations order nothing without fences, so they replace neither writes nor reads.
struct Cell {
    Write plain, atomic;
    bool pending = false;  // the write is a cp.async for which the thread has not waited
    bool read_only = false;
    Readers readers;
    std::vector<Readers> more;
};

struct Page {
    std::array<Cell, WORDS> words;
    std::bitset<WORDS> divided;
    std::unique_ptr<std::array<Cell, PAGE>> bytes;  // of the words that are divided
};

struct Detector {
    u32 threads_per_cta = 32;
    const void *params = nullptr, *quiet = nullptr;
    size_t params_size = 0, quiet_bytes = 0;
    std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
    // The pages in use of late.
    struct Recent {
        uintptr_t number = 0;
        Page* page = nullptr;
    };
    std::array<Recent, 64> recent;
    // What threads have published at an address by atomic operations.
    std::map<uintptr_t, Clock> published;

    Page& page(uintptr_t number) {
        Recent& at = recent[number % recent.size()];
        if (at.page && at.number == number) return *at.page;
        auto& page = pages[number];
        if (!page) page = std::make_unique<Page>();
        at = {number, page.get()};
        return *at.page;
    }
};

Detector& detector() {
    static thread_local Detector instance;
    return instance;
}

thread_local Thread* running = nullptr;

u32 site_of(const void* address) { return (u32)(static_cast<const char*>(address) - __ehdr_start); }

void raise(std::vector<std::pair<u32, u32>>& times, u32 key, u32 until) {
    for (auto& [known, time] : times) {
        if (known != key) continue;
        time = std::max(time, until);
        return;
    }
    times.push_back({key, until});
}

// ------------------------------------------------------------------------------------------- reports

std::string thread_name(u32 number) {
    const u32 size = detector().threads_per_cta;
    return "thread " + std::to_string(number % size) + " of CTA " + std::to_string(number / size);
}

// The program that launches kernels replaces the address by lines of the source.
std::string site_name(u32 site) {
    char text[32];
    snprintf(text, sizeof text, " at <%#x>", site - 1);
    return text;
}

std::string place_name(uintptr_t address) {
    for (const Shared& array : shared_memory()) {
        const uintptr_t offset = address - (uintptr_t)array.start;
        if (offset < array.bytes) return std::string("byte ") + std::to_string(offset) + " of " + array.name + " in shared memory";
    }
    // The parameter that points to the least number of bytes before the address.
    const Detector& d = detector();
    uintptr_t least = ~(uintptr_t)0;
    size_t which = 0;
    for (size_t at = 0; at + 8 <= d.params_size; at += 8) {
        uintptr_t start;
        memcpy(&start, static_cast<const char*>(d.params) + at, sizeof start);
        if (start > address || address - start >= least) continue;
        least = address - start;
        which = at;
    }
    return "byte " + std::to_string(least) + " from the address in byte " + std::to_string(which) + " of the parameters";
}

struct Party {
    u32 thread;
    const char* what;
    u32 site;
};

[[noreturn]] void report(uintptr_t address, const Party& now, const Party& before, const char* why) {
    static thread_local std::string text;
    text = "race at " + place_name(address) + ": " + now.what + " by " + thread_name(now.thread) + site_name(now.site) + ", " +
           before.what + " by " + thread_name(before.thread) + site_name(before.site) + why;
    fail(text.c_str());
}

[[noreturn]] void report_early(uintptr_t address, const Party& now) {
    static thread_local std::string text;
    text = "race at " + place_name(address) + ": " + now.what + " by " + thread_name(now.thread) + site_name(now.site) +
           ", which has not waited for the launch before";
    fail(text.c_str());
}

bool is_shared(uintptr_t address) {
    for (const Shared& array : shared_memory())
        if (address - (uintptr_t)array.start < array.bytes) return true;
    return false;
}

constexpr const char* UNORDERED = "; nothing orders them";

const char* name(Access kind) {
    switch (kind) {
        case Access::READ: return "a load";
        case Access::READ_ONLY: return "a load by the read-only path";
        case Access::WRITE: return "a store";
        case Access::ATOMIC_READ: return "a volatile load";
        case Access::ATOMIC_WRITE: return "a volatile store";
        case Access::ATOMIC: return "an atomic operation";
    }
    return "";
}

// ------------------------------------------------------------------------------------------- accesses

struct Event {
    Thread& thread;
    Access kind;
    u32 site;
    bool pending;  // the store of a cp.async

    bool atomic() const { return kind >= Access::ATOMIC_READ; }
    bool writes() const { return kind == Access::WRITE || kind == Access::ATOMIC_WRITE || kind == Access::ATOMIC; }
    Party party() const { return {thread.number, pending ? "a cp.async" : name(kind), site}; }
};

void check_writers(const Event& event, const Cell& cell, uintptr_t address) {
    const auto check = [&](const Write& write, const char* what) {
        if (write.thread == Thread::NONE) return;
        const Party writer{write.thread, what, write.site};
        if (cell.pending) report(address, event.party(), writer, ", which has not been waited for");
        if (event.kind == Access::READ_ONLY) report(address, event.party(), writer, " in the same launch");
        if (!event.thread.knows(write.thread, write.time)) report(address, event.party(), writer, UNORDERED);
    };
    check(cell.plain, cell.pending ? "a cp.async" : "a store");
    if (!event.atomic()) check(cell.atomic, "an atomic operation");
}

void check_readers(const Event& event, const Cell& cell, uintptr_t address) {
    const auto check = [&](const Readers& readers) {
        if (event.atomic() && readers.atomic) return;
        for (u32 rest = readers.lanes; rest; rest &= rest - 1) {
            const Party reader{readers.warp * 32 + (u32)__builtin_ctz(rest), cell.read_only ? name(Access::READ_ONLY) : "a load",
                               readers.site};
            if (cell.read_only) report(address, event.party(), reader, " in the same launch");
            if (!event.thread.knows(reader.thread, readers.time)) report(address, event.party(), reader, UNORDERED);
        }
    };
    check(cell.readers);
    for (const Readers& readers : cell.more) check(readers);
}

void note_reader(const Event& event, Cell& cell) {
    const Thread& t = event.thread;
    const Readers own{t.warp(), t.time, 1u << t.lane(), event.site, event.atomic()};
    // Returns whether the read has found a place.
    const auto put = [&](Readers& at) {
        if (at.warp == own.warp && at.time == own.time && at.atomic == own.atomic) {
            at.lanes |= own.lanes;
            return true;
        }
        // A write that follows this read also follows those that it follows.
        bool followed = at.warp == Thread::NONE || at.atomic || !own.atomic;
        for (u32 rest = at.lanes; followed && rest; rest &= rest - 1)
            followed = t.knows(at.warp * 32 + (u32)__builtin_ctz(rest), at.time);
        if (followed) at = own;
        return followed;
    };
    if (put(cell.readers)) return;
    for (Readers& at : cell.more)
        if (put(at)) return;
    cell.more.push_back(own);
}

void apply(const Event& event, Cell& cell, uintptr_t address) {
    check_writers(event, cell, address);
    if (!event.writes()) {
        note_reader(event, cell);
        cell.read_only |= event.kind == Access::READ_ONLY;
        return;
    }
    check_readers(event, cell, address);
    const Write write{event.thread.number, event.thread.time, event.site};
    if (event.atomic()) {
        cell.atomic = write;
        return;
    }
    cell.plain = write;
    cell.pending = event.pending;
    cell.atomic = Write();
    cell.readers = Readers();
    cell.more.clear();
}

// Calls visit(cell, address) for the words of a page, and for bytes where only a part of a word is meant or it is divided.
// Writes of whole words join them again.
template <class F>
void visit(uintptr_t address, size_t bytes, bool joins, F visit) {
    for (const uintptr_t end = address + bytes; address < end;) {
        Page& page = detector().page(address / PAGE);
        const size_t word = address % PAGE / WORD;
        const uintptr_t stop = std::min(end, (address / WORD + 1) * WORD);
        const bool whole = stop - address == WORD;
        if (whole && !page.divided[word]) {
            visit(page.words[word], address);
            address = stop;
            continue;
        }
        if (!page.bytes) page.bytes = std::make_unique<std::array<Cell, PAGE>>();
        Cell* const cells = page.bytes->data() + word * WORD;
        if (!page.divided[word]) std::fill(cells, cells + WORD, page.words[word]);
        page.divided[word] = true;
        for (; address < stop; ++address) visit(cells[address % WORD], address);
        if (!whole || !joins) continue;
        page.words[word] = cells[0];
        page.divided[word] = false;
    }
}

void perform(const Event& event, uintptr_t address, size_t bytes) {
    visit(address, bytes, event.writes(), [&](Cell& cell, uintptr_t at) { apply(event, cell, at); });
}

}  // namespace

// ------------------------------------------------------------------------------------------- clocks

void Clock::learn(const Clock& other) {
    for (auto [cta, until] : other.ctas) raise(ctas, cta, until);
    for (auto [thread, until] : other.threads) raise(threads, thread, until);
}

u32 Clock::of_cta(u32 cta) const {
    for (auto [known, until] : ctas)
        if (known == cta) return until;
    return 0;
}

bool Thread::knows(u32 other, u32 until) const {
    if (other == number) return true;
    if (until <= known.of_cta(other / detector().threads_per_cta)) return true;
    for (auto [thread, time] : known.threads)
        if (thread == other) return until <= time;
    return false;
}

void begin_launch(u32 threads_per_cta, const void* params, size_t params_size, const void* quiet, size_t quiet_bytes) {
    Detector& d = detector();
    d.threads_per_cta = (threads_per_cta + 31) / 32 * 32;
    d.params = params;
    d.params_size = params_size;
    d.quiet = quiet;
    d.quiet_bytes = quiet_bytes;
}

void end_launch() {
    Detector& d = detector();
    running = nullptr;
    d.pages.clear();
    d.recent.fill({});
    d.published.clear();
}

void begin_memory(const void* start, size_t bytes) {
    Detector& d = detector();
    const uintptr_t first = (uintptr_t)start, end = first + bytes;
    for (uintptr_t page = first / PAGE; page < (end + PAGE - 1) / PAGE; ++page) d.pages.erase(page);
    d.recent.fill({});
    d.published.erase(d.published.lower_bound(first), d.published.lower_bound(end));
}

void begin_thread(Thread& thread, u32 cta, u32 index, const void* stack, size_t stack_bytes) {
    thread = Thread();
    thread.cta = cta;
    thread.number = cta * detector().threads_per_cta + index;
    thread.stack = stack;
    thread.stack_bytes = stack_bytes;
}

void run(Thread* thread) { running = thread; }

void join_cta(const std::vector<Thread*>& threads) {
    u32 latest = 0;
    Clock all;
    const u32 cta = threads[0]->cta, size = detector().threads_per_cta;
    for (const Thread* thread : threads) {
        latest = std::max(latest, thread->time);
        for (auto [other, until] : thread->known.ctas) raise(all.ctas, other, until);
        // The threads of the CTA are known all together.
        for (auto [other, until] : thread->known.threads)
            if (other / size != cta) raise(all.threads, other, until);
    }
    raise(all.ctas, cta, latest);
    for (Thread* thread : threads) {
        thread->known = all;
        thread->time = latest + 1;
    }
}

void join_lanes(const std::vector<Thread*>& lanes) {
    u32 latest = 0;
    for (const Thread* lane : lanes) latest = std::max(latest, lane->time);
    Clock all;
    for (const Thread* lane : lanes) all.threads.push_back({lane->number, latest});
    for (const Thread* lane : lanes) {
        for (auto [cta, until] : lane->known.ctas) raise(all.ctas, cta, until);
        for (auto [other, until] : lane->known.threads)
            if (other / 32 != lane->warp() || std::none_of(lanes.begin(), lanes.end(), [&](auto l) { return l->number == other; }))
                raise(all.threads, other, until);
    }
    for (Thread* lane : lanes) {
        lane->known = all;
        lane->time = latest + 1;
    }
}

// ------------------------------------------------------------------------------------------- what threads do

void access(const void* pointer, size_t bytes, Access kind, const void* site, bool of_weight) {
    Thread* const thread = running;
    if (!thread) return;
    const uintptr_t address = (uintptr_t)pointer;
    const Detector& d = detector();
    const auto within = [&](const void* start, size_t size) { return address - (uintptr_t)start < size; };
    if (within(thread->stack, thread->stack_bytes) || within(d.quiet, d.quiet_bytes) || within(d.params, d.params_size)) return;
    const Event event{*thread, kind, site_of(site), false};
    if (!thread->waited && !of_weight && !is_shared(address)) report_early(address, event.party());
    perform(event, address, bytes);
    if (!event.atomic()) return;
    Clock& published = detector().published[address];
    if (kind != Access::ATOMIC_WRITE) thread->observed.learn(published);
    // A store replaces what others have published; an operation that reads and writes adds to it.
    if (kind == Access::ATOMIC_WRITE) published.clear();
    if (kind != Access::ATOMIC_READ) published.learn(thread->published);
}

// The copy is a write from here to the wait, so not even this thread may access its bytes before.
void copy_begins(const void* shared, const void* global, size_t bytes, const void* site) {
    if (global) access(global, bytes, Access::READ, site);
    perform({*running, Access::WRITE, site_of(site), true}, (uintptr_t)shared, bytes);
}

void copy_ends(const void* shared, const void* global, size_t bytes, const void* site) {
    const Thread& thread = *running;
    visit((uintptr_t)shared, bytes, false, [&](Cell& cell, uintptr_t) {
        if (!cell.pending || cell.plain.thread != thread.number) return;
        cell.pending = false;
        cell.plain.time = thread.time;
    });
    if (global) access(global, bytes, Access::READ, site);
}

}  // namespace emu::races

namespace emu {

void atomic_access(const void* address, u32 bytes, const void* site) { races::access(address, bytes, races::Access::ATOMIC, site); }

void read_only_access(const void* address, u32 bytes) {
    races::access(address, bytes, races::Access::READ_ONLY, __builtin_return_address(0));
}

void weight_access(const void* address, u32 bytes) {
    races::access(address, bytes, races::Access::READ_ONLY, __builtin_return_address(0), true);
}

void fence() {
    races::Thread& thread = *races::running;
    thread.known.learn(thread.observed);
    thread.observed.clear();
    thread.published = thread.known;
    races::raise(thread.published.threads, thread.number, thread.time);
    thread.time += 1;
}

}  // namespace emu

// ------------------------------------------------------------------------------------------- what the compiler calls

#define REPORT(KIND, SIZE, ACCESS)                                                                         \
    void __tsan_##KIND##SIZE(const void* address) {                                                        \
        emu::races::access(address, SIZE, emu::races::Access::ACCESS, __builtin_return_address(0));        \
    }
#define REPORTS(KIND, ACCESS)                                                                              \
    REPORT(KIND, 1, ACCESS) REPORT(KIND, 2, ACCESS) REPORT(KIND, 4, ACCESS) REPORT(KIND, 8, ACCESS) REPORT(KIND, 16, ACCESS)
#define REPORTS_BOTH(KIND)                                                                                 \
    REPORTS(KIND##read, READ) REPORTS(KIND##write, WRITE)

extern "C" {
void __tsan_init() {}
REPORTS_BOTH()
REPORTS_BOTH(unaligned_)
REPORTS(volatile_read, ATOMIC_READ)
REPORTS(volatile_write, ATOMIC_WRITE)
void __tsan_read_range(const void* address, size_t bytes) {
    emu::races::access(address, bytes, emu::races::Access::READ, __builtin_return_address(0));
}
void __tsan_write_range(const void* address, size_t bytes) {
    emu::races::access(address, bytes, emu::races::Access::WRITE, __builtin_return_address(0));
}
}
