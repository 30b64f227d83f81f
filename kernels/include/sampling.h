// What the sampling kernels share. A row is divided into segments of `p.segment` tokens with a CTA each, and the last CTA
// of a row to arrive merges what the others have found.
//
// Nothing is sorted. If tokens are ordered by descending logit, equals by id, top-k and top-p keep a prefix. Tokens are
// divided into bins by how far their logits are below the largest, so the sizes of bins tell in which the prefix ends.
// Only the tokens of that bin are compared with each other. Probabilities are summed as integers, 2^44 for the most
// likely token: such a sum does not depend on the order of additions, so neither the number of CTAs nor the order of
// threads has an effect.
#pragma once
#include "gpu.h"

constexpr u32 THREADS = 256, WARPS = THREADS / 32;
constexpr float ONE = 17592186044416.0f;  // 2^44

// ------------------------------------------------------------------------------------------- order

// Returns an integer with the same order as logits: NaN as minus infinity, and both zeros equal. No logit has the key
// 0.
DEVICE u32 order_key(float x) {
    const u32 bits = __float_as_uint(x != x ? minus_infinity() : x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float key_value(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Position of a token in the order: the largest comes first. No token has the place 0.
DEVICE u64 place(float x, u32 id) { return (u64)order_key(x) << 32 | ~id; }
DEVICE u32 place_id(u64 place) { return ~(u32)place; }
DEVICE float place_value(u64 place) { return key_value((u32)(place >> 32)); }

// ------------------------------------------------------------------------------------------- reductions

// Returns the sum of a value over the lanes up to this one.
template <class N>
DEVICE N warp_scan(N value) {
#pragma unroll
    for (u32 offset = 1; offset < 32; offset *= 2) {
        N other = __shfl_up_sync(ALL_LANES, value, offset);
        if (lane_id() >= offset) value += other;
    }
    return value;
}

// Shared memory of a CTA.
struct Scratch {
    u64* partial;  // WARPS
    u64* found;    // 4
    u32* count;    // 1
    u64* places;   // THREADS
    u64* amounts;  // THREADS
};
#define SAMPLING_SCRATCH(NAME)          \
    SHARED_ARRAY(u64, partial, WARPS);  \
    SHARED_ARRAY(u64, found, 4);        \
    SHARED_ARRAY(u32, count, 1);        \
    SHARED_ARRAY(u64, places, THREADS); \
    SHARED_ARRAY(u64, amounts, THREADS); \
    const Scratch NAME = {partial, found, count, places, amounts}

// Returns the largest value of the CTA in every thread. `partial` is free again on return.
DEVICE u64 block_max(u64 value, u64* partial) {
#pragma unroll
    for (u32 offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, offset));
    if (lane_id() == 0) partial[warp_id()] = value;
    __syncthreads();
#pragma unroll
    for (u32 warp = 0; warp < WARPS; ++warp) value = max(value, partial[warp]);
    __syncthreads();
    return value;
}

// Returns the sum over the threads up to this one, and in `total` the sum over all.
DEVICE u64 block_scan(u64 value, u64* partial, u64& total) {
    value = warp_scan(value);
    if (lane_id() == 31) partial[warp_id()] = value;
    __syncthreads();
    total = 0;
    u64 before = 0;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; ++warp) {
        if (warp == warp_id()) before = total;
        total += partial[warp];
    }
    __syncthreads();
    return before + value;
}

DEVICE u64 block_sum(u64 value, u64* partial) {
    u64 total;
    block_scan(value, partial, total);
    return total;
}

// Adds to a number of 64 bits in two words of shared memory, which has no such operation: a thread whose addition to the
// lower word overflows adds the carry to the upper one.
DEVICE void add_wide(u32* low, u32* high, u64 value) {
    const u32 lower = (u32)value, sum = atomicAdd(low, lower) + lower;
    const u32 upper = (u32)(value >> 32) + (sum < lower);
    if (upper != 0) atomicAdd(high, upper);
}

// ------------------------------------------------------------------------------------------- rows

// Tokens from `begin` to `end` of a row.
struct Segment {
    u32 begin, end;
};

DEVICE Segment segment_at(const SamplingParams& p, u32 index) {
    const u32 begin = index * p.segment;
    return {begin, min(begin + p.segment, p.vocab)};
}

// Calls visit(id, logit) for this thread's share of a segment. No CTA of the launch writes the row.
template <class F>
DEVICE void for_each(const float* row, Segment segment, F visit) {
    constexpr u32 LOADS = 2;
    for (u32 base = segment.begin + threadIdx.x * 4; base < segment.end; base += LOADS * SAMPLING_TILE) {
        Vec<float, 4> x[LOADS];
        // Rows are padded to whole loads.
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
            const u32 first = base + i * SAMPLING_TILE;
            x[i] = load_once_if<4>(row + first, first < segment.end);
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const u32 id = base + i * SAMPLING_TILE + e;
                if (id < segment.end) visit(id, x[i].x[e]);
            }
        }
    }
}

// Weights of a row's tokens: 2^44 for the most likely.
struct Weights {
    float largest, inverse_temperature, min_p;

    DEVICE u64 operator()(float x) const {
        // The first case is needed for correctness too: infinity minus infinity is NaN.
        const float weight = x == largest ? 1.0f : expf((x - largest) * inverse_temperature);
        // NaN and tokens dropped by min-p have the weight 0.
        return weight >= min_p ? (u64)(weight * ONE) : 0;
    }

    // Returns the bin of a token, which grows as the logit falls. The weights in the last bin but one are below 1.
    DEVICE u32 bin(float x) const {
        constexpr float BINS_OF_E = 33.5f;
        const float below = (largest - x) * inverse_temperature * BINS_OF_E;
        return x == largest ? 0 : (u32)fminf(below, SAMPLING_BINS - 1);
    }
};

// ------------------------------------------------------------------------------------------- bins

// Bins of a CTA's tokens in shared memory: their numbers and the sums of their weights.
struct Bins {
    u32* counts;  // SAMPLING_BINS
    u32* low;     // SAMPLING_BINS
    u32* high;    // SAMPLING_BINS

    DEVICE void clear() const {
        for (u32 i = threadIdx.x; i < SAMPLING_BINS; i += THREADS) counts[i] = low[i] = high[i] = 0;
        __syncthreads();
    }

    // Adds them to those of the row.
    DEVICE void merge(const SamplingParams& p) const {
        __syncthreads();
        const u64 row = (u64)blockIdx.y * SAMPLING_BINS;
        for (u32 i = threadIdx.x; i < SAMPLING_BINS; i += THREADS) {
            const u64 mass = (u64)high[i] << 32 | low[i];
            if (counts[i] != 0) atomicAdd(p.counts + row + i, counts[i]);
            if (mass != 0) atomicAdd(p.masses + row + i, mass);
        }
    }
};
#define SAMPLING_BINS_OF_CTA(NAME)             \
    SHARED_ARRAY(u32, counts, SAMPLING_BINS);  \
    SHARED_ARRAY(u32, low, SAMPLING_BINS);     \
    SHARED_ARRAY(u32, high, SAMPLING_BINS);    \
    const Bins NAME = {counts, low, high}

// Adjacent bins of a row, which a thread of its last CTA takes and clears for the next launch.
struct OwnBins {
    static constexpr u32 COUNT = SAMPLING_BINS / THREADS;
    u64 amounts[COUNT];

    static DEVICE u32 first() { return threadIdx.x * COUNT; }

    static DEVICE OwnBins take_counts(const SamplingParams& p) {
        u32* own = p.counts + (u64)blockIdx.y * SAMPLING_BINS + first();
        const Vec<u32, COUNT> found = load_fresh<COUNT>(own);
        OwnBins bins;
        Vec<u32, COUNT> zeros;
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            bins.amounts[i] = found.x[i];
            zeros.x[i] = 0;
        }
        store(own, zeros);
        return bins;
    }

    static DEVICE OwnBins take_masses(const SamplingParams& p) {
        u64* own = p.masses + (u64)blockIdx.y * SAMPLING_BINS + first();
        OwnBins bins;
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            bins.amounts[i] = load_fresh<1>(own + i).x[0];
            own[i] = 0;
        }
        return bins;
    }

    DEVICE u64 sum() const {
        u64 sum = 0;
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) sum += amounts[i];
        return sum;
    }

    // Calls found(bin, sum before it) if the sum, which is `before` at the first bin, reaches `needed` in an own bin.
    template <class F>
    DEVICE void reach(u64 before, u64 needed, F found) const {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            if (before < needed && before + amounts[i] >= needed) found(i, before);
            before += amounts[i];
        }
    }
};

// ------------------------------------------------------------------------------------------- lists

// Adds those of this CTA's tokens to the row's list for which `is_listed(logit)`; there are `own` of them in this thread's
// share. A list that is full takes no more, but all are counted.
template <class F>
DEVICE void list(const SamplingParams& p, const float* row, Segment segment, u32 own, F is_listed, Scratch scratch) {
    u64 total;
    const u32 through = (u32)block_scan(own, scratch.partial, total);
    if (total == 0) return;
    if (threadIdx.x == 0) *scratch.count = atomicAdd(&p.states[blockIdx.y].listed, (u32)total);
    __syncthreads();
    u32 at = *scratch.count + through - own;
    u64* entries = p.lists + (u64)blockIdx.y * SAMPLING_LIST;
    for_each(row, segment, [&](u32 id, float x) {
        if (!is_listed(x)) return;
        if (at < SAMPLING_LIST) entries[at] = place(x, id);
        ++at;
    });
}

// The listed tokens of a row, in the row itself if they are too many for the list.
template <class F>
struct Listed {
    const u64* entries;
    u32 count;
    const float* row;
    u32 vocab;
    F is_listed;

    // Calls visit(place) for this thread's share.
    template <class V>
    DEVICE void for_each(V visit) const {
        const bool in_list = count <= SAMPLING_LIST;
        const u32 end = in_list ? count : vocab;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < end; i += THREADS) {
            const float x = in_list ? 0.0f : row[i];
            if (!in_list && !is_listed(x)) continue;
            visit(in_list ? load_fresh<1>(entries + i).x[0] : place(x, i));
        }
    }
};

// Takes the row's list in the last CTA and empties it for the next launch.
template <class F>
DEVICE Listed<F> take_list(const SamplingParams& p, const float* row, F is_listed, Scratch scratch) {
    if (threadIdx.x == 0) {
        u32* listed = &p.states[blockIdx.y].listed;
        *scratch.count = atomicExch(listed, 0u);
    }
    __syncthreads();
    const u32 count = *scratch.count;
    __syncthreads();
    return {p.lists + (u64)blockIdx.y * SAMPLING_LIST, count, row, p.vocab, is_listed};
}

// Returns the first of the few places in `scratch.places`, by the order of tokens, at which the sum reaches `needed`. The next
// barrier makes `scratch.found` free.
template <class A>
DEVICE u64 select_few(u32 count, A amount, u64 above, u64 needed, Scratch scratch) {
    const bool has = threadIdx.x < count;
    const u64 own = has ? scratch.places[threadIdx.x] : 0, own_amount = has ? amount(own) : 0;
    if (has) scratch.amounts[threadIdx.x] = own_amount;
    __syncthreads();
    u64 before = above;
    for (u32 i = 0; i < count; ++i)
        if (scratch.places[i] > own) before += scratch.amounts[i];
    if (has && before < needed && before + own_amount >= needed) scratch.found[0] = own;
    __syncthreads();
    return scratch.found[0];
}

// Returns the first place, by the order of tokens, at which the sum of the amounts of the listed tokens, which begins with
// `above`, reaches `needed`; there is one. Tokens with amount(place) 0 do not count.
template <class L, class A>
DEVICE u64 select(const L& listed, A amount, u64 above, u64 needed, Scratch scratch) {
    u64 lowest = 0, highest = ~0ull;
    while (true) {
        if (threadIdx.x == 0) *scratch.count = 0;
        __syncthreads();
        // The bottom is a complement, so that its maximum gives the lowest place.
        u64 top = 0, bottom = 0;
        listed.for_each([&](u64 place) {
            if (place < lowest || place > highest || amount(place) == 0) return;
            top = max(top, place);
            bottom = max(bottom, ~place);
            const u32 at = atomicAdd(scratch.count, 1u);
            if (at < THREADS) scratch.places[at] = place;
        });
        __syncthreads();
        const u32 count = *scratch.count;
        if (count <= THREADS) return select_few(count, amount, above, needed, scratch);
        highest = block_max(top, scratch.partial);
        lowest = ~block_max(bottom, scratch.partial);

        // The interval is divided into as many parts as there are threads, the uppermost first.
        const u64 length = highest - lowest;
        const u32 upper = (u32)(length >> 32);
        const u32 bits = upper != 0 ? 64 - __clz((int)upper) : 32 - __clz((int)(u32)length);
        const u32 shift = bits > 8 ? bits - 8 : 0;
        u32 *low = (u32*)scratch.amounts, *high = low + THREADS;
        low[threadIdx.x] = high[threadIdx.x] = 0;
        __syncthreads();
        listed.for_each([&](u64 place) {
            if (place < lowest || place > highest) return;
            const u64 own = amount(place);
            const u32 part = THREADS - 1 - (u32)((place - lowest) >> shift);
            if (own != 0) add_wide(low + part, high + part, own);
        });
        __syncthreads();
        u64 total;
        const u64 own = (u64)high[threadIdx.x] << 32 | low[threadIdx.x];
        const u64 through = above + block_scan(own, scratch.partial, total);
        if (through >= needed && through - own < needed) {
            scratch.found[0] = threadIdx.x;
            scratch.found[1] = through - own;
        }
        __syncthreads();
        const u64 part = THREADS - 1 - scratch.found[0];
        above = scratch.found[1];
        lowest += part << shift;
        highest = min(highest, lowest + (((u64)1 << shift) - 1));
    }
}
