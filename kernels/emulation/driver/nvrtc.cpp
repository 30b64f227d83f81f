// libnvrtc.so.12 and .13 of the stand-in: compiles with g++, for the emulation, the sources that NVRTC would compile
// for a chip. The file's name determines its release: 12.9, which supports Volta, or 13.0, which does not. Results of
// g++ are cached beside the library, because it takes seconds where NVRTC takes tenths of a second.
// OCTAVO_STANDIN_COMPILE_MS is the minimum time of a compilation.
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"

extern char** environ;

namespace {

enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6, INTERNAL_ERROR = 11 };

struct Program {
    std::string name, source, log, code;
    std::vector<std::pair<std::string, std::string>> headers;
};

bool is_13() {
    Dl_info info;
    return dladdr((void*)is_13, &info) && strstr(info.dli_fname, ".so.13");
}

const std::vector<int>& architectures() {
    static const std::vector<int> twelve = {50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121};
    static const std::vector<int> thirteen = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
    return is_13() ? thirteen : twelve;
}

std::string read(const std::filesystem::path& path) {
    std::stringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}

// Runs a command with its messages in a file. Returns whether it succeeded.
bool run(std::vector<std::string> command, const std::string& messages) {
    std::vector<char*> arguments;
    for (auto& word : command) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, messages.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t child;
    int status = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    return status == 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Returns the folder of the library.
std::filesystem::path own_folder() {
    Dl_info info;
    return dladdr((void*)own_folder, &info) ? std::filesystem::path(info.dli_fname).parent_path() : "/tmp";
}

// Returns the path of the cached result of a program, which depends on everything except the emulation itself.
std::filesystem::path kept(const Program& program) {
    uint64_t hash = 0xcbf29ce484222325;
    auto add = [&](const std::string& text) {
        for (unsigned char byte : text + '\0') hash = (hash ^ byte) * 0x100000001b3;
    };
    add(program.source);
    for (auto& [name, text] : program.headers) add(name), add(text);
    char name[32];
    snprintf(name, sizeof name, "%016llx.so", (unsigned long long)hash);
    return own_folder() / "objects" / name;
}

// Builds the shared library of a program in `folder` and moves it to its cache path.
int build(Program& program, const std::filesystem::path& folder, const std::filesystem::path& place) {
    for (auto& [name, text] : program.headers) std::ofstream(folder / name) << text;
    std::ofstream(folder / "kernels.cpp") << program.source;
    std::string object = folder / "kernels.so";
    const char* compiler = getenv("CXX");
    // The program's own headers have priority over those of the package.
    std::vector<std::string> command = {compiler ? compiler : "g++", "-I" + folder.string(), EMULATION_ARGUMENTS};
    for (std::string word : {std::string("-x"), std::string("c++"), (folder / "kernels.cpp").string(), std::string("-o"), object}) {
        command.push_back(word);
    }
    bool compiled = run(command, folder / "messages");
    program.log = read(folder / "messages");
    if (!compiled) return COMPILATION;
    std::error_code error;
    std::filesystem::create_directories(place.parent_path(), error);
    // The library is copied under a unique name and renamed, because another process may build the same one.
    std::filesystem::path draft = place.string() + "." + folder.filename().string();
    std::filesystem::copy_file(object, draft, error);
    if (!error) std::filesystem::rename(draft, place, error);
    return error ? INTERNAL_ERROR : SUCCESS;
}

// Returns the assembler's report on each entry point, from the lines that define them: KERNEL(name, ...),
// KERNEL_RESIDENT(name, ...). Version 13 reports more registers, as another compiler would.
std::string usage(const std::string& source, const std::string& chip) {
    if (chip.rfind("sm_", 0) != 0) return "";
    std::stringstream lines(source);
    std::string log;
    for (std::string line; std::getline(lines, line);) {
        if (line.rfind("KERNEL(", 0) != 0 && line.rfind("KERNEL_RESIDENT(", 0) != 0) continue;
        size_t start = line.find('(') + 1;
        std::string name = line.substr(start, line.find(',') - start);
        log += "ptxas info    : Compiling entry function '" + name + "' for '" + chip + "'\n";
        log += "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n";
        log += std::string("ptxas info    : Used ") + (is_13() ? "40" : "32") + " registers, 400 bytes cmem[0]\n";
    }
    return log;
}

int compile(Program& program, const std::string& chip, const std::filesystem::path& folder) {
    if (const char* least = getenv("OCTAVO_STANDIN_COMPILE_MS")) usleep(1000 * atoi(least));
    std::filesystem::path place = kept(program);
    if (!std::filesystem::exists(place)) {
        int result = build(program, folder, place);
        if (result != SUCCESS) return result;
    }
    std::string bytes = read(place);
    CodeHeader header = {};
    memcpy(header.magic, CODE_MAGIC, sizeof header.magic);
    strncpy(header.chip, chip.c_str(), sizeof header.chip - 1);
    header.bytes = bytes.size();
    program.code.assign((const char*)&header, sizeof header);
    program.code += bytes;
    program.log += usage(program.source, chip);
    return SUCCESS;
}

}  // namespace

API const char* nvrtcGetErrorString(int result) {
    switch (result) {
        case SUCCESS: return "NVRTC_SUCCESS";
        case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case COMPILATION: return "NVRTC_ERROR_COMPILATION";
        default: return "NVRTC_ERROR_INTERNAL_ERROR";
    }
}
API int nvrtcVersion(int* major, int* minor) {
    *major = is_13() ? 13 : 12;
    *minor = is_13() ? 0 : 9;
    return SUCCESS;
}
API int nvrtcGetNumSupportedArchs(int* count) {
    *count = (int)architectures().size();
    return SUCCESS;
}
API int nvrtcGetSupportedArchs(int* archs) {
    memcpy(archs, architectures().data(), architectures().size() * sizeof(int));
    return SUCCESS;
}
API int nvrtcCreateProgram(void** program, const char* source, const char* name, int count, const char* const* headers,
                           const char* const* names) {
    auto* made = new Program{name, source, "", "", {}};
    for (int i = 0; i < count; i++) made->headers.emplace_back(names[i], headers[i]);
    *program = made;
    return SUCCESS;
}
API int nvrtcDestroyProgram(void** program) {
    delete (Program*)*program;
    *program = nullptr;
    return SUCCESS;
}
API int nvrtcCompileProgram(void* handle, int count, const char* const* options) {
    auto& program = *(Program*)handle;
    const char prefix[] = "--gpu-architecture=";
    std::string chip;
    for (int i = 0; i < count; i++) {
        if (!strncmp(options[i], prefix, sizeof prefix - 1)) chip = options[i] + sizeof prefix - 1;
    }
    bool known = false;
    for (int architecture : architectures()) known |= architecture_of(chip.c_str()) == architecture;
    if (!known) {
        program.log = "nvrtc: error: invalid value for --gpu-architecture (-arch)";
        return INVALID_OPTION;
    }
    char folder[] = "/tmp/octavo-nvrtc-XXXXXX";
    if (!mkdtemp(folder)) return INTERNAL_ERROR;
    int result = compile(program, chip, folder);
    std::filesystem::remove_all(folder);
    return result;
}
API int nvrtcGetProgramLogSize(void* program, size_t* size) {
    *size = ((Program*)program)->log.size() + 1;
    return SUCCESS;
}
API int nvrtcGetProgramLog(void* program, char* log) {
    strcpy(log, ((Program*)program)->log.c_str());
    return SUCCESS;
}
// As in NVRTC, there is machine code if a chip was named, and PTX if only an architecture was named.
const std::string& made(void* handle, bool ptx) {
    static const std::string none;
    auto& code = ((Program*)handle)->code;
    return !code.empty() && is_ptx(((CodeHeader*)code.data())->chip) == ptx ? code : none;
}
API int nvrtcGetCUBINSize(void* program, size_t* size) {
    *size = made(program, false).size();
    return SUCCESS;
}
API int nvrtcGetCUBIN(void* program, char* code) {
    auto& bytes = made(program, false);
    memcpy(code, bytes.data(), bytes.size());
    return bytes.empty() ? INVALID_INPUT : SUCCESS;
}
API int nvrtcGetPTXSize(void* program, size_t* size) {
    *size = made(program, true).size();
    return SUCCESS;
}
API int nvrtcGetPTX(void* program, char* code) {
    auto& bytes = made(program, true);
    memcpy(code, bytes.data(), bytes.size());
    return bytes.empty() ? INVALID_INPUT : SUCCESS;
}
