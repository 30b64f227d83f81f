// Quantised weights: their product with activations of 8 bits (MMVQ, for few rows), and their values. kernels/src/quant.rs says how
// they lie in memory.
#include "linear.h"

// 32 neighbouring weights of a row: (q[w] byte e) * scale[w / 4] + min[w / 4], element 4w + e, codes signed.
struct QuantGroup {
    int q[8];
    float scale[2], min[2];  // of the first and the last 16: where a format has one for both, they are the same

    DEVICE void set_scale(float value) { scale[0] = scale[1] = value; }
    DEVICE void set_min(float value) { min[0] = min[1] = value; }
};

DEVICE float half_at(const u8* plane, u64 index) {
    f16 value;
    value.bits = ((const u16*)plane)[index];
    return to_float(value);
}

// The codes of group `index` of a plane of 4-bit codes: elements 0..15 in the low nibbles, 16..31 in the high ones.
DEVICE void read_nibbles(int* q, const u8* plane, u64 index) {
    uint4 codes = load_once((const uint4*)plane + index);
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
        q[w] = (int)(words[w] & 0x0f0f0f0f);
        q[w + 4] = (int)(words[w] >> 4 & 0x0f0f0f0f);
    }
}

// The codes of group `index` of a plane of pairs of bits.
DEVICE void read_pairs(int* q, const u8* plane, u64 index) {
    uint2 codes = *((const uint2*)plane + index);
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
        q[w] = (int)(codes.x >> 2 * w & 0x03030303);
        q[w + 4] = (int)(codes.y >> 2 * w & 0x03030303);
    }
}

// Adds the bits of group `index` of a plane as bit BIT of the codes.
template <u32 BIT>
DEVICE void add_bits(int* q, const u8* plane, u64 index) {
    const u32 bits = *((const u32*)plane + index);
#pragma unroll
    for (u32 w = 0; w < 8; ++w) q[w] |= (int)((bits >> w & 0x01010101) << BIT);
}

// Takes VALUE from each code: bit 7 is lent, so that no byte borrows from its neighbour.
template <u32 VALUE>
DEVICE void subtract_from_codes(int* q) {
#pragma unroll
    for (u32 w = 0; w < 8; ++w) q[w] = (int)((((u32)q[w] | 0x80808080) - VALUE * 0x01010101) ^ 0x80808080);
}

// Scale and minimum of a group of Q4_K or Q5_K: two f16, then twelve bytes with 6-bit factors of eight groups: those of the last
// four have their upper bits in the first eight bytes.
DEVICE void read_super_scales(QuantGroup& group, const u8* plane, u64 index) {
    uint4 header = *((const uint4*)plane + index / 8);
    const u32 shift = index % 4 * 8;
    const u32 a = header.y >> shift, b = header.z >> shift, c = header.w >> shift;
    u32 scale = a & 63, min = b & 63;
    if (index % 8 >= 4) {
        scale = (c & 15) | (a & 0xc0) >> 2;
        min = (c >> 4 & 15) | (b & 0xc0) >> 2;
    }
    Vec<f16, 2> pair;
    pair.registers = header.x;
    group.set_scale(to_float(pair.x[0]) * (float)scale);
    group.set_min(-to_float(pair.x[1]) * (float)min);
}

// Scale and minimum of a group of its own.
DEVICE void read_scale_and_min(QuantGroup& group, const u8* plane, u64 index) {
    Vec<f16, 2> pair = load<2>((const f16*)plane + index * 2);
    group.set_scale(to_float(pair.x[0]));
    group.set_min(to_float(pair.x[1]));
}

// The formats: `read` gives the group with that index in the whole weight. SCALES and MINS: how many of each a group has.

struct Q4_0 {
    static constexpr u32 SCALES = 1, MINS = 1;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_nibbles(group.q, weight.codes, index);
        const float scale = half_at(weight.deltas, index);
        // Codes are from 0: what they are too much by is a minimum.
        group.set_scale(scale);
        group.set_min(-8.0f * scale);
        return group;
    }
};

struct Q4_1 {
    static constexpr u32 SCALES = 1, MINS = 1;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_nibbles(group.q, weight.codes, index);
        read_scale_and_min(group, weight.deltas, index);
        return group;
    }
};

struct Q5_0 {
    static constexpr u32 SCALES = 1, MINS = 1;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_nibbles(group.q, weight.codes, index);
        add_bits<4>(group.q, weight.high, index);
        const float scale = half_at(weight.deltas, index);
        group.set_scale(scale);
        group.set_min(-16.0f * scale);
        return group;
    }
};

struct Q5_1 {
    static constexpr u32 SCALES = 1, MINS = 1;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_nibbles(group.q, weight.codes, index);
        add_bits<4>(group.q, weight.high, index);
        read_scale_and_min(group, weight.deltas, index);
        return group;
    }
};

struct Q8_0 {
    static constexpr u32 SCALES = 1, MINS = 0;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            uint4 codes = load_once((const uint4*)weight.codes + index * 2 + half);
            group.q[half * 4] = (int)codes.x;
            group.q[half * 4 + 1] = (int)codes.y;
            group.q[half * 4 + 2] = (int)codes.z;
            group.q[half * 4 + 3] = (int)codes.w;
        }
        group.set_scale(half_at(weight.deltas, index));
        group.set_min(0.0f);
        return group;
    }
};

struct Q2_K {
    static constexpr u32 SCALES = 2, MINS = 2;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_pairs(group.q, weight.codes, index);
        Vec<f16, 2> pair = load<2>((const f16*)weight.deltas + index / 8 * 2);
        const u32 factors = *((const u16*)weight.scales + index);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            group.scale[half] = to_float(pair.x[0]) * (float)(factors >> 8 * half & 15);
            group.min[half] = -to_float(pair.x[1]) * (float)(factors >> (8 * half + 4) & 15);
        }
        return group;
    }
};

struct Q3_K {
    static constexpr u32 SCALES = 2, MINS = 0;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_pairs(group.q, weight.codes, index);
        add_bits<2>(group.q, weight.high, index);
        subtract_from_codes<4>(group.q);
        // Of the sixteen factors of a block, eight bytes have the low four bits, the last eight of them in the upper nibbles, and
        // four bytes the upper two, those of factors 4i to 4i + 3 in bits 2i and 2i + 1. A group has two neighbours.
        const u16* packed = (const u16*)weight.scales + index / 8 * 6;
        const u32 at = index % 8;
        const u32 low = packed[at % 4] >> at / 4 * 4 & 0x0f0f, high = packed[4 + at % 2] >> at / 2 * 2 & 0x0303;
        const u32 factors = low | high << 4;
        const float scale = half_at(weight.deltas, index / 8);
        group.scale[0] = scale * (float)((int)(factors & 63) - 32);
        group.scale[1] = scale * (float)((int)(factors >> 8) - 32);
        group.set_min(0.0f);
        return group;
    }
};

struct Q4_K {
    static constexpr u32 SCALES = 1, MINS = 1;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_nibbles(group.q, weight.codes, index);
        read_super_scales(group, weight.scales, index);
        return group;
    }
};

struct Q5_K {
    static constexpr u32 SCALES = 1, MINS = 1;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_nibbles(group.q, weight.codes, index);
        add_bits<4>(group.q, weight.high, index);
        read_super_scales(group, weight.scales, index);
        return group;
    }
};

struct Q6_K {
    static constexpr u32 SCALES = 2, MINS = 0;
    static DEVICE QuantGroup read(const QuantWeight& weight, u64 index) {
        QuantGroup group;
        read_nibbles(group.q, weight.codes, index);
        int high[8];
        read_pairs(high, weight.high, index);
#pragma unroll
        for (u32 w = 0; w < 8; ++w) group.q[w] |= high[w] << 4;
        subtract_from_codes<32>(group.q);
        const float scale = half_at(weight.deltas, index / 8);
        const i8* factors = (const i8*)weight.scales + index * 2;
        group.scale[0] = scale * (float)factors[0];
        group.scale[1] = scale * (float)factors[1];
        group.set_min(0.0f);
        return group;
    }
};

// ------------------------------------------------------------------------------------------- products

// A thread rounds 8 neighbours, four threads a block of 32. A block with a value that is not finite has such a scale and no codes.
template <class T>
DEVICE void quantize_activations(const QuantizeParams& p) {
    const u32 k = (blockIdx.y * blockDim.x + threadIdx.x) * 8, row = blockIdx.x;
    // Four lanes of one block are all within k or all beyond; those beyond take part in the shuffles.
    const bool valid = k < p.k;
    const u64 at = (u64)row * p.k + k;
    float x[8];
#pragma unroll
    for (u32 part = 0; part < 8; part += WIDE<T>) {
        Vec<T, WIDE<T>> values = {};
        if (valid) values = load<WIDE<T>>((const T*)p.input + at + part);
#pragma unroll
        for (u32 e = 0; e < WIDE<T>; ++e) x[part + e] = to_float(values.x[e]);
    }
    // Magnitudes as integers: NaN is the largest.
    u32 largest = 0;
#pragma unroll
    for (u32 e = 0; e < 8; ++e) largest = max(largest, __float_as_uint(x[e]) & 0x7fffffffu);
    largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    const float magnitude = __uint_as_float(largest);
    const bool codable = largest != 0 && largest < 0x7f800000u;
    const float inverse = codable ? 127.0f / magnitude : 0.0f;
    int sum = 0;
    Vec<i8, 8> codes;
#pragma unroll
    for (u32 e = 0; e < 8; ++e) {
        // 127 / magnitude is infinite for the smallest numbers there are.
        int code = codable ? (int)fminf(fmaxf(rintf(x[e] * inverse), -127.0f), 127.0f) : 0;
        codes.x[e] = (i8)code;
        sum += code;
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    if (!valid) return;
    store(p.codes + at, codes);
    if (threadIdx.x % 4 == 0) {
        const float scale = magnitude / 127.0f;
        Vec<float, 2> scales;
        scales.x[0] = scale;
        scales.x[1] = scale * (float)sum;
        store(p.scales + at / 32 * 2, scales);
    }
}

// What a group of 32 inputs gives to the sum of an output.
template <class F>
DEVICE float accumulate(const QuantGroup& group, const int* x, float scale, float scaled_sum, float sum) {
    int low = 0, high = 0;
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
        low = dot4(group.q[w], x[w], low);
        high = dot4(group.q[w + 4], x[w + 4], high);
    }
    if (F::SCALES == 1) {
        sum = fmaf(group.scale[0] * scale, (float)(low + high), sum);
    } else {
        sum = fmaf(group.scale[0] * scale, (float)low, sum);
        sum = fmaf(group.scale[1] * scale, (float)high, sum);
    }
    if (F::MINS == 1) sum = fmaf(group.min[0], scaled_sum, sum);
    if (F::MINS == 2) {
        // The inputs' own sum is of all 32: that of their first half is found here.
        int first = 0;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) first = dot4(0x01010101, x[w], first);
        const float scaled_first = scale * (float)first;
        sum = fmaf(group.min[0], scaled_first, sum);
        sum = fmaf(group.min[1], scaled_sum - scaled_first, sum);
    }
    return sum;
}

// A warp computes OUTPUTS neighbouring outputs of all rows. A lane sums over its groups in order, then the lanes are summed in one
// fixed order: neither ROWS nor what the other rows hold changes a row's bits.
template <class F, class O, int ROWS>
DEVICE void mmvq(const QuantLinearParams& p) {
    constexpr u32 OUTPUTS = 2;
    const u32 n0 = (blockIdx.x * (blockDim.x / 32) + warp_id()) * OUTPUTS;
    if (n0 >= p.n) return;
    const u32 groups = p.k / 32;
    float sums[ROWS][OUTPUTS] = {};
    // Many rows have enough to do with one group.
#pragma unroll(ROWS <= 2 ? 2 : 1)
    for (u32 at = lane_id(); at < groups; at += 32) {
        QuantGroup weight[OUTPUTS];
#pragma unroll
        for (u32 j = 0; j < OUTPUTS; ++j) weight[j] = F::read(p.weight, (u64)min(n0 + j, p.n - 1) * groups + at);
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            // Rows beyond the last are computed as the last, and not written.
            const u64 group = (u64)min((u32)i, p.m - 1) * groups + at;
            Vec<int, 4> low = load<4>((const int*)p.input + group * 8), high = load<4>((const int*)p.input + group * 8 + 4);
            const int x[8] = {low.x[0], low.x[1], low.x[2], low.x[3], high.x[0], high.x[1], high.x[2], high.x[3]};
            Vec<float, 2> scales = load<2>(p.scales + group * 2);
#pragma unroll
            for (u32 j = 0; j < OUTPUTS; ++j) sums[i][j] = accumulate<F>(weight[j], x, scales.x[0], scales.x[1], sums[i][j]);
        }
    }
    write_warp_sums<O>(p, n0, sums);
}

// ------------------------------------------------------------------------------------------- values

// A thread writes 32 neighbours.
template <class F, class T>
DEVICE void dequantize(const DequantizeParams& p) {
    const u32 groups = p.k / 32, at = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
    if (at >= groups) return;
    const u64 from = p.row_ids ? token_row(p.row_ids, p.drawn, row, p.n) : row;
    const QuantGroup group = F::read(p.weight, from * groups + at);
    T* out = (T*)p.out + ((u64)row * groups + at) * 32;
#pragma unroll
    for (u32 e = 0; e < 32; e += WIDE<T>) {
        Vec<T, WIDE<T>> values;
#pragma unroll
        for (u32 i = 0; i < WIDE<T>; ++i) {
            const u32 element = e + i;
            const float code = (float)(i8)(group.q[element / 4] >> element % 4 * 8);
            values.x[i] = from_float<T>(fmaf(code, group.scale[element / 16], group.min[element / 16]) * p.scale);
        }
        store(out + e, values);
    }
}
