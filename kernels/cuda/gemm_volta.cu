// Matrix product on the tensor cores of Volta, of a dense matrix or of experts: f16 operands with f32 accumulation.
//
// A CTA computes BM x BN outputs, a warp WM x WN of them. sm_70 has no asynchronous copies to shared memory, so a
// thread loads its pieces of the next stage into registers before this stage is multiplied and stores them afterwards;
// it decodes quantised weights then.
// The sum of an output adds the inputs in steps of 4 from first to last for every tile, so tiles of all sizes give the
// same bits.
#include "experts.h"
#include "linear.h"
#include "quant.h"

// A thread's 16-byte pieces of a tile of ROWS rows of `k` inputs. `row(r, valid)` returns the address of row r and clears
// `valid` if there is no such row.
template <u32 ROWS, u32 THREADS, class Row>
struct Pieces {
    static constexpr u32 COUNT = (ROWS * PIECES + THREADS - 1) / THREADS;
    u32 k;
    Row row;
    uint4 held[COUNT];

    // Reads the inputs of a stage, with zeros beyond the last.
    DEVICE void read(u32 step) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            u32 at = threadIdx.x + i * THREADS, column = step * STAGE_INPUTS + at % PIECES * 8;
            bool valid = at < ROWS * PIECES && column < k;
            const f16* from = row(at / PIECES, valid);
            held[i] = valid ? *(const uint4*)(from + column) : make_uint4(0, 0, 0, 0);
        }
    }

    DEVICE void write(f16* stage) const {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            u32 at = threadIdx.x + i * THREADS;
            Vec<f16, 8> piece;
            piece.registers = held[i];
            if (at < ROWS * PIECES) store(stage + staged(at / PIECES, at % PIECES), piece);
        }
    }
};

template <u32 ROWS, u32 THREADS, class Row>
DEVICE Pieces<ROWS, THREADS, Row> pieces(u32 k, Row row) {
    return {k, row, {}};
}

// The same for rows of a quantised weight, of which a stage has one group each. Four threads decode a group.
template <class F, u32 ROWS, u32 THREADS>
struct Groups {
    static constexpr u32 PARTS = 4, STEP = THREADS / PARTS, COUNT = ROWS / STEP;
    static_assert(STAGE_INPUTS == 32 && ROWS % STEP == 0, "threads decode equally many parts of groups");
    const QuantWeight& weight;
    // Row of the weight that is the first of the tile, the number of rows from there on, and groups of a row.
    u64 first;
    u32 rows, groups;
    decltype(read_group<F, 2>(QuantWeight(), GroupAt(0, 0, 0))) held[COUNT];

    DEVICE void read(u32 step) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            // Rows beyond the last are read as the last one and not written.
            const u32 row = min(threadIdx.x / PARTS + i * STEP, rows - 1);
            held[i] = read_group<F, 2>(weight, GroupAt(first + row, groups, step), threadIdx.x % PARTS);
        }
    }

    DEVICE void write(f16* stage) const {
        const u32 part = threadIdx.x % PARTS;
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                float values[4];
                held[i].values(half, values);
                Vec<f16, 4> rounded;
#pragma unroll
                for (u32 e = 0; e < 4; ++e) rounded.x[e] = from_float<f16>(values[e]);
                store(stage + staged(threadIdx.x / PARTS + i * STEP, half * 2 + part / 2) + part % 2 * 4, rounded);
            }
    }
};

template <int BM, int BN, int WM, int WN>
struct VoltaTile {
    static constexpr u32 WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
    // An instruction multiplies four 8x8 tiles, one per eight lanes: here the quarters of a 16x16 tile by bit 2 of row
    // and column, so that eight lanes that load together have eight adjacent rows of an operand, in different banks.
    static constexpr u32 TILES_M = WM / 16, TILES_N = WN / 16;
    static constexpr u32 STAGE = (BM + BN) * STAGE_INPUTS;
    static_assert(WM % 16 == 0 && WN % 16 == 0, "a warp's part is of whole tensor-core tiles");

    // Row and column in the tile of this warp's part.
    u32 warp_m = warp_id() / WARPS_N * WM, warp_n = warp_id() % WARPS_N * WN;
    float sums[TILES_M][TILES_N][8] = {};

    // Adds the products of the rows of the input and of the weight.
    template <class Input, class Weight>
    DEVICE void run(f16* stages, u32 k, Input input, Weight weight) {
        const u32 steps = (k + STAGE_INPUTS - 1) / STAGE_INPUTS;
        auto read = [&](u32 step) {
            input.read(step);
            weight.read(step);
        };
        auto write = [&](u32 step) {
            f16* stage = stages + step % 2 * STAGE;
            input.write(stage);
            weight.write(stage + BM * STAGE_INPUTS);
        };
        read(0);
        write(0);
        __syncthreads();
        for (u32 step = 0; step < steps; ++step) {
            if (step + 1 < steps) read(step + 1);
            multiply(stages + step % 2 * STAGE);
            // All threads left the other stage before the last barrier.
            if (step + 1 < steps) write(step + 1);
            __syncthreads();
        }
    }

    DEVICE void multiply(const f16* a) {
        const u32 lane = lane_id(), line_m = lane % 4 + lane / 8 % 2 * 4 + lane / 16 * 8, line_n = lane % 8 + lane / 16 * 8;
        const f16* b = a + BM * STAGE_INPUTS;
#pragma unroll
        for (u32 piece = 0; piece < PIECES; ++piece) {
            uint4 a_rows[TILES_M], b_rows[TILES_N];
#pragma unroll
            for (u32 i = 0; i < TILES_M; ++i)
                a_rows[i] = load<8>(a + staged(warp_m + i * 16 + line_m, piece)).registers;
#pragma unroll
            for (u32 j = 0; j < TILES_N; ++j)
                b_rows[j] = load<8>(b + staged(warp_n + j * 16 + line_n, piece)).registers;
            // The loop takes the first four of the eight inputs, then the others.
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
    }

    // Writes the outputs. `row(r)` returns the row of the output for row r of the tile; the first column is `n0`.
    template <class O, class Row>
    DEVICE void write(const LinearParams& p, u32 n0, Row row) {
        const u32 lane = lane_id();
        const u32 line = warp_m + lane % 2 + lane / 8 % 2 * 4 + lane / 16 * 8, col = n0 + warp_n + (lane & 6);
        // Each 16x16 is four pairs per thread: the second is two rows down, the third and fourth are eight columns on.
        write_pairs<O>(p, (float (&)[TILES_M * TILES_N * 4][2])sums, [&](u32 i) {
            const u32 tile = i / 4;
            return make_uint2(row(line + tile / TILES_N * 16 + i % 2 * 2), col + tile % TILES_N * 16 + i / 2 % 2 * 8);
        });
    }
};

template <class O, int BM, int BN, int WM, int WN>
DEVICE void gemm_volta(const LinearParams& p) {
    DYNAMIC_SHARED(shared);
    const u32 m0 = blockIdx.x * BM, n0 = blockIdx.y * BN;
    auto row_of = [&](const void* matrix, u32 rows, u32 r, bool& valid) {
        valid = valid && r < rows;
        return (const f16*)matrix + (u64)r * p.k;
    };
    using Tile = VoltaTile<BM, BN, WM, WN>;
    Tile tile;
    tile.run((f16*)shared, p.k,
             pieces<BM, Tile::THREADS>(p.k, [&](u32 r, bool& valid) { return row_of(p.input, p.m, m0 + r, valid); }),
             pieces<BN, Tile::THREADS>(p.k, [&](u32 r, bool& valid) { return row_of(p.weight, p.n, n0 + r, valid); }));
    tile.template write<O>(p, n0, [&](u32 r) { return m0 + r; });
}

// Multiplies the pairs of an expert. `weight(expert)` returns the rows of the weight. Grid: tiles, outputs, parts of a tile.
template <class Tile, u32 BM, u32 BN, class Weight>
DEVICE void multiply_volta_pairs(const ExpertLinearParams& p, Weight weight) {
    SHARED_ARRAY(u32, pairs, BM);
    const ExpertTile own(p, BM);
    if (own.count == 0) return;
    for (u32 r = threadIdx.x; r < BM; r += Tile::THREADS) pairs[r] = own.pair(p, r);
    __syncthreads();

    DYNAMIC_SHARED(shared);
    Tile tile;
    const auto input = pieces<BM, Tile::THREADS>(p.k, [&](u32 r, bool& valid) {
        valid = valid && r < own.count;
        return (const f16*)p.input + (u64)(pairs[r % BM] / p.share) * p.input_stride;
    });
    tile.run((f16*)shared, p.k, input, weight(own.expert));
    tile.template write<f16>(own.template output<f16>(p), blockIdx.y * BN,
                             [&](u32 r) { return r < own.count ? pairs[r] : ExpertTile::NO_PAIR; });
}

template <int BM, int BN, int WM, int WN>
DEVICE void expert_volta(const ExpertLinearParams& p) {
    using Tile = VoltaTile<BM, BN, WM, WN>;
    const u32 n0 = blockIdx.y * BN;
    multiply_volta_pairs<Tile, BM, BN>(p, [&](u32 expert) {
        return pieces<BN, Tile::THREADS>(p.k, [&p, expert, n0](u32 r, bool& valid) {
            valid = valid && n0 + r < p.n;
            return (const f16*)p.weight + ((u64)expert * p.n + n0 + r) * p.k;
        });
    });
}

// The same with a quantised weight, whose values are rounded to f16.
template <class F, int BM, int BN, int WM, int WN>
DEVICE void expert_volta_quant(const ExpertLinearParams& p) {
    using Tile = VoltaTile<BM, BN, WM, WN>;
    const u32 n0 = blockIdx.y * BN;
    multiply_volta_pairs<Tile, BM, BN>(p, [&](u32 expert) {
        return Groups<F, BN, Tile::THREADS>{p.quant, (u64)expert * p.n + n0, p.n - n0, p.k / 32, {}};
    });
}
