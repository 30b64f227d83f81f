// Code shared by the attention kernels: visibility and location of keys, and the conversion of products to scores.
#pragma once
#include "gpu.h"

// Returns the last position that a query sees, which may be beyond the keys; `position` is the query's own.
DEVICE u32 last_seen(const AttentionParams& p, u32 position, u32 length) { return position + min(p.lookahead, length); }

// Returns the place after the last key that a query sees, which may be beyond the keys. `position` is the last one that it
// sees if it has no span.
DEVICE u32 seen_end(const AttentionParams& p, u32 row, u32 position) { return p.seen_ends ? p.seen_ends[row] : position + 1; }

// Returns the first key that a query sees; `position` is the last one that it sees if it has no span.
DEVICE u32 first_key(const AttentionParams& p, u32 position) {
    return p.window && position + 1 > p.window ? position + 1 - p.window : 0;
}

// Returns the score of a product of query and key: scaled, capped and multiplied by log2(e), so that the softmax uses
// powers of two.
DEVICE float scaled(const AttentionParams& p, float product) { return product * (p.scale * LOG2_E); }
DEVICE float capped(const AttentionParams& p, float product) {
    // tanh(x) = 1 - 2 / (exp(2x) + 1)
    const float cap = p.softcap * LOG2_E;
    return fmaf(-2.0f * cap, reciprocal_fast(exp2_fast(product * (p.scale * (2.0f * LOG2_E) / p.softcap)) + 1.0f), cap);
}

// Converts products to scores. The cap is tested once, because a branch at each score would serialise them.
template <u32 A, u32 B>
DEVICE void score(const AttentionParams& p, float (&products)[A][B]) {
    if (p.softcap > 0.0f) {
#pragma unroll
        for (u32 a = 0; a < A; ++a) {
#pragma unroll
            for (u32 b = 0; b < B; ++b) products[a][b] = capped(p, products[a][b]);
        }
    } else {
#pragma unroll
        for (u32 a = 0; a < A; ++a) {
#pragma unroll
            for (u32 b = 0; b < B; ++b) products[a][b] = scaled(p, products[a][b]);
        }
    }
}

// Returns the factor of an output that is relative to the maximum `largest` and whose weights have the sum `sum`; 0 if
// there is no key. The sink of the head, if any, is one more weight of that sum. Called once for a head of a query,
// after all its keys.
DEVICE float share(const AttentionParams& p, u32 head, float largest, float sum) {
    float scale = 1.0f;
    if (p.sinks) {
        const float sink = p.sinks[head] * LOG2_E, next = fmaxf(largest, sink);
        scale = exp2_fast(largest - next);
        sum = fmaf(sum, scale, exp2_fast(sink - next));
    }
    return sum == 0.0f ? 0.0f : scale * p.value_scale / sum;
}

// Returns the blocks of a sequence.
DEVICE const u32* blocks_of(const AttentionParams& p, u32 sequence) {
    return p.block_table + (u64)(p.seats ? p.seats[sequence] : sequence) * p.table_stride;
}

// Keys or values of one KV head of one sequence, in the type of the cache.
template <class T>
struct Cache {
    const T* base;
    const u32* blocks;  // blocks of the sequence
    u64 block_stride;
    u32 key_stride;

    DEVICE Cache(const AttentionParams& p, const void* layer, const u32* blocks, u32 kv_head, u32 head_size)
        : base((const T*)layer + kv_head * head_size),
          blocks(blocks),
          block_stride(p.block_stride),
          key_stride(p.kv_heads * head_size) {}

    DEVICE const T* at(u32 key) const { return base + blocks[key / KV_BLOCK] * block_stride + key % KV_BLOCK * key_stride; }
};

// A tile of prefill: adjacent queries of one sequence, and the keys that any of them sees.
struct PrefillTile {
    u32 row;        // row of the first query, in q and out
    u32 queries;    // number of queries
    u32 position;   // last position that the first query sees if it has no span, which may be beyond the keys
    u32 keys;       // position of the last key that any query sees plus 1; 0 if the sequence has no keys
    u32 first;      // first key that any query sees
    const u32* blocks;

    DEVICE PrefillTile(const AttentionParams& p, u32 tile) {
        const u32 sequence = p.plan[3 * tile], offset = p.plan[3 * tile + 1];
        const u32 start = p.query_start[sequence], count = p.query_start[sequence + 1] - start;
        const u32 length = p.seq_lens[sequence];
        row = start + offset;
        queries = p.plan[3 * tile + 2];
        position = last_seen(p, length - count + offset, length);
        const u32 last = queries - 1;
        keys = length >= count ? min(seen_end(p, row + last, position + last), length) : 0;
        first = first_key(p, position);
        blocks = blocks_of(p, sequence);
    }

    // Returns the first of the keys from `key` on that any query sees, relative to `key`.
    DEVICE u32 begin_in(u32 key) const { return first > key ? first - key : 0; }

    // Returns the first key that a query sees, and the place after the last one.
    DEVICE u32 begin_of(const AttentionParams& p, u32 query) const { return first_key(p, position + query); }
    DEVICE u32 end_of(const AttentionParams& p, u32 query) const {
        // Queries behind the last one of the tile have no row.
        return min(seen_end(p, row + min(query, queries - 1), position + query), keys);
    }

    // Returns whether a query sees the key.
    DEVICE bool sees(const AttentionParams& p, u32 query, u32 key) const {
        return key < end_of(p, query) && key >= begin_of(p, query);
    }

    // Returns whether all queries see all of `count` keys from `key` on.
    DEVICE bool all_see(const AttentionParams& p, u32 key, u32 count) const {
        return key + count <= keys && key + count <= position + 1 && key >= begin_of(p, queries - 1);
    }
};

// Pieces of W elements of rows that are copied to shared memory, counted row by row. Rows have SIZE elements there and are
// padded to D. Those outside begin .. end, and the padding, become zeros.
template <int SIZE, int D, u32 W>
struct RowPieces {
    static constexpr u32 EACH = D / W;
    static_assert(SIZE % W == 0, "pieces are whole");
    u32 begin, end;

    // Returns the address of piece `at`, of which row r begins at `row(r)`. That of a piece of zeros may be read too, so that
    // rows are looked up without a branch, and no lookup waits for another.
    template <class Row>
    DEVICE auto from(u32 at, Row row) const {
        const u32 column = at % EACH * W;
        return row(min(max(at / EACH, begin), end - 1)) + (D == SIZE || column < SIZE ? column : 0);
    }

    DEVICE bool is_read(u32 at) const {
        const u32 r = at / EACH;
        return r >= begin && r < end && (D == SIZE || at % EACH * W < SIZE);
    }

    static DEVICE u32 place(u32 at) { return at / EACH * (D + 8) + at % EACH * W; }
};

// Returns the number of pieces that a thread has in flight of `each`, which registers hold: as many as make whole batches.
DEVICE constexpr u32 pieces_in_flight(u32 each) {
    u32 batch = 7;
    while (each % batch != 0) --batch;
    return batch;
}

// Copies ROWS rows of SIZE elements, of which row r begins at `row(r)` and may be of another type.
template <u32 THREADS, u32 ROWS, int SIZE, int D, class T, class Row>
DEVICE void copy_rows(T* shared, u32 begin, u32 end, Row row) {
    using Pieces = RowPieces<SIZE, D, 8>;
    constexpr u32 COUNT = ROWS * Pieces::EACH, BATCH = pieces_in_flight((COUNT + THREADS - 1) / THREADS);
    const Pieces pieces{begin, end};
    for (u32 first = threadIdx.x; first < COUNT; first += BATCH * THREADS) {
        decltype(load<8>(row(0))) batch[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) batch[i] = load<8>(pieces.from(min(first + i * THREADS, COUNT - 1), row));
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            const u32 at = first + i * THREADS;
            if (COUNT % THREADS != 0 && at >= COUNT) continue;
            if (!pieces.is_read(at)) batch[i] = {};
            store(shared + Pieces::place(at), convert<T>(batch[i]));
        }
    }
}

#ifdef HAS_SM75
// Starts the copy of ROWS rows of SIZE elements, of which row r begins at `row(r)`. Rows of another type pass through
// registers, which is complete on return.
template <u32 THREADS, u32 ROWS, int SIZE, int D, class T, class Row>
DEVICE void copy_rows_async(T* shared, u32 begin, u32 end, Row row) {
    if constexpr (sizeof(*row(0)) != sizeof(T)) {
        copy_rows<THREADS, ROWS, SIZE, D>(shared, begin, end, row);
        cp_async_commit();
    } else {
        using Pieces = RowPieces<SIZE, D, WIDE<T>>;
        constexpr u32 EACH = ROWS * Pieces::EACH / THREADS;
        static_assert(ROWS * Pieces::EACH % THREADS == 0, "threads copy equally many pieces");
        const Pieces pieces{begin, end};
        const T* from[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) from[i] = pieces.from(i * THREADS + threadIdx.x, row);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 at = i * THREADS + threadIdx.x;
            cp_async_16(shared + Pieces::place(at), from[i], pieces.is_read(at));
        }
        cp_async_commit();
    }
}
#endif  // HAS_SM75
