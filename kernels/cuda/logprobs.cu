// Log-probabilities of the raw distribution, as defined by octavo_ops::sampling, for rows whose tokens are known. The
// launches are `rank` for the row's token and for tokens that are named, and `report` for the most likely ones.
#include "sampling.h"

// Returns the number of tokens that a row names.
DEVICE u32 named(const SamplingParams& p, const SamplingRow& asked) {
    return min(min(asked.listed_end - asked.listed_start, p.top_stride), SAMPLING_MAX_TOP);
}

// Returns the number of the most likely tokens that a row reports.
DEVICE u32 wanted(const SamplingParams& p, const SamplingRow& asked) {
    const u32 top = min(min(asked.top, p.vocab), min(p.top_stride, SAMPLING_MAX_TOP));
    return named(p, asked) > 0 ? 0 : top;
}

DEVICE bool is_reported(const SamplingRow& asked) {
    return asked.flags & SAMPLING_LOGPROBS && !(asked.flags & SAMPLING_PADDING);
}

DEVICE const float* raw_row(const SamplingParams& p) { return p.logits + (u64)blockIdx.y * p.row_stride; }

DEVICE u64 place_of(const SamplingParams& p, u32 id) {
    return place(id < p.vocab ? raw_row(p)[id] : minus_infinity(), id);
}

DEVICE Weights raw_weights(const SamplingParams& p) { return {place_value(p.states[blockIdx.y].raw_best), 1.0f, 0.0f}; }

DEVICE float logprob(float x, float largest, double log_sum) {
    if (x == minus_infinity()) return x;
    return (float)((x == largest ? 0.0 : (double)(x - largest)) - log_sum);
}

// Writes tokens, of which some may be the same, and their log-probabilities in the order of tokens.
DEVICE void write_tokens(const SamplingParams& p, const u64* items, u32* again, u32 count, Scratch scratch) {
    const float largest = place_value(p.states[blockIdx.y].raw_best);
    const double log_sum = p.states[blockIdx.y].log_sum;
    u64 distinct = 0;
    for (u32 own = threadIdx.x; own < count; own += THREADS) {
        bool found = false;
        for (u32 i = 0; i < own && !found; ++i) found = items[i] == items[own];
        again[own] = found;
        distinct += !found;
    }
    distinct = block_sum(distinct, scratch.partial);
    // The rank of a token among the others is the number of tokens ahead of it.
    for (u32 own = threadIdx.x; own < count; own += THREADS) {
        if (again[own]) continue;
        u32 at = 0;
        for (u32 i = 0; i < count; ++i) at += !again[i] && items[i] > items[own];
        p.top_ids[(u64)blockIdx.y * p.top_stride + at] = place_id(items[own]);
        p.top_logprobs[(u64)blockIdx.y * p.top_stride + at] = logprob(place_value(items[own]), largest, log_sum);
    }
    if (threadIdx.x == 0) p.top_counts[blockIdx.y] = (u32)distinct;
}

// Finds the bin in which the most likely tokens end. The last CTA of the row runs this.
DEVICE void find_bin(const SamplingParams& p, u32 top, Scratch scratch) {
    const OwnBins counts = OwnBins::take_counts(p);
    SamplingState& state = p.states[blockIdx.y];
    u64 total;
    const u64 before = block_scan(counts.sum(), scratch.partial, total) - counts.sum();
    counts.reach(before, top, [&](u32 own, u64) { state.last = OwnBins::first() + own; });
}

DEVICE void rank_rows(const SamplingParams& p) {
    SAMPLING_SCRATCH(scratch);
    SAMPLING_BINS_OF_CTA(bins);
    SHARED_ARRAY(u64, items, SAMPLING_MAX_TOP);
    SHARED_ARRAY(u32, flag, 1);
    const SamplingRow& asked = p.rows_of[blockIdx.y];
    if (!is_reported(asked)) return;
    const u64 own = place_of(p, p.ids[blockIdx.y]);
    const Weights weights = raw_weights(p);
    const u32 top = wanted(p, asked);
    if (top > 0) bins.clear();
    u64 sum = 0, ahead = 0;
    for_each(raw_row(p), segment_at(p, blockIdx.x), [&](u32 id, float x) {
        sum += weights(x);
        ahead += place(x, id) > own;
        if (top > 0) atomicAdd(bins.counts + weights.bin(x), 1u);
    });
    sum = block_sum(sum, scratch.partial);
    ahead = block_sum(ahead, scratch.partial);
    u64* parts = p.parts + (u64)blockIdx.y * 2 * gridDim.x;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
        parts[gridDim.x + blockIdx.x] = ahead;
    }
    if (top > 0) bins.merge(p);
    SamplingState& state = p.states[blockIdx.y];
    if (!is_last(&state.ticket, gridDim.x, flag)) return;

    sum = ahead = 0;
    for (u32 i = threadIdx.x; i < gridDim.x; i += THREADS) {
        sum += load_fresh<1>(parts + i).x[0];
        ahead += load_fresh<1>(parts + gridDim.x + i).x[0];
    }
    sum = block_sum(sum, scratch.partial);
    ahead = block_sum(ahead, scratch.partial);
    if (threadIdx.x == 0) {
        state.log_sum = log((double)sum / (double)ONE);
        p.logprobs[blockIdx.y] = logprob(place_value(own), weights.largest, state.log_sum);
        p.ranks[blockIdx.y] = (u32)ahead + 1;
    }
    if (top > 0) return find_bin(p, top, scratch);
    const u32 names = named(p, asked);
    for (u32 i = threadIdx.x; i < names; i += THREADS) items[i] = place_of(p, p.listed_ids[asked.listed_start + i]);
    __syncthreads();
    write_tokens(p, items, bins.counts, names, scratch);
}

DEVICE void report_rows(const SamplingParams& p) {
    SAMPLING_SCRATCH(scratch);
    SHARED_ARRAY(u64, items, SAMPLING_MAX_TOP);
    SHARED_ARRAY(u32, again, SAMPLING_MAX_TOP);
    SHARED_ARRAY(u32, flag, 1);
    const SamplingRow& asked = p.rows_of[blockIdx.y];
    const u32 top = wanted(p, asked);
    if (!is_reported(asked) || top == 0) return;
    const float* row = raw_row(p);
    const Weights weights = raw_weights(p);
    const u32 last = p.states[blockIdx.y].last;
    auto is_listed = [&](float x) { return weights.bin(x) <= last; };
    const Segment segment = segment_at(p, blockIdx.x);
    u32 own = 0;
    for_each(row, segment, [&](u32, float x) { own += is_listed(x); });
    list(p, row, segment, own, is_listed, scratch);
    if (!is_last(&p.states[blockIdx.y].ticket, gridDim.x, flag)) return;

    const auto listed = take_list(p, row, is_listed, scratch);
    auto one = [](u64) -> u64 { return 1; };
    const u64 cut = select(listed, one, 0, top, scratch);
    if (threadIdx.x == 0) *scratch.count = 0;
    __syncthreads();
    listed.for_each([&](u64 place) {
        if (place >= cut) items[atomicAdd(scratch.count, 1u)] = place;
    });
    __syncthreads();
    write_tokens(p, items, again, top, scratch);
}
