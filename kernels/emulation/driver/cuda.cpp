// libcuda.so.1 of the stand-in. Environment variables, read when they are needed:
//   OCTAVO_STANDIN_DRIVER   CUDA version of the driver, as returned by cuDriverGetVersion [13000]
//   OCTAVO_STANDIN_FAULT    function:calls:error: after this number of calls of the function, by any thread, all functions fail with the error
//   OCTAVO_STANDIN_DEVICES  name:compute capability:MiB of memory, separated by commas; empty means no GPU
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "emu.h"

namespace {

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_FAILED = 719,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
};

// ------------------------------------------------------------------------------------------- devices

struct Device {
    std::string name;
    int capability;
    uint64_t memory;
};

const char* setting(const char* name, const char* fallback) {
    const char* value = getenv(name);
    return value ? value : fallback;
}

// The devices are read once, because they do not change for a process.
const std::vector<Device>& devices() {
    static const std::vector<Device> all = [] {
        std::vector<Device> found;
        const char* usual = "Emulated H200:90:1024,Emulated L40S:89:1024,Emulated V100:70:1024,Emulated P100:60:1024,Small H200:90:8,Emulated T4:75:1024,Emulated H100:90:1024";
        std::string text = setting("OCTAVO_STANDIN_DEVICES", usual);
        for (size_t at = 0; at < text.size();) {
            size_t end = std::min(text.find(',', at), text.size());
            std::string one = text.substr(at, end - at);
            size_t first = one.find(':'), second = one.find(':', first + 1);
            found.push_back({one.substr(0, first), atoi(one.c_str() + first + 1),
                             strtoull(one.c_str() + second + 1, nullptr, 10) << 20});
            at = end + 1;
        }
        return found;
    }();
    return all;
}

const Device* device(int number) {
    return number >= 0 && (size_t)number < devices().size() ? &devices()[number] : nullptr;
}

int shared_memory(int capability) {
    return capability >= 90 ? 227 << 10 : capability >= 80 ? 99 << 10 : capability >= 75 ? 64 << 10 : 96 << 10;
}

// A context is the address of its device's element here: all contexts are primary ones.
char contexts[64];
thread_local int current = -1;

// ------------------------------------------------------------------------------------------- faults and counts, by thread

struct Fault {
    unsigned after;
    int code;
    bool sticky;
};
thread_local std::map<std::string, Fault> faults;
// The errors of functions that always fail.
thread_local std::map<std::string, int> refused;
thread_local std::map<std::string, uint64_t> calls;
thread_local int sticky_error = SUCCESS;
thread_local int captures = 0;
thread_local bool spoilt = false;
thread_local int clock_khz = 0;
thread_local int driver_version = 0;
thread_local std::vector<float> algorithm_times;

// Returns the CUDA version that the driver supports.
int supported_version() { return driver_version ? driver_version : atoi(setting("OCTAVO_STANDIN_DRIVER", "13000")); }

// Returns the error of an operation that a capture does not allow, which also ends the capture.
int unsupported() {
    spoilt = true;
    return STREAM_CAPTURE_UNSUPPORTED;
}

// Returns the fault requested by the environment: a device that is lost while a server runs.
int fault_of_process(const char* function) {
    static const std::string text = setting("OCTAVO_STANDIN_FAULT", "");
    if (text.empty()) return SUCCESS;
    static std::atomic<int> left{atoi(text.c_str() + text.find(':') + 1)};
    if (text.compare(0, text.find(':'), function) == 0) left--;
    return left < 0 ? atoi(text.c_str() + text.rfind(':') + 1) : SUCCESS;
}

int entered(const char* function, bool needs_context) {
    calls[function]++;
    if (int error = fault_of_process(function)) return error;
    auto refusal = refused.find(function);
    if (refusal != refused.end()) return refusal->second;
    auto fault = faults.find(function);
    if (fault != faults.end() && fault->second.after-- == 0) {
        Fault found = fault->second;
        faults.erase(fault);
        if (found.sticky) sticky_error = found.code;
        return found.code;
    }
    if (needs_context && sticky_error) return sticky_error;
    if (needs_context && current < 0) return INVALID_CONTEXT;
    return SUCCESS;
}

#define ENTER() \
    if (int error = entered(__func__, true)) return error
#define ENTER_ANYWHERE() \
    if (int error = entered(__func__, false)) return error

// ------------------------------------------------------------------------------------------- memory

struct Allocation {
    size_t bytes;
    int device;  // -1: page-locked host memory
};
std::mutex memory_lock;
std::map<uint64_t, Allocation> allocations;
uint64_t in_use[64];

// Larger memory is not poisoned: a test of large memory would need all of it.
constexpr size_t POISONED = 256 << 20;

uint64_t allocate(size_t bytes, int number) {
    size_t mapped = (bytes + 4095) & ~(size_t)4095;
    void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return 0;
    if (bytes <= POISONED) memset(start, 0xff, mapped);
    std::lock_guard<std::mutex> guard(memory_lock);
    allocations[(uint64_t)start] = {bytes, number};
    return (uint64_t)start;
}

// Returns the allocation that contains the whole range.
const Allocation* holding(uint64_t address, size_t bytes) {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return nullptr;
    const auto& [start, found] = *std::prev(after);
    return address - start <= found.bytes && bytes <= found.bytes - (address - start) ? &found : nullptr;
}

bool is_device(uint64_t address, size_t bytes) {
    std::lock_guard<std::mutex> guard(memory_lock);
    const Allocation* found = holding(address, bytes);
    return found && found->device >= 0;
}

bool is_pinned(const void* address, size_t bytes) {
    std::lock_guard<std::mutex> guard(memory_lock);
    const Allocation* found = holding((uint64_t)address, bytes);
    return found && found->device < 0;
}

int release(uint64_t address, bool pinned) {
    std::lock_guard<std::mutex> guard(memory_lock);
    auto found = allocations.find(address);
    if (found == allocations.end() || (found->second.device < 0) != pinned) return INVALID_VALUE;
    if (!pinned) in_use[found->second.device] -= found->second.bytes;
    munmap((void*)address, (found->second.bytes + 4095) & ~(size_t)4095);
    allocations.erase(found);
    return SUCCESS;
}

// ------------------------------------------------------------------------------------------- streams

using Work = std::function<int()>;
struct Stream {
    bool capturing = false;
    bool after_kernel = false;  // whether the last work is a kernel
    std::vector<Work> recorded, waiting;
    uint64_t done = 0;
    double time = 0;  // that all work of the stream takes, in milliseconds
};
struct Graph {
    std::vector<Work> work;
};
struct Event {
    Stream* stream = nullptr;
    uint64_t position = 0;  // position of `done` once it is reached
    double time = 0;        // of the stream at this position
    uint64_t left() const { return stream && position > stream->done ? position - stream->done : 0; }
};

// Adds work, which takes a millisecond unless another time is set.
int submit(void* handle, Work work, double milliseconds = 1) {
    auto* stream = (Stream*)handle;
    if (!stream) return INVALID_HANDLE;
    stream->after_kernel = false;
    if (!stream->capturing) stream->time += milliseconds;
    (stream->capturing ? stream->recorded : stream->waiting).push_back(std::move(work));
    return SUCCESS;
}

// Runs the waiting work, up to a number of pieces.
int run_waiting(Stream* stream, size_t pieces = SIZE_MAX) {
    if (stream->capturing) return unsupported();
    auto end = stream->waiting.begin() + std::min(pieces, stream->waiting.size());
    std::vector<Work> now(std::make_move_iterator(stream->waiting.begin()), std::make_move_iterator(end));
    stream->waiting.erase(stream->waiting.begin(), end);
    stream->done += now.size();
    for (auto& work : now) {
        if (int error = work()) return sticky_error = error;
    }
    return SUCCESS;
}

// ------------------------------------------------------------------------------------------- modules

// An object file of kernels, with the functions of emulation/emu.h.
struct Object {
    decltype(&emu_find) find = nullptr;
    decltype(&emu_launch) launch = nullptr;
    decltype(&emu_error) error = nullptr;
};
struct Module {
    const Object* object;
    int device;
};
struct Function {
    const Object* object;
    std::string name;
    size_t params_bytes;
    unsigned threads;
    int device;
    int allowed_shared;
};

// Loads each object file once and permanently, because threads keep its state.
int load_object(const std::string& code, const Object** loaded) {
    static std::mutex lock;
    static std::map<std::string, Object> objects;
    std::lock_guard<std::mutex> guard(lock);
    Object& object = objects[code];
    *loaded = &object;
    if (object.launch) return SUCCESS;
    int file = memfd_create("kernels", 0);
    if (file < 0 || write(file, code.data(), code.size()) != (ssize_t)code.size()) return OUT_OF_MEMORY;
    // The descriptor stays open, because its number is part of the path by which the loader identifies the file.
    void* handle = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        fprintf(stderr, "stand-in driver: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    object.find = (decltype(object.find))dlsym(handle, "emu_find");
    object.error = (decltype(object.error))dlsym(handle, "emu_error");
    object.launch = (decltype(object.launch))dlsym(handle, "emu_launch");
    return object.find && object.error && object.launch ? SUCCESS : INVALID_IMAGE;
}

}  // namespace

// ------------------------------------------------------------------------------------------- outside NVIDIA's interface

API int standin_submit(void* stream, int (*work)(void*), void* data, void (*destroy)(void*), float milliseconds) {
    std::shared_ptr<void> owned(data, destroy);
    return submit(stream, [=] { return work(owned.get()); }, milliseconds);
}
API int standin_enter(const char* function) { return entered(function, false); }
API int standin_is_device_memory(uint64_t address, size_t bytes) { return is_device(address, bytes); }
API void standin_fail(const char* function, unsigned after, int code, int sticky) {
    faults[function] = {after, code, sticky != 0};
}
API void standin_refuse(const char* function, int code) { refused[function] = code; }
API int standin_capability() { return current < 0 ? 0 : devices()[current].capability; }
API void standin_reset() {
    faults.clear();
    refused.clear();
    calls.clear();
    sticky_error = SUCCESS;
    clock_khz = driver_version = 0;
    algorithm_times.clear();
}
API void standin_set_clock(int khz) { clock_khz = khz; }
API void standin_set_driver(int version) { driver_version = version; }
API void standin_set_algorithm_times(const float* milliseconds, size_t count) { algorithm_times.assign(milliseconds, milliseconds + count); }
API float standin_algorithm_time(uint64_t algorithm) { return algorithm < algorithm_times.size() ? algorithm_times[algorithm] : 1; }
API uint64_t standin_calls(const char* function) { return calls[function]; }
API uint64_t standin_memory_in_use(int number) {
    std::lock_guard<std::mutex> guard(memory_lock);
    return in_use[number];
}

// ------------------------------------------------------------------------------------------- the driver's interface

API int cuInit(unsigned) {
    ENTER_ANYWHERE();
    return devices().empty() ? NO_DEVICE : SUCCESS;
}
API int cuDriverGetVersion(int* version) {
    ENTER_ANYWHERE();
    *version = supported_version();
    return SUCCESS;
}
API int cuGetErrorName(int error, const char** name) {
    static const std::map<int, const char*> names = {
        {SUCCESS, "CUDA_SUCCESS"},
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {NOT_READY, "CUDA_ERROR_NOT_READY"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
        {STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
        {STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    };
    auto found = names.find(error);
    if (found == names.end()) return INVALID_VALUE;
    *name = found->second;
    return SUCCESS;
}

API int cuDeviceGetCount(int* count) {
    ENTER_ANYWHERE();
    *count = (int)devices().size();
    return SUCCESS;
}
API int cuDeviceGet(int* found, int ordinal) {
    ENTER_ANYWHERE();
    *found = ordinal;
    return device(ordinal) ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceGetName(char* name, int length, int number) {
    ENTER_ANYWHERE();
    snprintf(name, (size_t)length, "%s", device(number)->name.c_str());
    return SUCCESS;
}
API int cuDeviceTotalMem_v2(size_t* bytes, int number) {
    ENTER_ANYWHERE();
    *bytes = device(number)->memory;
    return SUCCESS;
}
API int cuDeviceGetAttribute(int* value, int attribute, int number) {
    ENTER_ANYWHERE();
    int capability = device(number)->capability;
    switch (attribute) {
        case 13:
            *value = clock_khz;
            return clock_khz ? SUCCESS : INVALID_VALUE;
        case 16: *value = 4; return SUCCESS;  // multiprocessors
        case 75: *value = capability / 10; return SUCCESS;
        case 76: *value = capability % 10; return SUCCESS;
        case 97: *value = shared_memory(capability); return SUCCESS;
        default: return INVALID_VALUE;
    }
}
API int cuDevicePrimaryCtxRetain(void** context, int number) {
    ENTER_ANYWHERE();
    *context = &contexts[number];
    return SUCCESS;
}
API int cuDevicePrimaryCtxRelease_v2(int) {
    ENTER_ANYWHERE();
    return SUCCESS;
}
API int cuCtxSetCurrent(void* context) {
    ENTER_ANYWHERE();
    current = context ? (int)((char*)context - contexts) : -1;
    return SUCCESS;
}

API int cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER();
    *total = devices()[current].memory;
    *free = *total - standin_memory_in_use(current);
    return SUCCESS;
}
API int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    ENTER();
    if (captures) return unsupported();
    if (!bytes) return INVALID_VALUE;
    {
        std::lock_guard<std::mutex> guard(memory_lock);
        if (bytes > devices()[current].memory - in_use[current]) return OUT_OF_MEMORY;
        in_use[current] += bytes;
    }
    *address = allocate(bytes, current);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
API int cuMemFree_v2(uint64_t address) {
    ENTER();
    return captures ? unsupported() : release(address, false);
}
API int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    ENTER();
    if (captures) return unsupported();
    *address = (void*)allocate(bytes, -1);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
API int cuMemFreeHost(void* address) {
    ENTER();
    return release((uint64_t)address, true);
}
API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    ENTER();
    if (!is_device(to, bytes)) return INVALID_VALUE;
    // Most drivers stage memory that is not page-locked before the call returns, which a capture does not allow. If the
    // device shares the host's page tables, such memory is read when the copy runs, like page-locked memory.
    if (captures && !is_pinned(from, bytes)) return unsupported();
    return submit(stream, [=] { memcpy((void*)to, from, bytes); return 0; });
}
API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    ENTER();
    if (!is_device(from, bytes)) return INVALID_VALUE;
    if (captures && !is_pinned(to, bytes)) return unsupported();
    return submit(stream, [=] { memcpy(to, (void*)from, bytes); return 0; });
}
API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    ENTER();
    if (!is_device(to, bytes) || !is_device(from, bytes)) return INVALID_VALUE;
    return submit(stream, [=] { memmove((void*)to, (void*)from, bytes); return 0; });
}
API int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void* stream) {
    ENTER();
    if (!bytes || !is_device(at, bytes)) return INVALID_VALUE;
    return submit(stream, [=] { memset((void*)at, value, bytes); return 0; });
}

API int cuStreamCreate(void** stream, unsigned) {
    ENTER();
    *stream = new Stream;
    return SUCCESS;
}
API int cuStreamDestroy_v2(void* stream) {
    ENTER();
    delete (Stream*)stream;
    return SUCCESS;
}
API int cuStreamSynchronize(void* stream) {
    ENTER();
    return stream ? run_waiting((Stream*)stream) : INVALID_HANDLE;
}

API int cuEventCreate(void** event, unsigned) {
    ENTER();
    *event = new Event;
    return SUCCESS;
}
API int cuEventDestroy_v2(void* event) {
    ENTER();
    delete (Event*)event;
    return SUCCESS;
}
API int cuEventRecord(void* event, void* stream) {
    ENTER();
    auto* found = (Stream*)stream;
    if (!found || found->capturing) return INVALID_HANDLE;
    *(Event*)event = {found, found->done + found->waiting.size(), found->time};
    return SUCCESS;
}
API int cuEventQuery(void* event) {
    ENTER();
    return ((Event*)event)->left() ? NOT_READY : SUCCESS;
}
API int cuEventSynchronize(void* event) {
    ENTER();
    auto* found = (Event*)event;
    return found->left() ? run_waiting(found->stream, found->left()) : SUCCESS;
}

API int cuEventElapsedTime(float* milliseconds, void* from, void* to) {
    ENTER();
    auto *first = (Event*)from, *last = (Event*)to;
    if (!first->stream || first->stream != last->stream) return INVALID_HANDLE;
    if (first->left() || last->left()) return NOT_READY;
    *milliseconds = (float)(last->time - first->time);
    return SUCCESS;
}

API int cuModuleLoadData(void** module, const void* image) {
    ENTER();
    if (captures) return unsupported();
    auto* header = (const CodeHeader*)image;
    if (memcmp(header->magic, CODE_MAGIC, sizeof CODE_MAGIC)) return INVALID_IMAGE;
    int capability = devices()[current].capability;
    // The `a` of sm_90a restricts the code to that chip; without it, the code would run on later chips of its major
    // too. PTX runs on its architecture and all later ones.
    int made_for = architecture_of(header->chip);
    if (is_ptx(header->chip) ? made_for > capability : made_for != capability) return NO_BINARY_FOR_GPU;
    const Object* object;
    if (int error = load_object({(const char*)(header + 1), header->bytes}, &object)) return error;
    *module = new Module{object, current};
    return SUCCESS;
}
API int cuModuleUnload(void* module) {
    ENTER();
    delete (Module*)module;
    return SUCCESS;
}
API int cuModuleGetFunction(void** function, void* module, const char* name) {
    ENTER();
    auto& of = *(Module*)module;
    size_t params_bytes;
    unsigned threads;
    if (of.object->find(name, &params_bytes, &threads)) return NOT_FOUND;
    // The function is never freed; the driver's own functions live as long as their module.
    *function = new Function{of.object, name, params_bytes, threads, of.device, 48 << 10};
    return SUCCESS;
}
API int cuFuncSetAttribute(void* function, int attribute, int value) {
    ENTER();
    auto* found = (Function*)function;
    if (attribute != 8 || value > shared_memory(devices()[found->device].capability)) return INVALID_VALUE;
    found->allowed_shared = value;
    return SUCCESS;
}

struct Attribute {
    int id;
    alignas(8) int value;
    char rest[60];
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void* stream;
    const Attribute* attributes;
    unsigned attribute_count;
};

// Returns whether a launch may have these attributes: none, or the one by which it may begin before the kernel before has ended. Drivers
// before CUDA 12.3 do not record it.
bool attributes_fit(const LaunchConfig& config) {
    if (!config.attribute_count) return true;
    const auto* stream = (const Stream*)config.stream;
    const Attribute& one = config.attributes[0];
    calls["programmatic launch"]++;
    return config.attribute_count == 1 && one.id == 6 && one.value == 1 && devices()[current].capability >= 90 &&
           supported_version() >= 12030 && stream && stream->after_kernel;
}

API int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
    ENTER();
    auto* found = (Function*)function;
    const unsigned *grid = config->grid, *block = config->block;
    bool grid_fits = grid[0] && grid[1] && grid[2] && grid[0] < 1u << 31 && grid[1] < 1 << 16 && grid[2] < 1 << 16;
    // The launch bounds come from KERNEL: fewer threads would run on a GPU, but no kernel supports that.
    bool block_fits = block[0] == found->threads && block[1] == 1 && block[2] == 1;
    if (!grid_fits || !block_fits || (int)config->shared > found->allowed_shared || found->device != current || extra ||
        !attributes_fit(*config)) {
        return INVALID_VALUE;
    }
    auto params = std::make_shared<std::string>((const char*)arguments[0], found->params_bytes);
    std::array<uint32_t, 3> blocks{grid[0], grid[1], grid[2]}, threads{block[0], 1, 1};
    unsigned shared = config->shared;
    int error = submit(config->stream, [=] {
        const Object& object = *found->object;
        if (!object.launch(found->name.c_str(), blocks.data(), threads.data(), shared, params->data(), params->size())) {
            return SUCCESS;
        }
        fprintf(stderr, "stand-in driver: %s\n", object.error());
        return LAUNCH_FAILED;
    });
    if (!error) ((Stream*)config->stream)->after_kernel = true;
    return error;
}

API int cuStreamBeginCapture_v2(void* stream, int) {
    ENTER();
    auto* found = (Stream*)stream;
    if (!found || found->capturing) return INVALID_VALUE;
    found->capturing = true;
    found->after_kernel = false;
    captures++;
    return SUCCESS;
}
API int cuStreamEndCapture(void* stream, void** graph) {
    ENTER();
    auto* found = (Stream*)stream;
    if (!found->capturing) return INVALID_VALUE;
    found->capturing = false;
    found->after_kernel = false;
    captures--;
    std::vector<Work> recorded = std::move(found->recorded);
    found->recorded.clear();
    *graph = nullptr;
    if (std::exchange(spoilt, false)) return STREAM_CAPTURE_INVALIDATED;
    *graph = new Graph{std::move(recorded)};
    return SUCCESS;
}
API int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    ENTER();
    *executable = new Graph(*(Graph*)graph);
    return SUCCESS;
}
API int cuGraphUpload(void*, void*) {
    ENTER();
    return SUCCESS;
}
API int cuGraphLaunch(void* executable, void* stream) {
    ENTER();
    auto work = std::make_shared<std::vector<Work>>(((Graph*)executable)->work);
    return submit(stream, [=] {
        for (auto& one : *work) {
            if (int error = one()) return error;
        }
        return (int)SUCCESS;
    });
}
API int cuGraphDestroy(void* graph) {
    ENTER();
    delete (Graph*)graph;
    return SUCCESS;
}
API int cuGraphExecDestroy(void* graph) {
    ENTER();
    delete (Graph*)graph;
    return SUCCESS;
}
