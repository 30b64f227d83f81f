// Prefill attention over the paged cache, on the tensor cores of sm_75 and later: sequences of many queries, of any
// lengths, each at its offset in its sequence. The scheme is that of FlashAttention-2: a CTA holds a tile of rows, each a
// head of a query, and iterates over the keys in tiles; scores stay in registers. Keys of the next tile are copied
// while this tile's values are multiplied, and values while its keys are multiplied.
//
// A warp has FRAGMENTS times the 16 rows of an instruction. With two, it loads a fragment of keys or values from shared memory
// once for both: an instruction of one fragment would wait for shared memory on the chips of data centres.
//
// The rows of a tile are those of adjacent heads that share a KV head. A tile has few queries then, so it passes over fewer
// keys that only some of its queries see, and a sequence of few queries fills more of it.
//
// Tiles of keys begin at multiples of their size, and a tile that a row does not see does not change its result,
// which is therefore the same, bit for bit, for any division of a sequence into chunks, and for any place of a row in a tile.
// Values must be finite: a NaN would also affect earlier queries of its tile (0 · NaN). heads.h ensures that.
//
// Of a cache in e4m3 (C), the codes of the next tile are copied, and widened to the type of the queries before it is multiplied.
//
// An instruction multiplies 16 elements of a head. A head whose SIZE is no multiple of that is padded to D elements in
// shared memory, where the padding is zero.
#include "attention.h"

// Sizes of a tile.
template <class T, int SIZE, int WARPS, int FRAGMENTS, int TILE_KEYS, class C>
struct PrefillShape {
    static constexpr int D = (SIZE + 15) / 16 * 16;
    static constexpr u32 THREADS = 32 * WARPS, WARP_ROWS = 16 * FRAGMENTS, ROWS = WARPS * WARP_ROWS;
    static constexpr u32 KEYS = TILE_KEYS;
    static constexpr u32 STRIDE = D + 8;                // elements of a row in shared memory: rows begin in different banks
    static constexpr u32 STAGE = 2 * TILE_KEYS * STRIDE;  // elements of a tile of keys and its values
    static constexpr bool IS_NARROW = sizeof(C) != sizeof(T);
    static_assert(!IS_NARROW || D == SIZE, "codes are not padded");
    // Elements of T that precede the queries: two stages, or one and the codes of the next.
    static constexpr u32 COPIED = STAGE + (IS_NARROW ? TILE_KEYS * SIZE : STAGE);
    // Queries that do not fit into registers beside the output stay in shared memory.
    static constexpr bool Q_IN_REGISTERS = FRAGMENTS * D <= 128;
};

// The rows of a tile: the heads of its first query, then those of the next.
struct PrefillRows {
    u32 heads;       // number of adjacent heads
    u32 reciprocal;  // 2^16 over the number of heads, rounded up: exact for a division of rows

    DEVICE PrefillRows(u32 heads) : heads(heads), reciprocal((0xffff + heads) / heads) {}

    DEVICE u32 query(u32 row) const { return row * reciprocal >> 16; }
    DEVICE u32 head(u32 row) const { return row - query(row) * heads; }
    // Returns the element at which a row begins in q or out, relative to the first.
    DEVICE u32 place(const AttentionParams& p, u32 row, u32 size) const { return (query(row) * p.q_heads + head(row)) * size; }
};

// The copies of tiles of keys and values to shared memory. A thread copies a piece of 16 bytes of several rows, all at the same
// column; the pieces of a row are those of SLOTS threads, of which some have none.
template <class T, class Shape, int SIZE, class C>
struct TileCopies {
    static constexpr u32 EACH = Shape::D / WIDE<C>;
    static constexpr u32 SLOTS = EACH <= 4 ? 4 : EACH <= 8 ? 8 : EACH <= 16 ? 16 : 32;
    static constexpr u32 STEP = Shape::THREADS / SLOTS;  // rows of which a thread has one piece
    // Rows of which a thread has pieces of one block, and the elements of a row in shared memory.
    static constexpr u32 GROUP = STEP < KV_BLOCK ? KV_BLOCK : STEP, STRIDE = Shape::IS_NARROW ? SIZE : Shape::STRIDE;
    static_assert(GROUP % STEP == 0 && Shape::KEYS % GROUP == 0, "a tile has whole groups");

    const PrefillTile& tile;
    const Cache<C> k, v;
    u32 blocks[Shape::KEYS / GROUP];  // of the thread's rows in the tile that is copied next

    DEVICE TileCopies(const AttentionParams& p, const PrefillTile& tile, u32 kv_head)
        : tile(tile),
          k(p, p.k_cache, tile.blocks, kv_head, SIZE),
          v(p, p.v_cache, tile.blocks, kv_head, SIZE) {}

    static DEVICE u32 row() { return threadIdx.x / SLOTS; }
    static DEVICE u32 column() { return threadIdx.x % SLOTS * WIDE<C>; }

    // Looks up the blocks of the tile that begins at a key. Those beyond the last key are that of the last one.
    DEVICE void find(u32 key) {
        if (key >= tile.keys) return;
        const u32 first = key / KV_BLOCK + (GROUP > KV_BLOCK ? row() / KV_BLOCK : 0);
#pragma unroll
        for (u32 i = 0; i < Shape::KEYS / GROUP; ++i) {
            blocks[i] = tile.blocks[min(first + i * (GROUP / KV_BLOCK), (tile.keys - 1) / KV_BLOCK)];
        }
    }

    // Starts the copy to a stage of the tile that was looked up and begins at a key, if there are such keys. Keys that no query
    // sees are not read: they may belong to other sequences, and no weight removes a NaN.
    DEVICE void copy(C* stage, u32 key) const {
        if (key >= tile.keys) return;
        C* const values = stage + Shape::KEYS * STRIDE;
        if (key >= tile.first && key + Shape::KEYS <= tile.keys) {
            copy_pieces(stage, k, [](u32) { return true; });
            copy_pieces(values, v, [](u32) { return true; });
        } else {
            const auto is_read = [&](u32 r) { return key + r >= tile.first && key + r < tile.keys; };
            copy_pieces(stage, k, is_read);
            copy_pieces(values, v, is_read);
        }
        cp_async_commit();
    }

    template <class IsRead>
    DEVICE void copy_pieces(C* shared, const Cache<C>& cache, IsRead is_read) const {
        if (EACH < SLOTS && column() >= Shape::D) return;
        const u32 own = row() % KV_BLOCK;
        const C* const base = cache.base + own * cache.key_stride + column();
        C* const to = one_address(shared + row() * STRIDE + column());
        // A block has less than 4 GiB, so its address is one multiplication.
        const u32 block_bytes = (u32)cache.block_stride * (u32)sizeof(C);
#pragma unroll
        for (u32 at = 0; at < Shape::KEYS; at += STEP) {
            const C* const place = base + at % GROUP * cache.key_stride;
            const C* const from = (const C*)((const char*)place + (u64)blocks[at / GROUP] * block_bytes);
            cp_async_16(to + at * STRIDE, from, is_read(row() + at) && (Shape::D == SIZE || column() < SIZE));
        }
    }

    // Widens the codes of keys and values to a stage.
    static DEVICE void widen_codes(T* stage, const C* codes) {
        constexpr u32 COUNT = 2 * Shape::KEYS * SIZE / 8;
        static_assert(COUNT % Shape::THREADS == 0, "threads widen equally many codes");
#pragma unroll
        for (u32 i = 0; i < COUNT / Shape::THREADS; ++i) {
            const u32 at = i * Shape::THREADS + threadIdx.x;
            const u32 place = at / (SIZE / 8) * Shape::STRIDE + at % (SIZE / 8) * 8;
            store(stage + place, convert<T>(load<8>(codes + at * 8)));
        }
    }
};

// The largest weight is at most two to this power. As long as scores grow by less, sum and output are not rescaled.
// (FlashAttention-4 rescales as seldom.)
constexpr float MARGIN = 8.0f;

// One warp's share of the rows. A lane's fragments hold the rows `lane / 4` and `lane / 4 + 8` of each 16.
template <class T, class Shape, int SIZE, int FRAGMENTS>
struct PrefillWarp {
    static constexpr u32 D = Shape::D, KEYS = Shape::KEYS, STRIDE = Shape::STRIDE;
    static constexpr bool Q_IN_REGISTERS = Shape::Q_IN_REGISTERS;

    u32 q[FRAGMENTS][Q_IN_REGISTERS ? D / 16 : 1][4];
    float scores[FRAGMENTS][KEYS / 8][4];
    float out[FRAGMENTS][D / 8][4] = {};
    float largest[FRAGMENTS][2];  // power of two to which weights are relative
    float sum[FRAGMENTS][2] = {};  // this lane's columns only
    // The first key that any row sees and the place after the last one, and the same of all rows.
    u32 begin, end, all_begin, all_end;

    static DEVICE u32 first_row() { return warp_id() * Shape::WARP_ROWS; }
    static DEVICE u32 row(u32 fragment, u32 half) { return first_row() + fragment * 16 + lane_id() / 4 + 8 * half; }

    DEVICE PrefillWarp(const AttentionParams& p, const PrefillTile& tile, const PrefillRows& rows, u32 count) {
        for (u32 i = 0; i < 2 * FRAGMENTS; ++i) largest[i / 2][i % 2] = LOWEST;
        const u32 first = rows.query(first_row()), last = rows.query(min(first_row() + Shape::WARP_ROWS, count) - 1);
        begin = tile.begin_of(p, first);
        // A warp without rows sees no key.
        end = first_row() < count ? tile.end_of(p, last) : 0;
        all_begin = tile.begin_of(p, last);
        all_end = tile.end_of(p, first);
    }

    // Returns whether any row sees a key of the tile of keys, and whether all rows see all of them.
    DEVICE bool sees(u32 key) const { return key < end && key + KEYS > begin; }
    DEVICE bool sees_all(u32 key) const { return key >= all_begin && key + KEYS <= all_end; }

    // `at(row)` returns the address of a row, of which there are `count`.
    template <class At>
    DEVICE void load_queries(u32 count, At at) {
#pragma unroll
        for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const T* const from = at(min(row(f, half), count - 1));
#pragma unroll
                for (u32 i = 0; i < D / 8; ++i) {
                    const u32 column = lane_id() % 4 * 2 + i * 8;
                    q[f][i / 2][half + i % 2 * 2] = D == SIZE || column < SIZE ? *(const u32*)(from + column) : 0;
                }
            }
        }
    }

    // Computes scores = q · keysᵀ.
    DEVICE void multiply_keys(const T* keys, const T* queries) {
        const u32 lane = lane_id();
        const T* const left = one_address(queries + (first_row() + lane % 16) * STRIDE + lane / 16 * 8);
        const T* const right = one_address(keys + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS * KEYS / 2; ++i) scores[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4] = 0.0f;
#pragma unroll
        for (u32 k = 0; k < D / 16; ++k) {
            u32 a[FRAGMENTS][4];
#pragma unroll
            for (u32 f = 0; f < FRAGMENTS; ++f) {
                if constexpr (Q_IN_REGISTERS) {
                    for (u32 i = 0; i < 4; ++i) a[f][i] = q[f][k][i];
                } else {
                    ldmatrix_x4(a[f], left + f * 16 * STRIDE + k * 16);
                }
            }
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; ++n) {
                // These are two tiles of eight keys: the lower and the upper half of the 16 columns of each.
                u32 b[4];
                ldmatrix_x4(b, right + n * 16 * STRIDE + k * 16);
#pragma unroll
                for (u32 f = 0; f < FRAGMENTS; ++f) {
                    mma_m16n8k16(scores[f][2 * n], a[f], b, T());
                    mma_m16n8k16(scores[f][2 * n + 1], a[f], b + 2, T());
                }
            }
        }
    }

    DEVICE void cap(const AttentionParams& p) {
#pragma unroll
        for (u32 f = 0; f < FRAGMENTS; ++f) score(p, scores[f]);
    }

    // Removes the scores of keys that a row does not see.
    DEVICE void hide(const AttentionParams& p, const PrefillTile& tile, const PrefillRows& rows, u32 key) {
#pragma unroll
        for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 query = opaque(rows.query(row(f, half))), low = tile.begin_of(p, query), high = tile.end_of(p, query);
#pragma unroll
                for (u32 i = 0; i < KEYS / 4; ++i) {
                    const u32 at = key + i / 2 * 8 + lane_id() % 4 * 2 + i % 2;
                    if (at < low || at >= high) scores[f][i / 2][2 * half + i % 2] = minus_infinity();
                }
            }
        }
    }

    // Converts scores to weights relative to the maximum, and rescales sum and output if that has grown. `factor` makes powers
    // of two of scores.
    DEVICE void soften(float factor) {
        float shrink[FRAGMENTS][2];
        bool grows = false;
#pragma unroll
        for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                float most = scores[f][0][2 * half];
#pragma unroll
                for (u32 i = 1; i < KEYS / 4; ++i) most = fmaxf(most, scores[f][i / 2][2 * half + i % 2]);
                most = warp_max<4>(most) * factor;
                // A row decides by itself, so that its result does not depend on the others.
                const bool is_larger = most > largest[f][half] + MARGIN;
                const float next = is_larger ? most : largest[f][half];
                shrink[f][half] = exp2_fast(largest[f][half] - next);
                largest[f][half] = next;
                grows = grows || is_larger;
            }
        }
        if (__any_sync(ALL_LANES, grows)) {
#pragma unroll
            for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
                for (u32 half = 0; half < 2; ++half) sum[f][half] *= shrink[f][half];
#pragma unroll
                for (u32 n = 0; n < D / 8; ++n) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) out[f][n][i] *= shrink[f][i / 2];
                }
            }
        }
#pragma unroll
        for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    scores[f][n][i] = exp2_fast(fmaf(scores[f][n][i], factor, -largest[f][i / 2]));
                    sum[f][i / 2] += scores[f][n][i];
                }
            }
        }
    }

    // Computes out += weights · values. The layout of the scores in registers is that of a product's left factor.
    DEVICE void multiply_values(const T* values) {
        const u32 lane = lane_id();
        const T* const right = one_address(values + lane % 16 * STRIDE + lane / 16 * 8);
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; ++k) {
            u32 a[FRAGMENTS][4];
#pragma unroll
            for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const float* pair = &scores[f][2 * k + i / 2][i % 2 * 2];
                    a[f][i] = pack_pair<T>(pair[0], pair[1]);
                }
            }
#pragma unroll
            for (u32 n = 0; n < D / 16; ++n) {
                u32 b[4];
                ldmatrix_x4_trans(b, right + k * 16 * STRIDE + n * 16);
#pragma unroll
                for (u32 f = 0; f < FRAGMENTS; ++f) {
                    mma_m16n8k16(out[f][2 * n], a[f], b, T());
                    mma_m16n8k16(out[f][2 * n + 1], a[f], b + 2, T());
                }
            }
        }
    }

    // Writes the first `count` rows. `head(row)` returns the head of a row, and `at(row)` its address.
    template <class Head, class At>
    DEVICE void store_output(const AttentionParams& p, u32 count, Head head, At at) const {
#pragma unroll
        for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 own = row(f, half);
                const float total = warp_sum<4>(sum[f][half]);
                if (own >= count) continue;
                const float inverse = share(p, head(own), largest[f][half], total);
                T* const to = at(own) + lane_id() % 4 * 2;
#pragma unroll
                for (u32 n = 0; n < SIZE / 8; ++n) {
                    *(u32*)(to + n * 8) = pack_pair<T>(out[f][n][2 * half] * inverse, out[f][n][2 * half + 1] * inverse);
                }
            }
        }
    }
};

// Grid: (the plan's tiles, q_heads / tile_heads).
template <class T, int SIZE, int WARPS, int FRAGMENTS, int KEYS, class C = T>
DEVICE void paged_prefill(const AttentionParams& p) {
    using Shape = PrefillShape<T, SIZE, WARPS, FRAGMENTS, KEYS, C>;
    DYNAMIC_SHARED(memory);
    T* const stages = (T*)memory;
    C* const codes = (C*)(stages + Shape::STAGE);
    T* const queries = stages + Shape::COPIED;  // unless they are in registers
    const PrefillTile tile(p, blockIdx.x);
    const PrefillRows rows(p.tile_heads);
    const u32 head = blockIdx.y * p.tile_heads, count = tile.queries * p.tile_heads;
    const u64 at = ((u64)tile.row * p.q_heads + head) * SIZE;
    const auto query = [&](u32 r) { return (const T*)p.q + at + rows.place(p, r, SIZE); };

    PrefillWarp<T, Shape, SIZE, FRAGMENTS> warp(p, tile, rows, count);
    if constexpr (Shape::Q_IN_REGISTERS) {
        warp.load_queries(count, query);
    } else {
        copy_rows_async<Shape::THREADS, Shape::ROWS, SIZE, Shape::D>(queries, 0, count, query);
    }
    TileCopies<T, Shape, SIZE, C> copies(p, tile, head / (p.q_heads / p.kv_heads));
    const float factor = p.softcap > 0.0f ? 1.0f : p.scale * LOG2_E;
    u32 key = tile.first / Shape::KEYS * Shape::KEYS, stage = 0;
    copies.find(key);
    copies.copy(Shape::IS_NARROW ? codes : (C*)stages, key);
    copies.find(key + Shape::KEYS);
#pragma unroll 1
    for (; key < tile.keys; key += Shape::KEYS) {
        cp_async_wait<0>();
        __syncthreads();
        if constexpr (Shape::IS_NARROW) {
            copies.widen_codes(stages, codes);
            __syncthreads();
            copies.copy(codes, key + Shape::KEYS);
        } else {
            copies.copy(stages + (Shape::STAGE - stage), key + Shape::KEYS);
        }
        if (warp.sees(key)) {
            warp.multiply_keys(stages + stage, queries);
            if (p.softcap > 0.0f) warp.cap(p);
            if (!warp.sees_all(key)) warp.hide(p, tile, rows, key);
            warp.soften(factor);
            // Here registers are free.
            copies.find(key + 2 * Shape::KEYS);
            warp.multiply_values(stages + stage + Shape::STAGE / 2);
        } else {
            copies.find(key + 2 * Shape::KEYS);
        }
        if constexpr (!Shape::IS_NARROW) stage = Shape::STAGE - stage;
    }
    const auto output = [&](u32 r) { return (T*)p.out + at + rows.place(p, r, SIZE); };
    warp.store_output(p, count, [&](u32 r) { return head + rows.head(r); }, output);
}
