//! Reading of a group of a stored panel with AVX2.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::scaling::{Factors, Numbers, Scaling, Whole};
use crate::memory::{LINE, Level, prefetch};
use crate::weights::{Codes, E2M1_CODES, E2M1_OFFSET, HALVES_OFFSET, IQ4_CODES, Layout, STEPS};

/// Codes of a group of a panel as bytes, by step: four inputs of sixteen output rows.
#[repr(align(64))]
pub(super) struct Bytewise([[u8; LINE]; STEPS]);

impl Bytewise {
    pub(super) const EMPTY: Self = Self([[0; LINE]; STEPS]);

    /// Unpacks a group.
    ///
    /// # Safety
    /// The conditions of [`ReadCodes::step`] apply.
    #[inline(always)]
    pub(super) unsafe fn fill(&mut self, codes: &impl Steps) {
        for (step, line) in self.0.iter_mut().enumerate() {
            // SAFETY: the caller guarantees this; a line has two registers.
            unsafe {
                let [first, second] = codes.step(step);
                _mm256_store_si256(line.as_mut_ptr().cast(), first);
                _mm256_store_si256(line.as_mut_ptr().add(LINE / 2).cast(), second);
            }
        }
    }
}

/// Codes of a group, two registers a step. It is a trait because the compiler does not inline every closure that
/// returns registers.
pub(super) trait Steps {
    /// # Safety
    /// AVX2 must be available, and there must be this step.
    unsafe fn step(&self, step: usize) -> [__m256i; 2];
}

impl Steps for &Bytewise {
    #[inline(always)]
    unsafe fn step(&self, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this; a line has two registers.
        unsafe {
            let line = self.0.get_unchecked(step).as_ptr();
            [_mm256_load_si256(line.cast()), _mm256_load_si256(line.add(LINE / 2).cast())]
        }
    }
}

/// Codes of a stored panel. The panel must have this layout and group.
pub(super) struct Stored<'a, C> {
    pub(super) panel: *const u8,
    pub(super) layout: &'a Layout,
    pub(super) group: usize,
    pub(super) codes: PhantomData<C>,
}

impl<C: ReadCodes> Steps for Stored<'_, C> {
    #[inline(always)]
    unsafe fn step(&self, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { C::step(self.panel, self.layout, self.group, step) }
    }
}

/// Reads the codes of a stored panel.
pub(super) trait ReadCodes {
    /// The scales of these codes.
    type Scaling: Scaling;

    const CODES: Codes;

    /// Offset of the codes if each half of a group has a scale.
    const OFFSET: i32 = 0;

    /// Returns the codes of four inputs of sixteen output rows.
    ///
    /// # Safety
    /// AVX2 must be available, and the panel must have this layout, these codes and this group.
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2];
}

pub(super) struct Four;
pub(super) struct Five;
pub(super) struct Six;
pub(super) struct E2m1;
pub(super) struct Nvfp4;
pub(super) struct Iq4;
pub(super) struct Eight;

impl ReadCodes for Four {
    type Scaling = Whole;

    const CODES: Codes = Codes::Four;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { nibbles(panel.add(layout.codes_at(Self::CODES, group)), step) }
    }
}

impl ReadCodes for E2m1 {
    type Scaling = Whole;

    const CODES: Codes = Codes::E2m1;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { looked_up(&E2M1_CODES, nibbles(panel.add(layout.codes_at(Self::CODES, group)), step)) }
    }
}

impl ReadCodes for Nvfp4 {
    type Scaling = Numbers;

    const CODES: Codes = Codes::E2m1;

    const OFFSET: i32 = E2M1_OFFSET as i32;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this; the codes are the same.
        unsafe { E2m1::step(panel, layout, group, step) }
    }
}

impl ReadCodes for Iq4 {
    type Scaling = Whole;

    const CODES: Codes = Codes::Iq4;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { looked_up(&IQ4_CODES, nibbles(panel.add(layout.codes_at(Self::CODES, group)), step)) }
    }
}

impl ReadCodes for Five {
    type Scaling = Whole;

    const CODES: Codes = Codes::Five;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let [first, second] = nibbles(panel.add(layout.codes_at(Self::CODES, group)), step);
            let uppers = panel.add(layout.uppers_at(Self::CODES, group));
            [fifth(first, uppers, step, 0), fifth(second, uppers, step, 1)]
        }
    }
}

impl ReadCodes for Six {
    type Scaling = Factors;

    const CODES: Codes = Codes::Six;

    const OFFSET: i32 = HALVES_OFFSET;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let [first, second] = nibbles(panel.add(layout.codes_at(Self::CODES, group)), step);
            let uppers = panel.add(layout.uppers_at(Self::CODES, group));
            [sixth(first, uppers, step, 0), sixth(second, uppers, step, 1)]
        }
    }
}

impl ReadCodes for Eight {
    type Scaling = Whole;

    const CODES: Codes = Codes::Eight;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { line(panel.add(layout.codes_at(Self::CODES, group) + step * LINE)) }
    }
}

#[inline(always)]
unsafe fn line(at: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller of `step` guarantees this.
    unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(LINE / 2).cast())] }
}

/// Unpacks nibbles: those of step j are the low ones of line j, those of step j + 4 its high ones.
#[inline(always)]
unsafe fn nibbles(at: *const u8, step: usize) -> [__m256i; 2] {
    // SAFETY: the caller of `step` guarantees this.
    unsafe {
        let [first, second] = line(at.add(step % (STEPS / 2) * LINE));
        let mask = _mm256_set1_epi8(15);
        if step < STEPS / 2 {
            [_mm256_and_si256(first, mask), _mm256_and_si256(second, mask)]
        } else {
            let (first, second) = (_mm256_srli_epi16::<4>(first), _mm256_srli_epi16::<4>(second));
            [_mm256_and_si256(first, mask), _mm256_and_si256(second, mask)]
        }
    }
}

/// Replaces codes by the values of a table.
#[inline(always)]
unsafe fn looked_up(table: &[u8; 16], [first, second]: [__m256i; 2]) -> [__m256i; 2] {
    // SAFETY: the caller of `step` guarantees this; the table has sixteen bytes.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        [_mm256_shuffle_epi8(table, first), _mm256_shuffle_epi8(table, second)]
    }
}

/// Adds the fifth bits, a mask of 64 for each step.
#[inline(always)]
unsafe fn fifth(codes: __m256i, uppers: *const u8, step: usize, half: usize) -> __m256i {
    // SAFETY: the caller of `step` guarantees this.
    unsafe {
        let bits = uppers.add(step * 8 + half * 4).cast::<i32>().read_unaligned();
        // Each byte gets the byte of the mask that has its bit, then only that bit.
        let order = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), order);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi8(16)))
    }
}

/// Adds the two upper bits: those of step j are in register j % 2, from bit j / 2 · 2 on.
#[inline(always)]
unsafe fn sixth(codes: __m256i, uppers: *const u8, step: usize, half: usize) -> __m256i {
    // SAFETY: the caller of `step` guarantees this.
    unsafe {
        let uppers = _mm256_loadu_si256(uppers.add(step % 2 * LINE + half * LINE / 2).cast());
        // The bits move to bits 4 and 5; bits from the neighbouring byte are next to them and are masked.
        let uppers = match step / 2 {
            0 => _mm256_slli_epi16::<4>(uppers),
            1 => _mm256_slli_epi16::<2>(uppers),
            2 => uppers,
            _ => _mm256_srli_epi16::<2>(uppers),
        };
        _mm256_or_si256(codes, _mm256_and_si256(uppers, _mm256_set1_epi8(0x30)))
    }
}

/// Prefetches a panel in parts, one for each group.
pub(in super::super) struct Ahead {
    next: *const u8,
    /// Size of a part in bytes.
    bytes: usize,
}

impl Ahead {
    /// Begins a panel of this layout, `ahead` bytes after `panel`. It has no parts if `ahead` is 0.
    pub(in super::super) fn new(panel: *const u8, layout: &Layout, ahead: usize) -> Self {
        let bytes = if ahead == 0 { 0 } else { layout.bytes / layout.groups() };
        Self { next: panel.wrapping_add(ahead), bytes }
    }

    /// Prefetches the next part, which has so many lines: a constant, so that there is no loop.
    #[inline(always)]
    pub(in super::super) fn prefetch(&mut self, level: Level, lines: usize) {
        if self.bytes == 0 {
            return;
        }
        for line in 0..lines {
            prefetch(level, self.next.wrapping_add(line * LINE));
        }
        self.next = self.next.wrapping_add(self.bytes);
    }
}
