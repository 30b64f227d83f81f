//! GGUF types whose codes are points of a grid: the i-quants of less than four bits. No backend has kernels for them, so
//! they are read as another storage type.
//!
//! A block has 256 elements. A point has the magnitudes of eight or four adjacent ones; their signs and their scale are
//! apart. The layouts are those of ggml.

mod tables;

use std::fmt;

use half::{bf16, f16};
use octavo_ops::StorageType;

/// Number of elements of a block.
const BLOCK: usize = 256;

/// Number of elements of a block of [`StorageType::Int8`], and its zero point here.
const GROUP: usize = 32;
const ZERO: u8 = 128;

/// A type of GGUF files that is read as another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GridType {
    /// 1.56 bits.
    Iq1S,
    /// 1.75 bits.
    Iq1M,
    /// 2.06 bits.
    Iq2Xxs,
    /// 2.31 bits.
    Iq2Xs,
    /// 2.56 bits.
    Iq2S,
    /// 3.06 bits.
    Iq3Xxs,
    /// 3.44 bits.
    Iq3S,
}

impl GridType {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Iq1S, Self::Iq1M, Self::Iq2Xxs, Self::Iq2Xs, Self::Iq2S, Self::Iq3Xxs, Self::Iq3S];

    /// Returns the name used by the format's documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Iq1S => "IQ1_S",
            Self::Iq1M => "IQ1_M",
            Self::Iq2Xxs => "IQ2_XXS",
            Self::Iq2Xs => "IQ2_XS",
            Self::Iq2S => "IQ2_S",
            Self::Iq3Xxs => "IQ3_XXS",
            Self::Iq3S => "IQ3_S",
        }
    }

    /// Returns the type with this number in the format.
    pub(super) const fn of_id(id: u32) -> Option<Self> {
        Some(match id {
            16 => Self::Iq2Xxs,
            17 => Self::Iq2Xs,
            18 => Self::Iq3Xxs,
            19 => Self::Iq1S,
            21 => Self::Iq3S,
            22 => Self::Iq2S,
            29 => Self::Iq1M,
            _ => return None,
        })
    }

    /// Returns the storage type as which it is read: [`StorageType::Int8`], which is exact, if 32 elements share a scale.
    /// Those with a scale for 16 have numbers of more than eight bits, which [`StorageType::BF16`] rounds.
    pub const fn storage(self) -> StorageType {
        match self {
            Self::Iq1S | Self::Iq2Xxs | Self::Iq3Xxs | Self::Iq3S => StorageType::Int8,
            Self::Iq1M | Self::Iq2Xs | Self::Iq2S => StorageType::BF16,
        }
    }

    /// Returns the number of elements and of bytes of a block.
    pub(super) const fn block(self) -> (usize, usize) {
        let bytes = match self {
            Self::Iq1S => 50,
            Self::Iq1M => 56,
            Self::Iq2Xxs => 66,
            Self::Iq2Xs => 74,
            Self::Iq2S => 82,
            Self::Iq3Xxs => 98,
            Self::Iq3S => 110,
        };
        (BLOCK, bytes)
    }

    /// Returns whole blocks in the type of [`Self::storage`].
    pub fn transcode(self, blocks: &[u8]) -> Vec<u8> {
        let (_, size) = self.block();
        let storage = self.storage();
        let count = blocks.len() / size;
        let mut out = Vec::with_capacity(storage.bytes_for(count * BLOCK).unwrap_or_default());
        let mut codes = Codes { scales: [0.0; BLOCK / Codes::SCALED], codes: [0; BLOCK] };
        for block in blocks.chunks_exact(size) {
            self.read(block, &mut codes);
            match storage {
                StorageType::Int8 => codes.write_int8(&mut out),
                _ => codes.write_bf16(&mut out),
            }
        }
        out
    }

    fn read(self, block: &[u8], out: &mut Codes) {
        match self {
            Self::Iq1S => iq1_s(block, out),
            Self::Iq1M => iq1_m(block, out),
            Self::Iq2Xxs => iq2_xxs(block, out),
            Self::Iq2Xs => iq2_xs(block, out),
            Self::Iq2S => iq2_s(block, out),
            Self::Iq3Xxs => iq3_xxs(block, out),
            Self::Iq3S => iq3_s(block, out),
        }
    }
}

impl fmt::Display for GridType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A block as integers with a scale for each 16.
struct Codes {
    scales: [f32; BLOCK / Codes::SCALED],
    codes: [i8; BLOCK],
}

impl Codes {
    /// Number of elements of a scale.
    const SCALED: usize = 16;

    /// Sets both scales of a group of 32.
    fn scale_group(&mut self, group: usize, scale: f32) {
        self.scales[2 * group..][..2].fill(scale);
    }

    /// Sets elements from `first` on to the values of the codes of a point, of `bits` bits each.
    fn point(&mut self, first: usize, point: u16, bits: u32, values: &[i8]) {
        let mask = (1 << bits) - 1;
        let count = if bits == 2 { 8 } else { 4 };
        for (element, code) in self.codes[first..][..count].iter_mut().enumerate() {
            *code = values[usize::from(point >> (bits * element as u32) & mask)];
        }
    }

    /// Negates those of eight elements from `first` on whose bits are 1.
    fn negate(&mut self, first: usize, signs: u8) {
        for (element, code) in self.codes[first..][..8].iter_mut().enumerate() {
            *code = if signs >> element & 1 == 1 { -*code } else { *code };
        }
    }

    fn write_int8(&self, out: &mut Vec<u8>) {
        for (scales, codes) in self.scales.chunks(2).zip(self.codes.chunks(GROUP)) {
            out.extend(scales[0].to_le_bytes());
            out.push(ZERO);
            out.extend(codes.iter().map(|code| ZERO.wrapping_add_signed(*code)));
        }
    }

    fn write_bf16(&self, out: &mut Vec<u8>) {
        for (scale, codes) in self.scales.iter().zip(self.codes.chunks(Self::SCALED)) {
            out.extend(codes.iter().flat_map(|code| bf16::from_f32(scale * f32::from(*code)).to_le_bytes()));
        }
    }
}

/// Magnitudes of the codes of points.
const OF_IQ2: [i8; 4] = [8, 25, 43, 0];
const OF_IQ3_XXS: [i8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
const OF_IQ3_S: [i8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

/// Eight times the values of the codes of IQ1, plus the shift of their group, which is an eighth.
const OF_IQ1_UP: [i8; 4] = [-7, 1, 9, 0];
const OF_IQ1_DOWN: [i8; 4] = [-9, -1, 7, 0];

/// Returns a whole byte of signs of which seven bits are stored: the number of ones is even.
const fn signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

fn u16_at(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
}

fn u32_at(bytes: &[u8], index: usize) -> u32 {
    u32::from(u16_at(bytes, 2 * index)) | u32::from(u16_at(bytes, 2 * index + 1)) << 16
}

fn f16_at(bytes: &[u8], index: usize) -> f32 {
    f16::from_bits(u16_at(bytes, index)).to_f32()
}

fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (index % 2 * 4) & 15
}

/// Returns an index of nine bits or more: its lower byte, and the upper bits.
fn index(low: u8, high: impl Into<usize>) -> usize {
    usize::from(low) | high.into() << 8
}

/// An f16 scale. Of each group, four indices, then their signs and four bits of a scale.
fn iq2_xxs(block: &[u8], out: &mut Codes) {
    let (scale, rest) = (f16_at(block, 0), &block[2..]);
    for (group, bytes) in rest.chunks_exact(8).enumerate() {
        let last = u32_at(bytes, 1);
        out.scale_group(group, scale * (0.5 + (last >> 28) as f32) * 0.25);
        for (point, &index) in bytes[..4].iter().enumerate() {
            let first = group * GROUP + point * 8;
            out.point(first, tables::IQ2_XXS[usize::from(index)], 2, &OF_IQ2);
            out.negate(first, signs(last >> (7 * point)));
        }
    }
}

/// An f16 scale, 32 points (nine bits of an index, seven of signs), 16 scales of four bits.
fn iq2_xs(block: &[u8], out: &mut Codes) {
    let (scale, points, factors) = (f16_at(block, 0), &block[2..66], &block[66..]);
    for (at, out) in out.scales.iter_mut().enumerate() {
        *out = scale * (0.5 + f32::from(nibble(factors, at))) * 0.25;
    }
    for point in 0..BLOCK / 8 {
        let code = u16_at(points, point);
        out.point(point * 8, tables::IQ2_XS[usize::from(code & 511)], 2, &OF_IQ2);
        out.negate(point * 8, signs(u32::from(code >> 9)));
    }
}

/// An f16 scale, lower bytes of 32 indices, their signs, their upper pairs of bits, 16 scales of four bits.
fn iq2_s(block: &[u8], out: &mut Codes) {
    let (scale, low, negative) = (f16_at(block, 0), &block[2..34], &block[34..66]);
    let (high, factors) = (&block[66..74], &block[74..]);
    for (at, out) in out.scales.iter_mut().enumerate() {
        *out = scale * (0.5 + f32::from(nibble(factors, at))) * 0.25;
    }
    for point in 0..BLOCK / 8 {
        let index = index(low[point], high[point / 4] >> (point % 4 * 2) & 3);
        out.point(point * 8, tables::IQ2_S[index], 2, &OF_IQ2);
        out.negate(point * 8, negative[point]);
    }
}

/// An f16 scale, 64 indices. Of each group, the signs and four bits of a scale.
fn iq3_xxs(block: &[u8], out: &mut Codes) {
    let (scale, points, rest) = (f16_at(block, 0), &block[2..66], &block[66..]);
    for (at, &index) in points.iter().enumerate() {
        out.point(at * 4, tables::IQ3_XXS[usize::from(index)], 3, &OF_IQ3_XXS);
    }
    for group in 0..BLOCK / GROUP {
        let word = u32_at(rest, group);
        out.scale_group(group, scale * (0.5 + (word >> 28) as f32) * 0.5);
        (0..4).for_each(|eight| out.negate(group * GROUP + eight * 8, signs(word >> (7 * eight))));
    }
}

/// An f16 scale, lower bytes of 64 indices, their upper bits, the signs, eight scales of four bits.
fn iq3_s(block: &[u8], out: &mut Codes) {
    let (scale, low, high) = (f16_at(block, 0), &block[2..66], &block[66..74]);
    let (negative, factors) = (&block[74..106], &block[106..]);
    for at in 0..BLOCK / 4 {
        let index = index(low[at], high[at / 8] >> (at % 8) & 1);
        out.point(at * 4, tables::IQ3_S[index], 3, &OF_IQ3_S);
    }
    negative.iter().enumerate().for_each(|(eight, &signs)| out.negate(eight * 8, signs));
    for group in 0..BLOCK / GROUP {
        out.scale_group(group, scale * f32::from(1 + 2 * nibble(factors, group)));
    }
}

/// Sets eight elements of IQ1 from their index, whose group is shifted down or up.
fn iq1_point(out: &mut Codes, point: usize, index: usize, down: bool) {
    let values = if down { OF_IQ1_DOWN } else { OF_IQ1_UP };
    out.point(point * 8, tables::IQ1[index], 2, &values);
}

/// An f16 scale, lower bytes of 32 indices. Of each group, the upper bits of four, three bits of a scale, the shift.
fn iq1_s(block: &[u8], out: &mut Codes) {
    let (scale, low, rest) = (f16_at(block, 0), &block[2..34], &block[34..]);
    for group in 0..BLOCK / GROUP {
        let word = u16_at(rest, group);
        out.scale_group(group, scale * f32::from(2 * (word >> 12 & 7) + 1) / 8.0);
        for (at, &low) in low[4 * group..][..4].iter().enumerate() {
            iq1_point(out, 4 * group + at, index(low, word >> (at * 3) & 7), word & 0x8000 != 0);
        }
    }
}

/// Lower bytes of 32 indices, nibbles with their upper bits and shifts. Four words have a quarter of the f16 scale each,
/// and four scales of three bits.
fn iq1_m(block: &[u8], out: &mut Codes) {
    let (low, high, words) = (&block[..32], &block[32..48], &block[48..]);
    let quarters = (0..4).map(|at| (u16_at(words, at) >> 12) << (4 * at));
    let scale = f16::from_bits(quarters.fold(0, |all, quarter| all | quarter)).to_f32();
    for (at, out) in out.scales.iter_mut().enumerate() {
        *out = scale * f32::from(2 * (u16_at(words, at / 4) >> (at % 4 * 3) & 7) + 1) / 8.0;
    }
    for (point, &low) in low.iter().enumerate() {
        let bits = nibble(high, point);
        iq1_point(out, point, index(low, bits & 7), bits & 8 != 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_read_whole() {
        for grid in GridType::ALL {
            let (elements, bytes) = grid.block();
            let storage = grid.storage();
            let random: Vec<u8> = (0..3 * bytes).map(|at| (at * 167 % 251) as u8).collect();
            let out = grid.transcode(&random);
            assert_eq!(Some(out.len()), storage.bytes_for(3 * elements), "{grid}");
            assert_eq!(grid.transcode(&random[..bytes]), out[..out.len() / 3], "{grid}");
        }
    }

    #[test]
    fn the_number_of_signs_is_even() {
        assert_eq!([0, 1, 3, 127].map(signs), [0, 0x81, 3, 0xff]);
    }

    #[test]
    fn a_shift_moves_each_value_by_an_eighth() {
        // Point 0 of the grid has the code 0, which is -1, in all places.
        let mut block = vec![0; 50];
        block[..2].copy_from_slice(&f16::from_f32(8.0).to_le_bytes());
        block[35] = 0x80;
        let mut codes = Codes { scales: [0.0; 16], codes: [0; BLOCK] };
        GridType::Iq1S.read(&block, &mut codes);
        assert_eq!((codes.scales[0], codes.codes[0], codes.codes[GROUP]), (1.0, -9, -7));
    }
}
