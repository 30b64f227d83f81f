//! Decoding of GGML's block formats into groups of 32 weights.
//!
//! Every format is converted to one form: weight = scale · code + minimum, with a code of 4, 5, 6 or 8 bits. Formats
//! without a minimum get one too, a multiple of the scale, so that codes are unsigned, as the integer products require.
//! The layouts follow the definitions in ggml's `ggml-common.h` and its reference dequantisation.

use half::f16;
use octavo_ops::{E2M1_DOUBLED, IQ4_VALUES, StorageType, e4m3, e8m0_halved, iq4_xs_factor};

use super::layout::HALVES_OFFSET;
use crate::rows::GROUP;

/// A group of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Group {
    pub(crate) codes: [u8; GROUP],
    pub(crate) scale: GroupScale,
}

/// Scale as the formats store it, so that nothing is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum GroupScale {
    /// A scale; the minimum is a fixed multiple of it.
    One(f16),
    /// Scale and minimum.
    Two(f16, f16),
    /// Scale `d · scale`, minimum `−least · min`, of a super-block's `d` and `least`.
    Super { d: f16, least: f16, scale: u8, min: u8 },
    /// An exponent: the scale is a power of two, and codes are those of e2m1.
    Power(u8),
    /// A super-block's `d` times a factor; codes are indices of [`IQ4_CODES`].
    Signed(f16, i8),
    /// Scale and zero point.
    Zero(f16, u8),
    /// Scale and zero point.
    Wide(f32, u8),
    /// A super-block's `d` times a factor for each half of the group; the minimum is −32 times the scale.
    Halves(f16, [i8; 2]),
    /// The factor of a row, and an e4m3 scale for each half of the group; codes are those of e2m1, doubled.
    Pair(f32, [u8; 2]),
}

impl Group {
    /// Returns the weights of the group in a format with these codes.
    pub(crate) fn values(&self, storage: StorageType) -> [f32; GROUP] {
        let below_zero = |scale: f32, zero: u8| (scale, -f32::from(zero) * scale);
        let [low, high] = match self.scale {
            GroupScale::One(d) => [(d.to_f32(), offset(storage) * d.to_f32()); 2],
            GroupScale::Two(d, min) => [(d.to_f32(), min.to_f32()); 2],
            GroupScale::Super { d, least, scale, min } => {
                [(d.to_f32() * f32::from(scale), -least.to_f32() * f32::from(min)); 2]
            }
            GroupScale::Power(exponent) => [below_zero(e8m0_halved(exponent), E2M1_OFFSET); 2],
            GroupScale::Signed(d, factor) => [below_zero(d.to_f32() * f32::from(factor), IQ4_OFFSET); 2],
            GroupScale::Zero(d, zero) => [below_zero(d.to_f32(), zero); 2],
            GroupScale::Wide(scale, zero) => [below_zero(scale, zero); 2],
            GroupScale::Halves(d, factors) => factors.map(|factor| {
                let scale = d.to_f32() * f32::from(factor);
                (scale, -(HALVES_OFFSET as f32) * scale)
            }),
            GroupScale::Pair(factor, codes) => codes.map(|code| below_zero(e4m3(code) * factor, E2M1_OFFSET)),
        };
        let codes = match storage {
            StorageType::Mxfp4 | StorageType::Nvfp4 => self.codes.map(|code| E2M1_CODES[usize::from(code)]),
            StorageType::Iq4Nl | StorageType::Iq4Xs => self.codes.map(|code| IQ4_CODES[usize::from(code)]),
            _ => self.codes,
        };
        std::array::from_fn(|k| {
            let (scale, min) = if k < GROUP / 2 { low } else { high };
            scale * f32::from(codes[k]) + min
        })
    }
}

/// Offset that makes the doubled values of e2m1 unsigned.
pub(crate) const E2M1_OFFSET: u8 = 12;

/// Doubled values of the codes of e2m1, plus their offset.
pub(crate) const E2M1_CODES: [u8; 16] = unsigned(&E2M1_DOUBLED, E2M1_OFFSET);

/// Offset that makes the values of the IQ4 types unsigned.
pub(crate) const IQ4_OFFSET: u8 = 128;

/// Values of the codes of the IQ4 types, plus their offset.
pub(crate) const IQ4_CODES: [u8; 16] = unsigned(&IQ4_VALUES, IQ4_OFFSET);

const fn unsigned(values: &[i8; 16], offset: u8) -> [u8; 16] {
    let mut codes = [offset; 16];
    let mut code = 0;
    while code < codes.len() {
        codes[code] = codes[code].wrapping_add_signed(values[code]);
        code += 1;
    }
    codes
}

/// Returns the minimum of a format that stores none, as a multiple of the scale: the offset of its unsigned codes.
pub(crate) const fn offset(storage: StorageType) -> f32 {
    match storage {
        StorageType::Q4_0 => -8.0,
        StorageType::Q5_0 => -16.0,
        _ => -128.0,
    }
}

/// Decodes group `index` of a row of blocks.
pub(crate) fn group(storage: StorageType, row: &[u8], index: usize) -> Group {
    let block_groups = storage.block_elements() / GROUP;
    let size = storage.block_bytes();
    let block = &row[index / block_groups.max(1) * size..][..size];
    match storage {
        StorageType::Q4_0 => one(block, nibbles(&block[2..])),
        StorageType::Q4_1 => two(block, nibbles(&block[4..])),
        StorageType::Q5_0 => one(block, with_fifth(nibbles(&block[6..]), &block[2..])),
        StorageType::Q5_1 => two(block, with_fifth(nibbles(&block[8..]), &block[4..])),
        StorageType::Q8_0 => one(block, std::array::from_fn(|k| block[2 + k] ^ 0x80)),
        StorageType::Q4K => super_block(block, index % block_groups, &block[16..], None),
        StorageType::Q5K => super_block(block, index % block_groups, &block[48..], Some(&block[16..48])),
        StorageType::Mxfp4 => Group { codes: nibbles(&block[1..]), scale: GroupScale::Power(block[0]) },
        StorageType::Nvfp4 => Group { codes: nibbles(&block[6..]), scale: pair(block) },
        StorageType::Iq4Nl => one(block, nibbles(&block[2..])),
        StorageType::Iq4Xs => iq4_xs(block, index % block_groups),
        StorageType::Int4 => {
            Group { codes: nibbles(&block[3..]), scale: GroupScale::Zero(half_at(block, 0), block[2]) }
        }
        StorageType::Int8 => {
            let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            Group { codes: std::array::from_fn(|k| block[5 + k]), scale: GroupScale::Wide(scale, block[4]) }
        }
        StorageType::Q3K => q3k(block, index % block_groups),
        StorageType::Q6K => q6k(block, index % block_groups),
        other => unreachable!("{other} is not kept in groups"),
    }
}

pub(crate) fn half_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Returns the scales of an NVFP4 block. The factor, which also makes up for the doubled codes, is the nearest f32 to the inverse
/// of a divisor, so that weights are within 2⁻²³ of theirs.
pub(crate) fn pair(block: &[u8]) -> GroupScale {
    let whole = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    let factor = if whole < 0.0 { -1.0 / whole } else { whole };
    GroupScale::Pair(factor / 2.0, [block[4], block[5]])
}

fn one(block: &[u8], codes: [u8; GROUP]) -> Group {
    Group { codes, scale: GroupScale::One(half_at(block, 0)) }
}

fn two(block: &[u8], codes: [u8; GROUP]) -> Group {
    Group { codes, scale: GroupScale::Two(half_at(block, 0), half_at(block, 2)) }
}

/// Unpacks nibbles: element i is the low nibble of byte i, element i + 16 its high nibble.
pub(crate) fn nibbles(bytes: &[u8]) -> [u8; GROUP] {
    std::array::from_fn(|k| if k < 16 { bytes[k] & 15 } else { bytes[k - 16] >> 4 })
}

/// Adds the fifth bits: that of element i is bit i of a little-endian word.
fn with_fifth(codes: [u8; GROUP], bits: &[u8]) -> [u8; GROUP] {
    std::array::from_fn(|k| codes[k] | (bits[k / 8] >> (k % 8) & 1) << 4)
}

/// Decodes a group of a Q4_K or Q5_K super-block: d, least, twelve bytes of 6-bit scales and minima, then the codes.
/// Two groups share 32 bytes, the first in the low nibbles; bit g of byte k is the fifth bit of element k of group g.
fn super_block(block: &[u8], group: usize, codes: &[u8], fifth: Option<&[u8]>) -> Group {
    let packed = &block[4..16];
    let (scale, min) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
    };
    let bytes = &codes[group / 2 * GROUP..][..GROUP];
    let codes = std::array::from_fn(|k| {
        let low = if group.is_multiple_of(2) { bytes[k] & 15 } else { bytes[k] >> 4 };
        fifth.map_or(low, |bits| low | (bits[k] >> group & 1) << 4)
    });
    Group { codes, scale: GroupScale::Super { d: half_at(block, 0), least: half_at(block, 2), scale, min } }
}

/// Rounds a group of 32 weights to Q8_0.
pub(crate) fn to_q8(values: &[f32; GROUP]) -> Group {
    let largest = values.iter().fold(0.0f32, |a, b| a.max(b.abs()));
    let scale = f16::from_f32(largest / 127.0);
    let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
    let code = |x: f32| ((x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8) ^ 0x80;
    Group { codes: values.map(code), scale: GroupScale::One(scale) }
}

/// Decodes a group of a Q6_K super-block: 128 bytes of low nibbles, 64 of upper bit pairs, sixteen signed factors, d.
/// In each half of 128 elements, the first 64 have the low nibbles of 64 bytes and the others the high ones; element
/// 32j + k has bits 2j of upper byte k.
fn q6k(block: &[u8], group: usize) -> Group {
    let (half, j) = (group / 4, group % 4);
    let codes = std::array::from_fn(|k| {
        let byte = block[half * 64 + j % 2 * 32 + k];
        let low = if j < 2 { byte & 15 } else { byte >> 4 };
        low | (block[128 + half * 32 + k] >> (2 * j) & 3) << 4
    });
    let factors = [0, 1].map(|i| block[192 + 2 * group + i] as i8);
    Group { codes, scale: GroupScale::Halves(half_at(block, 208), factors) }
}

/// Decodes a group of an IQ4_XS super-block: eight bytes with d and the factors, then the codes of each group.
fn iq4_xs(block: &[u8], group: usize) -> Group {
    let header = std::array::from_fn(|i| block[i]);
    let scale = GroupScale::Signed(half_at(block, 0), iq4_xs_factor(&header, group));
    Group { codes: nibbles(&block[8 + group * GROUP / 2..][..GROUP / 2]), scale }
}

/// Decodes a group of a Q3_K super-block: 32 bytes of third bits (if set, 4 is not subtracted), 64 bytes of 2-bit codes
/// as in Q2_K, twelve bytes of 6-bit factors, d.
fn q3k(block: &[u8], group: usize) -> Group {
    let (half, j, packed) = (group / 4, group % 4, &block[96..108]);
    let codes = std::array::from_fn(|k| {
        let low = block[32 + half * 32 + k] >> (2 * j) & 3;
        let third = block[k] >> group & 1;
        // The code has the offset 32, as in Q6_K.
        low + 4 * third + 28
    });
    let factors = [0, 1].map(|i| {
        let s = 2 * group + i;
        let low = if s < 8 { packed[s] & 15 } else { packed[s - 8] >> 4 };
        let high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    });
    Group { codes, scale: GroupScale::Halves(half_at(block, 108), factors) }
}

/// Decodes the weights of a Q2_K super-block: sixteen bytes of 4-bit scales and minima, 64 bytes of 2-bit codes, d and
/// least. Element 128h + 32j + k has bits 2j of byte 32h + k.
pub(crate) fn q2k(block: &[u8]) -> [f32; 256] {
    let (d, least) = (half_at(block, 80).to_f32(), half_at(block, 82).to_f32());
    std::array::from_fn(|i| {
        let (half, shift, k) = (i / 128, i % 128 / 32 * 2, i % 32);
        let code = block[16 + half * 32 + k] >> shift & 3;
        let scale = block[i / 16];
        d * f32::from(scale & 15) * f32::from(code) - least * f32::from(scale >> 4)
    })
}
