//! Storage types of the weights in a checkpoint.

mod decode;

use std::fmt;

pub use decode::{
    Decoder, E2M1_DOUBLED, FP4_VALUES, IQ4_VALUES, NF4_VALUES, e4m3, e8m0_halved, iq4_xs_factor, nvfp4_scale, to_e4m3,
};

/// Storage type of (a part of) a weight, with the block sizes of the GGML formats.
///
/// A quantised row is a sequence of blocks of [`StorageType::block_elements`] elements along the input dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StorageType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
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
    /// 4-bit floating-point blocks of 32 (e2m1) with a power of two as scale (e8m0): MXFP4.
    Mxfp4,
    /// 4-bit floating-point blocks of 32 (e2m1): NVFP4. An f32 that is the same in all blocks of a matrix ([`nvfp4_scale`]), an
    /// e4m3 scale of each half, and codes as in Q4_0.
    Nvfp4,
    /// 4-bit blocks of 32 with an f16 scale. Codes are indices of [`IQ4_VALUES`].
    Iq4Nl,
    /// 4-bit super-blocks of 256 with the codes of [`StorageType::Iq4Nl`].
    Iq4Xs,
    /// 4-bit integers in blocks of 32: an f16 scale, an 8-bit zero point, and codes as in Q4_0. A weight is
    /// `(code − zero) · scale`.
    Int4,
    /// 8-bit unsigned integers in blocks of 32: an f32 scale, an 8-bit zero point, and a byte for each code.
    Int8,
    /// 8-bit floating-point numbers (e4m3, without infinities) in blocks of 32, after an f32 scale.
    F8E4M3,
    /// 4-bit codes of [`NF4_VALUES`] in blocks of 64: an f32 scale, and the codes of each half as in Q4_0.
    Nf4,
    /// 4-bit codes of [`FP4_VALUES`] in blocks of 64: an f32 scale, and the codes of each half as in Q4_0.
    Fp4,
}

impl StorageType {
    /// All storage types, in the order of the enum.
    pub const ALL: [StorageType; 22] = [
        StorageType::F32,
        StorageType::F16,
        StorageType::BF16,
        StorageType::Q4_0,
        StorageType::Q4_1,
        StorageType::Q5_0,
        StorageType::Q5_1,
        StorageType::Q8_0,
        StorageType::Q2K,
        StorageType::Q3K,
        StorageType::Q4K,
        StorageType::Q5K,
        StorageType::Q6K,
        StorageType::Mxfp4,
        StorageType::Nvfp4,
        StorageType::Iq4Nl,
        StorageType::Iq4Xs,
        StorageType::Int4,
        StorageType::Int8,
        StorageType::F8E4M3,
        StorageType::Nf4,
        StorageType::Fp4,
    ];

    /// Returns the number of elements in a block; 1 for the plain types.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Mxfp4 | Self::Iq4Nl => 32,
            Self::Int4 | Self::Int8 | Self::F8E4M3 | Self::Nvfp4 => 32,
            Self::Nf4 | Self::Fp4 => 64,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// Returns the size of a block in bytes.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Int4 => 19,
            Self::Q4_1 => 20,
            Self::Q5_0 | Self::Nvfp4 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::F8E4M3 | Self::Nf4 | Self::Fp4 => 36,
            Self::Int8 => 37,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Iq4Xs => 136,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Mxfp4 => 17,
        }
    }

    /// Returns the size of `elements` elements in bytes; `None` if they do not fill whole blocks or the size overflows.
    pub const fn bytes_for(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// Returns the function that reads blocks as numbers; `None` for the types that only GGUF files have and candle reads.
    pub const fn decoder(self) -> Option<Decoder> {
        decode::decoder(self)
    }

    /// Returns the name used by the formats' documentation (`Q4_K`, `BF16`, ...).
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
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
}

impl fmt::Display for StorageType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
