// Conversion of logits to tokens, as defined by octavo_ops::sampling: one CTA per row, and no row depends on another.
//
// Nothing is sorted. If tokens are ordered by descending logit, equals by id, top-k and top-p keep a prefix. `select`
// finds the end of the prefix by histograms, each a thousand times finer than the one before. Probabilities are summed
// as integers, 2^44 for the most likely token: such a sum does not depend on the order of additions, so threads may add
// in any order.
#include "gpu.h"

constexpr u32 THREADS = 1024, WARPS = THREADS / 32;
constexpr float ONE = 17592186044416.0f;  // 2^44

// ------------------------------------------------------------------------------------------- order

// Returns an integer with the same order as logits: NaN as minus infinity, and both zeros equal. No logit has the key
// 0.
DEVICE u32 order_key(float x) {
    const u32 bits = __float_as_uint(x != x ? minus_infinity() : x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float key_value(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Position of a token in the order: the largest comes first.
DEVICE u64 place(u32 key, u32 id) { return (u64)key << 32 | ~id; }
DEVICE u32 place_id(u64 place) { return ~(u32)place; }
DEVICE float place_value(u64 place) { return key_value((u32)(place >> 32)); }

// The tokens that a filter keeps: those above the key, and the first `ties` with the key. Key 0 keeps all.
struct Cut {
    u32 key;
    u64 ties;
};

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

// Returns the largest value of the CTA in every thread. `partial` is shared memory, one number per warp, and is free
// again on return.
DEVICE u64 block_max(u64 value, u64* partial) {
#pragma unroll
    for (u32 offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, offset));
    if (lane_id() == 0) partial[warp_id()] = value;
    __syncthreads();
    // The loop is not fully unrolled, because there are not enough registers.
#pragma unroll 4
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
#pragma unroll 4
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

// ------------------------------------------------------------------------------------------- rows

// Each warp processes a part of a row: ids from `begin` to `end`, a multiple of the elements that its lanes load at
// once.
struct Segment {
    u32 begin, end;
};

DEVICE Segment segment_of(u32 warp, u32 vocab) {
    constexpr u32 STEP = 128;
    const u32 length = (vocab + WARPS * STEP - 1) / (WARPS * STEP) * STEP;
    const u32 begin = min(warp * length, vocab);
    return {begin, min(begin + length, vocab)};
}

// Calls visit(id, logit) for this thread's share of a row.
template <class F>
DEVICE void for_each(const float* row, u32 vocab, F visit) {
    const Segment segment = segment_of(warp_id(), vocab);
    for (u32 first = segment.begin + lane_id() * 4; first < segment.end; first += 128) {
        // Rows are padded to whole loads.
        const Vec<float, 4> x = load<4>(row + first);
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
            if (first + e < segment.end) visit(first + e, x.x[e]);
    }
}

// Visits a segment in the order of ids, 128 at a time, by all lanes of the warp together: visit(first of this lane's
// four ids, their keys, whether the cut keeps each). Ends when it returns true to all of them. `ties` is the number of
// earlier tokens with the cut's key.
template <class F>
DEVICE void walk(const float* row, Segment segment, Cut cut, u64 ties, F visit) {
    for (u32 base = segment.begin; base < segment.end; base += 128) {
        const u32 first = base + lane_id() * 4;
        u32 keys[4], own = 0;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            keys[e] = first + e < segment.end ? order_key(row[first + e]) : 0;
            own += cut.key != 0 && keys[e] == cut.key;
        }
        const u32 through = warp_scan(own);
        u64 rank = ties + through - own;
        bool kept[4];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) kept[e] = keys[e] > cut.key || (keys[e] != 0 && keys[e] == cut.key && rank++ < cut.ties);
        ties += __shfl_sync(ALL_LANES, through, 31);
        if (visit(first, keys, kept)) return;
    }
}

// Shared memory of a row.
struct Scratch {
    u64* bins;     // THREADS
    u64* partial;  // WARPS
    u64* found;    // 2
    u32* keys;     // THREADS
    u32* count;    // 1
};

// Returns the number of tokens with the cut's key in the segments before the warp's own.
DEVICE u64 ties_before(const float* row, u32 vocab, Cut cut, Scratch scratch) {
    u64 own = 0, total;
    if (cut.key != 0) for_each(row, vocab, [&](u32, float x) { own += order_key(x) == cut.key; });
    const u64 through = block_scan(own, scratch.partial, total);
    // The value of the first lane is the sum before the warp.
    return __shfl_sync(ALL_LANES, through - own, 0);
}

// ------------------------------------------------------------------------------------------- filters

// Returns the part of an interval that contains a key. It is monotonic in the key, and the two ends of the interval
// have separate parts.
DEVICE u32 bin_of(u32 key, u32 lowest, u32 highest) {
    if (key == lowest) return 0;
    if (key == highest) return THREADS - 1;
    constexpr float LARGEST = 3.4028235e38f;
    // Halves are used, so that no difference overflows.
    const float low = 0.5f * fmaxf(key_value(lowest), -LARGEST), high = 0.5f * fminf(key_value(highest), LARGEST);
    const float share = (0.5f * key_value(key) - low) / (high - low);
    return min((u32)(share * (THREADS - 1)), THREADS - 1);
}

// The remaining keys: those of a row from `lowest` to `highest`, all of them in shared memory once there are few.
struct Left {
    u32 lowest, highest;
    u32* keys;  // THREADS
    u32* count;
    bool few;
    u32 own;  // if there are few: this thread's key, or 0

    // Calls visit(key, logit) for this thread's share.
    template <class F>
    DEVICE void for_each(const float* row, u32 vocab, F visit) const {
        if (few) {
            if (own >= lowest && own <= highest) visit(own, key_value(own));
            return;
        }
        ::for_each(row, vocab, [&](u32, float x) {
            const u32 key = order_key(x);
            if (key >= lowest && key <= highest) visit(key, x);
        });
    }

    // Keeps the keys of one bin for which amount(logit) is not 0.
    template <class F>
    DEVICE void keep_bin(const float* row, u32 vocab, F amount, u32 bin, Scratch scratch) {
        if (threadIdx.x == 0) *count = 0;
        __syncthreads();
        // The bottom is a complement, so that its maximum gives the lowest key.
        u64 top = 0, bottom = 0;
        for_each(row, vocab, [&](u32 key, float x) {
            if (bin_of(key, lowest, highest) != bin || amount(x) == 0) return;
            top = max(top, (u64)key);
            bottom = max(bottom, (u64)~key);
            const u32 at = atomicAdd(count, 1u);
            if (at < THREADS) keys[at] = key;
        });
        highest = (u32)block_max(top, scratch.partial);
        lowest = ~(u32)block_max(bottom, scratch.partial);
        few = *count <= THREADS;
        own = threadIdx.x < *count ? keys[threadIdx.x] : 0;
        __syncthreads();
    }
};

// Returns the shortest prefix of the order whose amount is at least `needed`, which is above 0 and at most the whole
// amount. amount(logit) is the amount of a token; tokens with 0 are left out. The keys of the others are `lowest` to
// `highest`.
template <class F>
DEVICE Cut select(const float* row, u32 vocab, F amount, u64 needed, u32 lowest, u32 highest, Scratch scratch) {
    Left left = {lowest, highest, scratch.keys, scratch.count, false, 0};
    u64 above = 0, total;
    while (left.lowest < left.highest) {
        scratch.bins[threadIdx.x] = 0;
        __syncthreads();
        left.for_each(row, vocab, [&](u32 key, float x) {
            const u64 counts = amount(x);
            if (counts != 0) atomicAdd(&scratch.bins[bin_of(key, left.lowest, left.highest)], counts);
        });
        __syncthreads();
        // Bins are added from the uppermost down.
        const u32 own_bin = THREADS - 1 - threadIdx.x;
        const u64 own = scratch.bins[own_bin];
        const u64 through = above + block_scan(own, scratch.partial, total);
        if (through >= needed && through - own < needed) {
            scratch.found[0] = own_bin;
            scratch.found[1] = through - own;
        }
        __syncthreads();
        above = scratch.found[1];
        left.keep_bin(row, vocab, amount, (u32)scratch.found[0], scratch);
    }
    const u64 each = amount(key_value(left.lowest));
    return {left.lowest, (needed - above + each - 1) / each};
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
};

// Returns the tokens that top-k and top-p keep.
DEVICE Cut filter(const SamplingRow& asked, const float* row, u32 vocab, const Weights& weights, Scratch scratch) {
    const bool by_k = asked.top_k > 0 && asked.top_k < vocab, by_p = asked.top_p < 1.0f;
    Cut cut = {0, 0};
    if (!by_k && !by_p) return cut;
    u64 count = 0, mass = 0, bottom = 0;
    for_each(row, vocab, [&](u32, float x) {
        const u64 weight = weights(x);
        if (weight == 0) return;
        ++count;
        mass += weight;
        bottom = max(bottom, (u64)~order_key(x));
    });
    count = block_sum(count, scratch.partial);
    mass = block_sum(mass, scratch.partial);
    const u32 highest = order_key(weights.largest), lowest = ~(u32)block_max(bottom, scratch.partial);
    if (by_k && asked.top_k < count) {
        auto one = [&](float x) -> u64 { return weights(x) != 0; };
        cut = select(row, vocab, one, asked.top_k, lowest, highest, scratch);
    }
    if (!by_p) return cut;
    if (cut.key != 0) {
        mass = 0;
        for_each(row, vocab, [&](u32, float x) {
            if (order_key(x) > cut.key) mass += weights(x);
        });
        mass = block_sum(mass, scratch.partial) + cut.ties * weights(key_value(cut.key));
    }
    // At least the most likely token is kept.
    const u64 needed = min(max((u64)ceil((double)asked.top_p * (double)mass), (u64)1), mass);
    return select(row, vocab, weights, needed, lowest, highest, scratch);
}

// ------------------------------------------------------------------------------------------- random choice

// Returns bits 64 to 127 of a product.
DEVICE u64 multiply_high(u64 a, u64 b) {
    const u64 a0 = (u32)a, a1 = a >> 32, b0 = (u32)b, b1 = b >> 32;
    const u64 middle = a1 * b0 + (a0 * b0 >> 32);
    return a1 * b1 + (middle >> 32) + ((a0 * b1 + (u32)middle) >> 32);
}

// Returns the 53 random bits for an output: Philox4x32-10 with the position as counter and the seed as key.
DEVICE u64 random_bits(u64 seed, u32 position) {
    u32 counter[4] = {position, 0, 0, 0}, key[2] = {(u32)seed, (u32)(seed >> 32)};
#pragma unroll
    for (u32 round = 0; round < 10; ++round) {
        const u64 a = (u64)0xd2511f53u * counter[0], b = (u64)0xcd9e8d57u * counter[2];
        counter[0] = (u32)(b >> 32) ^ counter[1] ^ key[0];
        counter[1] = (u32)b;
        counter[2] = (u32)(a >> 32) ^ counter[3] ^ key[1];
        counter[3] = (u32)a;
        key[0] += 0x9e3779b9u;
        key[1] += 0xbb67ae85u;
    }
    return ((u64)counter[0] << 32 | counter[1]) >> 11;
}

// Samples the first token, by id, at which the sum over the kept tokens exceeds the random share of the total. One
// thread writes it to `out`.
DEVICE void draw(const SamplingRow& asked, const float* row, u32 vocab, const Weights& weights, Cut cut, Scratch scratch,
                 u32* out) {
    const u64 ties = ties_before(row, vocab, cut, scratch);
    const Segment segment = segment_of(warp_id(), vocab);
    u64 own = 0, total;
    walk(row, segment, cut, ties, [&](u32, const u32* keys, const bool* kept) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
            if (kept[e]) own += weights(key_value(keys[e]));
        return false;
    });
    const u64 through = block_scan(own, scratch.partial, total);
    const u64 target = multiply_high(random_bits(asked.seed, asked.output_position) << 11, total);
    const u64 end = __shfl_sync(ALL_LANES, through, 31);
    u64 sum = __shfl_sync(ALL_LANES, through - own, 0);
    // Exactly one warp's segment contains the token.
    if (target < sum || target >= end) return;
    walk(row, segment, cut, ties, [&](u32 first, const u32* keys, const bool* kept) {
        u64 four = 0;
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
            if (kept[e]) four += weights(key_value(keys[e]));
        const u64 reached = sum + warp_scan(four);
        const u32 beyond = __ballot_sync(ALL_LANES, reached > target);
        sum = __shfl_sync(ALL_LANES, reached, 31);
        if (beyond == 0) return false;
        if (lane_id() == (u32)__ffs((int)beyond) - 1) {
            u64 at = reached - four;
            u32 passed = 0;
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                if (kept[e]) at += weights(key_value(keys[e]));
                passed += at <= target;
            }
            *out = first + passed;
        }
        return true;
    });
}

DEVICE bool masked(const SamplingParams& p, const SamplingRow& asked, u32 id) {
    return asked.mask_row != SAMPLING_NONE && (p.masks[(u64)asked.mask_row * p.mask_words + id / 32] >> id % 32 & 1) == 0;
}

// Returns the token of a row in which no candidate is left: the most likely token that is allowed by the mask and not
// forbidden; if there is none, that is allowed by the mask; if there is none, that is not forbidden.
DEVICE u32 fallback(const SamplingParams& p, const SamplingRow& asked, Scratch scratch) {
    u64 both = 0, allowed = 0, unforbidden = 0;
    for_each(p.logits + (u64)blockIdx.x * p.row_stride, p.vocab, [&](u32 id, float x) {
        bool forbidden = false;
        for (u32 i = asked.forbidden_start; i < asked.forbidden_end; ++i) forbidden |= p.forbidden_ids[i] == id;
        const bool in_mask = !masked(p, asked, id);
        const u64 own = place(order_key(x), id);
        if (in_mask && !forbidden) both = max(both, own);
        if (in_mask) allowed = max(allowed, own);
        if (!forbidden) unforbidden = max(unforbidden, own);
    });
    u64 found = block_max(both, scratch.partial);
    if (found == 0) found = block_max(allowed, scratch.partial);
    if (found == 0) found = block_max(unforbidden, scratch.partial);
    return found == 0 ? 0 : place_id(found);
}

DEVICE u64 most_likely(const float* row, u32 vocab, Scratch scratch) {
    u64 best = 0;
    for_each(row, vocab, [&](u32 id, float x) { best = max(best, place(order_key(x), id)); });
    return block_max(best, scratch.partial);
}

DEVICE void draw_rows(const SamplingParams& p) {
    SHARED_ARRAY(u64, bins, THREADS);
    SHARED_ARRAY(u64, partial, WARPS);
    SHARED_ARRAY(u64, found, 2);
    SHARED_ARRAY(u32, keys, THREADS);
    SHARED_ARRAY(u32, count, 1);
    const Scratch scratch = {bins, partial, found, keys, count};
    const SamplingRow& asked = p.rows_of[blockIdx.x];
    if (asked.flags & SAMPLING_PADDING) return;
    u32* out = p.ids + blockIdx.x;
    const bool first = threadIdx.x == 0;
    if (first) p.status[blockIdx.x] = 0;
    if (asked.forced != SAMPLING_NONE) {
        if (first) *out = asked.forced;
        return;
    }
    const float* row = (asked.flags & SAMPLING_ADJUST ? p.adjusted : p.logits) + (u64)blockIdx.x * p.row_stride;
    const u64 best = most_likely(row, p.vocab, scratch);
    if (place_value(best) == minus_infinity()) {
        const u32 id = fallback(p, asked, scratch);
        if (first) {
            *out = id;
            p.status[blockIdx.x] = SAMPLING_STATUS_EXHAUSTED;
        }
        return;
    }
    // A temperature of NaN is greedy too.
    if (!(asked.temperature > 0.0f)) {
        if (first) *out = place_id(best);
        return;
    }
    const float min_p = asked.min_p > 0.0f ? fminf(asked.min_p, 1.0f) : 0.0f;
    const Weights weights = {place_value(best), 1.0f / asked.temperature, min_p};
    const Cut cut = filter(asked, row, p.vocab, weights, scratch);
    draw(asked, row, p.vocab, weights, cut, scratch, out);
}

// ------------------------------------------------------------------------------------------- adjusted logits

// Adds the biases. Those of the same token are added in the given order.
DEVICE void add_biases(const SamplingParams& p, const SamplingRow& asked, float* row) {
    for (u32 i = asked.bias_start + threadIdx.x; i < asked.bias_end; i += THREADS) {
        const u32 id = p.bias_ids[i];
        bool mine = id < p.vocab;
        for (u32 earlier = asked.bias_start; earlier < i; ++earlier) mine &= p.bias_ids[earlier] != id;
        if (!mine) continue;
        float x = row[id];
        for (u32 later = i; later < asked.bias_end; ++later)
            if (p.bias_ids[later] == id) x += p.bias_values[later];
        row[id] = x;
    }
}

// Applies the penalties to the logit of a token that was generated so many times; 0 if it is only in the prompt.
DEVICE void penalise(const SamplingRow& asked, float* row, u32 id, u32 times) {
    float x = row[id];
    x = x > 0.0f ? x / asked.repetition_penalty : x * asked.repetition_penalty;
    if (times > 0) x -= asked.frequency_penalty * (float)times + asked.presence_penalty;
    row[id] = x;
}

DEVICE void adjust_rows(const SamplingParams& p) {
    SHARED_ARRAY(u32, listed, 1);
    const SamplingRow& asked = p.rows_of[blockIdx.x];
    if (!(asked.flags & SAMPLING_ADJUST) || asked.flags & SAMPLING_PADDING || asked.forced != SAMPLING_NONE) return;
    if (threadIdx.x == 0) listed[0] = 0;
    float* row = p.adjusted + (u64)blockIdx.x * p.row_stride;
    for_each(p.logits + (u64)blockIdx.x * p.row_stride, p.vocab,
             [&](u32 id, float x) { row[id] = x != x || masked(p, asked, id) ? minus_infinity() : x; });
    __syncthreads();
    add_biases(p, asked, row);
    __syncthreads();
    for (u32 i = asked.forbidden_start + threadIdx.x; i < asked.forbidden_end; i += THREADS)
        if (p.forbidden_ids[i] < p.vocab) row[p.forbidden_ids[i]] = minus_infinity();
    __syncthreads();
    // The token of the preceding step is one more, whether it is listed or not.
    const u32 drawn = asked.pending != SAMPLING_NONE ? p.ids[asked.pending] : SAMPLING_NONE;
    for (u32 i = asked.counts_start + threadIdx.x; i < asked.counts_end; i += THREADS) {
        const u32 id = p.count_ids[i];
        if (id == drawn) listed[0] = 1;
        if (id < p.vocab) penalise(asked, row, id, p.count_times[i] + (id == drawn));
    }
    __syncthreads();
    if (threadIdx.x == 0 && drawn < p.vocab && !listed[0]) penalise(asked, row, drawn, 1);
}

// ------------------------------------------------------------------------------------------- log-probabilities

// Writes the positions of the tokens to report into `items` and returns their number. Listed tokens may occur more than
// once.
DEVICE u32 reported(const SamplingParams& p, const SamplingRow& asked, const float* row, u64* items, Scratch scratch) {
    const u32 listed = min(min(asked.listed_end - asked.listed_start, p.top_stride), SAMPLING_MAX_TOP);
    if (listed > 0) {
        if (threadIdx.x < listed) {
            const u32 id = p.listed_ids[asked.listed_start + threadIdx.x];
            items[threadIdx.x] = place(order_key(id < p.vocab ? row[id] : minus_infinity()), id);
        }
        return listed;
    }
    const u32 top = min(min(asked.top, p.vocab), min(p.top_stride, SAMPLING_MAX_TOP));
    if (top == 0) return 0;
    u64 highest = 0, bottom = 0;
    for_each(row, p.vocab, [&](u32, float x) {
        highest = max(highest, (u64)order_key(x));
        bottom = max(bottom, (u64)~order_key(x));
    });
    highest = block_max(highest, scratch.partial);
    const u32 lowest = ~(u32)block_max(bottom, scratch.partial);
    auto one = [](float) -> u64 { return 1; };
    const Cut cut = select(row, p.vocab, one, top, lowest, (u32)highest, scratch);
    const u64 ties = ties_before(row, p.vocab, cut, scratch);
    if (threadIdx.x == 0) *scratch.count = 0;
    __syncthreads();
    walk(row, segment_of(warp_id(), p.vocab), cut, ties, [&](u32 first, const u32* keys, const bool* kept) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
            if (kept[e]) items[atomicAdd(scratch.count, 1u)] = place(keys[e], first + e);
        return false;
    });
    return top;
}

DEVICE void report_rows(const SamplingParams& p) {
    SHARED_ARRAY(u64, bins, THREADS);
    SHARED_ARRAY(u64, partial, WARPS);
    SHARED_ARRAY(u64, found, 2);
    SHARED_ARRAY(u32, keys, THREADS);
    SHARED_ARRAY(u32, counter, 1);
    SHARED_ARRAY(u64, items, THREADS);
    const Scratch scratch = {bins, partial, found, keys, counter};
    const SamplingRow& asked = p.rows_of[blockIdx.x];
    if (!(asked.flags & SAMPLING_LOGPROBS) || asked.flags & SAMPLING_PADDING) return;
    const float* row = p.logits + (u64)blockIdx.x * p.row_stride;
    const u32 id = p.ids[blockIdx.x];
    const u64 own = place(order_key(id < p.vocab ? row[id] : minus_infinity()), id);
    const Weights weights = {place_value(most_likely(row, p.vocab, scratch)), 1.0f, 0.0f};
    u64 sum = 0, ahead = 0;
    for_each(row, p.vocab, [&](u32 other, float x) {
        sum += weights(x);
        ahead += place(order_key(x), other) > own;
    });
    sum = block_sum(sum, scratch.partial);
    ahead = block_sum(ahead, scratch.partial);
    const double log_sum = log((double)sum / (double)ONE);
    auto logprob = [&](float x) {
        if (x == minus_infinity()) return x;
        return (float)((x == weights.largest ? 0.0 : (double)(x - weights.largest)) - log_sum);
    };

    const u32 count = reported(p, asked, row, items, scratch);
    __syncthreads();
    // The rank of a token among the others is the number of tokens ahead of it; duplicates are left out.
    bool again = threadIdx.x >= count;
    for (u32 i = 0; i < threadIdx.x && !again; ++i) again = items[i] == items[threadIdx.x];
    bins[threadIdx.x] = !again;
    const u64 distinct = block_sum(!again, scratch.partial);
    if (!again) {
        u32 at = 0;
        for (u32 i = 0; i < count; ++i) at += bins[i] != 0 && items[i] > items[threadIdx.x];
        p.top_ids[(u64)blockIdx.x * p.top_stride + at] = place_id(items[threadIdx.x]);
        p.top_logprobs[(u64)blockIdx.x * p.top_stride + at] = logprob(place_value(items[threadIdx.x]));
    }
    if (threadIdx.x == 0) {
        p.logprobs[blockIdx.x] = logprob(place_value(own));
        p.ranks[blockIdx.x] = (u32)ahead + 1;
        p.top_counts[blockIdx.x] = (u32)distinct;
    }
}
