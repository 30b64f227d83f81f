// Product of f16 activations with a quantised weight on the tensor cores of Volta. While rows are few, every weight is read once, at
// the bandwidth of memory.
//
// As in gemm_skinny_quant.cu, outputs are the rows of a tile, CTAs share the inputs of an output in equal parts, codes become numbers
// in f16 exactly, and the scale is applied in f32 to their sum over the inputs that have it in common, so no weight is rounded but the
// numbers of NF4 and FP4. Minima are multiplied with the sums of the activations. The sums of a part are added in the order of the
// inputs, and the parts in their order, so a row's bits depend neither on ROWS nor on the other rows.
//
// The instruction multiplies four tiles of 8x8, one per eight lanes: here those of 32 outputs with the same eight rows. A lane has all
// inputs of its outputs then, so it takes codes from memory straight to registers and converts each of them once.
#include "code_pairs.h"
#include "linear.h"
#include "skinny.h"

// Number of groups of 32 inputs in a stage, and of the elements of its rows.
constexpr u32 GROUPS = 4, STAGE_ROW = GROUPS * 32;
// Outputs of a lane, which share what it reads of the input.
constexpr u32 OF_LANE = 2;
constexpr u32 WARPS = 4, THREADS = WARPS * 32, OUTPUTS = THREADS * OF_LANE;

// Returns the offset in elements of a piece of 16 bytes of a row of the staged input. Eight rows that are read together are in
// different banks.
DEVICE u32 staged_at(u32 row, u32 piece) { return row * STAGE_ROW + (piece ^ row % 8) * 8; }

// Factor of the numbers that codes become: an integer's bits are those of a denormal number in f16, which tensor cores multiply
// exactly. Numbers of a list are themselves.
template <class F>
constexpr float FACTOR = F::IS_FLOAT || NumberList<F>::EXISTS ? 1.0f : 16777216.0f;

// Number that integers exceed the codes by, unless a minimum of the format makes up for it.
template <class F>
constexpr u32 EXCESS = F::IS_SIGNED ? 128 : F::MINS == 0 ? F::OFFSET : 0;

// Minima of a group. Integers of all formats have them.
template <class F>
constexpr u32 MINS = FACTOR<F> == 1.0f ? 0 : F::SCALES;

// Converts the words of four codes of QuantGroup<2> for this part of a group to pairs of numbers.
template <class F>
DEVICE void number_pairs(const QuantWeight& weight, u32 part, u32 (&pairs)[2][2]) {
    if constexpr (MINS<F> == 0) {
        read_pairs<F, f16>(weight, part, pairs);
    } else {
        static_assert(F::MINS == 0 || F::MINS == F::SCALES, "a minimum for each scale");
        QuantGroup<2> codes;
        F::read_codes(codes, weight, 0, part);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 integers = F::IS_SIGNED ? codes.q[half] ^ 0x80808080 : codes.q[half];
            pairs[half][0] = permute_bytes(integers, 0, 0x4140), pairs[half][1] = permute_bytes(integers, 0, 0x4342);
        }
    }
}

// Reads BYTES bytes, a multiple of 4 or 2, as words.
template <u32 BYTES, u32 WORDS>
DEVICE void read_words(const u8* from, u32 (&words)[WORDS]) {
    static_assert(WORDS * 4 >= BYTES, "there is room");
    if constexpr (BYTES == 2) {
        words[0] = *(const u16*)from;
    } else if constexpr (BYTES % 16 == 0) {
#pragma unroll
        for (u32 i = 0; i < BYTES / 16; ++i) {
            const uint4 four = ((const uint4*)from)[i];
            words[i * 4] = four.x, words[i * 4 + 1] = four.y, words[i * 4 + 2] = four.z, words[i * 4 + 3] = four.w;
        }
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
        for (u32 i = 0; i < BYTES / 8; ++i) {
            const uint2 two = ((const uint2*)from)[i];
            words[i * 2] = two.x, words[i * 2 + 1] = two.y;
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < BYTES / 4; ++i) words[i] = ((const u32*)from)[i];
    }
}

// Grid: (tiles of OUTPUTS outputs and of ROWS rows, those of the same outputs beside each other; parts of `steps` stages).
template <class F, int ROWS>
struct SkinnyVolta {
    static constexpr u32 TILES = ROWS / 8;
    // Sums of the inputs of a stage that a row has.
    static constexpr u32 MINIMA = MINS<F> * GROUPS;
    // Scales and minima of a group.
    static constexpr u32 FACTORS = F::SCALES + MINS<F>;
    static constexpr u32 CODE_BYTES = F::CODES / F::BLOCK, HIGH_BYTES = F::HIGH / F::BLOCK;
    // Whether a stage has scales of its own, rather than those of a whole block: each group has its bytes.
    static constexpr bool HAS_OWN_SCALES = F::BLOCK <= GROUPS || (F::OF_SCALES == 2 * F::BLOCK && !F::HAS_SUPER_SCALES);
    static constexpr u32 SCALE_BYTES = HAS_OWN_SCALES ? F::OF_SCALES * GROUPS / F::BLOCK : F::OF_SCALES;
    static constexpr u32 DELTA_BYTES = F::OF_DELTAS * (F::BLOCK < GROUPS ? GROUPS / F::BLOCK : 1);
    // Groups that a lane reads at once: two of 4-bit codes are a sector of memory. With upper bits, there are no registers for two.
    static constexpr u32 AT_ONCE = CODE_BYTES == 32 || HIGH_BYTES == 4 ? 1 : 2;
    // Pieces of a stage of the input that a thread copies while it multiplies a pair of groups, one for each at most.
    static constexpr u32 PIECES_OF_ROW = STAGE_ROW / 8, PIECES_OF_PAIR = ROWS * PIECES_OF_ROW / THREADS / 2;
    static constexpr u32 ROW_STEP = THREADS / PIECES_OF_ROW;
    static constexpr u32 STAGE = ROWS * STAGE_ROW, SUM_ROW = ROWS + 8, OF_WARP = 32 * OF_LANE;
    static_assert(PIECES_OF_PAIR * 2 * ROW_STEP == ROWS && PIECES_OF_PAIR <= 2, "threads copy equally many pieces");
    static_assert(ROW_STEP == 8, "the order of pieces is the same in all rows of a thread");

    // What is stored of a group of an output.
    struct Stored {
        u32 codes[CODE_BYTES / 4], high[HIGH_BYTES > 0 ? HIGH_BYTES / 4 : 1];
    };

    // What is stored of the scales and minima of a stage of an output.
    struct StoredScales {
        // Those of a block of Q4_K or Q5_K are read as one vector.
        alignas(16) u32 scales[SCALE_BYTES > 0 ? (SCALE_BYTES + 3) / 4 : 1];
        u32 deltas[DELTA_BYTES > 0 ? (DELTA_BYTES + 3) / 4 : 1];
    };

    const SkinnyQuantParams& params;
    const QuantLinearParams& p;
    // Stages of the input, the sums of both, and this warp's scales and minima of a stage, by group, part of a group and output.
    f16* const stages;
    float *const input_sums, *const factors;
    const u32 groups;
    u32 m0, n0;
    // Rows of the weight of this lane's outputs, and what is stored of a pair of groups of them.
    u32 rows[OF_LANE];
    const u8 *codes[OF_LANE], *high[OF_LANE];
    // This thread's first piece of a stage of the input.
    const f16* input;
    float sums[TILES][OF_LANE][8];

    DEVICE SkinnyVolta(const SkinnyQuantParams& params, u8* shared)
        : params(params), p(params.product), stages((f16*)shared), input_sums((float*)(stages + 2 * STAGE)),
          factors(input_sums + 2 * MINIMA * SUM_ROW + warp_id() * GROUPS * FACTORS * OF_WARP), groups(p.k / 32), sums() {
        const u32 of_rows = (p.m + ROWS - 1) / ROWS;
        m0 = blockIdx.x % of_rows * ROWS;
        n0 = blockIdx.x / of_rows * OUTPUTS + warp_id() * 32 * OF_LANE;
        // Outputs beyond the last are computed as the last one and not written.
#pragma unroll
        for (u32 i = 0; i < OF_LANE; ++i) rows[i] = min(n0 + i * 32 + own_output(), p.n - 1);
    }

    // Returns the output of this lane's row among those of 32 lanes. Of eight lanes' outputs, those whose sums a thread gets, two
    // rows apart in the instruction, are adjacent.
    static DEVICE u32 own_output() {
        const u32 lane = lane_id();
        return lane / 4 % 4 * 8 + lane / 16 * 4 + lane % 2 * 2 + lane / 2 % 2;
    }

    // Returns the first of the two outputs of which this lane gets sums.
    static DEVICE u32 summed_output() { return own_output() & ~1u; }

    // Begins with a stage.
    DEVICE void begin(u32 nth) {
#pragma unroll
        for (u32 i = 0; i < OF_LANE; ++i) {
            const u64 at = (u64)rows[i] * groups + nth * GROUPS;
            codes[i] = p.weight.codes + at * CODE_BYTES;
            if constexpr (HIGH_BYTES > 0) high[i] = p.weight.high + at * HIGH_BYTES;
        }
        const u64 row = m0 + threadIdx.x / PIECES_OF_ROW;
        input = (const f16*)p.input + (row * p.k + nth * STAGE_ROW + threadIdx.x % PIECES_OF_ROW * 8);
    }

    // Reads a group of a pair of this lane's outputs.
    DEVICE void read(u32 second, Stored (&stored)[OF_LANE]) const {
#pragma unroll
        for (u32 i = 0; i < OF_LANE; ++i) {
            read_words<CODE_BYTES>(codes[i] + second * CODE_BYTES, stored[i].codes);
            if constexpr (HIGH_BYTES > 0) read_words<HIGH_BYTES>(high[i] + second * HIGH_BYTES, stored[i].high);
        }
    }

    // Goes on to the next pair if there is one.
    DEVICE void advance(bool exists) {
        const u32 groups = exists ? 2 : 0;
#pragma unroll
        for (u32 i = 0; i < OF_LANE; ++i) {
            codes[i] += groups * CODE_BYTES;
            if constexpr (HIGH_BYTES > 0) high[i] += groups * HIGH_BYTES;
        }
    }

    // Reads the scales and minima of a stage.
    DEVICE void read(u32 nth, StoredScales (&stored)[OF_LANE]) const {
#pragma unroll
        for (u32 i = 0; i < OF_LANE; ++i) {
            const u64 group = (u64)rows[i] * groups + nth * GROUPS, block = group / F::BLOCK;
            const u64 scales = HAS_OWN_SCALES ? group * F::OF_SCALES / F::BLOCK : block * F::OF_SCALES;
            if constexpr (SCALE_BYTES > 0) read_words<SCALE_BYTES>(p.weight.scales + scales, stored[i].scales);
            if constexpr (DELTA_BYTES > 0) read_words<DELTA_BYTES>(p.weight.deltas + block * F::OF_DELTAS, stored[i].deltas);
        }
    }

    // Decodes the scales and minima of a stage of this lane's outputs for its warp.
    DEVICE void decode(u32 nth, const StoredScales (&stored)[OF_LANE]) const {
        const u32 first = HAS_OWN_SCALES ? 0 : nth % (F::BLOCK / GROUPS) * GROUPS;
#pragma unroll
        for (u32 i = 0; i < OF_LANE; ++i) {
            QuantWeight planes = {};
            planes.scales = (const u8*)stored[i].scales;
            // A format without deltas of groups has those of rows, if any.
            planes.deltas = F::OF_DELTAS == 0 ? p.weight.deltas : (const u8*)stored[i].deltas;
            Vec<float, GROUPS> scales[2], mins[2];
            read_scales_of_groups<F>(planes, rows[i], first, scales, mins);
            float* to = factors + i * 32 + own_output();
#pragma unroll
            for (u32 group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (u32 half = 0; half < F::SCALES; ++half)
                    to[(group * FACTORS + half) * OF_WARP] = scales[half].x[group] * FACTOR<F>;
#pragma unroll
                for (u32 half = 0; half < MINS<F>; ++half)
                    to[(group * FACTORS + F::SCALES + half) * OF_WARP] =
                        EXCESS<F> > 0 ? fmaf(-(float)EXCESS<F>, scales[half].x[group], mins[half].x[group]) : mins[half].x[group];
            }
        }
    }

    // Reads one of this thread's pieces of a stage of the input, or zeros for a row beyond the last.
    DEVICE uint4 read_piece(u32 nth) const {
        const u32 below = nth * ROW_STEP;
        const bool valid = m0 + threadIdx.x / PIECES_OF_ROW + below < p.m;
        return valid ? *(const uint4*)(input + below * p.k) : make_uint4(0, 0, 0, 0);
    }

    // Stores it and its sums.
    DEVICE void write_piece(u32 step, u32 nth, uint4 registers) {
        const u32 row = threadIdx.x / PIECES_OF_ROW, piece = threadIdx.x % PIECES_OF_ROW, below = nth * ROW_STEP;
        Vec<f16, 8> eight;
        eight.registers = registers;
        store(stages + step % 2 * STAGE + staged_at(row, piece) + below * STAGE_ROW, eight);
        if constexpr (MINS<F> > 0) {
            float values[8];
            widen(eight, values);
            float sum = 0.0f;
#pragma unroll
            for (u32 e = 0; e < 8; ++e) sum += values[e];
            // Adjacent lanes have the pieces of a group, or of a half of one.
            constexpr u32 PIECES_OF_SUM = 4 / MINS<F>;
            sum = warp_sum<PIECES_OF_SUM>(sum);
            float* to = input_sums + (step % 2 * MINIMA + piece / PIECES_OF_SUM) * SUM_ROW + row + below;
            if (piece % PIECES_OF_SUM == 0) *to = sum;
        }
    }

    // Weights of a group of this lane's outputs, four at a time.
    struct Weights {
        u32 fours[OF_LANE][8][2];
    };

    static DEVICE Weights converted(const Stored (&stored)[OF_LANE]) {
        Weights weights;
#pragma unroll
        for (u32 i = 0; i < OF_LANE; ++i) {
            QuantWeight planes = {};
            planes.codes = (const u8*)stored[i].codes;
            planes.high = (const u8*)stored[i].high;
#pragma unroll
            for (u32 part = 0; part < 4; ++part) {
                u32 pairs[2][2];
                number_pairs<F>(planes, part, pairs);
#pragma unroll
                for (u32 half = 0; half < 2; ++half)
                    weights.fours[i][half * 4 + part][0] = pairs[half][0], weights.fours[i][half * 4 + part][1] = pairs[half][1];
            }
        }
        return weights;
    }

    // Adds the products of a group, the first or the second of a pair. `stage`, `stage_sums` and `pair_factors` are those of the pair.
    DEVICE void multiply(const f16* stage, const float* stage_sums, const float* pair_factors, u32 second, const Weights& weights) {
        auto of_outputs = [&](u32 i, u32 of) {
            return load<2>(pair_factors + (second * FACTORS + of) * OF_WARP + i * 32 + summed_output());
        };
        const u32 lane = lane_id(), line = lane % 4 + lane / 16 * 4;
#pragma unroll
        for (u32 j = 0; j < TILES; ++j) {
            // What a tile loads, it loads when the one before has used its own: there are no registers for both.
            __syncwarp();
            if constexpr (MINS<F> > 0) {
#pragma unroll
                for (u32 half = 0; half < MINS<F>; ++half) {
                    const float* of_rows = stage_sums + (second * MINS<F> + half) * SUM_ROW + j * 8 + (lane & 2);
#pragma unroll
                    for (u32 upper = 0; upper < 8; upper += 4) {
                        const Vec<float, 2> two = load<2>(of_rows + upper);
#pragma unroll
                        for (u32 i = 0; i < OF_LANE; ++i) {
                            const Vec<float, 2> mins = of_outputs(i, F::SCALES + half);
#pragma unroll
                            for (u32 e = 0; e < 4; ++e) {
                                float& sum = sums[j][i][upper + e];
                                sum = fmaf(mins.x[e / 2], two.x[e % 2], sum);
                            }
                        }
                    }
                }
            }
            float partial[OF_LANE][8] = {};
#pragma unroll
            for (u32 piece = 0; piece < 4; ++piece) {
                const uint4 x = load<8>(stage + staged_at(j * 8 + line, second * 4 + piece)).registers;
                const u32 inputs[2][2] = {{x.x, x.y}, {x.z, x.w}};
#pragma unroll
                for (u32 four = 0; four < 2; ++four)
#pragma unroll
                    for (u32 i = 0; i < OF_LANE; ++i) mma_m8n8k4_row_col(partial[i], weights.fours[i][piece * 2 + four], inputs[four]);
                if (piece % 2 == 0 || (F::SCALES == 1 && piece < 3)) continue;
#pragma unroll
                for (u32 i = 0; i < OF_LANE; ++i) {
                    const Vec<float, 2> scales = of_outputs(i, F::SCALES == 2 ? piece / 2 : 0);
#pragma unroll
                    for (u32 e = 0; e < 8; ++e) {
                        sums[j][i][e] = fmaf(scales.x[e / 2 % 2], partial[i][e], sums[j][i][e]);
                        partial[i][e] = 0.0f;
                    }
                }
            }
        }
    }

    DEVICE void run() {
        const u32 first = blockIdx.y * params.steps, steps = min(params.steps, groups / GROUPS - first);
        const u32 pairs = steps * (GROUPS / 2);
        Stored stored[AT_ONCE][OF_LANE];
        StoredScales next_scales[OF_LANE];
        begin(first);
        read(first, next_scales);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) read(i, stored[i]);
#pragma unroll
        for (u32 i = 0; i < 2 * PIECES_OF_PAIR; ++i) write_piece(0, i, read_piece(i));
        // The last pair and the last stage are read again for want of others.
#pragma unroll 1
        for (u32 pair = 0; pair < pairs; ++pair) {
            const u32 step = pair / 2, half = pair % 2;
            if (half == 0) {
                // After the barrier, this stage is complete for all threads, and all have left the other one.
                __syncthreads();
                decode(first + step, next_scales);
                const u32 next = step + 1 < steps;
                read(first + step + next, next_scales);
                input += next * STAGE_ROW;
            }
            const f16* stage = stages + step % 2 * STAGE + half * (STAGE_ROW / 2);
            const float* stage_sums = input_sums + (step % 2 * MINIMA + half * MINS<F> * 2) * SUM_ROW;
            const float* pair_factors = factors + half * 2 * FACTORS * OF_WARP;
#pragma unroll
            for (u32 second = 0; second < 2; ++second) {
                const u32 piece = half * PIECES_OF_PAIR + second;
                uint4 copied;
                if (second < PIECES_OF_PAIR) copied = read_piece(piece);
                const Weights weights = converted(stored[second % AT_ONCE]);
                // What comes next is read in the place of what has been converted.
                if (second == 1) advance(pair + 1 < pairs);
                if (second == 1 || AT_ONCE == 1) {
#pragma unroll
                    for (u32 i = 0; i < AT_ONCE; ++i) read(second == 0 ? 1 : i, stored[i]);
                }
                multiply(stage, stage_sums, pair_factors, second, weights);
                if (second < PIECES_OF_PAIR) write_piece(step + 1, piece, copied);
            }
        }
    }

    template <class O>
    DEVICE void write() {
        constexpr u32 PAIRS = TILES * OF_LANE * 4;
        float pairs[PAIRS][2];
#pragma unroll
        for (u32 i = 0; i < PAIRS; ++i) {
            const u32 first = i % 4 / 2 * 4 + i % 2;
            const float(&eight)[8] = sums[i / 4 / OF_LANE][i / 4 % OF_LANE];
            pairs[i][0] = eight[first], pairs[i][1] = eight[first + 2];
        }
        const u32 row = m0 + (lane_id() & 2), output = n0 + summed_output();
        write_pairs<O>(p, pairs, [&](u32 i) {
            return make_uint2(row + i / 4 / OF_LANE * 8 + i % 4 / 2 * 4 + i % 2, output + i / 4 % OF_LANE * 32);
        });
    }
};

template <class F, int ROWS>
DEVICE void gemm_skinny_volta(const SkinnyQuantParams& params) {
    DYNAMIC_SHARED(shared);
    SHARED_ARRAY(u32, flag, 1);
    SkinnyVolta<F, ROWS> product(params, shared);
    product.run();
    constexpr u32 SUMS = ROWS / 8 * OF_LANE * 2;
    if (gridDim.y > 1 && !add_parts<THREADS>(params, (float (&)[SUMS][4])product.sums, flag)) return;
    if (params.out_f32) {
        product.template write<float>();
    } else {
        product.template write<f16>();
    }
}
