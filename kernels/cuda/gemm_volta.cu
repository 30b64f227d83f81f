// Dense matrix product by the tensor cores of Volta: operands in f16, sums in f32.
//
// A CTA computes BM x BN outputs, a warp WM x WN of them. sm_70 cannot copy to shared memory behind a kernel's back, so a thread
// loads its pieces of the next stage into registers before this stage is multiplied and stores them after. The sum of an output
// runs over the inputs in steps of 4 from first to last, whatever the tile, so tiles of all sizes give the same bits.
#include "linear.h"

// The pieces of 16 bytes that a thread has of a tile of ROWS rows.
template <u32 ROWS, u32 THREADS>
struct Pieces {
    static constexpr u32 COUNT = (ROWS * PIECES + THREADS - 1) / THREADS;
    uint4 held[COUNT];

    // The inputs from `k0` on of the rows from `row0` on of a matrix [rows, k]; zeros beyond it.
    DEVICE void read(const f16* matrix, u32 rows, u32 k, u32 row0, u32 k0) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            u32 at = threadIdx.x + i * THREADS, row = row0 + at / PIECES, column = k0 + at % PIECES * 8;
            bool valid = at < ROWS * PIECES && row < rows && column < k;
            held[i] = valid ? *(const uint4*)(matrix + ((u64)row * k + column)) : make_uint4(0, 0, 0, 0);
        }
    }

    DEVICE void write(f16* stage) const {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            u32 at = threadIdx.x + i * THREADS;
            if (at < ROWS * PIECES) *(uint4*)(stage + staged(at / PIECES, at % PIECES)) = held[i];
        }
    }
};

template <class O, int BM, int BN, int WM, int WN>
DEVICE void gemm_volta(const LinearParams& p) {
    constexpr u32 WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
    // An instruction multiplies four 8x8 tiles, one each eight lanes: here the quarters of a 16x16 tile.
    constexpr u32 TILES_M = WM / 16, TILES_N = WN / 16;
    constexpr u32 STAGE = (BM + BN) * STAGE_INPUTS;
    static_assert(WM % 16 == 0 && WN % 16 == 0, "a warp's part is of whole tensor-core tiles");

    DYNAMIC_SHARED(shared);
    f16* stages = (f16*)shared;
    const u32 lane = lane_id();
    const u32 m0 = blockIdx.x * BM, n0 = blockIdx.y * BN;
    const u32 warp_m = warp_id() / WARPS_N * WM, warp_n = warp_id() % WARPS_N * WN;
    const u32 steps = (p.k + STAGE_INPUTS - 1) / STAGE_INPUTS;
    const u32 quarter_m = lane / 8 % 2 * 8, quarter_n = lane / 4 % 2 * 8;
    const u32 line = lane % 4 + lane / 16 * 4;

    Pieces<BM, THREADS> input;
    Pieces<BN, THREADS> weight;
    auto read = [&](u32 step) {
        input.read((const f16*)p.input, p.m, p.k, m0, step * STAGE_INPUTS);
        weight.read((const f16*)p.weight, p.n, p.k, n0, step * STAGE_INPUTS);
    };
    auto write = [&](u32 step) {
        f16* stage = stages + step % 2 * STAGE;
        input.write(stage);
        weight.write(stage + BM * STAGE_INPUTS);
    };

    float sums[TILES_M][TILES_N][8] = {};
    read(0);
    write(0);
    __syncthreads();
    for (u32 step = 0; step < steps; ++step) {
        if (step + 1 < steps) read(step + 1);
        const f16* a = stages + step % 2 * STAGE;
        const f16* b = a + BM * STAGE_INPUTS;
#pragma unroll
        for (u32 piece = 0; piece < PIECES; ++piece) {
            uint4 a_rows[TILES_M], b_rows[TILES_N];
#pragma unroll
            for (u32 i = 0; i < TILES_M; ++i)
                a_rows[i] = *(const uint4*)(a + staged(warp_m + i * 16 + quarter_m + line, piece));
#pragma unroll
            for (u32 j = 0; j < TILES_N; ++j)
                b_rows[j] = *(const uint4*)(b + staged(warp_n + j * 16 + quarter_n + line, piece));
            // The first four of the eight inputs, then the others.
#pragma unroll
            for (u32 half = 0; half < 2; ++half)
#pragma unroll
                for (u32 i = 0; i < TILES_M; ++i)
#pragma unroll
                    for (u32 j = 0; j < TILES_N; ++j) {
                        const uint4 x = a_rows[i], y = b_rows[j];
                        u32 a_four[2] = {half ? x.z : x.x, half ? x.w : x.y};
                        u32 b_four[2] = {half ? y.z : y.x, half ? y.w : y.y};
                        mma_m8n8k4_row_col(sums[i][j], a_four, b_four);
                    }
        }
        // The other stage: everyone left it before the last barrier.
        if (step + 1 < steps) write(step + 1);
        __syncthreads();
    }

    const u32 row = m0 + warp_m + quarter_m + lane % 2 + lane / 16 * 4, col = n0 + warp_n + quarter_n + (lane & 2);
#pragma unroll
    for (u32 i = 0; i < TILES_M; ++i)
#pragma unroll
        for (u32 j = 0; j < TILES_N; ++j)
#pragma unroll
            for (u32 e = 0; e < 8; e += 2)
                write_output_pair<O>(p, row + i * 16 + (e & 2), col + j * 16 + (e & 4), sums[i][j][e], sums[i][j][e + 1]);
}
