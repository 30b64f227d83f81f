// Mixtures of experts: the choice of experts, their order, their products and the sum of their outputs.
//
// Everything is on the device: the host knows only the numbers of tokens and pairs, so a launch can be captured.
#include "experts.h"
#include "quant.h"

// ------------------------------------------------------------------------------------------- choice

constexpr u32 NO_EXPERT = 0xffffffffu;

// Returns the index of the largest value, the first among equals, in each lane of a warp. The values are not NaN.
DEVICE u32 warp_largest(const float* values, u32 count) {
    float best = minus_infinity();
    u32 index = NO_EXPERT;
    for (u32 i = lane_id(); i < count; i += 32) {
        if (index == NO_EXPERT || values[i] > best) {
            best = values[i];
            index = i;
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, best, offset);
        const u32 at = __shfl_xor_sync(ALL_LANES, index, offset);
        // Lanes without a value have the largest index.
        const bool better = other > best || (other == best && at < index);
        best = better ? other : best;
        index = better ? at : index;
    }
    return index;
}

// Sets the ranks of experts outside the best groups to minus infinity. One warp runs it.
DEVICE void keep_groups(const RouteParams& p, float* ranks, float* values) {
    const u32 size = p.experts / p.groups;
    for (u32 group = lane_id(); group < p.groups; group += 32) {
        float first = minus_infinity(), second = minus_infinity();
        for (u32 i = group * size; i < (group + 1) * size; ++i) {
            const float rank = ranks[i];
            if (rank > first) {
                second = first;
                first = rank;
            } else if (rank > second) {
                second = rank;
            }
        }
        values[group] = p.best_two && size > 1 ? first + second : first;
    }
    __syncwarp();
    for (u32 i = 0; i < p.kept_groups; ++i) {
        const u32 group = warp_largest(values, p.groups);
        __syncwarp();
        if (lane_id() == 0) values[group] = minus_infinity();
        __syncwarp();
    }
    // The groups that were taken are those that remain.
    for (u32 i = lane_id(); i < p.experts; i += 32)
        if (values[i / size] != minus_infinity()) ranks[i] = minus_infinity();
    __syncwarp();
}

// Turns logits into scores. One warp runs it.
DEVICE void score(const RouteParams& p, float* scores) {
    if (p.sigmoid) {
        for (u32 i = lane_id(); i < p.experts; i += 32) scores[i] = sigmoid(scores[i]);
        __syncwarp();
        return;
    }
    float largest = minus_infinity();
    for (u32 i = lane_id(); i < p.experts; i += 32) largest = fmaxf(largest, scores[i]);
    largest = warp_max(largest);
    float sum = 0.0f;
    for (u32 i = lane_id(); i < p.experts; i += 32) {
        scores[i] = exp2_fast(LOG2_E * (scores[i] - largest));
        sum += scores[i];
    }
    sum = warp_sum(sum);
    for (u32 i = lane_id(); i < p.experts; i += 32) scores[i] /= sum;
    __syncwarp();
}

// Grid: one CTA per token. A warp computes the logit of an expert at a time, and the first warp chooses.
template <class T>
DEVICE void route(const RouteParams& p) {
    SHARED_ARRAY(float, scores, MAX_EXPERTS);
    SHARED_ARRAY(float, ranks, MAX_EXPERTS);
    SHARED_ARRAY(float, values, MAX_EXPERTS);
    const T* x = (const T*)p.input + (u64)blockIdx.x * p.cols;
    for (u32 expert = warp_id(); expert < p.experts; expert += blockDim.x / 32) {
        const float* weight = p.weight + (u64)expert * p.cols;
        float sum = 0.0f;
        for (u32 c = lane_id(); c < p.cols; c += 32) sum = fmaf(to_float(x[c]), weight[c], sum);
        sum = warp_sum(sum);
        if (lane_id() != 0) continue;
        if (p.bias) sum += p.bias[expert];
        if (p.deltas) {
            float& delta = p.deltas[(u64)blockIdx.x * p.experts + expert];
            sum += delta;
            delta = 0.0f;
        }
        scores[expert] = sum;
    }
    __syncthreads();
    if (warp_id() != 0) return;

    score(p, scores);
    for (u32 i = lane_id(); i < p.experts; i += 32) {
        // NaN is the least of all, so that the experts chosen exist.
        const float rank = scores[i] != scores[i] ? LOWEST : scores[i];
        ranks[i] = p.correction ? rank + p.correction[i] : rank;
    }
    __syncwarp();
    if (p.groups) keep_groups(p, ranks, values);
    // From here on, 1 in `values` marks an expert that was chosen.
    for (u32 i = lane_id(); i < p.experts; i += 32) values[i] = 0.0f;
    __syncwarp();
    for (u32 j = 0; j < p.chosen; ++j) {
        const u32 expert = warp_largest(ranks, p.experts);
        __syncwarp();
        if (lane_id() == 0) {
            ranks[expert] = minus_infinity();
            values[expert] = 1.0f;
        }
        __syncwarp();
    }
    u32* picked = p.picked + (u64)blockIdx.x * p.chosen;
    float* weights = p.weights + (u64)blockIdx.x * p.chosen;
    if (lane_id() != 0) return;
    float sum = 0.0f;
    u32 count = 0;
    for (u32 expert = 0; expert < p.experts; ++expert) {
        if (values[expert] == 0.0f) continue;
        picked[count] = expert;
        // The ranks are no longer needed.
        ranks[count++] = scores[expert];
        sum += scores[expert];
    }
    const float factor = p.normalise ? p.scale / (sum + 1e-20f) : p.scale;
    for (u32 j = 0; j < p.chosen; ++j) {
        // An expert is chosen twice only if corrections are not numbers.
        if (j >= count) picked[j] = picked[0];
        weights[j] = j < count ? ranks[j] * factor : 0.0f;
    }
}

// ------------------------------------------------------------------------------------------- order

// Grid: one CTA. The order of an expert's pairs is any: a pair's product does not depend on the others in its tile.
DEVICE void sort_pairs(const SortExpertsParams& p) {
    SHARED_ARRAY(u32, counts, MAX_EXPERTS);
    SHARED_ARRAY(u32, places, MAX_EXPERTS);
    SHARED_ARRAY(u32, tiles, MAX_EXPERTS);
    for (u32 e = threadIdx.x; e < p.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < p.pairs; pair += blockDim.x) atomicAdd(&counts[p.picked[pair]], 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 place = 0, tile = 0;
        for (u32 e = 0; e < p.experts; ++e) {
            places[e] = place;
            tiles[e] = tile;
            place += counts[e];
            tile += (counts[e] + p.tile_rows - 1) / p.tile_rows;
        }
        p.tiles[0] = tile;
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < p.experts; e += blockDim.x) {
        u32* tile = p.tiles + 1 + 3 * tiles[e];
        for (u32 done = 0; done < counts[e]; done += p.tile_rows, tile += 3) {
            tile[0] = e;
            tile[1] = places[e] + done;
            tile[2] = min(p.tile_rows, counts[e] - done);
        }
    }
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < p.pairs; pair += blockDim.x)
        p.order[atomicAdd(&places[p.picked[pair]], 1u)] = pair;
}

// ------------------------------------------------------------------------------------------- products

constexpr u32 EXPERT_OUTPUTS = 2;

// The pairs of a few rows.
struct FewPairs : ExpertTile {
    u32 pairs[EXPERT_ROWS];

    DEVICE FewPairs(const ExpertLinearParams& p) : ExpertTile(p, EXPERT_ROWS) {
        if (count == 0) return;
#pragma unroll
        for (u32 i = 0; i < EXPERT_ROWS; ++i) pairs[i] = pair(p, i);
    }

    template <class T>
    DEVICE const T* input(const ExpertLinearParams& p, u32 i) const {
        return (const T*)p.input + (u64)(pairs[i] / p.share) * p.input_stride;
    }

    // Adds the lanes' sums in one fixed order and writes the outputs.
    template <class T>
    DEVICE void write(const ExpertLinearParams& p, u32 n0, float (&sums)[EXPERT_ROWS][EXPERT_OUTPUTS]) const {
#pragma unroll
        for (u32 i = 0; i < EXPERT_ROWS; ++i) {
#pragma unroll
            for (u32 j = 0; j < EXPERT_OUTPUTS; ++j) {
                float sum = warp_sum(sums[i][j]);
                if (lane_id() != 0 || i >= count || n0 + j >= p.n) continue;
                const u32 column = p.column + n0 + j;
                if (p.bias) sum += p.bias[(u64)expert * p.out_stride + column];
                ((T*)p.out)[(u64)pairs[i] * p.out_stride + column] = from_float<T>(sum);
            }
        }
    }
};

DEVICE u32 first_output() { return (blockIdx.y * (blockDim.x / 32) + warp_id()) * EXPERT_OUTPUTS; }

// A warp computes EXPERT_OUTPUTS adjacent outputs of a few pairs. Grid: tiles, outputs, parts of a tile; of the tiles there
// may be more than the second number of a grid can be.
template <class T>
DEVICE void expert_gemv(const ExpertLinearParams& p) {
    const u32 n0 = first_output();
    const FewPairs tile(p);
    if (tile.count == 0 || n0 >= p.n) return;
    const T* weight[EXPERT_OUTPUTS];
#pragma unroll
    for (u32 j = 0; j < EXPERT_OUTPUTS; ++j)
        weight[j] = (const T*)p.weight + ((u64)tile.expert * p.n + min(n0 + j, p.n - 1)) * p.k;
    float sums[EXPERT_ROWS][EXPERT_OUTPUTS] = {};
    for (u32 k = lane_id() * WIDE<T>; k < p.k; k += 32 * WIDE<T>) {
        Vec<T, WIDE<T>> w[EXPERT_OUTPUTS];
#pragma unroll
        for (u32 j = 0; j < EXPERT_OUTPUTS; ++j) w[j] = load_once(weight[j] + k);
#pragma unroll
        for (u32 i = 0; i < EXPERT_ROWS; ++i) {
            const Vec<T, WIDE<T>> x = load<WIDE<T>>(tile.input<T>(p, i) + k);
#pragma unroll
            for (u32 e = 0; e < WIDE<T>; ++e)
#pragma unroll
                for (u32 j = 0; j < EXPERT_OUTPUTS; ++j)
                    sums[i][j] = fmaf(to_float(x.x[e]), to_float(w[j].x[e]), sums[i][j]);
        }
    }
    tile.write<T>(p, n0, sums);
}

// Adds the products of a group, whose codes are multiplied with the activations as they are.
template <class T, class G>
DEVICE void add_group(const ExpertLinearParams& p, const FewPairs& tile, u32 at, const G (&weight)[EXPERT_OUTPUTS],
                      float (&sums)[EXPERT_ROWS][EXPERT_OUTPUTS]) {
    constexpr u32 HALF = 16;
#pragma unroll
    for (u32 i = 0; i < EXPERT_ROWS; ++i) {
        const T* input = tile.input<T>(p, i) + at * 32;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float total = 0.0f, dots[EXPERT_OUTPUTS] = {};
#pragma unroll
            for (u32 from = half * HALF; from < (half + 1) * HALF; from += WIDE<T>) {
                const Vec<T, WIDE<T>> x = load<WIDE<T>>(input + from);
#pragma unroll
                for (u32 e = 0; e < WIDE<T>; ++e) {
                    const float value = to_float(x.x[e]);
                    const u32 element = from + e;
                    total += value;
#pragma unroll
                    for (u32 j = 0; j < EXPERT_OUTPUTS; ++j)
                        dots[j] = fmaf((float)(i8)(weight[j].q[element / 4] >> element % 4 * 8), value, dots[j]);
                }
            }
#pragma unroll
            for (u32 j = 0; j < EXPERT_OUTPUTS; ++j)
                sums[i][j] = fmaf(weight[j].min[half], total, fmaf(weight[j].scale[half], dots[j], sums[i][j]));
        }
    }
}

// Adds the products of a group of floating-point numbers.
template <class T, class D>
DEVICE void add_group(const ExpertLinearParams& p, const FewPairs& tile, u32 at,
                      const NumberGroup<D, 8> (&weight)[EXPERT_OUTPUTS], float (&sums)[EXPERT_ROWS][EXPERT_OUTPUTS]) {
#pragma unroll
    for (u32 word = 0; word < 8; ++word) {
        float values[EXPERT_OUTPUTS][4];
#pragma unroll
        for (u32 j = 0; j < EXPERT_OUTPUTS; ++j) weight[j].values(word, values[j]);
#pragma unroll
        for (u32 i = 0; i < EXPERT_ROWS; ++i) {
            const Vec<T, 4> x = load<4>(tile.input<T>(p, i) + at * 32 + word * 4);
#pragma unroll
            for (u32 e = 0; e < 4; ++e)
#pragma unroll
                for (u32 j = 0; j < EXPERT_OUTPUTS; ++j) sums[i][j] = fmaf(to_float(x.x[e]), values[j][e], sums[i][j]);
        }
    }
}

// The same with a quantised weight.
template <class F, class T>
DEVICE void expert_gemv_quant(const ExpertLinearParams& p) {
    const u32 n0 = first_output();
    const FewPairs tile(p);
    if (tile.count == 0 || n0 >= p.n) return;
    const u32 groups = p.k / 32;
    float sums[EXPERT_ROWS][EXPERT_OUTPUTS] = {};
    for (u32 at = lane_id(); at < groups; at += 32) {
        decltype(read_group<F, 8>(p.quant, GroupAt(0, 0, 0))) weight[EXPERT_OUTPUTS];
#pragma unroll
        for (u32 j = 0; j < EXPERT_OUTPUTS; ++j) {
            const u64 row = (u64)tile.expert * p.n + min(n0 + j, p.n - 1);
            weight[j] = read_group<F, 8>(p.quant, GroupAt(row, groups, at));
        }
        add_group<T>(p, tile, at, weight, sums);
    }
    tile.write<T>(p, n0, sums);
}

// ------------------------------------------------------------------------------------------- rows

// Grid: one CTA per token.
template <class T>
DEVICE void expert_sum(const ExpertSumParams& p) {
    const u64 token = blockIdx.x;
    for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) {
        float sum = 0.0f;
        for (u32 j = 0; j < p.chosen; ++j) {
            const u64 pair = token * p.chosen + j;
            sum = fmaf(p.weights[pair], to_float(((const T*)p.input)[pair * p.cols + c]), sum);
        }
        sum *= p.scale;
        const u64 at = token * p.cols + c;
        if (p.add) sum += to_float(((const T*)p.add)[at]);
        ((T*)p.out)[at] = from_float<T>(sum);
    }
}

// Grid: one CTA per row.
template <class T>
DEVICE void gate_rows(const GateRowsParams& p) {
    const u64 row = blockIdx.x;
    const float gate = sigmoid(to_float(((const T*)p.gate)[row]));
    T* out = (T*)p.out + row * p.cols;
    for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) out[c] = from_float<T>(gate * to_float(out[c]));
}
