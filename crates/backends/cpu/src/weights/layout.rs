//! Where the pieces of a panel lie.

use octavo_ops::StorageType;

use super::blocks::offset;
use super::{Group, GroupScale, PANEL, kept_as};
use crate::memory::LINE;
use crate::rows::GROUP;

/// Registers of codes in a group of a panel: four inputs of sixteen rows each.
pub(crate) const STEPS: usize = GROUP / 4;

/// Groups of a super-block.
const SUPER: usize = 8;

/// How the codes of a group lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codes {
    /// Two in a byte: step j in the low nibbles of register j, step j + 4 in its high ones.
    Four,
    /// The same, and the fifth bits as a mask of 64 for each step.
    Five,
    /// A byte each.
    Eight,
}

/// How the scales of a group lie, each an array of sixteen rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scales {
    /// f16; the minimum is the scale times this.
    Fixed(f32),
    /// f16 scales, f16 minima.
    Two,
    /// 8-bit scales and minima of each group, after f16 `d` and `least` of each super-block.
    Super,
}

/// What a panel is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Groups of integers.
    Quant(Codes, Scales),
    /// Pairs of inputs, sixteen rows each; inputs are padded to whole tiles of 32.
    Bf16,
    /// Sixteen rows of each input.
    F16,
    /// Sixteen rows of each input.
    F32,
}

/// The layout of a panel of so many inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Layout {
    pub(crate) kind: Kind,
    /// Inputs, padded as the kind wants.
    pub(crate) cols: usize,
    /// Where the fifth bits begin.
    fifths: usize,
    /// Where the groups' scales begin.
    scales: usize,
    /// Where the super-blocks' scales begin.
    supers: usize,
    /// Of the whole panel; whole cache lines.
    pub(crate) bytes: usize,
}

impl Codes {
    const fn bytes(self) -> usize {
        match self {
            Self::Four | Self::Five => GROUP * PANEL / 2,
            Self::Eight => GROUP * PANEL,
        }
    }
}

impl Scales {
    /// Of a group.
    const fn bytes(self) -> usize {
        match self {
            Self::Fixed(_) | Self::Super => 2 * PANEL,
            Self::Two => 4 * PANEL,
        }
    }
}

impl Kind {
    fn of(storage: StorageType) -> Self {
        let fixed = Scales::Fixed(offset(kept_as(storage)));
        match kept_as(storage) {
            StorageType::Q4_0 => Self::Quant(Codes::Four, fixed),
            StorageType::Q4_1 => Self::Quant(Codes::Four, Scales::Two),
            StorageType::Q5_0 => Self::Quant(Codes::Five, fixed),
            StorageType::Q5_1 => Self::Quant(Codes::Five, Scales::Two),
            StorageType::Q4K => Self::Quant(Codes::Four, Scales::Super),
            StorageType::Q5K => Self::Quant(Codes::Five, Scales::Super),
            StorageType::BF16 => Self::Bf16,
            StorageType::F16 => Self::F16,
            StorageType::F32 => Self::F32,
            StorageType::Q8_0 | StorageType::Q2K | StorageType::Q3K | StorageType::Q6K => {
                Self::Quant(Codes::Eight, fixed)
            }
        }
    }
}

impl Layout {
    /// Of a checkpoint's storage type. `None` if the size overflows.
    pub(crate) fn new(storage: StorageType, cols: usize) -> Option<Self> {
        let kind = Kind::of(storage);
        let lines = |bytes: usize| bytes.checked_next_multiple_of(LINE);
        let plain = |cols: usize, size: usize| {
            let bytes = lines(cols.checked_mul(size * PANEL)?)?;
            Some(Self { kind, cols, fifths: bytes, scales: bytes, supers: bytes, bytes })
        };
        match kind {
            Kind::F32 => plain(cols, 4),
            Kind::F16 => plain(cols, 2),
            Kind::Bf16 => plain(cols.checked_next_multiple_of(GROUP)?, 2),
            Kind::Quant(codes, scales) => {
                let groups = cols / GROUP;
                let fifths = groups.checked_mul(codes.bytes())?;
                let fifth_bytes = if codes == Codes::Five { groups.checked_mul(LINE)? } else { 0 };
                let scales_at = fifths.checked_add(fifth_bytes)?;
                let supers = lines(scales_at.checked_add(groups.checked_mul(scales.bytes())?)?)?;
                let super_bytes = if scales == Scales::Super { groups / SUPER * 4 * PANEL } else { 0 };
                let bytes = lines(supers.checked_add(super_bytes)?)?;
                Some(Self { kind, cols, fifths, scales: scales_at, supers, bytes })
            }
        }
    }

    /// Groups of inputs, where there are any.
    pub(crate) fn groups(&self) -> usize {
        self.cols / GROUP
    }

    /// Where a group's codes begin.
    pub(crate) fn codes_at(&self, codes: Codes, group: usize) -> usize {
        group * codes.bytes()
    }

    /// Where a group's fifth bits begin.
    pub(crate) fn fifths_at(&self, group: usize) -> usize {
        self.fifths + group * LINE
    }

    /// Where a group's scales begin.
    pub(crate) fn scales_at(&self, scales: Scales, group: usize) -> usize {
        self.scales + group * scales.bytes()
    }

    /// Where the scales of a group's super-block begin.
    pub(crate) fn supers_at(&self, group: usize) -> usize {
        self.supers + group / SUPER * 4 * PANEL
    }

    /// Writes a group of one row of the panel.
    pub(crate) fn put(&self, panel: &mut [u8], row: usize, index: usize, group: &Group) {
        let Kind::Quant(codes, scales) = self.kind else { unreachable!("only integers have groups") };
        let at = self.codes_at(codes, index) + row * 4;
        let mut put_steps = |bytes: &[u8]| {
            for (step, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
                panel[at + step * LINE..][..4].copy_from_slice(bytes);
            }
        };
        match codes {
            Codes::Eight => put_steps(&group.codes),
            Codes::Four | Codes::Five => {
                let (low, high) = group.codes.split_at(GROUP / 2);
                put_steps(&std::array::from_fn::<u8, { GROUP / 2 }, _>(|k| low[k] & 15 | high[k] << 4));
            }
        }
        if codes == Codes::Five {
            for (step, codes) in group.codes.as_chunks::<4>().0.iter().enumerate() {
                let bits = codes.iter().enumerate().fold(0, |bits, (i, code)| bits | (code >> 4) << i);
                panel[self.fifths_at(index) + step * 8 + row / 2] |= bits << (row % 2 * 4);
            }
        }
        let at = self.scales_at(scales, index);
        let mut put_half = |at: usize, x: half::f16| panel[at..at + 2].copy_from_slice(&x.to_le_bytes());
        match group.scale {
            GroupScale::One(d) => put_half(at + 2 * row, d),
            GroupScale::Two(d, min) => {
                put_half(at + 2 * row, d);
                put_half(at + 2 * (PANEL + row), min);
            }
            GroupScale::Super { d, least, scale, min } => {
                let supers = self.supers_at(index);
                put_half(supers + 2 * row, d);
                put_half(supers + 2 * (PANEL + row), least);
                panel[at + row] = scale;
                panel[at + PANEL + row] = min;
            }
        }
    }
}
