// Low-rank adapters: out += scale * s * B (A x) for the rows of a step whose sequences have an adapter. Rows with the same
// adapter, and the same expert where a weight has some, form tiles of LORA_ROWS rows, so that its matrices are read once for all of them. The slot of a tile and the
// number of tiles are read on the device: a launch has a grid for the most tiles, and the others end at once.
//
// A row's sums are those of pieces of LORA_PIECE inputs, added in their order, so a row's bits depend on no other row, on
// no other adapter and not on the grid.
#include "gpu.h"

// The rows of a CTA, which have the same adapter and the same expert.
struct LoraTile {
    u32 slot;
    u32 expert;
    u32 count;
    const u32* rows;

    DEVICE LoraTile(const LoraParams& p) {
        const u32* tile = p.tiles + 1 + LORA_TILE_WORDS * blockIdx.x;
        slot = tile[0];
        expert = tile[1];
        rows = p.rows + tile[2];
        count = tile[3];
    }

    static DEVICE bool exists(const LoraParams& p) { return blockIdx.x < p.tiles[0]; }

    DEVICE const LoraPart& part(const LoraParams& p, u32 index) const {
        return p.parts_of[(u64)slot * p.part_stride + expert * p.parts + index];
    }

    // Rows beyond the last are computed as the last one and not written.
    DEVICE u32 row(u32 i) const { return rows[min(i, count - 1)]; }
};

// Returns the place of the sums of a column of A for the rows of a tile.
DEVICE float* lora_sums(const LoraParams& p, u32 split, u32 column) {
    return p.partial + (((u64)blockIdx.x * p.splits + split) * (p.parts * p.rank) + column) * LORA_ROWS;
}

// Adds the first WIDTH numbers of each lane, or those behind them, to those of the lane at this distance.
template <u32 WIDTH>
DEVICE void halve(float (&values)[32]) {
    const bool upper = lane_id() & WIDTH;
#pragma unroll
    for (u32 i = 0; i < WIDTH; ++i) {
        const float low = values[i], high = values[i + WIDTH];
        values[i] = (upper ? high : low) + __shfl_xor_sync(ALL_LANES, upper ? low : high, WIDTH);
    }
}

// Adds 32 numbers of each lane over the lanes: lane i receives the sum of number i, in one fixed order.
DEVICE float transposed_sum(float (&values)[32]) {
    halve<16>(values);
    halve<8>(values);
    halve<4>(values);
    halve<2>(values);
    halve<1>(values);
    return values[0];
}

// Computes partial sums of A x. Grid: (tiles, parts * groups of columns of A, splits). A warp reads LORA_COLUMNS rows of A
// and the inputs of the tile's rows, in pieces of 16 bytes: the elements of A are read from memory once for a tile.
template <class T>
DEVICE void lora_shrink(const LoraParams& p) {
    constexpr u32 LANE = WIDE<T>, STEP = 32 * LANE;
    static_assert(LORA_ROWS * LORA_COLUMNS == 32, "a lane receives one sum");
    if (!LoraTile::exists(p)) return;
    const LoraTile tile(p);
    const u32 per_cta = LORA_COLUMNS * (blockDim.x / 32), groups = (p.rank + per_cta - 1) / per_cta;
    const u32 index = blockIdx.y / groups, first = blockIdx.y % groups * per_cta + warp_id() * LORA_COLUMNS;
    const LoraPart& part = tile.part(p, index);
    if (first >= part.rank) return;

    const T *a[LORA_COLUMNS], *x[LORA_ROWS];
#pragma unroll
    for (u32 j = 0; j < LORA_COLUMNS; ++j) a[j] = (const T*)(p.matrices + part.a) + (u64)min(first + j, part.rank - 1) * p.k;
#pragma unroll
    for (u32 i = 0; i < LORA_ROWS; ++i) x[i] = (const T*)p.input + (u64)(tile.row(i) / p.share) * p.k;

    // With one split, the pieces are added here instead of where they are read, in the same order.
    const u32 from = p.splits > 1 ? blockIdx.z * LORA_PIECE : 0;
    const u32 to = p.splits > 1 ? min(from + LORA_PIECE, p.k) : p.k;
    float total = 0.0f;
    for (u32 piece = from; piece < to; piece += LORA_PIECE) {
        float sums[32] = {};
        const u32 end = min(piece + LORA_PIECE, to);
        for (u32 k = piece + lane_id() * LANE; k < end; k += STEP) {
            Vec<T, WIDE<T>> columns[LORA_COLUMNS];
#pragma unroll
            for (u32 j = 0; j < LORA_COLUMNS; ++j) columns[j] = load<WIDE<T>>(a[j] + k);
#pragma unroll
            for (u32 i = 0; i < LORA_ROWS; ++i) {
                if (i < tile.count) {
                    const Vec<T, WIDE<T>> inputs = load<WIDE<T>>(x[i] + k);
#pragma unroll
                    for (u32 e = 0; e < LANE; ++e)
#pragma unroll
                        for (u32 j = 0; j < LORA_COLUMNS; ++j) {
                            float& sum = sums[j * LORA_ROWS + i];
                            sum = fmaf(to_float(inputs.x[e]), to_float(columns[j].x[e]), sum);
                        }
                }
            }
        }
        total += transposed_sum(sums);
    }
    const u32 column = first + lane_id() / LORA_ROWS;
    if (column < part.rank) lora_sums(p, blockIdx.z, index * p.rank + column)[lane_id() % LORA_ROWS] = total;
}

// Whether A is a table of embeddings, whose rows are read by the ids of tokens.
constexpr bool FROM_TABLE = true;

// Adds the products of A x with B to the output, of type O. Grid: (tiles, groups of columns of the output). A thread
// computes LORA_OUTPUTS adjacent columns of all rows of the tile and reads these columns of the transposed B; the sums of
// A x are in shared memory.
template <class T, class O, bool IS_TABLE = false>
DEVICE void lora_expand(const LoraParams& p) {
    SHARED_ARRAY(float, shrunk, LORA_MAX_RANK * LORA_ROWS);
    if (!LoraTile::exists(p)) return;
    const LoraTile tile(p);
    const u32 per_cta = LORA_OUTPUTS * blockDim.x;
    u32 index = 0, group = blockIdx.y;
    // Each part has whole groups.
    for (u32 groups; group >= (groups = (tile.part(p, index).columns + per_cta - 1) / per_cta); ++index) group -= groups;
    const LoraPart& part = tile.part(p, index);
    const u32 rank = part.rank;
    if (rank == 0) return;

    for (u32 i = threadIdx.x; i < rank * LORA_ROWS; i += blockDim.x) {
        const u32 column = i / LORA_ROWS, row = i % LORA_ROWS;
        float sum = 0.0f;
        if constexpr (IS_TABLE) {
            const u32 token = token_row(p.ids, p.drawn, tile.row(row), p.k);
            sum = to_float(((const T*)(p.matrices + part.a))[(u64)token * rank + column]);
        } else {
            const u32 of = index * p.rank + column;
#pragma unroll 4
            for (u32 split = 0; split < p.splits; ++split) sum += lora_sums(p, split, of)[row];
        }
        // The sums of rows beyond the last are those of an earlier step.
        shrunk[i] = row < tile.count ? part.scaling * sum : 0.0f;
    }
    __syncthreads();

    const u32 first = group * per_cta + threadIdx.x * LORA_OUTPUTS;
    if (first >= part.columns) return;
    // Rows of B are padded to whole groups of LORA_OUTPUTS.
    const u32 stride = (part.columns + LORA_OUTPUTS - 1) / LORA_OUTPUTS * LORA_OUTPUTS;
    const T* b = (const T*)(p.matrices + part.b) + first;
    float sums[LORA_ROWS][LORA_OUTPUTS] = {};
#pragma unroll 4
    for (u32 j = 0; j < rank; ++j) {
        const Vec<T, LORA_OUTPUTS> column = load<LORA_OUTPUTS>(b + (u64)j * stride);
        float of[LORA_ROWS];
#pragma unroll
        for (u32 i = 0; i < LORA_ROWS; i += 4) {
            const Vec<float, 4> four = load<4>(shrunk + j * LORA_ROWS + i);
#pragma unroll
            for (u32 e = 0; e < 4; ++e) of[i + e] = four.x[e];
        }
#pragma unroll
        for (u32 i = 0; i < LORA_ROWS; ++i)
#pragma unroll
            for (u32 e = 0; e < LORA_OUTPUTS; ++e) sums[i][e] = fmaf(of[i], to_float(column.x[e]), sums[i][e]);
    }
    const bool whole = first + LORA_OUTPUTS <= part.columns;
#pragma unroll
    for (u32 i = 0; i < LORA_ROWS; ++i) {
        if (i >= tile.count) break;
        O* out = (O*)p.out + ((u64)tile.rows[i] * p.out_stride + part.first + first);
        if (whole && ((u64)out & (LORA_OUTPUTS * sizeof(O) - 1)) == 0) {
            Vec<O, LORA_OUTPUTS> values = load<LORA_OUTPUTS>(out);
#pragma unroll
            for (u32 e = 0; e < LORA_OUTPUTS; ++e)
                values.x[e] = from_float<O>(fmaf(p.scale, sums[i][e], to_float(values.x[e])));
            store(out, values);
        } else {
#pragma unroll
            for (u32 e = 0; e < LORA_OUTPUTS; ++e)
                if (first + e < part.columns) out[e] = from_float<O>(fmaf(p.scale, sums[i][e], to_float(out[e])));
        }
    }
}

// ------------------------------------------------------------------------------------------- pairs

// A pair of a token that has an adapter and one of its experts, by a number below that of such tokens' places.
struct LoraPair {
    u32 pair;
    // Index among the pairs of an expert and an adapter.
    u32 kind;
    bool exists;

    DEVICE LoraPair(const LoraPairsParams& p, u32 index) {
        const u32 at = index / p.chosen;
        const u32* tile = p.adapted_tiles + 1 + LORA_TILE_WORDS * (at / LORA_ROWS);
        exists = at % LORA_ROWS < tile[3];
        if (!exists) return;
        pair = p.adapted_rows[tile[2] + at % LORA_ROWS] * p.chosen + index % p.chosen;
        kind = p.picked[pair] * p.slots + tile[0];
    }
};

// Divides the pairs into tiles. Grid: one CTA. The order of the pairs of an expert and an adapter is any: what is added to a
// pair does not depend on the others in its tile.
DEVICE void divide_pairs(const LoraPairsParams& p) {
    SHARED_ARRAY(u32, places, LORA_PAIRS_THREADS);
    SHARED_ARRAY(u32, tiles, LORA_PAIRS_THREADS);
    const u32 kinds = p.experts * p.slots, each = (kinds + blockDim.x - 1) / blockDim.x;
    const u32 from = min(threadIdx.x * each, kinds), to = min(from + each, kinds);
    const u32 all = p.adapted_tiles[0] * LORA_ROWS * p.chosen;
    for (u32 kind = from; kind < to; ++kind) p.counts[kind] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
        const LoraPair of(p, i);
        if (of.exists) atomicAdd(&p.counts[of.kind], 1u);
    }
    __syncthreads();
    u32 place = 0, tile = 0;
    for (u32 kind = from; kind < to; ++kind) {
        place += p.counts[kind];
        tile += (p.counts[kind] + LORA_ROWS - 1) / LORA_ROWS;
    }
    places[threadIdx.x] = place;
    tiles[threadIdx.x] = tile;
    __syncthreads();
    if (threadIdx.x == 0) {
        place = tile = 0;
        for (u32 i = 0; i < blockDim.x; ++i) {
            const u32 more_places = places[i], more_tiles = tiles[i];
            places[i] = place;
            tiles[i] = tile;
            place += more_places;
            tile += more_tiles;
        }
        p.tiles[0] = tile;
    }
    __syncthreads();
    place = places[threadIdx.x];
    tile = tiles[threadIdx.x];
    for (u32 kind = from; kind < to; ++kind) {
        const u32 count = p.counts[kind];
        // From here on, the next place of the kind.
        p.counts[kind] = place;
        for (u32 done = 0; done < count; done += LORA_ROWS) {
            u32* out = p.tiles + 1 + LORA_TILE_WORDS * tile++;
            out[0] = kind % p.slots;
            out[1] = kind / p.slots;
            out[2] = place + done;
            out[3] = min(LORA_ROWS, count - done);
        }
        place += count;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
        const LoraPair of(p, i);
        if (of.exists) p.rows[atomicAdd(&p.counts[of.kind], 1u)] = of.pair;
    }
}
