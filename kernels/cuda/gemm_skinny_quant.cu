// Product of 16-bit activations with a quantised weight for at most ROWS rows, on the tensor cores of sm_80 and later: every weight
// is read once, at the bandwidth of memory.
//
// As in gemm_skinny.cu, outputs are the rows of a tile, and CTAs share the inputs of an output in equal parts. Codes are converted to
// 16 bits exactly and multiplied as they are. Their sum over the inputs that have a scale in common starts from zero, and the scale is
// applied to it in f32, so no weight is rounded but the numbers of NF4 and FP4. Minima are multiplied with the sums of the
// activations, and in bf16 make up for a constant in the codes (LEFT). The sums of a part are added in the order of the inputs, and the
// parts in their order, so a row's bits depend neither on ROWS nor on the other rows.
#include "code_pairs.h"
#include "linear.h"
#include "skinny.h"

// Number of groups of 32 inputs in a stage.
constexpr u32 GROUPS = 4;

// Offsets of the planes in a stage of OUTPUTS outputs and ROWS rows, and their sizes in bytes. `*_ROW` is what an output has.
template <class F, u32 OUTPUTS, u32 ROWS>
struct StageLayout {
    static constexpr u32 CODE_GROUP = F::CODES / F::BLOCK, HIGH_GROUP = F::HIGH / F::BLOCK;
    static constexpr u32 CODE_ROW = CODE_GROUP * GROUPS, HIGH_ROW = HIGH_GROUP * GROUPS;
    // Rows of 128 bytes are padded, so that eight rows that are read together are in different banks. Those of 64 have an order of
    // pieces that depends on the row, see `staged_code`.
    static constexpr u32 CODE_STRIDE = CODE_ROW == 128 ? 144 : CODE_ROW;
    // A stage has the scales of whole blocks. Two bytes are copied with the two beside them.
    static constexpr u32 BLOCKS = F::BLOCK < GROUPS ? GROUPS / F::BLOCK : 1;
    static constexpr u32 SCALE_ROW = F::OF_SCALES * BLOCKS, DELTA_BYTES = F::OF_DELTAS * BLOCKS;
    static constexpr u32 DELTA_ROW = DELTA_BYTES == 2 ? 4 : DELTA_BYTES;
    static constexpr u32 INPUT_ROW = GROUPS * 32 * 2;
    static constexpr u32 HIGH = OUTPUTS * CODE_STRIDE, SCALES = HIGH + OUTPUTS * HIGH_ROW;
    static constexpr u32 DELTAS = SCALES + OUTPUTS * SCALE_ROW, INPUT = DELTAS + OUTPUTS * DELTA_ROW;
    static constexpr u32 BYTES = INPUT + ROWS * INPUT_ROW;
};

// Returns the place of a piece of 16 bytes among those of a row of nibbles. Eight rows that are read together are in different banks.
DEVICE u32 staged_code(u32 row, u32 piece) { return piece ^ (row / 2 % 4); }

// Returns the place of a piece of 16 bytes in a row of the input. Four rows, of which 32 bytes each are read together, are in
// different banks.
DEVICE u32 staged_input(u32 row, u32 piece) { return piece ^ (row % 4 * 2); }

// Returns the part of a number that TF32 has; the rest is nearly another.
DEVICE u32 tf32_of(float value) { return __float_as_uint(value) & 0xffffe000; }

// The two terms of a factor in TF32.
struct SplitFactor {
    u32 upper, lower;
    DEVICE SplitFactor(float value) : upper(tf32_of(value)), lower(__float_as_uint(value - __uint_as_float(upper))) {}
};

// Grid: (tiles of WARPS * 32 outputs, parts of `steps` stages of GROUPS * 32 inputs).
template <class F, class T, int ROWS, int WARPS, int STAGES>
struct SkinnyQuant {
    static constexpr u32 THREADS = WARPS * 32, OUTPUTS = THREADS, TILES_N = ROWS / 8;
    static constexpr bool HAS_MINS = F::MINS > 0 && F::OFFSET == 0;
    // Parts of a stage with a minimum each.
    static constexpr u32 MINIMA = HAS_MINS ? F::MINS * GROUPS : 0;
    using Layout = StageLayout<F, OUTPUTS, ROWS>;
    // Number of pieces that a thread copies from each plane, and the distance of their rows.
    static constexpr u32 CODE_PIECES = Layout::CODE_ROW / 16, HIGH_PIECES = Layout::HIGH_ROW / 16;
    static constexpr u32 INPUT_PIECES = (ROWS * Layout::INPUT_ROW / 16 + THREADS - 1) / THREADS;
    static constexpr u32 INPUT_STEP = THREADS / (Layout::INPUT_ROW / 16);
    // Places after the stages: scales and minima by part of a group, output and group; sums of the inputs of a stage by part and row,
    // with a distance that puts the parts in different banks. Minima and sums are used in the next step.
    static constexpr u32 OF_SCALES = OUTPUTS * GROUPS * 4, OF_MINS = HAS_MINS ? F::MINS * OF_SCALES : 0;
    static constexpr u32 SUM_ROW = ROWS + 8, OF_SUMS = MINIMA * SUM_ROW * 4;
    static constexpr u32 SCALES = STAGES * Layout::BYTES, MINS = SCALES + F::SCALES * OF_SCALES, SUMS = MINS + 2 * OF_MINS;

    const SkinnyQuantParams& params;
    const QuantLinearParams& p;
    u8* const shared;
    const u32 n0, groups;
    float sums[2 * TILES_N][4];

    // What this thread copies, from places that do not change beside the stage's.
    struct Copies {
        const u8 *codes, *high, *scales, *deltas, *input;
        u32 code_row, high_row, input_row;
        u32 code_at, high_at, input_at;
    };

    DEVICE SkinnyQuant(const SkinnyQuantParams& params, u8* shared)
        : params(params), p(params.product), shared(shared), n0(blockIdx.x * OUTPUTS), groups(p.k / 32), sums() {}

    // Returns the row of the weight for a row of the tile. Rows beyond the last are computed as the last one and not written.
    DEVICE u32 weight_row(u32 r) const { return min(n0 + output_of(r), p.n - 1); }

    // Returns the address of the scales or deltas of a stage of this thread's output, in a plane with BYTES bytes of a block.
    template <u32 BYTES>
    DEVICE const u8* own(const u8* plane, u32 nth) const {
        return plane + ((u64)weight_row(threadIdx.x) * groups + nth * GROUPS) / F::BLOCK * BYTES;
    }

    DEVICE Copies copies(u32 first) const {
        const QuantWeight& w = p.weight;
        const u64 group = (u64)n0 * groups + first * GROUPS;
        Copies c = {};
        const u32 code_row = threadIdx.x / CODE_PIECES, code_piece = threadIdx.x % CODE_PIECES;
        c.codes = w.codes + group * Layout::CODE_GROUP + code_piece * 16;
        c.code_row = opaque(output_of(code_row));
        c.code_at = opaque(code_row * Layout::CODE_STRIDE +
                           (Layout::CODE_ROW == 64 ? staged_code(code_row, code_piece) : code_piece) * 16);
        if constexpr (HIGH_PIECES > 0) {
            const u32 row = threadIdx.x / HIGH_PIECES, piece = threadIdx.x % HIGH_PIECES;
            c.high = w.high + group * Layout::HIGH_GROUP + piece * 16;
            c.high_row = opaque(output_of(row));
            c.high_at = opaque(Layout::HIGH + threadIdx.x * 16);
        }
        if constexpr (Layout::SCALE_ROW > 0) c.scales = own<F::OF_SCALES>(w.scales, 0);
        if constexpr (Layout::DELTA_ROW > 0) c.deltas = own<F::OF_DELTAS>(w.deltas, 0);
        const u32 row = threadIdx.x / (Layout::INPUT_ROW / 16), piece = threadIdx.x % (Layout::INPUT_ROW / 16);
        c.input = (const u8*)p.input + (u64)first * Layout::INPUT_ROW + piece * 16;
        c.input_at = opaque(Layout::INPUT + row * Layout::INPUT_ROW + staged_input(row, piece) * 16);
        c.input_row = row;
        return c;
    }

    // Starts copying the BYTES bytes of this thread's output that are neither codes nor their upper bits.
    template <u32 BYTES>
    static DEVICE void copy_own(u8* to, const u8* from) {
        constexpr u32 EACH = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : 4;
#pragma unroll
        for (u32 i = 0; i < BYTES; i += EACH) {
            if constexpr (EACH == 16) {
                cp_async_16(to + i, from + i);
            } else {
                cp_async_few<EACH>(to + i, from + i);
            }
        }
    }

    // Returns the number of a stage's block among those of a row.
    static DEVICE u32 block_of(u32 nth) { return F::BLOCK > GROUPS ? nth / (F::BLOCK / GROUPS) : nth * (GROUPS / F::BLOCK); }

    // Starts copying the stage `step` steps after the first, which is stage `nth` of the inputs.
    DEVICE void fill(const Copies& c, u8* stage, u32 step, u32 nth) const {
        const u8* codes = c.codes + step * Layout::CODE_ROW;
#pragma unroll
        for (u32 i = 0; i < CODE_PIECES; ++i)
            cp_async_16(stage + c.code_at + i * (THREADS / CODE_PIECES * Layout::CODE_STRIDE),
                        codes + min(c.code_row + i * (THREADS / CODE_PIECES), p.n - 1 - n0) * (groups * Layout::CODE_GROUP));
        if constexpr (HIGH_PIECES > 0) {
            const u8* high = c.high + step * Layout::HIGH_ROW;
#pragma unroll
            for (u32 i = 0; i < HIGH_PIECES; ++i)
                cp_async_16(stage + c.high_at + i * THREADS * 16,
                            high + min(c.high_row + i * (THREADS / HIGH_PIECES), p.n - 1 - n0) * (groups * Layout::HIGH_GROUP));
        }
        if constexpr (Layout::SCALE_ROW > 0)
            copy_own<Layout::SCALE_ROW>(stage + Layout::SCALES + threadIdx.x * Layout::SCALE_ROW,
                                        c.scales + block_of(nth) * F::OF_SCALES);
        if constexpr (Layout::DELTA_ROW > 0) {
            const u8* deltas = c.deltas + block_of(nth) * F::OF_DELTAS;
            if constexpr (Layout::DELTA_BYTES == 2) deltas = (const u8*)((u64)deltas & ~(u64)3);
            copy_own<Layout::DELTA_ROW>(stage + Layout::DELTAS + threadIdx.x * Layout::DELTA_ROW, deltas);
        }
        const u8* input = c.input + step * Layout::INPUT_ROW;
#pragma unroll
        for (u32 i = 0; i < INPUT_PIECES; ++i) {
            const u32 r = c.input_row + i * INPUT_STEP;
            const bool valid = r < p.m;
            cp_async_16(stage + c.input_at + i * INPUT_STEP * Layout::INPUT_ROW, input + (valid ? r * p.k * 2 : 0), valid);
        }
    }

    // Decodes the scales and minima of this thread's output for its warp.
    DEVICE void decode(const Copies& c, const u8* stage, u32 nth, float* mins) const {
        QuantWeight planes = {};
        planes.scales = stage + Layout::SCALES + threadIdx.x * Layout::SCALE_ROW;
        planes.deltas = stage + Layout::DELTAS + threadIdx.x * Layout::DELTA_ROW;
        if constexpr (Layout::DELTA_BYTES == 2) planes.deltas += (u64)(c.deltas + block_of(nth) * F::OF_DELTAS) & 2;
        // A format without deltas has those of rows, if any.
        if constexpr (F::OF_DELTAS == 0) planes.deltas = p.weight.deltas;
        const u32 first = F::BLOCK > GROUPS ? nth % (F::BLOCK / GROUPS) * GROUPS : 0;
        Vec<float, GROUPS> of_scales[2], of_mins[2];
        read_scales_of_groups<F>(planes, weight_row(threadIdx.x), first, of_scales, of_mins);
        float* scales = (float*)(shared + SCALES);
#pragma unroll
        for (u32 half = 0; half < F::SCALES; ++half) store(scales + (half * OUTPUTS + threadIdx.x) * GROUPS, of_scales[half]);
        if constexpr (HAS_MINS) {
#pragma unroll
            for (u32 half = 0; half < F::MINS; ++half) {
#pragma unroll
                for (u32 i = 0; i < GROUPS; ++i)
                    of_mins[half].x[i] = fmaf(-(float)LEFT<F, T>, of_scales[half].x[i], of_mins[half].x[i]);
                store(mins + (half * OUTPUTS + threadIdx.x) * GROUPS, of_mins[half]);
            }
        }
    }

    // Sums the activations of each row for each part of a stage that has a minimum; warps take turns at the parts of eight rows.
    DEVICE void sum_inputs(const u8* stage, float* input_sums) const {
        const u32 ones = pack_pair<T>(1.0f, 1.0f), all[4] = {ones, ones, ones, ones};
        const u32 line = lane_id() / 4, column = lane_id() % 4;
#pragma unroll
        for (u32 i = 0; i < MINIMA * TILES_N; i += WARPS) {
            const u32 at = i + warp_id(), minimum = at % MINIMA, rows = at / MINIMA * 8;
            if (MINIMA * TILES_N % WARPS != 0 && at >= MINIMA * TILES_N) continue;
            float found[4] = {};
#pragma unroll
            for (u32 half = 0; half < 2 / F::MINS; ++half) {
                const uint2 b = input_piece(stage, rows + line, minimum * (4 / F::MINS) + half * 2);
                mma_m16n8k16(found, all, (const u32*)&b, T());
            }
            // All lines are equal.
            if (line < 2) input_sums[minimum * SUM_ROW + rows + column * 2 + line] = line ? found[1] : found[0];
        }
    }

    // Returns this lane's fragment of 16 inputs of a row, of which `piece` is the first of two.
    static DEVICE uint2 input_piece(const u8* stage, u32 row, u32 piece) {
        const u32 part = lane_id() % 4, at = staged_input(row, piece + part / 2) * 16 + part % 2 * 8;
        return load<4>((const T*)(stage + Layout::INPUT + row * Layout::INPUT_ROW + at)).registers;
    }

    // Adds the products of the minima of a stage with the sums of its activations.
    DEVICE void add_mins(const float* mins, const float* input_sums) {
        const u32 line = lane_id() / 4, column = lane_id() % 4;
#pragma unroll
        for (u32 half = 0; half < F::MINS; ++half) {
            u32 upper[2][2], lower[2][2];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const SplitFactor factor(mins[(half * OUTPUTS + warp_id() * 32 + i * 8 + line) * GROUPS + column]);
                upper[i / 2][i % 2] = factor.upper, lower[i / 2][i % 2] = factor.lower;
            }
#pragma unroll
            for (u32 j = 0; j < TILES_N; ++j) {
                const SplitFactor input(input_sums[(column * F::MINS + half) * SUM_ROW + j * 8 + line]);
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    float(&sum)[4] = sums[i * TILES_N + j];
                    mma_m16n8k4_tf32(sum, lower[i], &input.upper);
                    mma_m16n8k4_tf32(sum, upper[i], &input.lower);
                    mma_m16n8k4_tf32(sum, upper[i], &input.upper);
                }
            }
        }
    }

    // Adds the products of a stage. `code_at` and `input_at` are this lane's places in it.
    DEVICE void multiply(const u8* stage, u32 code_at, u32 input_at) {
        const u32 line = lane_id() / 4, part = lane_id() % 4, first = warp_id() * 32;
        const float* scales = (const float*)(shared + SCALES) + (first + line) * GROUPS;
        // Scales of two groups; those of all would take too many registers.
        Vec<float, 2> of_scales[F::SCALES][4];
#pragma unroll
        for (u32 group = 0; group < GROUPS; ++group) {
            if (group % 2 == 0) {
#pragma unroll
                for (u32 half = 0; half < F::SCALES; ++half)
#pragma unroll
                    for (u32 i = 0; i < 4; ++i)
                        of_scales[half][i] = load<2>(scales + (half * OUTPUTS + i * 8) * GROUPS + group);
            }
            // A group's loads begin when those of the one before have been used: there are no registers for both.
            if (ROWS == 64) code_at = opaque(code_at), input_at = opaque(input_at);
            // Fragments of two tiles of outputs, by half of the group.
            u32 a[2][2][4];
            const u8* group_codes = stage + (Layout::CODE_ROW == 64 ? code_at ^ group * 16 : code_at + group * Layout::CODE_GROUP);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                QuantWeight planes = {};
                planes.codes = group_codes + i * 8 * Layout::CODE_STRIDE;
                planes.high = stage + (Layout::HIGH + (first + i * 8 + line) * Layout::HIGH_ROW + group * Layout::HIGH_GROUP);
                u32 pairs[2][2];
                read_pairs<F, T>(planes, part, pairs);
#pragma unroll
                for (u32 half = 0; half < 2; ++half)
                    a[i / 2][half][i % 2] = pairs[half][0], a[i / 2][half][i % 2 + 2] = pairs[half][1];
            }
#pragma unroll
            for (u32 j = 0; j < TILES_N; ++j) {
                uint2 b[2];
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const u8* at = stage + (input_at ^ (group % 2 * 4 + half * 2) * 16) + group / 2 * 128;
                    b[half] = load<4>((const T*)(at + j * 8 * Layout::INPUT_ROW)).registers;
                }
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    float partial[4] = {};
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        mma_m16n8k16(partial, a[i][half], (const u32*)&b[half], T());
                        if (F::SCALES == 1 && half == 0) continue;
                        float(&sum)[4] = sums[i * TILES_N + j];
#pragma unroll
                        for (u32 e = 0; e < 4; ++e) {
                            sum[e] = fmaf(of_scales[F::SCALES == 2 ? half : 0][i * 2 + e / 2].x[group % 2], partial[e], sum[e]);
                            partial[e] = 0.0f;
                        }
                    }
                }
            }
        }
    }

    DEVICE void run() {
        const u32 first = blockIdx.y * params.steps, steps = min(params.steps, groups / GROUPS - first);
        const Copies c = copies(first);
        const u32 line = lane_id() / 4, part = lane_id() % 4, row = warp_id() * 32 + line;
        const u32 code_at = opaque(row * Layout::CODE_STRIDE + (Layout::CODE_ROW == 64 ? staged_code(row, 0) * 16 : 0));
        const u32 input_at =
            opaque(Layout::INPUT + line * Layout::INPUT_ROW + staged_input(line, part / 2) * 16 + part % 2 * 8);
        auto mins = [&](u32 step) { return (float*)(shared + MINS + step % 2 * OF_MINS); };
        auto input_sums = [&](u32 step) { return (float*)(shared + SUMS + step % 2 * OF_SUMS); };
        auto next = [&](u32 step, u32 place) {
            if (step < steps) fill(c, shared + place * Layout::BYTES, step, first + step);
            // A group is committed even if there is nothing to copy, because waits count groups.
            cp_async_commit();
        };
#pragma unroll
        for (u32 step = 0; step < STAGES - 1; ++step) next(step, step);
        u32 place = 0;
        for (u32 step = 0; step < steps; ++step) {
            const u8* stage = shared + place * Layout::BYTES;
            cp_async_wait<STAGES - 2>();
            // After the barrier, this stage is complete for all threads, and all have left the stage that is filled next.
            __syncthreads();
            next(step + STAGES - 1, place == 0 ? STAGES - 1 : place - 1);
            decode(c, stage, first + step, mins(step));
            if constexpr (HAS_MINS) {
                sum_inputs(stage, input_sums(step));
                if (step > 0) add_mins(mins(step - 1), input_sums(step - 1));
            }
            __syncwarp();
            multiply(stage, code_at, input_at);
            place = place == STAGES - 1 ? 0 : place + 1;
        }
        if constexpr (HAS_MINS) {
            __syncthreads();
            add_mins(mins(steps - 1), input_sums(steps - 1));
        }
    }

    template <class O>
    DEVICE void write() {
        constexpr u32 PAIRS = 2 * TILES_N * 2;
        float pairs[PAIRS][2];
#pragma unroll
        for (u32 i = 0; i < PAIRS; ++i) pairs[i][0] = sums[i / 2][i % 2], pairs[i][1] = sums[i / 2][i % 2 + 2];
        write_pairs<O>(p, pairs, [&](u32 i) {
            const u32 at = i / 2, row = at % TILES_N * 8 + lane_id() % 4 * 2 + i % 2;
            return make_uint2(row, n0 + warp_id() * 32 + at / TILES_N * 16 + lane_id() / 4 * 2);
        });
    }
};

template <class F, class T, int ROWS, int WARPS, int STAGES>
DEVICE void gemm_skinny_quant(const SkinnyQuantParams& params) {
    DYNAMIC_SHARED(shared);
    SHARED_ARRAY(u32, flag, 1);
    SkinnyQuant<F, T, ROWS, WARPS, STAGES> product(params, shared);
    product.run();
    if (gridDim.y > 1 && !add_parts<WARPS * 32>(params, product.sums, flag)) return;
    if (params.out_f32) {
        product.template write<float>();
    } else {
        product.template write<T>();
    }
}
