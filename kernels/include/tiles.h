// The loop of the products on the tensor cores of sm_75 and later, and the copies of their operands.
#pragma once
#include "linear.h"

// Starts copying the inputs from `k0` on of ROWS rows of `k` inputs to a stage, with zeros beyond them. `row(r, valid)`
// returns the address of row r and clears `valid` if there is no such row; the address is readable then too.
template <u32 ROWS, u32 THREADS, class T, class Row>
DEVICE void fill_stage(T* stage, u32 k, u32 k0, Row row) {
    constexpr u32 EACH = (ROWS * PIECES + THREADS - 1) / THREADS;
    static_assert(ROWS * PIECES % THREADS == 0 || EACH == 1, "threads copy equally many pieces");
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 at = i * THREADS + threadIdx.x, r = at / PIECES, piece = at % PIECES, column = k0 + piece * 8;
        if (ROWS * PIECES < THREADS && at >= ROWS * PIECES) continue;
        bool valid = column < k;
        const T* from = row(r, valid);
        cp_async_16(stage + staged(r, piece), valid ? from + column : from, valid);
    }
}

// Returns the address of row r of a matrix of `rows` rows of `k` elements. If there is no such row, it clears `valid` and returns
// that of the first.
template <class T>
DEVICE const T* row_of(const void* matrix, u32 rows, u32 k, u32 r, bool& valid) {
    valid = valid && r < rows;
    return (const T*)matrix + (valid ? (u64)r * k : 0);
}

// Multiplies fragments of 16-bit elements. A product has `begin(group)`, which is called before the products of a group of
// 32 bytes of each row, counted from the first input, and `add(sum, a, b, j)`, which adds the product of fragments to the
// sums of the j-th tile of columns.
template <class T>
struct PlainProduct {
    DEVICE void begin(u32) {}
    DEVICE void add(float (&sum)[4], const u32* a, const u32* b, u32) { mma_m16n8k16(sum, a, b, T()); }
};

// BM x BN outputs of a CTA, WM x WN of a warp. Both operands pass through a ring of STAGES stages in shared memory, which
// are filled while older stages are multiplied. The sum of an output adds the inputs in steps of 16 from first to last,
// so tiles of all sizes give the same bits, and a row's result depends on no other row.
template <class T, int BM, int BN, int WM, int WN, int STAGES>
struct MmaTile {
    static constexpr u32 WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
    static constexpr u32 TILES_M = WM / 16, TILES_N = WN / 8;
    static constexpr u32 STAGE = (BM + BN) * STAGE_INPUTS;
    static_assert(WM % 16 == 0 && (WN % 16 == 0 || WN == 8), "a warp's part is of whole tensor-core tiles");

    // Row and column in the tile of this warp's part.
    u32 warp_m = warp_id() / WARPS_N * WM, warp_n = warp_id() % WARPS_N * WN;
    float sums[TILES_M][TILES_N][4] = {};

    // Adds the products of `steps` stages. `fill(stage, step)` writes the rows of the input, then those of the weight, to
    // a stage; it may use cp.async.
    template <class Fill>
    DEVICE void run(T* stages, u32 steps, Fill fill) {
        run(stages, steps, fill, PlainProduct<T>());
    }

    template <class Fill, class Product>
    DEVICE void run(T* stages, u32 steps, Fill fill, Product product) {
        auto next = [&](u32 step) {
            if (step < steps) fill(stages + step % STAGES * STAGE, step);
            // A group is committed even if there is nothing to copy, because waits count groups.
            cp_async_commit();
        };
#pragma unroll
        for (u32 step = 0; step < STAGES - 1; ++step) next(step);
        for (u32 step = 0; step < steps; ++step) {
            cp_async_wait<STAGES - 2>();
            // After the barrier, this stage is complete for all threads, and all have left the stage that is filled next.
            __syncthreads();
            next(step + STAGES - 1);
            multiply(stages + step % STAGES * STAGE, step * (PIECES / 2), product);
        }
    }

    template <class Product>
    DEVICE void multiply(const T* a, u32 group, Product& product) {
        const u32 lane = lane_id();
        const T* b = a + BM * STAGE_INPUTS;
#pragma unroll
        for (u32 piece = 0; piece < PIECES; piece += 2) {
            product.begin(group + piece / 2);
            u32 a_tiles[TILES_M][4], b_tiles[(TILES_N + 1) / 2][4];
#pragma unroll
            for (u32 i = 0; i < TILES_M; ++i)
                ldmatrix_x4(a_tiles[i], a + staged(warp_m + i * 16 + lane % 16, piece + lane / 16));
#pragma unroll
            for (u32 j = 0; j < (TILES_N + 1) / 2; ++j) {
                // A single tile of columns is loaded twice.
                const u32 second = TILES_N == 1 ? 0 : lane / 16 * 8;
                ldmatrix_x4(b_tiles[j], b + staged(warp_n + j * 16 + second + lane % 8, piece + lane / 8 % 2));
            }
#pragma unroll
            for (u32 i = 0; i < TILES_M; ++i)
#pragma unroll
                for (u32 j = 0; j < TILES_N; ++j) product.add(sums[i][j], a_tiles[i], &b_tiles[j / 2][j % 2 * 2], j);
        }
    }

    // Writes the outputs. `row(r)` returns the row of the output for row r of the tile; the first column is `n0`.
    template <class O, class P, class Row>
    DEVICE void write(const P& p, u32 n0, Row row) {
        const u32 lane = lane_id();
        // Each 16x8 is two pairs per thread, eight rows apart.
        write_pairs<O>(p, (float (&)[TILES_M * TILES_N * 2][2])sums, [&](u32 i) {
            const u32 tile = i / 2;
            return make_uint2(row(warp_m + tile / TILES_N * 16 + i % 2 * 8 + lane / 4),
                              n0 + warp_n + tile % TILES_N * 8 + lane % 4 * 2);
        });
    }
};
