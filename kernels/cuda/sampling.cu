// Conversion of logits to tokens, as defined by octavo_ops::sampling: no row depends on another. The launches are
// `adjust` for biases, masks and penalties; `scan` for the most likely token; `weigh` for the sum of the weights, of which
// a token is drawn if there are no filters, or the sizes of the bins; and `draw` for the end of the kept tokens and the draw.
#include "sampling.h"

// ------------------------------------------------------------------------------------------- adjusted logits

DEVICE bool masked(const SamplingParams& p, const SamplingRow& asked, u32 id) {
    return asked.mask_row != SAMPLING_NONE && (p.masks[(u64)asked.mask_row * p.mask_words + id / 32] >> id % 32 & 1) == 0;
}

DEVICE bool contains(Segment segment, u32 id) { return id >= segment.begin && id < segment.end; }

// Adds the biases. Those of the same token are added in the given order.
DEVICE void add_biases(const SamplingParams& p, const SamplingRow& asked, Segment segment, float* row) {
    for (u32 i = asked.bias_start + threadIdx.x; i < asked.bias_end; i += THREADS) {
        const u32 id = p.bias_ids[i];
        bool mine = contains(segment, id);
        for (u32 earlier = asked.bias_start; earlier < i && mine; ++earlier) mine = p.bias_ids[earlier] != id;
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
    const SamplingRow& asked = p.rows_of[blockIdx.y];
    if (!(asked.flags & SAMPLING_ADJUST) || asked.flags & SAMPLING_PADDING || asked.forced != SAMPLING_NONE) return;
    if (threadIdx.x == 0) listed[0] = 0;
    const Segment segment = segment_at(p, blockIdx.x);
    float* row = p.adjusted + (u64)blockIdx.y * p.row_stride;
    for_each(p.logits + (u64)blockIdx.y * p.row_stride, segment,
             [&](u32 id, float x) { row[id] = x != x || masked(p, asked, id) ? minus_infinity() : x; });
    __syncthreads();
    add_biases(p, asked, segment, row);
    __syncthreads();
    for (u32 i = asked.forbidden_start + threadIdx.x; i < asked.forbidden_end; i += THREADS)
        if (contains(segment, p.forbidden_ids[i])) row[p.forbidden_ids[i]] = minus_infinity();
    __syncthreads();
    // The token of the preceding step is one more, whether it is listed or not.
    const u32 drawn = asked.pending != SAMPLING_NONE ? p.ids[asked.pending] : SAMPLING_NONE;
    for (u32 i = asked.counts_start + threadIdx.x; i < asked.counts_end; i += THREADS) {
        const u32 id = p.count_ids[i];
        if (id == drawn) listed[0] = 1;
        if (contains(segment, id)) penalise(asked, row, id, p.count_times[i] + (id == drawn));
    }
    __syncthreads();
    if (threadIdx.x == 0 && contains(segment, drawn) && !listed[0]) penalise(asked, row, drawn, 1);
}

// ------------------------------------------------------------------------------------------- most likely tokens

// Returns the token of a row in which no candidate is left: the most likely token that is allowed by the mask and not
// forbidden; if there is none, that is allowed by the mask; if there is none, that is not forbidden.
DEVICE u32 fallback(const SamplingParams& p, const SamplingRow& asked, Scratch scratch) {
    u64 both = 0, allowed = 0, unforbidden = 0;
    for_each(p.logits + (u64)blockIdx.y * p.row_stride, {0, p.vocab}, [&](u32 id, float x) {
        bool forbidden = false;
        for (u32 i = asked.forbidden_start; i < asked.forbidden_end; ++i) forbidden |= p.forbidden_ids[i] == id;
        const bool in_mask = !masked(p, asked, id);
        const u64 own = place(x, id);
        if (in_mask && !forbidden) both = max(both, own);
        if (in_mask) allowed = max(allowed, own);
        if (!forbidden) unforbidden = max(unforbidden, own);
    });
    u64 found = block_max(both, scratch.partial);
    if (found == 0) found = block_max(allowed, scratch.partial);
    if (found == 0) found = block_max(unforbidden, scratch.partial);
    return found == 0 ? 0 : place_id(found);
}

// Returns the row of logits from which a token is drawn.
DEVICE const float* drawn_row(const SamplingParams& p, const SamplingRow& asked) {
    return (asked.flags & SAMPLING_ADJUST ? p.adjusted : p.logits) + (u64)blockIdx.y * p.row_stride;
}

// A temperature of NaN is greedy too.
DEVICE bool is_greedy(const SamplingRow& asked) { return !(asked.temperature > 0.0f); }

DEVICE u64 most_likely(const float* row, Segment segment, Scratch scratch) {
    u64 best = 0;
    for_each(row, segment, [&](u32 id, float x) { best = max(best, place(x, id)); });
    return block_max(best, scratch.partial);
}

// Writes the token of a row whose most likely one is `best`, unless it must be drawn.
DEVICE void choose(const SamplingParams& p, const SamplingRow& asked, u64 best, Scratch scratch) {
    const bool is_forced = asked.forced != SAMPLING_NONE, exhausted = !is_forced && place_value(best) == minus_infinity();
    if (!is_forced && !exhausted && !is_greedy(asked)) {
        if (threadIdx.x == 0) p.status[blockIdx.y] = 0;
        return;
    }
    const u32 id = is_forced ? asked.forced : exhausted ? fallback(p, asked, scratch) : place_id(best);
    if (threadIdx.x == 0) {
        p.ids[blockIdx.y] = id;
        p.status[blockIdx.y] = exhausted ? SAMPLING_STATUS_EXHAUSTED : 0;
    }
}

DEVICE void scan_rows(const SamplingParams& p) {
    SAMPLING_SCRATCH(scratch);
    SHARED_ARRAY(u32, flag, 1);
    const SamplingRow& asked = p.rows_of[blockIdx.y];
    if (asked.flags & SAMPLING_PADDING) return;
    const bool is_forced = asked.forced != SAMPLING_NONE, reports = asked.flags & SAMPLING_LOGPROBS;
    if (is_forced && !reports) {
        if (blockIdx.x == 0) choose(p, asked, 0, scratch);
        return;
    }
    // The model's own logits matter too, unless they are those from which a token is drawn.
    const float *raw = p.logits + (u64)blockIdx.y * p.row_stride, *row = is_forced ? raw : drawn_row(p, asked);
    const Segment segment = segment_at(p, blockIdx.x);
    u64* parts = p.parts + (u64)blockIdx.y * 2 * gridDim.x;
    const u64 own = most_likely(row, segment, scratch);
    const u64 own_raw = reports && row != raw ? most_likely(raw, segment, scratch) : own;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = own;
        parts[gridDim.x + blockIdx.x] = own_raw;
    }
    if (!is_last(&p.states[blockIdx.y].ticket, gridDim.x, flag)) return;
    u64 best = 0, raw_best = 0;
    for (u32 i = threadIdx.x; i < gridDim.x; i += THREADS) {
        best = max(best, load_fresh<1>(parts + i).x[0]);
        raw_best = max(raw_best, load_fresh<1>(parts + gridDim.x + i).x[0]);
    }
    best = block_max(best, scratch.partial);
    raw_best = block_max(raw_best, scratch.partial);
    if (threadIdx.x == 0) {
        p.states[blockIdx.y].best = best;
        p.states[blockIdx.y].raw_best = raw_best;
    }
    choose(p, asked, best, scratch);
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

// Visits tokens in the order of their ids, 128 at a time, by all lanes of the warp together: visit(first of this lane's
// four ids, their weights, 0 for tokens after the cut). Ends when it returns true to all of them.
template <class F>
DEVICE void walk(const float* row, Segment segment, const Weights& weights, u64 cut, F visit) {
    for (u32 base = segment.begin; base < segment.end; base += 128) {
        const u32 first = base + lane_id() * 4;
        u64 kept[4];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const u32 id = first + e;
            const float x = id < segment.end ? row[id] : minus_infinity();
            kept[e] = id < segment.end && place(x, id) >= cut ? weights(x) : 0;
        }
        if (visit(first, kept)) return;
    }
}

// Draws the first token of a segment, by id, at which the sum over the kept tokens exceeds `target`; there is one.
DEVICE void draw_in(const float* row, Segment segment, const Weights& weights, u64 cut, u64 target, Scratch scratch,
                    u32* out) {
    // Each warp has a part of the segment: a multiple of the tokens that its lanes load at once.
    const u32 length = (segment.end - segment.begin + WARPS * 128 - 1) / (WARPS * 128) * 128;
    const u32 begin = min(segment.begin + warp_id() * length, segment.end);
    const Segment own_part = {begin, min(begin + length, segment.end)};
    u64 own = 0, total;
    walk(row, own_part, weights, cut, [&](u32, const u64* kept) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) own += kept[e];
        return false;
    });
    const u64 through = block_scan(own, scratch.partial, total);
    const u64 end = __shfl_sync(ALL_LANES, through, 31);
    u64 sum = __shfl_sync(ALL_LANES, through - own, 0);
    // Exactly one warp's part contains the token.
    if (target < sum || target >= end) return;
    walk(row, own_part, weights, cut, [&](u32 first, const u64* kept) {
        const u64 four = kept[0] + kept[1] + kept[2] + kept[3];
        const u64 reached = sum + warp_scan(four);
        const u32 beyond = __ballot_sync(ALL_LANES, reached > target);
        sum = __shfl_sync(ALL_LANES, reached, 31);
        if (beyond == 0) return false;
        if (lane_id() == (u32)__ffs((int)beyond) - 1) {
            u64 at = reached - four;
            u32 passed = 0;
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                at += kept[e];
                passed += at <= target;
            }
            *out = first + passed;
        }
        return true;
    });
}

// Samples the first token, by id, at which the sum over the kept tokens exceeds the random share of the total. `parts` has
// the sum of each segment. The last CTA of the row runs this.
DEVICE void draw(const SamplingParams& p, const SamplingRow& asked, const Weights& weights, u64 cut, const u64* parts,
                 Scratch scratch) {
    // Each thread has adjacent segments.
    const u32 each = (gridDim.x + THREADS - 1) / THREADS;
    const u32 first = min(threadIdx.x * each, gridDim.x), end = min(first + each, gridDim.x);
    u64 own = 0, total;
    for (u32 i = first; i < end; ++i) own += load_fresh<1>(parts + i).x[0];
    u64 sum = block_scan(own, scratch.partial, total) - own;
    const u64 target = multiply_high(random_bits(asked.seed, asked.output_position) << 11, total);
    for (u32 i = first; i < end; ++i) {
        const u64 through = sum + load_fresh<1>(parts + i).x[0];
        if (target >= sum && target < through) {
            scratch.found[0] = i;
            scratch.found[1] = target - sum;
        }
        sum = through;
    }
    __syncthreads();
    draw_in(drawn_row(p, asked), segment_at(p, (u32)scratch.found[0]), weights, cut, scratch.found[1], scratch,
            p.ids + blockIdx.y);
}

// ------------------------------------------------------------------------------------------- filters

// The filters of a row whose token is drawn.
struct Filters {
    bool by_k, by_p;

    DEVICE Filters(const SamplingParams& p, const SamplingRow& asked)
        : by_k(asked.top_k > 0 && asked.top_k < p.vocab), by_p(asked.top_p < 1.0f) {}
    DEVICE bool any() const { return by_k || by_p; }
};

// Returns whether a token is drawn from a row; its state has the most likely one.
DEVICE bool is_drawn(const SamplingParams& p, const SamplingRow& asked) {
    if (asked.flags & SAMPLING_PADDING || asked.forced != SAMPLING_NONE || is_greedy(asked)) return false;
    return place_value(p.states[blockIdx.y].best) != minus_infinity();
}

DEVICE Weights weights_of(const SamplingParams& p, const SamplingRow& asked) {
    const float min_p = asked.min_p > 0.0f ? fminf(asked.min_p, 1.0f) : 0.0f;
    return {place_value(p.states[blockIdx.y].best), 1.0f / asked.temperature, min_p};
}

// Returns the sum of weights that top-p keeps of `mass`: at least that of the most likely token.
DEVICE u64 needed_mass(const SamplingRow& asked, u64 mass) {
    return max(min((u64)ceil((double)asked.top_p * (double)mass), mass), (u64)1);
}

// Finds the bins in which the kept tokens end. With both filters, top-p ends in one of several bins, which depends on the
// tokens that top-k keeps of its last bin. The last CTA of the row runs this.
DEVICE void find_bins(const SamplingParams& p, const SamplingRow& asked, Filters filters, Scratch scratch) {
    const OwnBins counts = OwnBins::take_counts(p), masses = OwnBins::take_masses(p);
    SamplingState& state = p.states[blockIdx.y];
    u64 count, mass;
    const u64 count_before = block_scan(counts.sum(), scratch.partial, count) - counts.sum();
    const u64 mass_before = block_scan(masses.sum(), scratch.partial, mass) - masses.sum();
    const bool by_k = filters.by_k && asked.top_k < count;
    u64 least = mass;
    if (by_k) {
        counts.reach(count_before, asked.top_k, [&](u32 own, u64 before) {
            u64 sum = mass_before;
#pragma unroll
            for (u32 i = 0; i < OwnBins::COUNT; ++i) sum += i < own ? masses.amounts[i] : 0;
            scratch.found[0] = OwnBins::first() + own;
            scratch.found[1] = sum;
            scratch.found[2] = sum + masses.amounts[own];
            state.k_rank = asked.top_k - (u32)before;
        });
        __syncthreads();
        least = scratch.found[1];
        mass = scratch.found[2];
    }
    const u32 k_bin = by_k ? (u32)scratch.found[0] : SAMPLING_NONE;
    if (threadIdx.x == 0) {
        state.k_bin = k_bin;
        state.mass_before_k = least;
        // Without top-p, the kept tokens end in the bin of top-k, or nowhere.
        if (!filters.by_p) {
            state.first = by_k ? k_bin : SAMPLING_BINS;
            state.last = by_k ? k_bin : SAMPLING_BINS;
            state.mass_before = least;
        }
    }
    if (!filters.by_p) return;
    masses.reach(mass_before, needed_mass(asked, least), [&](u32 own, u64 before) {
        state.first = OwnBins::first() + own;
        state.mass_before = before;
    });
    masses.reach(mass_before, needed_mass(asked, mass), [&](u32 own, u64) { state.last = OwnBins::first() + own; });
}

DEVICE void weigh_rows(const SamplingParams& p) {
    SAMPLING_SCRATCH(scratch);
    SAMPLING_BINS_OF_CTA(bins);
    SHARED_ARRAY(u32, flag, 1);
    const SamplingRow& asked = p.rows_of[blockIdx.y];
    if (!is_drawn(p, asked)) return;
    const Filters filters(p, asked);
    const Weights weights = weights_of(p, asked);
    const Segment segment = segment_at(p, blockIdx.x);
    const float* row = drawn_row(p, asked);
    u64* parts = p.parts + (u64)blockIdx.y * 2 * gridDim.x;
    if (!filters.any()) {
        u64 own = 0;
        for_each(row, segment, [&](u32, float x) { own += weights(x); });
        own = block_sum(own, scratch.partial);
        if (threadIdx.x == 0) parts[blockIdx.x] = own;
    } else {
        bins.clear();
        for_each(row, segment, [&](u32, float x) {
            const u64 weight = weights(x);
            if (weight == 0) return;
            const u32 bin = weights.bin(x);
            if (filters.by_k) atomicAdd(bins.counts + bin, 1u);
            if (filters.by_p) add_wide(bins.low + bin, bins.high + bin, weight);
        });
        bins.merge(p);
    }
    if (!is_last(&p.states[blockIdx.y].ticket, gridDim.x, flag)) return;
    if (filters.any())
        find_bins(p, asked, filters, scratch);
    else
        draw(p, asked, weights, 0, parts, scratch);
}

// Returns the place of the last token that the filters keep. `listed` has the tokens of the bins in which the kept ones end.
template <class L>
DEVICE u64 cut_of(const SamplingRow& asked, const SamplingState& state, const Weights& weights, bool by_p, const L& listed,
                  Scratch scratch) {
    u64 cut = 0, mass = state.mass_before_k;
    if (state.k_bin != SAMPLING_NONE) {
        auto one = [&](u64 place) -> u64 { return weights.bin(place_value(place)) == state.k_bin; };
        cut = select(listed, one, 0, state.k_rank, scratch);
        u64 own = 0;
        listed.for_each([&](u64 place) { own += one(place) != 0 && place >= cut ? weights(place_value(place)) : 0; });
        mass += block_sum(own, scratch.partial);
    }
    if (!by_p) return cut;
    auto weight = [&](u64 place) -> u64 {
        const u32 bin = weights.bin(place_value(place));
        return place >= cut && bin >= state.first && bin <= state.last ? weights(place_value(place)) : 0;
    };
    return select(listed, weight, state.mass_before, needed_mass(asked, mass), scratch);
}

DEVICE void draw_rows(const SamplingParams& p) {
    SAMPLING_SCRATCH(scratch);
    SHARED_ARRAY(u32, flag, 1);
    const SamplingRow& asked = p.rows_of[blockIdx.y];
    const Filters filters(p, asked);
    if (!filters.any() || !is_drawn(p, asked)) return;
    SamplingState& state = p.states[blockIdx.y];
    const Weights weights = weights_of(p, asked);
    const u32 first = state.first, last = state.last, k_bin = state.k_bin;
    auto is_listed = [&](float x) {
        const u32 bin = weights.bin(x);
        return bin >= first && (bin <= last || bin == k_bin) && weights(x) != 0;
    };
    const Segment segment = segment_at(p, blockIdx.x);
    const float* row = drawn_row(p, asked);
    u64* parts = p.parts + (u64)blockIdx.y * 2 * gridDim.x;
    u64 kept = 0;
    u32 own = 0;
    for_each(row, segment, [&](u32, float x) {
        if (weights.bin(x) < first)
            kept += weights(x);
        else
            own += is_listed(x);
    });
    kept = block_sum(kept, scratch.partial);
    if (threadIdx.x == 0) parts[blockIdx.x] = kept;
    list(p, row, segment, own, is_listed, scratch);
    if (!is_last(&state.ticket, gridDim.x, flag)) return;

    const auto listed = take_list(p, row, is_listed, scratch);
    const u64 cut = cut_of(asked, state, weights, filters.by_p, listed, scratch);
    listed.for_each([&](u64 place) {
        if (place >= cut) atomicAdd(parts + place_id(place) / p.segment, weights(place_value(place)));
    });
    __syncthreads();
    draw(p, asked, weights, cut, parts, scratch);
}
