//! Layout of a panel.

use octavo_ops::StorageType;

use super::blocks::offset;
use super::{Group, GroupScale, PANEL, short};
use crate::isa::Isa;
use crate::memory::LINE;
use crate::rows::GROUP;

/// Number of registers of codes in a group of a panel: four inputs of sixteen rows each.
pub(crate) const STEPS: usize = GROUP / 4;

/// Number of groups in a super-block.
pub(crate) const SUPER: usize = 8;

/// Layout of the codes of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codes {
    /// Two codes in a byte: step j in the low nibbles of register j, step j + 4 in its high nibbles.
    Four,
    /// The layout of `Four`, with the fifth bits as a mask of 64 for each step.
    Five,
    /// The layout of `Four`, with the two upper bits in two more registers: those of step j in register j % 2, from bit
    /// j / 2 · 2 on.
    Six,
    /// The layout of `Four`, with codes of e2m1, of which [`E2M1_CODES`](super::E2M1_CODES) are the integers.
    E2m1,
    /// The layout of `Four`, with indices of [`IQ4_CODES`](super::IQ4_CODES).
    Iq4,
    /// One code in a byte.
    Eight,
}

/// Layout of the scales of a group, each an array of sixteen rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scales {
    /// f16 scales; the minimum is the scale times this value.
    Fixed(f32),
    /// f16 scales and f16 minima.
    Two,
    /// 8-bit scales and minima of each group, after f16 `d` and `least` of each super-block.
    Super,
    /// 8-bit exponents of powers of two; the minimum is the scale times −[`E2M1_OFFSET`](super::E2M1_OFFSET).
    Power,
    /// Signed 8-bit factors, after f16 `d` of each super-block. The minimum is −[`IQ4_OFFSET`](super::IQ4_OFFSET) times the
    /// scale.
    Signed,
    /// f16 scales and 8-bit zero points.
    Zero,
    /// f32 scales and 8-bit zero points.
    Wide,
    /// Signed 8-bit scales of each half of each group, after f16 `d` of each super-block. The minimum is −32 times the
    /// scale.
    Halves,
    /// e4m3 scales of each half of each group, and an f32 factor of each row, which its results are multiplied with. The minimum is
    /// −[`E2M1_OFFSET`](super::E2M1_OFFSET) times the scale.
    Pair,
}

/// Factor of the factors of [`Scales::Pair`]: the bits of an e4m3 number are those of an f16 number that is so many times
/// smaller.
pub(crate) const E4M3_OVER_F16: f32 = 256.0;

/// Offset of the codes of [`Scales::Halves`].
pub(crate) const HALVES_OFFSET: i32 = 32;

/// Floating-point numbers in fewer than 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numbers {
    /// Bytes in e4m3. The largest of a group is from 240 to 448, unless all are 0.
    F8,
    /// Nibbles that are indices of [`NF4_VALUES`](octavo_ops::NF4_VALUES).
    Nf4,
    /// Nibbles that are indices of [`FP4_VALUES`](octavo_ops::FP4_VALUES).
    Fp4,
}

/// Content of a panel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PanelKind {
    /// Groups of integers.
    Quant(Codes, Scales),
    /// Groups of floating-point numbers in fewer than 16 bits, with an f32 scale each or for two of them. With AVX2, and with AVX-512
    /// that has no BF16, they are multiplied as integers of 16 bits, and elsewhere as bf16.
    Packed(Numbers),
    /// Pairs of inputs, sixteen rows each; inputs are padded to whole tiles of 32.
    Bf16,
    /// The same numbers in twelve bits each, as in [`short`].
    Short,
    /// Sixteen rows of each input.
    F16,
    /// Sixteen rows of each input.
    F32,
}

/// Layout of a panel with a given number of inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Layout {
    pub(crate) kind: PanelKind,
    /// Number of inputs, padded according to the kind.
    pub(crate) cols: usize,
    /// Start of the bits beyond the fourth, or of the octets.
    uppers: usize,
    /// Start of the groups' scales.
    scales: usize,
    /// Start of the super-blocks' scales.
    supers: usize,
    /// Size of the whole panel in bytes; whole cache lines.
    pub(crate) bytes: usize,
}

impl Codes {
    /// Returns the size of a group's codes in bytes.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Four | Self::Five | Self::Six | Self::E2m1 | Self::Iq4 => GROUP * PANEL / 2,
            Self::Eight => GROUP * PANEL,
        }
    }

    /// Returns the size of a group's bits beyond the fourth, in bytes.
    const fn upper_bytes(self) -> usize {
        match self {
            Self::Four | Self::E2m1 | Self::Iq4 | Self::Eight => 0,
            Self::Five => LINE,
            Self::Six => 2 * LINE,
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Codes {
    /// Returns the largest number of cache lines that a group has on average, with its scales.
    pub(crate) const fn lines(self) -> usize {
        let scales = if matches!(self, Self::Eight) { Scales::Wide } else { Scales::Two };
        (self.bytes() + self.upper_bytes() + scales.bytes()).div_ceil(LINE)
    }
}

impl Scales {
    /// Returns the size of a group's scales in bytes.
    const fn bytes(self) -> usize {
        match self {
            Self::Fixed(_) | Self::Super | Self::Halves | Self::Pair => 2 * PANEL,
            Self::Two => 4 * PANEL,
            Self::Power | Self::Signed => PANEL,
            Self::Zero => 3 * PANEL,
            Self::Wide => 5 * PANEL,
        }
    }

    /// Returns the size of a super-block's scales in bytes. With [`Scales::Pair`], a row is one.
    const fn super_bytes(self) -> usize {
        match self {
            Self::Fixed(_) | Self::Two | Self::Power | Self::Zero | Self::Wide => 0,
            Self::Super | Self::Pair => 4 * PANEL,
            Self::Halves | Self::Signed => 2 * PANEL,
        }
    }

    /// Returns the index of a group's super-block.
    const fn super_of(self, group: usize) -> usize {
        match self {
            Self::Pair => 0,
            _ => group / SUPER,
        }
    }

    /// Returns the number of super-blocks of a row.
    const fn supers(self, groups: usize) -> usize {
        match self {
            Self::Pair => 1,
            _ => groups / SUPER,
        }
    }
}

/// Returns the byte of an input of a row in a group of nibbles, and the place of the nibble in the byte: 0 or 4.
///
/// A line of 64 bytes has four inputs of each half of the group: the low nibbles those of the first half. Sixteen bytes have four rows:
/// first their first two inputs, each row's beside each other, and then the next two.
pub(crate) fn nibble_at(k: usize, row: usize) -> (usize, u32) {
    let (half, line, pair) = (k / (GROUP / 2), k % (GROUP / 2) / 4, k % 4 / 2);
    (line * LINE + row / 4 * 16 + pair * 8 + row % 4 * 2 + k % 2, 4 * half as u32)
}

impl Numbers {
    /// Returns the size of a group's codes in bytes.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F8 => GROUP * PANEL,
            Self::Nf4 | Self::Fp4 => GROUP * PANEL / 2,
        }
    }

    /// Returns the number of cache lines that a group has on average, with its scales.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn lines(self) -> usize {
        (self.bytes() + 4 * PANEL / self.groups_of_scale()).div_ceil(LINE)
    }

    /// Returns the number of groups with the same scale.
    pub(crate) const fn groups_of_scale(self) -> usize {
        match self {
            Self::F8 => 1,
            Self::Nf4 | Self::Fp4 => const { StorageType::Nf4.block_elements() / GROUP },
        }
    }
}

/// Orders of a row's inputs in 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WordOrder {
    InOrder,
    /// The second and the third of each four inputs are exchanged.
    Crossed,
}

impl PanelKind {
    /// Returns the kind of a storage type in which weights are kept.
    fn for_storage(storage: StorageType) -> Self {
        let fixed = Scales::Fixed(offset(storage));
        match storage {
            StorageType::Q4_0 => Self::Quant(Codes::Four, fixed),
            StorageType::Q4_1 => Self::Quant(Codes::Four, Scales::Two),
            StorageType::Q5_0 => Self::Quant(Codes::Five, fixed),
            StorageType::Q5_1 => Self::Quant(Codes::Five, Scales::Two),
            StorageType::Q4K => Self::Quant(Codes::Four, Scales::Super),
            StorageType::Q5K => Self::Quant(Codes::Five, Scales::Super),
            StorageType::Mxfp4 => Self::Quant(Codes::E2m1, Scales::Power),
            StorageType::Nvfp4 => Self::Quant(Codes::E2m1, Scales::Pair),
            StorageType::Iq4Nl => Self::Quant(Codes::Iq4, fixed),
            StorageType::Iq4Xs => Self::Quant(Codes::Iq4, Scales::Signed),
            StorageType::Int4 => Self::Quant(Codes::Four, Scales::Zero),
            StorageType::Int8 => Self::Quant(Codes::Eight, Scales::Wide),
            StorageType::F8E4M3 => Self::Packed(Numbers::F8),
            StorageType::Nf4 => Self::Packed(Numbers::Nf4),
            StorageType::Fp4 => Self::Packed(Numbers::Fp4),
            StorageType::BF16 => Self::Bf16,
            StorageType::F16 => Self::F16,
            StorageType::F32 => Self::F32,
            StorageType::Q6K | StorageType::Q3K => Self::Quant(Codes::Six, Scales::Halves),
            StorageType::Q8_0 | StorageType::Q2K => Self::Quant(Codes::Eight, fixed),
        }
    }

    /// Returns whether products read their rows as integers.
    pub(crate) const fn takes_integers(self, isa: Isa) -> bool {
        match self {
            Self::Quant(..) => true,
            // Where bf16 is multiplied, it takes as many instructions, and rows have no scales.
            Self::Packed(_) => matches!(isa, Isa::Avx2 | Isa::AvxVnni | Isa::Avx512),
            Self::Bf16 | Self::Short | Self::F16 | Self::F32 => false,
        }
    }

    /// Returns whether products add numbers as bf16 before they scale them. With AMX, all are scaled first.
    #[cfg(any(target_arch = "x86_64", test))]
    pub(crate) fn takes_rounded(self, isa: Isa) -> bool {
        matches!((self, isa), (Self::Packed(_), Isa::Avx512Bf16))
    }

    /// Returns how products read their rows in 16 bits, if they do for any number of rows. `coarse` is whether rows have eight bits.
    pub(crate) const fn words(self, isa: Isa, coarse: bool) -> Option<WordOrder> {
        match (self, isa) {
            (Self::Packed(_), _) if self.takes_integers(isa) => Some(WordOrder::InOrder),
            (Self::Quant(_, Scales::Pair), Isa::Avx2 | Isa::AvxVnni) => Some(WordOrder::Crossed),
            // As bytes, coarse rows have half of the products.
            (Self::Quant(_, Scales::Pair), Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx) if !coarse => {
                Some(WordOrder::Crossed)
            }
            (Self::Quant(Codes::Six | Codes::Eight | Codes::Iq4, _), Isa::Avx2) => Some(WordOrder::InOrder),
            (Self::Quant(..), Isa::Avx2) if !coarse => Some(WordOrder::InOrder),
            _ => None,
        }
    }

    /// Returns whether products with coarse rows take less time than others: they multiply bytes, and both parts in turn.
    pub(crate) const fn gains_from_coarse_rows(self, isa: Isa) -> bool {
        matches!(self, Self::Quant(..)) && self.words(isa, true).is_none() && !matches!(isa, Isa::Portable | Isa::Amx)
    }

    /// Returns whether each half of a group has its own scale.
    pub(crate) fn has_halves(self) -> bool {
        matches!(self, Self::Quant(_, Scales::Halves | Scales::Pair))
    }
}

impl Layout {
    /// Returns the layout for a storage type in which weights are kept; `None` if the size overflows.
    pub(crate) fn new(storage: StorageType, cols: usize) -> Option<Self> {
        let kind = PanelKind::for_storage(storage);
        let lines = |bytes: usize| bytes.checked_next_multiple_of(LINE);
        let plain = |cols: usize, size: usize| {
            let bytes = lines(cols.checked_mul(size * PANEL)?)?;
            Some(Self { kind, cols, uppers: bytes, scales: bytes, supers: bytes, bytes })
        };
        match kind {
            PanelKind::F32 => plain(cols, 4),
            PanelKind::F16 => plain(cols, 2),
            PanelKind::Bf16 | PanelKind::Short => plain(cols.checked_next_multiple_of(GROUP)?, 2),
            PanelKind::Quant(codes, scales) => {
                let groups = cols / GROUP;
                let uppers = groups.checked_mul(codes.bytes())?;
                let scales_at = uppers.checked_add(groups.checked_mul(codes.upper_bytes())?)?;
                let supers = lines(scales_at.checked_add(groups.checked_mul(scales.bytes())?)?)?;
                let bytes = lines(supers.checked_add(scales.supers(groups) * scales.super_bytes())?)?;
                Some(Self { kind, cols, uppers, scales: scales_at, supers, bytes })
            }
            PanelKind::Packed(numbers) => {
                let groups = cols / GROUP;
                let scales = groups.checked_mul(numbers.bytes())?;
                let bytes = lines(scales.checked_add((groups / numbers.groups_of_scale()).checked_mul(4 * PANEL)?)?)?;
                Some(Self { kind, cols, uppers: scales, scales, supers: bytes, bytes })
            }
        }
    }

    /// Returns the layout of bf16 in twelve bits; `None` if a panel cannot have so many inputs.
    pub(crate) fn short(cols: usize) -> Option<Self> {
        let cols = cols.checked_next_multiple_of(GROUP)?;
        let header = short::header_bytes(cols)?;
        let bytes = header + cols / short::OCTET * short::OCTET_BYTES;
        Some(Self { kind: PanelKind::Short, cols, uppers: header, scales: bytes, supers: bytes, bytes })
    }

    /// Returns the start of the octets of bf16 in twelve bits.
    pub(crate) fn octets_at(&self) -> usize {
        self.uppers
    }

    /// Returns the number of groups of inputs.
    pub(crate) fn groups(&self) -> usize {
        self.cols / GROUP
    }

    /// Returns the start of a group's codes.
    pub(crate) fn codes_at(&self, codes: Codes, group: usize) -> usize {
        group * codes.bytes()
    }

    /// Returns the start of a group's bits beyond the fourth.
    pub(crate) fn uppers_at(&self, codes: Codes, group: usize) -> usize {
        self.uppers + group * codes.upper_bytes()
    }

    /// Returns the start of a group's scales.
    pub(crate) fn scales_at(&self, scales: Scales, group: usize) -> usize {
        self.scales + group * scales.bytes()
    }

    /// Returns the start of the scales of a group's super-block.
    pub(crate) fn supers_at(&self, scales: Scales, group: usize) -> usize {
        self.supers + scales.super_of(group) * scales.super_bytes()
    }

    /// Returns the factors of the rows of a panel with [`Scales::Pair`].
    pub(crate) fn row_factors(&self, panel: &[u8]) -> [f32; PANEL] {
        let (factors, _) = panel[self.supers_at(Scales::Pair, 0)..].as_chunks();
        std::array::from_fn(|row| f32::from_le_bytes(factors[row]))
    }

    /// Returns the start of the scales of a group of packed numbers: sixteen f32.
    pub(crate) fn number_scales_at(&self, numbers: Numbers, group: usize) -> usize {
        self.scales + group / numbers.groups_of_scale() * 4 * PANEL
    }

    /// Writes a group of packed numbers of one row: its scale, and its codes in order. For each pair of inputs, a panel has
    /// the codes of the rows, each row's two beside each other; [`nibble_at`] says where nibbles are.
    pub(crate) fn put_numbers(&self, panel: &mut [u8], row: usize, index: usize, scale: [u8; 4], codes: &[u8; GROUP]) {
        let PanelKind::Packed(numbers) = self.kind else { unreachable!("only packed numbers have such groups") };
        panel[self.number_scales_at(numbers, index) + 4 * row..][..4].copy_from_slice(&scale);
        let to = &mut panel[index * numbers.bytes()..][..numbers.bytes()];
        for (k, code) in codes.iter().enumerate() {
            match numbers {
                Numbers::F8 => to[(k / 2 * PANEL + row) * 2 + k % 2] = *code,
                Numbers::Nf4 | Numbers::Fp4 => {
                    let (at, shift) = nibble_at(k, row);
                    to[at] |= code << shift;
                }
            }
        }
    }

    /// Writes a group of one row of the panel.
    pub(crate) fn put(&self, panel: &mut [u8], row: usize, index: usize, group: &Group) {
        let PanelKind::Quant(codes, _) = self.kind else { unreachable!("only integers have groups") };
        match codes {
            Codes::Eight => self.put_codes(panel, row, index, &group.codes),
            Codes::Four | Codes::Five | Codes::Six | Codes::E2m1 | Codes::Iq4 => {
                let (low, high) = group.codes.split_at(GROUP / 2);
                let pairs: [u8; GROUP / 2] = std::array::from_fn(|k| low[k] & 15 | high[k] << 4);
                self.put_codes(panel, row, index, &pairs);
            }
        }
        let uppers = self.uppers_at(codes, index);
        for (step, four) in group.codes.as_chunks::<4>().0.iter().enumerate() {
            match codes {
                Codes::Four | Codes::E2m1 | Codes::Iq4 | Codes::Eight => {}
                Codes::Five => {
                    let bits = four.iter().enumerate().fold(0, |bits, (i, code)| bits | (code >> 4) << i);
                    panel[uppers + step * 8 + row / 2] |= bits << (row % 2 * 4);
                }
                Codes::Six => {
                    let at = uppers + step % 2 * LINE + row * 4;
                    for (upper, code) in panel[at..at + 4].iter_mut().zip(four) {
                        *upper |= (code >> 4) << (step / 2 * 2);
                    }
                }
            }
        }
        self.put_scale(panel, row, index, group.scale);
    }

    /// Writes the codes of a group of one row in the panel's layout: as bytes, or with the low four bits of the first
    /// half in the low nibbles and those of the second in the high nibbles.
    #[inline]
    pub(crate) fn put_codes<const BYTES: usize>(
        &self,
        panel: &mut [u8],
        row: usize,
        index: usize,
        bytes: &[u8; BYTES],
    ) {
        let panel = &mut panel[index * BYTES * PANEL..][..BYTES * PANEL];
        for (bytes, line) in bytes.as_chunks::<4>().0.iter().zip(panel.as_chunks_mut::<LINE>().0) {
            line[row * 4..][..4].copy_from_slice(bytes);
        }
    }

    /// Writes the scale of a group of one row.
    #[inline]
    pub(crate) fn put_scale(&self, panel: &mut [u8], row: usize, index: usize, scale: GroupScale) {
        let PanelKind::Quant(_, scales) = self.kind else { unreachable!("only integers have groups") };
        let at = self.scales_at(scales, index);
        let mut put_half = |at: usize, x: half::f16| panel[at..at + 2].copy_from_slice(&x.to_le_bytes());
        match scale {
            GroupScale::One(d) => put_half(at + 2 * row, d),
            GroupScale::Two(d, min) => {
                put_half(at + 2 * row, d);
                put_half(at + 2 * (PANEL + row), min);
            }
            GroupScale::Power(exponent) => panel[at + row] = exponent,
            GroupScale::Signed(d, factor) => {
                put_half(self.supers_at(scales, index) + 2 * row, d);
                panel[at + row] = factor as u8;
            }
            GroupScale::Zero(d, zero) => {
                put_half(at + 2 * row, d);
                panel[at + 2 * PANEL + row] = zero;
            }
            GroupScale::Wide(scale, zero) => {
                panel[at + 4 * row..][..4].copy_from_slice(&scale.to_le_bytes());
                panel[at + 4 * PANEL + row] = zero;
            }
            GroupScale::Super { d, least, scale, min } => {
                let supers = self.supers_at(scales, index);
                put_half(supers + 2 * row, d);
                put_half(supers + 2 * (PANEL + row), least);
                panel[at + row] = scale;
                panel[at + PANEL + row] = min;
            }
            GroupScale::Halves(d, [first, second]) => {
                put_half(self.supers_at(scales, index) + 2 * row, d);
                panel[at + row] = first as u8;
                panel[at + PANEL + row] = second as u8;
            }
            GroupScale::Pair(factor, [first, second]) => {
                let factor = (E4M3_OVER_F16 * factor).to_le_bytes();
                panel[self.supers_at(scales, index) + 4 * row..][..4].copy_from_slice(&factor);
                panel[at + row] = first;
                panel[at + PANEL + row] = second;
            }
        }
    }
}
