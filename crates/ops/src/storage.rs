//! Storage types of the weights in a checkpoint.

use std::fmt;

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
}

impl StorageType {
    /// All storage types, in the order of the enum.
    pub const ALL: [StorageType; 14] = [
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
    ];

    /// Returns the number of elements in a block; 1 for the plain types.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Mxfp4 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the size of a block in bytes.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
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
        }
    }
}

/// Values of the codes of [`StorageType::Mxfp4`], doubled so that they are integers.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Returns the factor of [`E2M1_DOUBLED`] in a block of [`StorageType::Mxfp4`] with this scale: half of
/// `2^(exponent − 127)`.
pub const fn e8m0_halved(exponent: u8) -> f32 {
    // The two smallest are denormal.
    f32::from_bits(if exponent < 2 { 0x20_0000 << exponent } else { (exponent as u32 - 1) << 23 })
}

impl fmt::Display for StorageType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
