// Decoding of quantised weights. kernels/src/quant.rs describes their layout in memory.
#pragma once
#include "gpu.h"

// Returns -a·b. As one operation with a sum, the product has its sign without another.
DEVICE float minus_product(float a, float b) { return fmaf(-a, b, 0.0f); }

// The numbers of e2m1, doubled: four signed bytes in a word. The upper half of the codes has the negatives.
struct E2m1Numbers {
    u32 words[4] = {0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc};
};
// The numbers of IQ4, as ggml defines them: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
struct Iq4Numbers {
    u32 words[4] = {0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535};
};

// Replaces the nibbles of four bytes by numbers of a list: those of the low and of the high nibbles.
template <class NUMBERS>
DEVICE void listed_values(u32 codes, int& low, int& high) {
    constexpr NUMBERS numbers;
    u32 values[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        // Four nibbles. The third argument of the last permutation takes byte j of the upper half if nibble j has bit 3.
        const u32 nibbles = codes >> 16 * i, selector = nibbles & 0x7777;
        const u32 lower = permute_bytes(numbers.words[0], numbers.words[1], selector);
        const u32 upper = permute_bytes(numbers.words[2], numbers.words[3], selector);
        values[i] = permute_bytes(lower, upper, 0x3210 | (nibbles & 0x8888) >> 1);
    }
    low = (int)permute_bytes(values[0], values[1], 0x6420);
    high = (int)permute_bytes(values[0], values[1], 0x7531);
}

// A group of 32 adjacent weights of a row, or the part of one of the four lanes that share a group: WORDS words of four
// signed codes. With eight words, word w has the elements 4w to 4w + 3; with two, they are the words `part` and part +
// 4. A weight is code * scale + min: the first pair of scale and min applies to words of the first 16 elements, the
// second to the others. They are equal in formats with one pair per group.
template <int WORDS>
struct QuantGroup {
    static_assert(WORDS == 8 || WORDS == 2, "a whole group, or a quarter");
    int q[WORDS];
    float scale[2], min[2];

    // Returns the weights of q[i], four adjacent ones.
    DEVICE void values(u32 i, float (&out)[4]) const {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) out[e] = fmaf((float)(i8)(q[i] >> e * 8), scale[half(i)], min[half(i)]);
    }

    DEVICE void set_scale(float value) { scale[0] = scale[1] = value; }
    DEVICE void set_min(float value) { min[0] = min[1] = value; }

    // Index of the word in q[i].
    static DEVICE u32 word(u32 i, u32 part) { return WORDS == 8 ? i : part + 4 * i; }
    // Index of the scale and minimum of q[i].
    static DEVICE u32 half(u32 i) { return i * 2 / WORDS; }

    // Reads the codes of group `index` of a plane of 4-bit codes: elements 0..15 in the low nibbles, 16..31 in the high
    // nibbles.
    DEVICE void read_nibbles(const u8* plane, u64 index, u32 part) {
        if constexpr (WORDS == 8) {
            uint4 codes = load_once((const uint4*)plane + index);
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                q[w] = (int)(words[w] & 0x0f0f0f0f);
                q[w + 4] = (int)(words[w] >> 4 & 0x0f0f0f0f);
            }
        } else {
            const u32 codes = ((const u32*)plane)[index * 4 + part];
            q[0] = (int)(codes & 0x0f0f0f0f);
            q[1] = (int)(codes >> 4 & 0x0f0f0f0f);
        }
    }

    // Reads the codes of a plane of nibbles of a list, as their numbers.
    template <class NUMBERS>
    DEVICE void read_listed(const u8* plane, u64 index, u32 part) {
        if constexpr (WORDS == 8) {
            uint4 codes = load_once((const uint4*)plane + index);
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (u32 w = 0; w < 4; ++w) listed_values<NUMBERS>(words[w], q[w], q[w + 4]);
        } else {
            listed_values<NUMBERS>(((const u32*)plane)[index * 4 + part], q[0], q[1]);
        }
    }

    // Reads the codes of a plane of bytes.
    DEVICE void read_bytes(const u8* plane, u64 index, u32 part) {
        if constexpr (WORDS == 8) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                uint4 codes = load_once((const uint4*)plane + index * 2 + i);
                q[i * 4] = (int)codes.x;
                q[i * 4 + 1] = (int)codes.y;
                q[i * 4 + 2] = (int)codes.z;
                q[i * 4 + 3] = (int)codes.w;
            }
        } else {
            q[0] = ((const int*)plane)[index * 8 + part];
            q[1] = ((const int*)plane)[index * 8 + 4 + part];
        }
    }

    // Adds the codes of a plane of bit pairs, from bit BIT on.
    template <u32 BIT>
    DEVICE void add_pairs(const u8* plane, u64 index, u32 part) {
        const uint2 codes = *((const uint2*)plane + index);
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i)
            q[i] |= (int)(((half(i) ? codes.y : codes.x) >> 2 * (word(i, part) % 4) & 0x03030303) << BIT);
    }

    // Adds the codes of a plane of bits, as bit BIT.
    template <u32 BIT>
    DEVICE void add_bits(const u8* plane, u64 index, u32 part) {
        const u32 bits = *((const u32*)plane + index);
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) q[i] |= (int)((bits >> word(i, part) & 0x01010101) << BIT);
    }

    DEVICE void clear() {
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) q[i] = 0;
    }

    // Subtracts VALUE from each code. Bit 7 is set first, so that no byte borrows from its neighbour.
    template <u32 VALUE>
    DEVICE void subtract_from_codes() {
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) q[i] = (int)((((u32)q[i] | 0x80808080) - VALUE * 0x01010101) ^ 0x80808080);
    }

    // Reads scale and minimum of a group of Q4_K or Q5_K: two f16, then twelve bytes with 6-bit factors of eight
    // groups. The factors of the last four have their upper bits in the first eight bytes.
    DEVICE void read_super_scales(const u8* plane, u64 index) {
        uint4 header = *((const uint4*)plane + index / 8);
        const u32 shift = index % 4 * 8;
        const u32 a = header.y >> shift, b = header.z >> shift, c = header.w >> shift;
        u32 factor = a & 63, least = b & 63;
        if (index % 8 >= 4) {
            factor = (c & 15) | (a & 0xc0) >> 2;
            least = (c >> 4 & 15) | (b & 0xc0) >> 2;
        }
        Vec<f16, 2> pair;
        pair.registers = header.x;
        set_scale(to_float(pair.x[0]) * (float)factor);
        set_min(minus_product(to_float(pair.x[1]), (float)least));
    }

    // Reads scale and minimum of a group that has its own.
    DEVICE void read_scale_and_min(const u8* plane, u64 index) {
        Vec<f16, 2> pair = load<2>((const f16*)plane + index * 2);
        set_scale(to_float(pair.x[0]));
        set_min(to_float(pair.x[1]));
    }
};

DEVICE float half_at(const u8* plane, u64 index) {
    f16 value;
    value.bits = ((const u16*)plane)[index];
    return to_float(value);
}

// Reads the scales and minima of four groups of a block of Q4_K or Q5_K, the first or the last, as read_super_scales does.
DEVICE void read_half_super_scales(const u8* block, bool last, float (&scales)[4], float (&mins)[4]) {
    const uint4 header = *(const uint4*)block;
    u32 factors = header.y & 0x3f3f3f3f, least = header.z & 0x3f3f3f3f;
    if (last) {
        factors = (header.w & 0x0f0f0f0f) | (header.y & 0xc0c0c0c0) >> 2;
        least = (header.w >> 4 & 0x0f0f0f0f) | (header.z & 0xc0c0c0c0) >> 2;
    }
    Vec<f16, 2> pair;
    pair.registers = header.x;
    const float scale = to_float(pair.x[0]), min = -to_float(pair.x[1]);
    // 2^23, to whose bits a byte is added. The product is exact.
    constexpr float BASE = 8388608.0f;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        scales[i] = fmaf(__uint_as_float(permute_bytes(factors, 0x4b000000, 0x7440 | i)), scale, -BASE * scale);
        mins[i] = fmaf(__uint_as_float(permute_bytes(least, 0x4b000000, 0x7440 | i)), min, -BASE * min);
    }
}

// Place of a group in a weight: the row, for what a whole row shares, and the group's index among those of all rows.
struct GroupAt {
    u64 row, index;
    DEVICE GroupAt(u64 row, u32 groups, u32 nth) : row(row), index(row * groups + nth) {}
};

// Sizes of a format: groups of a block, and bytes of a block in the planes of codes, upper bits, scales and deltas, as
// QuantFormat::plane_bytes states them.
template <u32 GROUPS, u32 CODE_BYTES, u32 HIGH_BYTES, u32 SCALE_BYTES, u32 DELTA_BYTES>
struct Planes {
    static constexpr u32 BLOCK = GROUPS, CODES = CODE_BYTES, HIGH = HIGH_BYTES, OF_SCALES = SCALE_BYTES, OF_DELTAS = DELTA_BYTES;
    // Whether codes are floating-point numbers, and whether the codes of read_codes that are no numbers of a list are signed.
    static constexpr bool IS_FLOAT = false, IS_SIGNED = false;
    // Number that is subtracted from the codes of read_codes.
    static constexpr u32 OFFSET = 0;
    // Whether scales and minima are those of read_super_scales.
    static constexpr bool HAS_SUPER_SCALES = false;
    template <int WORDS>
    using Group = QuantGroup<WORDS>;
};

// Reads the group of a format at this place. Without minima, OFFSET is subtracted from the codes here, and with them a minimum
// compensates for it.
template <class F, int WORDS>
DEVICE typename F::template Group<WORDS> read_group(const QuantWeight& weight, GroupAt at, u32 part = 0) {
    typename F::template Group<WORDS> group;
    F::read_codes(group, weight, at.index, part);
    if constexpr (F::OFFSET > 0 && F::MINS == 0) group.template subtract_from_codes<F::OFFSET>();
    F::read_scales(group, weight, at);
    return group;
}

// The formats. `read_codes` reads the codes of a group, and `read_scales` the rest. SCALES and MINS are the numbers of scales and
// minima of a group.
struct Q4_0 : Planes<1, 16, 0, 0, 2> {
    static constexpr u32 SCALES = 1, MINS = 1;
    static constexpr u32 OFFSET = 8;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        const float scale = half_at(weight.deltas, at.index);
        // Codes are unsigned, and a minimum compensates for their offset.
        group.set_scale(scale);
        group.set_min(-8.0f * scale);
    }
};

struct Q4_1 : Planes<1, 16, 0, 0, 4> {
    static constexpr u32 SCALES = 1, MINS = 1;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        group.read_scale_and_min(weight.deltas, at.index);
    }
};

struct Q5_0 : Planes<1, 16, 4, 0, 2> {
    static constexpr u32 SCALES = 1, MINS = 1;
    static constexpr u32 OFFSET = 16;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
        group.template add_bits<4>(weight.high, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        const float scale = half_at(weight.deltas, at.index);
        group.set_scale(scale);
        group.set_min(-16.0f * scale);
    }
};

struct Q5_1 : Planes<1, 16, 4, 0, 4> {
    static constexpr u32 SCALES = 1, MINS = 1;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
        group.template add_bits<4>(weight.high, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        group.read_scale_and_min(weight.deltas, at.index);
    }
};

struct Q8_0 : Planes<1, 32, 0, 0, 2> {
    static constexpr u32 SCALES = 1, MINS = 0;
    static constexpr bool IS_SIGNED = true;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_bytes(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        group.set_scale(half_at(weight.deltas, at.index));
        group.set_min(0.0f);
    }
};

struct Q2_K : Planes<8, 64, 0, 16, 4> {
    static constexpr u32 SCALES = 2, MINS = 2;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.clear();
        group.template add_pairs<0>(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        Vec<f16, 2> pair = load<2>((const f16*)weight.deltas + at.index / 8 * 2);
        const u32 factors = *((const u16*)weight.scales + at.index);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            group.scale[half] = to_float(pair.x[0]) * (float)(factors >> 8 * half & 15);
            group.min[half] = minus_product(to_float(pair.x[1]), (float)(factors >> (8 * half + 4) & 15));
        }
    }
};

struct Q3_K : Planes<8, 64, 32, 12, 2> {
    static constexpr u32 SCALES = 2, MINS = 0;
    static constexpr u32 OFFSET = 4;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.clear();
        group.template add_pairs<0>(weight.codes, index, part);
        group.template add_bits<2>(weight.high, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        // Eight bytes hold the low four bits of a block's sixteen factors, with those of the last eight in the upper
        // nibbles. Four bytes hold the upper two bits, those of factors 4i to 4i + 3 in bits 2i and 2i + 1. A group has
        // two adjacent factors.
        const u16* packed = (const u16*)weight.scales + at.index / 8 * 6;
        const u32 nth = at.index % 8;
        const u32 low = packed[nth % 4] >> nth / 4 * 4 & 0x0f0f, high = packed[4 + nth % 2] >> nth / 2 * 2 & 0x0303;
        const u32 factors = low | high << 4;
        const float scale = half_at(weight.deltas, at.index / 8);
        group.scale[0] = scale * (float)((int)(factors & 63) - 32);
        group.scale[1] = scale * (float)((int)(factors >> 8) - 32);
        group.set_min(0.0f);
    }
};

struct Q4_K : Planes<8, 128, 0, 16, 0> {
    static constexpr u32 SCALES = 1, MINS = 1;
    static constexpr bool HAS_SUPER_SCALES = true;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        group.read_super_scales(weight.scales, at.index);
    }
};

struct Q5_K : Planes<8, 128, 32, 16, 0> {
    static constexpr u32 SCALES = 1, MINS = 1;
    static constexpr bool HAS_SUPER_SCALES = true;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
        group.template add_bits<4>(weight.high, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        group.read_super_scales(weight.scales, at.index);
    }
};

struct Q6_K : Planes<8, 128, 64, 16, 2> {
    static constexpr u32 SCALES = 2, MINS = 0;
    static constexpr u32 OFFSET = 32;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
        group.template add_pairs<4>(weight.high, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        const float scale = half_at(weight.deltas, at.index / 8);
        const i8* factors = (const i8*)weight.scales + at.index * 2;
        group.scale[0] = scale * (float)factors[0];
        group.scale[1] = scale * (float)factors[1];
        group.set_min(0.0f);
    }
};

struct MXFP4 : Planes<1, 16, 0, 1, 0> {
    static constexpr u32 SCALES = 1, MINS = 0;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.template read_listed<E2m1Numbers>(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        // Half of 2^(exponent - 127), because the values are doubled. The two smallest are denormal.
        const u32 exponent = weight.scales[at.index];
        group.set_scale(__uint_as_float(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23));
        group.set_min(0.0f);
    }
};

struct NVFP4 : Planes<1, 16, 0, 2, 0> {
    static constexpr u32 SCALES = 2, MINS = 0;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.template read_listed<E2m1Numbers>(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        float scales[4];
        widen_e4m3(((const u16*)weight.scales)[at.index], scales);
        // The row's factor makes up for the doubled values.
        const float factor = ((const float*)weight.deltas)[at.row];
        group.scale[0] = scales[0] * factor;
        group.scale[1] = scales[1] * factor;
        group.set_min(0.0f);
    }
};

struct IQ4_NL : Planes<1, 16, 0, 0, 2> {
    static constexpr u32 SCALES = 1, MINS = 0;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.template read_listed<Iq4Numbers>(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        group.set_scale(half_at(weight.deltas, at.index));
        group.set_min(0.0f);
    }
};

struct IQ4_XS : Planes<8, 128, 0, 8, 0> {
    static constexpr u32 SCALES = 1, MINS = 0;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.template read_listed<Iq4Numbers>(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        // An f16 scale, the upper pairs of bits of eight factors, and their lower nibbles.
        const uint2 header = *((const uint2*)weight.scales + at.index / 8);
        Vec<f16, 2> pair;
        pair.registers = header.x;
        const u32 factor = (header.y >> at.index % 8 * 4 & 15) | (header.x >> (16 + at.index % 8 * 2) & 3) << 4;
        group.set_scale(to_float(pair.x[0]) * ((float)factor - 32.0f));
        group.set_min(0.0f);
    }
};

struct INT4 : Planes<1, 16, 0, 1, 2> {
    static constexpr u32 SCALES = 1, MINS = 1;
    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        const float scale = half_at(weight.deltas, at.index);
        group.set_scale(scale);
        group.set_min(minus_product((float)weight.scales[at.index], scale));
    }
};

// A group whose values are (code + offset) * scale, rounded once: as a minimum, the product of an offset and a scale in f32 would be
// rounded before.
template <int WORDS>
struct OffsetGroup : QuantGroup<WORDS> {
    float offset;

    DEVICE void values(u32 i, float (&out)[4]) const {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) out[e] = ((float)(i8)(this->q[i] >> e * 8) + offset) * this->scale[0];
    }
};

struct INT8 : Planes<1, 32, 0, 1, 4> {
    static constexpr u32 SCALES = 1, MINS = 1;
    static constexpr bool IS_SIGNED = true;
    template <int WORDS>
    using Group = OffsetGroup<WORDS>;

    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_bytes(weight.codes, index, part);
        // Codes and zero point become signed by the same offset.
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) group.q[i] ^= 0x80808080;
    }
    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        const float scale = ((const float*)weight.deltas)[at.index];
        group.set_scale(scale);
        group.set_min(offset(weight, at) * scale);
    }
    template <int WORDS>
    static DEVICE void read_scales(OffsetGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        read_scales((QuantGroup<WORDS>&)group, weight, at);
        group.offset = offset(weight, at);
    }
    static DEVICE float offset(const QuantWeight& weight, GroupAt at) { return 128.0f - (float)weight.scales[at.index]; }
};

// ------------------------------------------------------------------------------------------- floating-point codes

// A group of 32 weights in floating-point numbers of fewer than 16 bits, or the part of one of four lanes. D decodes the
// four codes of a word.
template <class D, int WORDS>
struct NumberGroup : QuantGroup<WORDS> {
    // Returns the weights of a word.
    DEVICE void values(u32 i, float (&out)[4]) const {
        D::decode((u32)this->q[i], out);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) out[e] *= this->scale[0];
    }
};

// Formats of such groups, of which GROUPS have a scale in f32.
template <class D, u32 GROUPS, u32 CODE_BYTES>
struct NumberFormat : Planes<GROUPS, CODE_BYTES, 0, 0, 4> {
    static constexpr u32 SCALES = 1, MINS = 0;
    static constexpr bool IS_FLOAT = true;
    template <int WORDS>
    using Group = NumberGroup<D, WORDS>;

    template <int WORDS>
    static DEVICE void read_scales(QuantGroup<WORDS>& group, const QuantWeight& weight, GroupAt at) {
        group.set_scale(((const float*)weight.deltas)[at.index / GROUPS]);
    }
};

struct F8_E4M3 : NumberFormat<F8_E4M3, 1, 32> {
    static DEVICE void decode(u32 codes, float (&out)[4]) { widen_e4m3(codes, out); }

    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_bytes(weight.codes, index, part);
    }
};

// Looks up four codes, each in a byte, in a table of sixteen f32: planes[b] has their bytes b.
DEVICE void table_values(const u32 (&planes)[4][4], u32 codes, float (&out)[4]) {
    const u32 pairs = codes | codes >> 4, nibbles = (pairs & 0xff) | (pairs >> 8 & 0xff00);
    // The last permutation takes byte j of the upper half of the table if nibble j has bit 3.
    const u32 selector = nibbles & 0x7777, upper = 0x3210 | (nibbles & 0x8888) >> 1;
    u32 bytes[4];
#pragma unroll
    for (u32 b = 0; b < 4; ++b)
        bytes[b] = permute_bytes(permute_bytes(planes[b][0], planes[b][1], selector),
                                 permute_bytes(planes[b][2], planes[b][3], selector), upper);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 halves = i ? 0x7362 : 0x5140;
        const u32 low = permute_bytes(bytes[0], bytes[1], halves), high = permute_bytes(bytes[2], bytes[3], halves);
        out[i * 2] = __uint_as_float(permute_bytes(low, high, 0x5410));
        out[i * 2 + 1] = __uint_as_float(permute_bytes(low, high, 0x7632));
    }
}

// A format of indices of a table, of which TABLE has the planes.
template <class TABLE>
struct TableFormat : NumberFormat<TableFormat<TABLE>, 2, 32> {
    static DEVICE void decode(u32 codes, float (&out)[4]) {
        constexpr TABLE table;
        table_values(table.planes, codes, out);
    }

    template <int WORDS>
    static DEVICE void read_codes(QuantGroup<WORDS>& group, const QuantWeight& weight, u64 index, u32 part) {
        group.read_nibbles(weight.codes, index, part);
    }
};

// NormalFloat of bitsandbytes (NF4_VALUES in Rust).
struct Nf4Table {
    u32 planes[4][4] = {
        {0xa030b100, 0x00713f4d, 0x3adde3ff, 0x00b3abb8},
        {0x326b3900, 0x007835a2, 0x0304cafa, 0x001307a4},
        {0xca063280, 0x00ba3d91, 0xad7c24a2, 0x803910e1},
        {0xbebfbfbf, 0x00bdbebe, 0x3e3e3e3d, 0x3f3f3f3e}};
};
using NF4 = TableFormat<Nf4Table>;

// FP4 of bitsandbytes (FP4_VALUES in Rust).
struct Fp4Table {
    u32 planes[4][4] = {
        {0x00abab00, 0x00ab00ab, 0x00abab00, 0x00ab00ab},
        {0x00aaaa00, 0x00aa00aa, 0x00aaaa00, 0x00aa00aa},
        {0x802aaa00, 0x802a00aa, 0x802aaa00, 0x802a00aa},
        {0x3f3f3b00, 0x3e3e3f3e, 0xbfbfbb80, 0xbebebfbe}};
};
using FP4 = TableFormat<Fp4Table>;
