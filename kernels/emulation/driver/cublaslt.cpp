// libcublasLt.so.12 of the stand-in: products in the simplest way, column-major like cuBLASLt, of f32, f16, bf16 and e4m3
// with sums in f32. It accepts the requests of the CUDA backend and refuses all others. Of the modes of scales it has none, as a
// scale of 1, and those that only compute capability 9.0 supports. standin_refuse("CUBLASLT_MATMUL_DESC_A_SCALE_MODE") makes it a library before 12.9.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "driver.h"

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_16F = 2, R_16BF = 14, R_8F_E4M3 = 28 };
// cublasLtMatmulMatrixScale_t: one scale for a matrix, for each of its rows (as a row-major factor has them), for each 128
// elements of a row, and for each 128 x 128 elements.
enum Mode { SCALAR = 0, ROWS = 3, VECTORS = 4, BLOCKS = 5 };

struct Description {
    int transpose_a = 0, transpose_b = 0, epilogue = 1;
    uint64_t bias = 0;
    // Of the factors a and b.
    int modes[2] = {SCALAR, SCALAR};
    uint64_t scales[2] = {};
};
struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;
    size_t element() const { return type == R_32F ? 4 : type == R_8F_E4M3 ? 1 : 2; }
    size_t bytes() const { return element() * ((columns - 1) * (uint64_t)stride + rows); }
};
// Preferences by attribute. The default alignment is 256.
struct Preference {
    size_t workspace = 0;
    uint32_t reductions = 7, alignment[9] = {256, 256, 256, 256, 256, 256, 256, 256, 256};
};
struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

// Four bits of exponent with a bias of 7 and three of mantissa; no infinity.
float of_e4m3(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return __builtin_nanf("");
    float value = exponent ? ldexpf((float)(mantissa + 8), exponent - 10) : ldexpf((float)mantissa, -9);
    return code >> 7 ? -value : value;
}

float load(int type, uint64_t base, uint64_t index) {
    if (type == R_32F) return ((const float*)base)[index];
    if (type == R_8F_E4M3) return of_e4m3(((const uint8_t*)base)[index]);
    uint16_t bits = ((const uint16_t*)base)[index];
    if (type == R_16F) {
        _Float16 number;
        memcpy(&number, &bits, 2);
        return (float)number;
    }
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

void store(int type, uint64_t base, uint64_t index, float value) {
    if (type == R_32F) {
        ((float*)base)[index] = value;
    } else if (type == R_16F) {
        _Float16 number = (_Float16)value;
        memcpy((uint16_t*)base + index, &number, 2);
    } else {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        ((uint16_t*)base)[index] = value != value ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

// Number of elements with one scale.
constexpr uint64_t SIDE = 128;

uint64_t padded_groups(uint64_t k) { return (k + SIDE * 4 - 1) / (SIDE * 4) * 4; }

// Returns the number of scales of a factor [k, rows].
uint64_t count_of_scales(int mode, const Layout& factor) {
    uint64_t k = factor.rows, rows = factor.columns;
    return mode == ROWS ? rows : mode == VECTORS ? (k + SIDE - 1) / SIDE * rows : padded_groups(k) * ((rows + SIDE - 1) / SIDE);
}

struct Product {
    Description description;
    Layout a, b, d;
    uint64_t at_a, at_b, at_c, at_d;
    float alpha, beta;

    // Returns the scale of 128 elements of a row of a factor.
    float scale(int which, uint64_t row, uint64_t group) const {
        const Layout& factor = which ? b : a;
        const float* scales = (const float*)description.scales[which];
        switch (description.modes[which]) {
            case ROWS: return scales[row];
            case VECTORS: return scales[group * factor.columns + row];
            case BLOCKS: return scales[row / SIDE * padded_groups(factor.rows) + group];
            default: return 1;
        }
    }
};

int multiply(void* data) {
    const auto& p = *(const Product*)data;
    uint64_t k = p.a.rows;
    // Values are converted first, so that the inner loop runs over plain numbers.
    std::vector<float> column(k), weights(k * p.d.rows);
    for (uint64_t i = 0; i < p.d.rows; i++) {
        for (uint64_t j = 0; j < k; j++) weights[i * k + j] = load(p.a.type, p.at_a, i * (uint64_t)p.a.stride + j);
    }
    for (uint64_t m = 0; m < p.d.columns; m++) {
        for (uint64_t j = 0; j < k; j++) column[j] = load(p.b.type, p.at_b, m * (uint64_t)p.b.stride + j);
        for (uint64_t i = 0; i < p.d.rows; i++) {
            float sum = 0;
            if (p.a.type == R_8F_E4M3) {
                for (uint64_t group = 0; group * SIDE < k; group++) {
                    float part = 0;
                    for (uint64_t j = group * SIDE; j < k && j < (group + 1) * SIDE; j++) part += weights[i * k + j] * column[j];
                    sum += part * p.scale(0, i, group) * p.scale(1, m, group);
                }
            } else {
                for (uint64_t j = 0; j < k; j++) sum += weights[i * k + j] * column[j];
            }
            uint64_t at = m * (uint64_t)p.d.stride + i;
            float value = p.alpha * sum;
            if (p.beta != 0) value += p.beta * load(p.d.type, p.at_c, at);
            if (p.description.epilogue == 4) value += load(p.d.type, p.description.bias, i);
            store(p.d.type, p.at_d, at, value);
        }
    }
    return 0;
}

// Returns a function of the stand-in driver, whose symbols are global.
template <class F>
F of_driver(const char* name) {
    return (F)dlsym(RTLD_DEFAULT, name);
}

// Returns whether the modes of the scales fit factors of a type, and the device multiplies them.
bool scales_fit(const Description& of, const Layout& a, const Layout& b, const Layout& d) {
    int first = of.modes[0], second = of.modes[1];
    if (a.type != R_8F_E4M3) return first == SCALAR && second == SCALAR && !of.scales[0] && !of.scales[1];
    bool plain = first == SCALAR && second == SCALAR, rows = first == ROWS && second == ROWS;
    bool blocks = (first == VECTORS || first == BLOCKS) && (second == VECTORS || second == BLOCKS) && first + second < 2 * BLOCKS;
    int capability = of_driver<int (*)()>("standin_capability")();
    if (plain ? capability < 89 : capability != 90 || !(rows || blocks)) return false;
    if (blocks && (a.columns % 4 || b.columns % 4)) return false;
    for (uint64_t scales : of.scales) {
        if (plain ? scales : !scales || scales % 16) return false;
    }
    // Rows of all matrices are aligned to 16 bytes, and the output is wider than the factors.
    return a.rows % 16 == 0 && a.stride % 16 == 0 && b.stride % 16 == 0 && d.rows * d.element() % 16 == 0 &&
           d.stride * d.element() % 16 == 0 && d.type != R_8F_E4M3;
}

}  // namespace

API int cublasLtCreate(void** handle) {
    *handle = new char;
    return SUCCESS;
}
API int cublasLtDestroy(void* handle) {
    delete (char*)handle;
    return SUCCESS;
}
// Major number, minor number and patch level of the release that has what it supports.
API int cublasLtGetProperty(int property, int* value) {
    constexpr int RELEASE[3] = {12, 9, 1};
    if (property < 0 || property > 2) return INVALID_VALUE;
    *value = RELEASE[property];
    return SUCCESS;
}
API int cublasLtMatmulDescCreate(void** description, int compute, int scale) {
    if (compute != 68 || scale != R_32F) return NOT_SUPPORTED;
    *description = new Description;
    return SUCCESS;
}
API int cublasLtMatmulDescDestroy(void* description) {
    delete (Description*)description;
    return SUCCESS;
}
API int cublasLtMatmulDescSetAttribute(void* description, int attribute, const void* value, size_t bytes) {
    auto& found = *(Description*)description;
    switch (attribute) {
        case 3: return bytes == 4 ? (memcpy(&found.transpose_a, value, 4), SUCCESS) : INVALID_VALUE;
        case 4: return bytes == 4 ? (memcpy(&found.transpose_b, value, 4), SUCCESS) : INVALID_VALUE;
        case 7: return bytes == 4 ? (memcpy(&found.epilogue, value, 4), SUCCESS) : INVALID_VALUE;
        case 8: return bytes == 8 ? (memcpy(&found.bias, value, 8), SUCCESS) : INVALID_VALUE;
        case 17: case 18: return bytes == 8 ? (memcpy(&found.scales[attribute - 17], value, 8), SUCCESS) : INVALID_VALUE;
        case 31: case 32:
            if (int error = of_driver<int (*)(const char*)>("standin_enter")("CUBLASLT_MATMUL_DESC_A_SCALE_MODE")) return error;
            return bytes == 4 ? (memcpy(&found.modes[attribute - 31], value, 4), SUCCESS) : INVALID_VALUE;
        default: return NOT_SUPPORTED;
    }
}
API int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    if (!rows || !columns || stride < (int64_t)rows) return INVALID_VALUE;
    *layout = new Layout{type, rows, columns, stride};
    return SUCCESS;
}
API int cublasLtMatrixLayoutDestroy(void* layout) {
    delete (Layout*)layout;
    return SUCCESS;
}
API int cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = new Preference;
    return SUCCESS;
}
API int cublasLtMatmulPreferenceDestroy(void* preference) {
    delete (Preference*)preference;
    return SUCCESS;
}
API int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t bytes) {
    auto& found = *(Preference*)preference;
    switch (attribute) {
        case 1: return bytes == 8 ? (memcpy(&found.workspace, value, 8), SUCCESS) : INVALID_VALUE;
        case 3: return bytes == 4 ? (memcpy(&found.reductions, value, 4), SUCCESS) : INVALID_VALUE;
        case 5: case 6: case 7: case 8:
            return bytes == 4 ? (memcpy(&found.alignment[attribute], value, 4), SUCCESS) : INVALID_VALUE;
        default: return NOT_SUPPORTED;
    }
}
// All algorithms compute the same. They require the full alignment that the preference states. The last one is offered as invalid.
constexpr int ALGORITHMS = 4;
API int cublasLtMatmulAlgoGetHeuristic(void*, void* description, void* a, void* b, void* c, void* d, void* preference,
                                       int wanted, Heuristic* found, int* count) {
    if (int error = of_driver<int (*)(const char*)>("standin_enter")(__func__)) return error;
    auto &da = *(Layout*)a, &db = *(Layout*)b, &dc = *(Layout*)c, &dd = *(Layout*)d;
    bool fits = ((Description*)description)->transpose_a == 1 && ((Description*)description)->transpose_b == 0 &&
                da.rows == db.rows && da.columns == dd.rows && db.columns == dd.columns && dc.rows == dd.rows &&
                dc.columns == dd.columns && da.type == db.type && wanted > 0;
    // Accumulation of bf16 in bf16 is refused. The algorithm that adds a bias depends on the bias's address.
    auto& preferred = *(Preference*)preference;
    fits &= (preferred.reductions & ~2u) == 0;
    fits &= ((Description*)description)->epilogue != 4 || ((Description*)description)->bias;
    fits &= scales_fit(*(Description*)description, da, db, dd);
    *count = fits ? std::min(wanted, ALGORITHMS) : 0;
    if (!fits) return NOT_SUPPORTED;
    for (int one = 0; one < *count; one++) {
        found[one] = {};
        found[one].algorithm[0] = 1 + (uint64_t)one;
        for (int i = 0; i < 4; i++) found[one].algorithm[1 + i] = preferred.alignment[5 + i];
        found[one].workspace = 1 << 20;
        found[one].state = one == ALGORITHMS - 1 ? NOT_SUPPORTED : SUCCESS;
    }
    return SUCCESS;
}
API int cublasLtMatmul(void* handle, void* description, const float* alpha, uint64_t a, void* a_layout, uint64_t b,
                       void* b_layout, const float* beta, uint64_t c, void* c_layout, uint64_t d, void* d_layout,
                       const uint64_t* algorithm, uint64_t workspace, size_t workspace_bytes, void* stream) {
    if (int error = of_driver<int (*)(const char*)>("standin_enter")(__func__)) return error;
    if (algorithm[0] < 1 || algorithm[0] >= ALGORITHMS) return INVALID_VALUE;
    std::string counted = "cublasLt algorithm " + std::to_string(algorithm[0]);
    if (int error = of_driver<int (*)(const char*)>("standin_enter")(counted.c_str())) return error;
    const uint64_t addresses[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        if (addresses[i] % algorithm[1 + i]) return INVALID_VALUE;
    }
    auto is_device = of_driver<int (*)(uint64_t, size_t)>("standin_is_device_memory");
    auto submit = of_driver<int (*)(void*, int (*)(void*), void*, void (*)(void*), float)>("standin_submit");
    auto time = of_driver<float (*)(uint64_t)>("standin_algorithm_time");
    if (!is_device || !submit || !time || !handle) return INVALID_VALUE;
    auto* product = new Product{*(Description*)description, *(Layout*)a_layout, *(Layout*)b_layout, *(Layout*)d_layout,
                                a, b, c, d, *alpha, *beta};
    const auto& p = *product;
    bool fits = is_device(a, p.a.bytes()) && is_device(b, p.b.bytes()) && is_device(d, p.d.bytes()) &&
                is_device(c, ((Layout*)c_layout)->bytes()) && workspace_bytes >= 1 << 20 &&
                is_device(workspace, workspace_bytes) &&
                (p.description.epilogue != 4 ||
                 (p.description.bias % 16 == 0 && is_device(p.description.bias, p.d.rows * p.d.element())));
    for (int i = 0; i < 2; i++) {
        int mode = p.description.modes[i];
        uint64_t scales = p.description.scales[i];
        fits &= mode == SCALAR || (scales % 16 == 0 && is_device(scales, count_of_scales(mode, i ? p.b : p.a) * sizeof(float)));
    }
    if (!fits) {
        delete product;
        return INVALID_VALUE;
    }
    auto destroy = [](void* data) { delete (Product*)data; };
    return submit(stream, multiply, product, destroy, time(algorithm[0] - 1)) ? EXECUTION_FAILED : SUCCESS;
}
