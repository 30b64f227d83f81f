// Warp instructions and asynchronous copies. The layout of fragments is that of "Warp Level Matrix Instructions" in the
// PTX ISA; comments here name a number of a fragment by its (row, column).
#include "machine.h"
#include "races.h"

namespace emu {

void exchange(const Offer* offers, u32 mask) {
    for (u32 rest = mask; rest; rest &= rest - 1) {
        const Offer& offer = offers[__builtin_ctz(rest)];
        // The value of a lane outside the mask is undefined, so it is NaN.
        if (mask >> offer.first & 1) {
            memcpy(offer.result, offers[offer.first].operand, (size_t)offer.second);
        } else {
            memset(offer.result, 0xff, (size_t)offer.second);
        }
    }
}

void ballot(const Offer* offers, u32 mask) {
    u32 votes = 0;
    for (u32 rest = mask; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        votes |= (u32)offers[lane].first << lane;
    }
    for (u32 rest = mask; rest; rest &= rest - 1) memcpy(offers[__builtin_ctz(rest)].result, &votes, sizeof votes);
}

void CopyQueue::Copy::perform() const {
    if (valid) {
        memcpy(shared, global, bytes);
    } else {
        memset(shared, 0, bytes);
    }
}

void wait_for_copies(size_t pending) {
    CopyQueue& queue = copy_queue();
    if (queue.group_ends.size() <= pending) return;
    size_t groups = queue.group_ends.size() - pending, copies = queue.group_ends[groups - 1];
    for (size_t i = 0; i < copies; ++i) {
        const CopyQueue::Copy& copy = queue.copies[i];
        if (!copy.done) copy.perform();
        if constexpr (FINDS_RACES) races::copy_ends(copy.shared, copy.valid ? copy.global : nullptr, copy.bytes, copy.site);
    }
    queue.copies.erase(queue.copies.begin(), queue.copies.begin() + (ptrdiff_t)copies);
    queue.group_ends.erase(queue.group_ends.begin(), queue.group_ends.begin() + (ptrdiff_t)groups);
    for (size_t& end : queue.group_ends) end -= copies;
}

namespace {

bool is_aligned(const void* address, u32 bytes = 16) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

u16 element(const Offer* offers, int matrix, int row, int column) {
    return static_cast<const u16*>(offers[8 * matrix + row].operand)[column];
}

template <bool TRANSPOSED>
void load_matrices(const Offer* offers, u32) {
    const void* rows[32];
    for (int lane = 0; lane < 32; ++lane) rows[lane] = offers[lane].operand;
    if (counts_banks) count_accesses(rows, 16);
    for (int lane = 0; lane < 32; ++lane) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            int row = lane / 4, column = 2 * (lane % 4);
            u16 low = TRANSPOSED ? element(offers, matrix, column, row) : element(offers, matrix, row, column);
            u16 high = TRANSPOSED ? element(offers, matrix, column + 1, row) : element(offers, matrix, row, column + 1);
            static_cast<u32*>(offers[lane].result)[matrix] = low | (u32)high << 16;
        }
    }
}

// A lane's fragments of the two factors.
struct Factors {
    const u32 *a, *b;
};

// Returns element i of a fragment of 16-bit elements.
template <class T>
float unpack(const u32* fragment, int i) {
    return to_float(T{(u16)(fragment[i / 2] >> 16 * (i % 2))});
}

// A row of eight numbers, whose sums and products are those of its numbers.
using Row = float __attribute__((vector_size(32)));

// Computes the product of two matrices.
template <int ROWS, int K>
void product(const float (&a)[ROWS][K], const Row (&b)[K], Row (&sums)[ROWS]) {
    for (int row = 0; row < ROWS; ++row) {
        sums[row] = Row{};
        for (int k = 0; k < K; ++k) sums[row] += a[row][k] * b[k];
    }
}

// Adds the product of two matrices to the fragments of a warp.
template <int K>
void add_product(const float (&a)[16][K], const Row (&b)[K], const Offer* offers) {
    Row sums[16];
    product(a, b, sums);
    for (int lane = 0; lane < 32; ++lane) {
        float* d = static_cast<float*>(offers[lane].result);
        for (int i = 0; i < 4; ++i) d[i] += sums[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
    }
}

template <class T>
void multiply_16x8x16(const Offer* offers, u32) {
    float a[16][16];
    Row b[16];
    for (int lane = 0; lane < 32; ++lane) {
        const Factors& factors = *static_cast<const Factors*>(offers[lane].operand);
        int group = lane / 4, pair = 2 * (lane % 4);
        for (int i = 0; i < 8; ++i) a[group + 8 * (i / 2 % 2)][pair + i % 2 + 8 * (i / 4)] = unpack<T>(factors.a, i);
        for (int i = 0; i < 4; ++i) b[pair + i % 2 + 8 * (i / 2)][group] = unpack<T>(factors.b, i);
    }
    add_product(a, b, offers);
}

void multiply_16x8x4_tf32(const Offer* offers, u32) {
    float a[16][4];
    Row b[4];
    // The lower 13 bits of a number do not count.
    auto number = [](u32 bits) { return __uint_as_float(bits & 0xffffe000); };
    for (int lane = 0; lane < 32; ++lane) {
        const Factors& factors = *static_cast<const Factors*>(offers[lane].operand);
        for (int i = 0; i < 2; ++i) a[lane / 4 + 8 * i][lane % 4] = number(factors.a[i]);
        b[lane % 4][lane / 4] = number(factors.b[0]);
    }
    add_product(a, b, offers);
}

void multiply_16x8x32_e4m3(const Offer* offers, u32) {
    float a[16][32], b[32][8];
    for (int lane = 0; lane < 32; ++lane) {
        const Factors& factors = *static_cast<const Factors*>(offers[lane].operand);
        int group = lane / 4, quad = 4 * (lane % 4);
        for (int i = 0; i < 16; ++i)
            a[group + 8 * (i / 4 % 2)][quad + i % 4 + 16 * (i / 8)] = to_float(e4m3{(u8)(factors.a[i / 4] >> 8 * (i % 4))});
        for (int i = 0; i < 8; ++i) b[quad + i % 4 + 16 * (i / 4)][group] = to_float(e4m3{(u8)(factors.b[i / 4] >> 8 * (i % 4))});
    }
    for (int lane = 0; lane < 32; ++lane) {
        float* d = static_cast<float*>(offers[lane].result);
        for (int i = 0; i < 4; ++i) {
            int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            d[i] = 0.0f;
            for (int k = 0; k < 32; ++k) d[i] += a[row][k] * b[k][column];
        }
    }
}

template <bool B_BY_ROWS>
void multiply_8x8x4(const Offer* offers, u32) {
    for (int quad_pair = 0; quad_pair < 4; ++quad_pair) {
        float a[8][4];
        Row b[4], sums[8];
        for (int r = 0; r < 8; ++r) {
            int lane = 4 * quad_pair + r % 4 + 16 * (r / 4);
            const Factors& factors = *static_cast<const Factors*>(offers[lane].operand);
            for (int i = 0; i < 4; ++i) {
                a[r][i] = unpack<f16>(factors.a, i);
                (B_BY_ROWS ? b[r % 4][4 * (r / 4) + i] : b[i][r]) = unpack<f16>(factors.b, i);
            }
        }
        product(a, b, sums);
        for (int r = 0; r < 8; ++r) {
            int lane = 4 * quad_pair + r % 4 + 16 * (r / 4);
            float* d = static_cast<float*>(offers[lane].result);
            for (int i = 0; i < 8; ++i) {
                int row = lane % 2 + (i & 2) + 4 * (lane / 16), column = (i & 4) + (lane & 2) + (i & 1);
                d[i] += sums[row][column];
            }
        }
    }
}

void multiply(float* d, const u32* a, const u32* b, Operation operation, const char* name) {
    Factors factors{a, b};
    warp_operation(ALL_LANES, {&factors, d, 0, 0}, operation, name);
}

}  // namespace
}  // namespace emu

using namespace emu;

void emu::begin_copy(void* shared, const void* global, u32 bytes, bool valid, const void* site) {
    if (!is_aligned(shared, bytes) || !is_aligned(global, bytes)) fail("cp.async of an address that is no multiple of its size");
    if (counts_banks) count_access(shared, bytes);
    const CopyQueue::Copy copy{shared, global, bytes, valid, copies_at_once(), site};
    if constexpr (FINDS_RACES) races::copy_begins(shared, valid ? global : nullptr, bytes, copy.site);
    if (copy.done) {
        copy.perform();
    } else {
        memset(shared, 0xff, bytes);
    }
    copy_queue().copies.push_back(copy);
}

void cp_async_16(void* shared, const void* global, bool valid) {
    begin_copy(shared, global, 16, valid, __builtin_return_address(0));
}

void cp_async_commit() {
    CopyQueue& queue = copy_queue();
    queue.group_ends.push_back(queue.copies.size());
}

void ldmatrix_x4(u32* result, const void* row) {
    if (!is_aligned(row)) fail("ldmatrix of an address that is no multiple of 16");
    // A row counts as read by the lane that passes its address.
    if constexpr (FINDS_RACES) races::access(row, 16, races::Access::READ, __builtin_return_address(0));
    warp_operation(ALL_LANES, {row, result, 0, 0}, load_matrices<false>, "ldmatrix");
}

void ldmatrix_x4_trans(u32* result, const void* row) {
    if (!is_aligned(row)) fail("ldmatrix of an address that is no multiple of 16");
    // A row counts as read by the lane that passes its address.
    if constexpr (FINDS_RACES) races::access(row, 16, races::Access::READ, __builtin_return_address(0));
    warp_operation(ALL_LANES, {row, result, 0, 0}, load_matrices<true>, "ldmatrix.trans");
}

void mma_m16n8k16(float* d, const u32* a, const u32* b, f16) { multiply(d, a, b, multiply_16x8x16<f16>, "mma.m16n8k16"); }
void mma_m16n8k16(float* d, const u32* a, const u32* b, bf16) { multiply(d, a, b, multiply_16x8x16<bf16>, "mma.m16n8k16"); }
void mma_m16n8k4_tf32(float* d, const u32* a, const u32* b) { multiply(d, a, b, multiply_16x8x4_tf32, "mma.m16n8k4"); }
void mma_m16n8k32_e4m3(float* d, const u32* a, const u32* b) { multiply(d, a, b, multiply_16x8x32_e4m3, "mma.m16n8k32"); }
u16 to_e4m3_pair(float low, float high) { return (u16)(from_float<e4m3>(low).bits | from_float<e4m3>(high).bits << 8); }
void mma_m8n8k4_row_col(float* d, const u32* a, const u32* b) { multiply(d, a, b, multiply_8x8x4<false>, "mma.m8n8k4"); }
void mma_m8n8k4_row_row(float* d, const u32* a, const u32* b) { multiply(d, a, b, multiply_8x8x4<true>, "mma.m8n8k4"); }
