// Dense matrix product on the tensor cores of sm_80 and later: 16-bit operands with f32 accumulation.
//
// A CTA computes BM x BN outputs, a warp WM x WN of them. Both operands pass through a ring of STAGES stages in shared
// memory, filled by cp.async while older stages are multiplied. The sum of an output adds the inputs in steps of 16
// from first to last for every tile, so tiles of all sizes give the same bits, and a row's result depends on no other
// row.
#include "linear.h"

// Starts copying a stage: the inputs from `k0` on of ROWS rows of a matrix [rows, k], from `row0` on, with zeros beyond
// the matrix.
template <u32 ROWS, u32 THREADS, class T>
DEVICE void fill_stage(T* stage, const T* matrix, u32 rows, u32 k, u32 row0, u32 k0) {
    constexpr u32 EACH = (ROWS * PIECES + THREADS - 1) / THREADS;
    static_assert(ROWS * PIECES % THREADS == 0 || EACH == 1, "threads copy equally many pieces");
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 at = i * THREADS + threadIdx.x, row = at / PIECES, piece = at % PIECES, column = k0 + piece * 8;
        if (ROWS * PIECES < THREADS && at >= ROWS * PIECES) continue;
        bool valid = row0 + row < rows && column < k;
        const T* from = valid ? matrix + ((u64)(row0 + row) * k + column) : matrix;
        cp_async_16(stage + staged(row, piece), from, valid);
    }
}

template <class T, class O, int BM, int BN, int WM, int WN, int STAGES>
DEVICE void gemm_mma(const LinearParams& p) {
    constexpr u32 WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
    constexpr u32 TILES_M = WM / 16, TILES_N = WN / 8;
    constexpr u32 STAGE = (BM + BN) * STAGE_INPUTS;
    static_assert(WM % 16 == 0 && WN % 16 == 0, "a warp's part is of whole tensor-core tiles");

    DYNAMIC_SHARED(shared);
    T* stages = (T*)shared;
    const u32 lane = lane_id();
    const u32 m0 = blockIdx.x * BM, n0 = blockIdx.y * BN;
    const u32 warp_m = warp_id() / WARPS_N * WM, warp_n = warp_id() % WARPS_N * WN;
    const u32 steps = (p.k + STAGE_INPUTS - 1) / STAGE_INPUTS;

    auto fill = [&](u32 step) {
        T* stage = stages + step % STAGES * STAGE;
        if (step < steps) {
            fill_stage<BM, THREADS>(stage, (const T*)p.input, p.m, p.k, m0, step * STAGE_INPUTS);
            fill_stage<BN, THREADS>(stage + BM * STAGE_INPUTS, (const T*)p.weight, p.n, p.k, n0, step * STAGE_INPUTS);
        }
        // A group is committed even if there is nothing to copy, because waits count groups.
        cp_async_commit();
    };

    float sums[TILES_M][TILES_N][4] = {};
#pragma unroll
    for (u32 step = 0; step < STAGES - 1; ++step) fill(step);

    for (u32 step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        // After the barrier, this stage is complete for all threads, and all have left the stage that is filled next.
        __syncthreads();
        fill(step + STAGES - 1);
        const T* a = stages + step % STAGES * STAGE;
        const T* b = a + BM * STAGE_INPUTS;
#pragma unroll
        for (u32 piece = 0; piece < PIECES; piece += 2) {
            u32 a_tiles[TILES_M][4], b_tiles[TILES_N / 2][4];
#pragma unroll
            for (u32 i = 0; i < TILES_M; ++i)
                ldmatrix_x4(a_tiles[i], a + staged(warp_m + i * 16 + lane % 16, piece + lane / 16));
#pragma unroll
            for (u32 j = 0; j < TILES_N / 2; ++j)
                ldmatrix_x4(b_tiles[j], b + staged(warp_n + j * 16 + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
#pragma unroll
            for (u32 i = 0; i < TILES_M; ++i)
#pragma unroll
                for (u32 j = 0; j < TILES_N; ++j) mma_m16n8k16(sums[i][j], a_tiles[i], &b_tiles[j / 2][j % 2 * 2], T());
        }
    }

    // Each 16x8 is two pairs per thread, eight rows apart.
    write_pairs<O>(p, (float (&)[TILES_M * TILES_N * 2][2])sums, [&](u32 i) {
        const u32 tile = i / 2;
        return make_uint2(m0 + warp_m + tile / TILES_N * 16 + i % 2 * 8 + lane / 4,
                          n0 + warp_n + tile % TILES_N * 8 + lane % 4 * 2);
    });
}
