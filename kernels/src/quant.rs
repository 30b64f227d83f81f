//! Layout of quantised weights on the device.
//!
//! GGUF blocks have 18 to 210 bytes, so in a file neither codes nor scales are aligned. On the device a weight `[N, K]`
//! is stored as **planes**, each `[N, K / group]` of one kind of item and aligned to 16 bytes: the codes of 32 adjacent
//! elements are one 16-byte load (two for Q8_0, 8 bytes for 2-bit codes) and contiguous with those of the next 32.
//! Nothing is rounded and nothing is added: the planes contain the file's bits, in as many bytes. NVFP4 is the exception:
//! the scale of a whole matrix, which each block of 32 has, is kept once for a row, as a factor.
//!
//! | format | `codes`, 32 elements | `high`, 32 elements | `scales` | `deltas` |
//! |---|---|---|---|---|
//! | Q4_0 | nibbles | | | f16 scale per 32 |
//! | Q4_1 | nibbles | | | f16 scale, f16 minimum per 32 |
//! | Q5_0 | nibbles | bits | | f16 scale per 32 |
//! | Q5_1 | nibbles | bits | | f16 scale, f16 minimum per 32 |
//! | Q8_0 | 32 signed bytes | | | f16 scale per 32 |
//! | Q2_K | pairs | | factor in the low nibble and minimum in the high nibble per 16 | f16 scale, f16 scale of minima per 256 |
//! | Q3_K | pairs | bits | the file's 12 bytes of factors per 256 | f16 scale per 256 |
//! | Q4_K | nibbles | | the 16 bytes before a block's codes per 256 | |
//! | Q5_K | nibbles | bits | the 16 bytes before a block's codes per 256 | |
//! | Q6_K | nibbles | pairs | i8 factor per 16 | f16 scale per 256 |
//! | MXFP4 | nibbles | | u8 exponent per 32 | |
//! | NVFP4 | nibbles | | e4m3 factor per 16 | f32 factor per row, see [`nvfp4_factor`] |
//! | IQ4_NL | nibbles | | | f16 scale per 32 |
//! | IQ4_XS | nibbles | | the 8 bytes before a block's codes per 256 | |
//! | INT4 | nibbles | | u8 zero point per 32 | f16 scale per 32 |
//! | INT8 | 32 bytes | | u8 zero point per 32 | f32 scale per 32 |
//! | F8_E4M3 | 32 bytes | | | f32 scale per 32 |
//! | NF4, FP4 | nibbles | | | f32 scale per 64 |
//!
//! - **Nibbles**: byte i of 16 holds element i in its low nibble and element i + 16 in its high nibble.
//! - **Pairs** of bits take 8 bytes: byte j of the first word holds those of the elements j, 4 + j, 8 + j and 12 + j,
//!   from the lowest bits up; the second word holds those of elements 16 on.
//! - **Bits** take 4 bytes: byte j holds those of the elements j, 4 + j, ..., 28 + j, from the lowest bit up.
//!
//! A shift and a mask of a word therefore give the codes of four adjacent elements, one per byte.

use std::ops::Range;

use crate::params::{DevicePtr, QuantWeight};

/// Storage type that stays quantised on the device, named as in GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantFormat {
    /// 4-bit blocks of 32 with an f16 scale.
    Q4_0,
    /// 4-bit blocks of 32 with an f16 scale and minimum.
    Q4_1,
    /// 5-bit blocks of 32 with an f16 scale.
    Q5_0,
    /// 5-bit blocks of 32 with an f16 scale and minimum.
    Q5_1,
    /// 8-bit blocks of 32 with an f16 scale.
    Q8_0,
    /// 2-bit super-blocks of 256.
    Q2K,
    /// 3-bit super-blocks of 256.
    Q3K,
    /// 4-bit super-blocks of 256.
    Q4K,
    /// 5-bit super-blocks of 256.
    Q5K,
    /// 6-bit super-blocks of 256.
    Q6K,
    /// 4-bit floating-point blocks of 32 with a power of two as scale.
    Mxfp4,
    /// 4-bit floating-point blocks of 32 with an e4m3 factor for each half and a scale that a whole matrix shares.
    Nvfp4,
    /// 4-bit indices of a table in blocks of 32 with an f16 scale.
    Iq4Nl,
    /// 4-bit super-blocks of 256 of the same indices.
    Iq4Xs,
    /// 4-bit integers in blocks of 32 with an f16 scale and a zero point.
    Int4,
    /// 8-bit integers in blocks of 32 with an f32 scale and a zero point.
    Int8,
    /// 8-bit floating-point numbers in blocks of 32 with an f32 scale.
    F8E4M3,
    /// 4-bit indices of bitsandbytes' NormalFloat in blocks of 32 with an f32 scale.
    Nf4,
    /// 4-bit floating-point numbers of bitsandbytes in blocks of 32 with an f32 scale.
    Fp4,
}

/// Alignment of the planes in bytes.
const ALIGNMENT: usize = 16;

/// Number of elements whose codes are loaded together.
const GROUP: usize = 32;

impl QuantFormat {
    /// All formats.
    pub const ALL: [Self; 19] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Mxfp4,
        Self::Nvfp4,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Int4,
        Self::Int8,
        Self::F8E4M3,
        Self::Nf4,
        Self::Fp4,
    ];

    /// Returns whether codes are floating-point numbers, which are not multiplied with activations of 8 bits.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::Nf4 | Self::Fp4)
    }

    /// Returns the name in instances.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q8_0 => "q8_0",
            Self::Q2K => "q2_k",
            Self::Q3K => "q3_k",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Iq4Nl => "iq4_nl",
            Self::Iq4Xs => "iq4_xs",
            Self::Int4 => "int4",
            Self::Int8 => "int8",
            Self::F8E4M3 => "f8_e4m3",
            Self::Nf4 => "nf4",
            Self::Fp4 => "fp4",
        }
    }

    /// Returns the type that represents it in C.
    pub const fn c_name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Mxfp4 => "MXFP4",
            Self::Nvfp4 => "NVFP4",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Int4 => "INT4",
            Self::Int8 => "INT8",
            Self::F8E4M3 => "F8_E4M3",
            Self::Nf4 => "NF4",
            Self::Fp4 => "FP4",
        }
    }

    /// Returns the number of elements in a block of the file; K is a multiple of it.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Mxfp4 | Self::Nvfp4 => 32,
            Self::Iq4Nl | Self::Int4 | Self::Int8 | Self::F8E4M3 => 32,
            Self::Nf4 | Self::Fp4 => 64,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// Returns the size of a block of the file in bytes.
    pub const fn block_bytes(self) -> usize {
        let planes = self.plane_bytes();
        planes[0] + planes[1] + planes[2] + planes[3] + self.row_bytes()
    }

    /// Returns the size of whole blocks of so many elements in bytes.
    pub const fn bytes_of(self, elements: u64) -> u64 {
        elements / self.block_elements() as u64 * self.block_bytes() as u64
    }

    /// Returns the number of bytes that each block of a file has and a row on the device has once, in the plane of deltas.
    const fn row_bytes(self) -> usize {
        if matches!(self, Self::Nvfp4) { size_of::<f32>() } else { 0 }
    }

    /// Returns whether codes are indices of a list of numbers.
    pub const fn is_listed(self) -> bool {
        matches!(self, Self::Mxfp4 | Self::Nvfp4 | Self::Iq4Nl | Self::Iq4Xs | Self::Nf4 | Self::Fp4)
    }

    /// Returns the numbers of scales and of minima that a group of 32 elements has for its codes without their offset.
    pub(crate) const fn scales_of_group(self) -> (usize, usize) {
        match self {
            Self::Q2K => (2, 2),
            Self::Q3K | Self::Q6K | Self::Nvfp4 => (2, 0),
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K | Self::Int4 | Self::Int8 => (1, 1),
            _ => (1, 0),
        }
    }

    /// Returns the number of bytes of a block for each plane: codes, high, scales, deltas.
    pub(crate) const fn plane_bytes(self) -> [usize; 4] {
        match self {
            Self::Q4_0 | Self::Iq4Nl => [16, 0, 0, 2],
            Self::Q4_1 => [16, 0, 0, 4],
            Self::Q5_0 => [16, 4, 0, 2],
            Self::Q5_1 => [16, 4, 0, 4],
            Self::Q8_0 => [32, 0, 0, 2],
            Self::Q2K => [64, 0, 16, 4],
            Self::Q3K => [64, 32, 12, 2],
            Self::Q4K => [128, 0, 16, 0],
            Self::Q5K => [128, 32, 16, 0],
            Self::Q6K => [128, 64, 16, 2],
            Self::Mxfp4 => [16, 0, 1, 0],
            Self::Nvfp4 => [16, 0, 2, 0],
            Self::Iq4Xs => [128, 0, 8, 0],
            Self::Int4 => [16, 0, 1, 2],
            Self::Int8 => [32, 0, 1, 4],
            Self::F8E4M3 => [32, 0, 0, 4],
            Self::Nf4 | Self::Fp4 => [32, 0, 0, 4],
        }
    }
}

/// Offsets of the planes of a weight `[N, K]` in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantLayout {
    format: QuantFormat,
    /// Number of blocks: N · K / elements of a block.
    blocks: usize,
    /// Number of blocks of a row.
    row_blocks: usize,
    /// Offset of each plane; the last is the end.
    starts: [usize; 5],
}

impl QuantLayout {
    /// Creates the layout of `rows` rows of `cols` elements; `None` if `cols` is not a multiple of the format's block
    /// or the size overflows.
    pub fn new(format: QuantFormat, rows: usize, cols: usize) -> Option<Self> {
        if !cols.is_multiple_of(format.block_elements()) {
            return None;
        }
        let row_blocks = cols / format.block_elements();
        let blocks = rows.checked_mul(row_blocks)?;
        let mut starts = [0usize; 5];
        for (plane, bytes) in format.plane_bytes().into_iter().enumerate() {
            let of_rows = if plane == 3 { rows.checked_mul(format.row_bytes())? } else { 0 };
            let end = starts[plane].checked_add(blocks.checked_mul(bytes)?)?.checked_add(of_rows)?;
            starts[plane + 1] = end.checked_next_multiple_of(ALIGNMENT)?;
        }
        Some(Self { format, blocks, row_blocks, starts })
    }

    /// Returns the size on the device in bytes, a multiple of 16.
    pub const fn bytes(&self) -> usize {
        self.starts[4]
    }

    /// Returns the planes of a weight at the address `base`, a multiple of 16.
    pub fn planes(&self, base: DevicePtr) -> QuantWeight {
        let bytes = self.row_plane_bytes();
        let at = |plane: usize| if bytes[plane] == 0 { 0 } else { base + self.starts[plane] as u64 };
        QuantWeight { codes: at(0), high: at(1), scales: at(2), deltas: at(3) }
    }

    /// Returns the offset and the size of each plane of some rows.
    pub fn pieces(&self, rows: Range<usize>) -> [(usize, usize); 4] {
        let bytes = self.row_plane_bytes();
        std::array::from_fn(|p| (self.starts[p] + rows.start * bytes[p], rows.len() * bytes[p]))
    }

    /// Returns the size of a row on the device for each plane.
    fn row_plane_bytes(&self) -> [usize; 4] {
        let mut bytes = self.format.plane_bytes().map(|bytes| bytes * self.row_blocks);
        bytes[3] += self.format.row_bytes();
        bytes
    }

    /// Converts the file's `blocks` to the device's layout in `out`.
    ///
    /// # Panics
    /// Panics if `blocks` is not the whole weight or `out` does not have [`QuantLayout::bytes`] bytes.
    pub fn repack(&self, blocks: &[u8], out: &mut [u8]) {
        assert_eq!(blocks.len(), self.blocks * self.format.block_bytes(), "the weight's blocks");
        assert_eq!(out.len(), self.bytes(), "the weight's memory");
        out.fill(0);
        self.write(blocks, [self.starts[0], self.starts[1], self.starts[2], self.starts[3]], out);
    }

    /// Converts the file's `blocks` of some rows to the planes of the device's layout in `out`, one after the other without
    /// gaps: the [`QuantLayout::pieces`] of these rows.
    ///
    /// # Panics
    /// Panics if `blocks` are no whole rows or `out` does not have the size of their planes.
    pub fn repack_rows(&self, blocks: &[u8], out: &mut [u8]) {
        let rows = blocks.len() / (self.row_blocks * self.format.block_bytes()).max(1);
        assert_eq!(blocks.len(), rows * self.row_blocks * self.format.block_bytes(), "blocks of whole rows");
        let [codes, high, scales, deltas] = self.row_plane_bytes().map(|bytes| bytes * rows);
        assert_eq!(out.len(), codes + high + scales + deltas, "the memory of the rows");
        self.write(blocks, [0, codes, codes + high, codes + high + scales], out);
    }

    /// Writes the planes of blocks, of which the first begins a row, at offsets of `out`.
    fn write(&self, blocks: &[u8], starts: [usize; 4], out: &mut [u8]) {
        let size = self.format.block_bytes();
        let bytes = self.format.plane_bytes();
        for (i, block) in blocks.chunks_exact(size).enumerate() {
            let mut plane = |p: usize, write: &mut dyn FnMut(&mut [u8])| {
                write(&mut out[starts[p] + i * bytes[p]..][..bytes[p]]);
            };
            match self.format {
                QuantFormat::Q4_0
                | QuantFormat::Q4_1
                | QuantFormat::Q8_0
                | QuantFormat::Iq4Nl
                | QuantFormat::F8E4M3
                | QuantFormat::Nf4
                | QuantFormat::Fp4 => {
                    plane(3, &mut |to| to.copy_from_slice(&block[..bytes[3]]));
                    plane(0, &mut |to| to.copy_from_slice(&block[bytes[3]..]));
                }
                QuantFormat::Q5_0 | QuantFormat::Q5_1 => {
                    let (scales, rest) = block.split_at(bytes[3]);
                    plane(3, &mut |to| to.copy_from_slice(scales));
                    // The fifth bit of element k is bit k of a word.
                    plane(1, &mut |to| pack_bits(|k| rest[k / 8] >> (k % 8), to));
                    plane(0, &mut |to| to.copy_from_slice(&rest[4..]));
                }
                QuantFormat::Int4 | QuantFormat::Int8 => {
                    let (scale, rest) = block.split_at(bytes[3]);
                    plane(3, &mut |to| to.copy_from_slice(scale));
                    plane(2, &mut |to| to.copy_from_slice(&rest[..1]));
                    plane(0, &mut |to| to.copy_from_slice(&rest[1..]));
                }
                // The codes of a group are contiguous, as on the device.
                QuantFormat::Iq4Xs => {
                    plane(2, &mut |to| to.copy_from_slice(&block[..8]));
                    plane(0, &mut |to| to.copy_from_slice(&block[8..]));
                }
                QuantFormat::Nvfp4 => {
                    plane(2, &mut |to| to.copy_from_slice(&block[4..6]));
                    plane(0, &mut |to| to.copy_from_slice(&block[6..]));
                    if i.is_multiple_of(self.row_blocks) {
                        let whole = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
                        let factor = nvfp4_factor(whole).to_le_bytes();
                        out[starts[3] + i / self.row_blocks * factor.len()..][..factor.len()].copy_from_slice(&factor);
                    }
                }
                QuantFormat::Mxfp4 => {
                    plane(2, &mut |to| to.copy_from_slice(&block[..1]));
                    plane(0, &mut |to| to.copy_from_slice(&block[1..]));
                }
                QuantFormat::Q2K => {
                    plane(2, &mut |to| to.copy_from_slice(&block[..16]));
                    plane(0, &mut |to| repack_pairs(&block[16..80], to));
                    plane(3, &mut |to| to.copy_from_slice(&block[80..]));
                }
                QuantFormat::Q3K => {
                    plane(1, &mut |to| repack_bits(&block[..32], to));
                    plane(0, &mut |to| repack_pairs(&block[32..96], to));
                    plane(2, &mut |to| to.copy_from_slice(&block[96..108]));
                    plane(3, &mut |to| to.copy_from_slice(&block[108..]));
                }
                QuantFormat::Q4K => {
                    plane(2, &mut |to| to.copy_from_slice(&block[..16]));
                    plane(0, &mut |to| repack_q4_k_codes(&block[16..], to));
                }
                QuantFormat::Q5K => {
                    plane(2, &mut |to| to.copy_from_slice(&block[..16]));
                    plane(1, &mut |to| repack_bits(&block[16..48], to));
                    plane(0, &mut |to| repack_q4_k_codes(&block[48..], to));
                }
                QuantFormat::Q6K => {
                    plane(0, &mut |to| repack_q6_k_low(block, to));
                    plane(1, &mut |to| repack_pairs(&block[128..192], to));
                    plane(2, &mut |to| to.copy_from_slice(&block[192..208]));
                    plane(3, &mut |to| to.copy_from_slice(&block[208..]));
                }
            }
        }
    }
}

/// Returns the factor of a row of NVFP4 from the scale of its matrix: the scale, or the f32 nearest to the inverse of its
/// magnitude if it is negative, which makes it a divisor. Weights are within 2⁻²³ of theirs. It is halved because kernels read
/// the values of codes doubled.
fn nvfp4_factor(whole: f32) -> f32 {
    let factor = if whole < 0.0 { -1.0 / whole } else { whole };
    factor / 2.0
}

/// Writes the low nibbles of 32 elements: element i together with element i + 16.
fn pack_nibbles(element: impl Fn(usize) -> u8, to: &mut [u8]) {
    for (i, byte) in to.iter_mut().enumerate() {
        *byte = element(i) & 15 | element(i + GROUP / 2) << 4;
    }
}

/// Writes the low two bits of 32 elements in the layout of pairs.
fn pack_pairs(element: impl Fn(usize) -> u8, to: &mut [u8]) {
    for (i, byte) in to.iter_mut().enumerate() {
        let (word, j) = (i / 4, i % 4);
        *byte = (0..4).map(|field| (element(word * 16 + field * 4 + j) & 3) << (2 * field)).sum();
    }
}

/// Writes the lowest bits of 32 elements in the layout of bits.
fn pack_bits(element: impl Fn(usize) -> u8, to: &mut [u8]) {
    for (j, byte) in to.iter_mut().enumerate() {
        *byte = (0..8).map(|field| (element(field * 4 + j) & 1) << field).sum();
    }
}

/// Repacks codes of a file in which two groups of 32 share 32 bytes: the first has the low nibbles, the second the high
/// nibbles.
fn repack_q4_k_codes(codes: &[u8], to: &mut [u8]) {
    for (group, to) in to.chunks_exact_mut(GROUP / 2).enumerate() {
        let bytes = &codes[group / 2 * GROUP..][..GROUP];
        pack_nibbles(|i| bytes[i] >> (group % 2 * 4), to);
    }
}

/// Repacks codes of a file in which, in each half of 128 elements, the first 64 have the low nibbles of 64 bytes and
/// the others the high nibbles.
fn repack_q6_k_low(block: &[u8], to: &mut [u8]) {
    for (group, to) in to.chunks_exact_mut(GROUP / 2).enumerate() {
        let (half, j) = (group / 4, group % 4);
        let bytes = &block[half * 64 + j % 2 * GROUP..][..GROUP];
        pack_nibbles(|i| bytes[i] >> (j / 2 * 4), to);
    }
}

/// Repacks codes of a file in which four groups of 32 share 32 bytes: group j of them has bits 2j and 2j + 1.
fn repack_pairs(bytes: &[u8], to: &mut [u8]) {
    for (group, to) in to.chunks_exact_mut(GROUP / 4).enumerate() {
        let bytes = &bytes[group / 4 * GROUP..][..GROUP];
        pack_pairs(|k| bytes[k] >> (group % 4 * 2), to);
    }
}

/// Repacks codes of a file in which eight groups of 32 share 32 bytes: group g has bit g.
fn repack_bits(bytes: &[u8], to: &mut [u8]) {
    for (group, to) in to.chunks_exact_mut(GROUP / 8).enumerate() {
        pack_bits(|k| bytes[k] >> group, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_take_no_more_than_the_file() {
        for format in QuantFormat::ALL {
            let (rows, blocks) = (16, 16 * 512 / format.block_elements());
            let layout = QuantLayout::new(format, rows, 512).expect("whole blocks");
            let once = (blocks - rows) * format.row_bytes();
            assert_eq!(layout.bytes() + once, blocks * format.block_bytes(), "{format:?}");
        }
        let layout = QuantLayout::new(QuantFormat::Nvfp4, 16, 512).expect("whole blocks");
        assert_eq!(layout.bytes(), 16 * (512 / 2 + 512 / 16 + 4), "the scale of the matrix is kept once for a row");
        assert_eq!(QuantLayout::new(QuantFormat::Q4K, 4, 128), None, "half a block");
        assert_eq!(QuantLayout::new(QuantFormat::Q8_0, usize::MAX, 32), None, "too large");
    }

    #[test]
    fn planes_are_aligned_and_missing_ones_null() {
        let layout = QuantLayout::new(QuantFormat::Q6K, 1, 256).expect("whole blocks");
        let planes = layout.planes(1 << 20);
        assert_eq!(
            [planes.codes, planes.high, planes.scales, planes.deltas].map(|p| p - (1 << 20)),
            [0, 128, 192, 208]
        );
        let layout = QuantLayout::new(QuantFormat::Q4_0, 1, 32).expect("whole blocks");
        assert_eq!(layout.planes(0), QuantWeight { codes: 0, high: 0, scales: 0, deltas: 16 });
        assert_eq!(layout.bytes(), 32, "18 bytes, planes aligned");
    }

    #[test]
    fn every_bit_of_the_file_is_kept() {
        // If a single bit is set in the file, a single bit is set on the device.
        for format in QuantFormat::ALL {
            let size = format.block_bytes();
            let layout = QuantLayout::new(format, 1, format.block_elements()).expect("whole blocks");
            let mut seen = std::collections::BTreeSet::new();
            // What a row has once is not kept as it is.
            for bit in format.row_bytes() * 8..size * 8 {
                let (mut block, mut out) = (vec![0; size], vec![0; layout.bytes()]);
                block[bit / 8] = 1 << (bit % 8);
                layout.repack(&block, &mut out);
                let set: Vec<_> = (0..out.len() * 8).filter(|i| out[i / 8] >> (i % 8) & 1 == 1).collect();
                assert_eq!(set.len(), 1, "{format:?} bit {bit}");
                assert!(seen.insert(set[0]), "{format:?} bit {bit} falls on another");
            }
        }
    }

    #[test]
    fn rows_are_repacked_as_a_part_of_the_whole() {
        for format in QuantFormat::ALL {
            let (rows, cols) = (7, 512);
            let layout = QuantLayout::new(format, rows, cols).expect("whole blocks");
            let row = cols / format.block_elements() * format.block_bytes();
            let blocks: Vec<u8> = (0..rows * row).map(|i| (i * 89 + i / 251) as u8).collect();
            let mut whole = vec![0; layout.bytes()];
            layout.repack(&blocks, &mut whole);
            let mut joined = vec![0; layout.bytes()];
            for range in [0..3, 3..4, 4..7] {
                let pieces = layout.pieces(range.clone());
                let mut out = vec![0xff; pieces.iter().map(|piece| piece.1).sum()];
                layout.repack_rows(&blocks[range.start * row..range.end * row], &mut out);
                let mut rest = &out[..];
                for (start, bytes) in pieces {
                    let (these, others) = rest.split_at(bytes);
                    joined[start..start + bytes].copy_from_slice(these);
                    rest = others;
                }
            }
            assert_eq!(joined, whole, "{format:?}");
        }
    }

    /// The kernels' constants are those of the formats.
    #[test]
    fn the_kernels_know_the_sizes_of_planes() {
        let header = crate::sources::HEADERS.iter().find(|(name, _)| *name == "quant.h").expect("a header").1;
        for format in QuantFormat::ALL {
            let [codes, high, scales, deltas] = format.plane_bytes();
            let name = format.c_name();
            let groups = format.block_elements() / GROUP;
            let planes = format!("{groups}, {codes}, {high}, {scales}, {deltas}");
            let stated = match format {
                QuantFormat::Nf4 | QuantFormat::Fp4 => {
                    format!("struct TableFormat : NumberFormat<TableFormat<TABLE>, {groups}, {codes}> {{")
                }
                _ if format.is_float() => format!("struct {name} : NumberFormat<{name}, {groups}, {codes}> {{"),
                _ => format!("struct {name} : Planes<{planes}> {{"),
            };
            let start = header.find(&stated).unwrap_or_else(|| panic!("no `{stated}`"));
            if !format.is_float() {
                let (parts, minima) = format.scales_of_group();
                let body = &header[start..][..header[start..].find("template").expect("functions")];
                // A minimum that makes up for an offset is none.
                let own = if body.contains("OFFSET") { 0 } else { minima };
                assert_eq!(own, minima, "{name}");
                assert!(body.contains(&format!("SCALES = {parts}, ")), "{name}");
                assert!(body.contains("OFFSET") || body.contains(&format!("MINS = {minima};")), "{name}");
            }
        }
    }

    #[test]
    fn rows_of_nvfp4_have_the_factor_of_their_matrix() {
        let layout = QuantLayout::new(QuantFormat::Nvfp4, 3, 64).expect("whole blocks");
        // The matrices of two experts follow each other: a factor, and a divisor.
        let blocks: Vec<u8> = [0.25f32, -3.0, -3.0]
            .iter()
            .flat_map(|whole| [[whole.to_le_bytes().as_slice(), &[0x38; 18]].concat(), vec![0; 22]])
            .flatten()
            .collect();
        let mut out = vec![0xff; layout.bytes()];
        layout.repack(&blocks, &mut out);
        let deltas = &out[layout.planes(0).deltas as usize..][..12];
        let found: Vec<_> = deltas.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert_eq!(found, [0.125, 0.5 * (1.0 / 3.0), 0.5 * (1.0 / 3.0)]);
    }
}
