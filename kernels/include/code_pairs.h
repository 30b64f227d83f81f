// Conversion of the codes of quantised weights to pairs of 16-bit numbers, for tensor cores.
#pragma once
#include "quant.h"

// Upper byte of a number whose mantissa is a byte below: 1024 + byte in f16, and in bf16 128 + byte, which has seven bits there.
template <class T>
constexpr u32 EXPONENT = 0;
template <>
constexpr u32 EXPONENT<f16> = 0x64;
template <>
constexpr u32 EXPONENT<bf16> = 0x43;

// Returns two of four bytes with the exponent.
template <class T>
DEVICE u32 with_exponent(u32 bytes, u32 first) {
    return permute_bytes(bytes, EXPONENT<T> * 0x01010101, first ? 0x4342 : 0x4140);
}

// Number that is left in the codes of a format with minima, which make up for it. With 1024, or in codes of two bits, the sums would
// lose too much.
template <class F, class T>
constexpr u32 LEFT = F::MINS == 1 && F::OFFSET == 0 && !F::IS_SIGNED && EXPONENT<T> == EXPONENT<bf16> ? 128 : 0;

// Converts four codes to T, less OFFSET and with what is LEFT. That is exact.
template <class F, class T>
DEVICE void code_pairs(u32 codes, u32 (&pairs)[2]) {
    if constexpr (F::IS_FLOAT) {
        float values[4];
        F::decode(codes, values);
#pragma unroll
        for (u32 i = 0; i < 2; ++i) pairs[i] = pack_pair<T>(values[i * 2], values[i * 2 + 1]);
    } else if constexpr (F::IS_SIGNED && EXPONENT<T> == EXPONENT<bf16>) {
        // The bit of the sign is 128 in both terms of the difference.
        const u32 magnitudes = codes & 0x7f7f7f7f, signs = codes & 0x80808080;
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
            pairs[i] = subtract_pairs(with_exponent<T>(magnitudes, i), with_exponent<T>(signs, i), T());
    } else {
        const u32 bytes = F::IS_SIGNED ? codes ^ 0x80808080 : codes;
        constexpr u32 ZERO = EXPONENT<T> << 8 | (F::IS_SIGNED ? 128 : F::OFFSET);
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 pair = with_exponent<T>(bytes, i);
            pairs[i] = LEFT<F, T> > 0 ? pair : subtract_pairs(pair, ZERO * 0x10001, T());
        }
    }
}

// The sixteen numbers of a format whose codes are indices of a list: `bits` returns those of a number in f32.
template <class F>
struct NumberList {
    static constexpr bool EXISTS = false;
};

template <class TABLE>
struct NumberList<TableFormat<TABLE>> {
    static constexpr bool EXISTS = true;
    static DEVICE constexpr u32 bits(u32 code) {
        const TABLE table;
        u32 result = 0;
        for (u32 b = 0; b < 4; ++b) result |= (table.planes[b][code / 4] >> code % 4 * 8 & 0xff) << b * 8;
        return result;
    }
};

// Returns the bits of an integer in f32.
DEVICE constexpr u32 bits_of(int value) {
    if (value == 0) return 0;
    u32 magnitude = value < 0 ? -value : value, exponent = 127 + 23;
    for (; magnitude < 1u << 23; magnitude <<= 1) --exponent;
    return (value < 0 ? 1u << 31 : 0) | exponent << 23 | (magnitude - (1u << 23));
}

// A list of signed bytes.
template <class NUMBERS>
struct ByteList {
    static constexpr bool EXISTS = true;
    static DEVICE constexpr u32 bits(u32 code) {
        const NUMBERS numbers;
        return bits_of((i8)(numbers.words[code / 4] >> code % 4 * 8));
    }
};
template <>
struct NumberList<MXFP4> : ByteList<E2m1Numbers> {};
template <>
struct NumberList<NVFP4> : ByteList<E2m1Numbers> {};
template <>
struct NumberList<IQ4_NL> : ByteList<Iq4Numbers> {};
template <>
struct NumberList<IQ4_XS> : ByteList<Iq4Numbers> {};

// Returns the bits in T of a number given by those in f32, rounded to nearest even. It is zero or normal in T.
template <class T>
DEVICE constexpr u32 rounded_bits(u32 bits) {
    constexpr bool IS_BF16 = EXPONENT<T> == EXPONENT<bf16>;
    constexpr u32 DROPPED = IS_BF16 ? 16 : 13, BIAS = IS_BF16 ? 0 : 112u << 23;
    const u32 magnitude = bits & 0x7fffffff;
    if (magnitude == 0) return 0;
    const u32 even = (magnitude >> DROPPED & 1) + (1u << (DROPPED - 1)) - 1;
    return (bits >> 16 & 0x8000) | (magnitude - BIAS + even) >> DROPPED;
}

// The numbers of a list in T: planes[b] has their bytes b.
template <class F, class T>
struct PairTable {
    u32 planes[2][4] = {};
    DEVICE constexpr PairTable() {
        for (u32 code = 0; code < 16; ++code)
            for (u32 b = 0; b < 2; ++b)
                planes[b][code / 4] |= (rounded_bits<T>(NumberList<F>::bits(code)) >> b * 8 & 0xff) << code % 4 * 8;
    }
};

// Looks up the numbers of the nibbles of four bytes, the low and the high ones.
template <class F, class T>
DEVICE void look_up_pairs(u32 codes, u32 (&pairs)[2][2]) {
    constexpr PairTable<F, T> table;
    // The last permutation takes byte j of the upper half of the table if nibble j has bit 3.
    const u32 selectors = codes & 0x77777777, uppers = 0x32103210 | (codes & 0x88888888) >> 1;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        u32 bytes[2];
#pragma unroll
        for (u32 b = 0; b < 2; ++b) {
            const u32(&plane)[4] = table.planes[b];
            bytes[b] = permute_bytes(permute_bytes(plane[0], plane[1], selectors >> i * 16),
                                     permute_bytes(plane[2], plane[3], selectors >> i * 16), uppers >> i * 16);
        }
        pairs[0][i] = permute_bytes(bytes[0], bytes[1], 0x6240);
        pairs[1][i] = permute_bytes(bytes[0], bytes[1], 0x7351);
    }
}

// Reads the codes of the first group of a weight as pairs of T, of which a lane has those of QuantGroup<2>.
template <class F, class T>
DEVICE void read_pairs(const QuantWeight& weight, u32 part, u32 (&pairs)[2][2]) {
    if constexpr (NumberList<F>::EXISTS) {
        look_up_pairs<F, T>(((const u32*)weight.codes)[part], pairs);
    } else {
        QuantGroup<2> codes;
        F::read_codes(codes, weight, 0, part);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) code_pairs<F, T>((u32)codes.q[half], pairs[half]);
    }
}

// Reads the scales of adjacent groups of a block of a weight's row, from the group `first` on, with what is added to a sum times the
// scale.
template <class F, int GROUPS>
DEVICE void read_scales_of_groups(const QuantWeight& block, u64 row, u32 first, Vec<float, GROUPS> (&scales)[2],
                                  Vec<float, GROUPS> (&mins)[2]) {
    if constexpr (F::HAS_SUPER_SCALES) {
        read_half_super_scales(block.scales, first > 0, scales[0].x, mins[0].x);
    } else {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            QuantGroup<2> group;
            F::read_scales(group, block, GroupAt(F::OF_DELTAS == 0 ? row : 0, 0, first + i));
#pragma unroll
            for (u32 half = 0; half < F::SCALES; ++half) scales[half].x[i] = group.scale[half], mins[half].x[i] = group.min[half];
        }
    }
}
