//! Reading of a group of a stored panel with AVX2.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::LANES;
use crate::memory::LINE;
use crate::weights::{
    Codes, E2M1_CODES, E2M1_OFFSET, HALVES_OFFSET, IQ4_CODES, IQ4_OFFSET, Layout, PANEL, STEPS, Scales,
};

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

/// Scales of a group, a register for each half of the output rows.
pub(super) struct GroupScales {
    pub(super) scales: [__m256; 2],
    pub(super) minima: [__m256; 2],
    pub(super) halves: Halves,
}

/// Scales of the halves of the inputs of a group.
pub(super) enum Halves {
    /// Both have the scale of the group.
    Alike,
    /// Integers that the scale is multiplied with; there is no minimum.
    Factors([[__m256i; 2]; 2]),
    /// Numbers. The scale of the group is not used, and there is no minimum.
    Numbers([[__m256; 2]; 2]),
}

/// Reads the scales of a group.
///
/// # Safety
/// AVX2 and F16C must be available, and the panel must have this layout and group.
#[inline(always)]
pub(super) unsafe fn scales(panel: *const u8, layout: &Layout, scales: Scales, index: usize) -> GroupScales {
    // SAFETY: the caller guarantees this.
    unsafe {
        let (at, supers) = (panel.add(layout.scales_at(scales, index)), panel.add(layout.supers_at(scales, index)));
        let (first, second) = (pair_of(scales, at, supers, 0), pair_of(scales, at, supers, LANES));
        let halves = match scales {
            Scales::Pair => Halves::Numbers(pair_scales(at, [first.0, second.0])),
            Scales::Halves => Halves::Factors([
                [factors(at), factors(at.add(LANES))],
                [factors(at.add(PANEL)), factors(at.add(PANEL + LANES))],
            ]),
            _ => Halves::Alike,
        };
        GroupScales { scales: [first.0, second.0], minima: [first.1, second.1], halves }
    }
}

/// Returns the scales of the halves of a group: e4m3 numbers times these factors.
///
/// # Safety
/// AVX2 and F16C must be available, and there must be the numbers of a group.
#[inline(always)]
pub(super) unsafe fn pair_scales(at: *const u8, factors: [__m256; 2]) -> [[__m256; 2]; 2] {
    // SAFETY: the caller guarantees this.
    unsafe {
        let mut scales = [factors; 2];
        for (half, scales) in scales.iter_mut().enumerate() {
            for (h, scale) in scales.iter_mut().enumerate() {
                *scale = _mm256_mul_ps(small(at.add(half * PANEL + h * LANES)), *scale);
            }
        }
        scales
    }
}

/// Reads eight e4m3 numbers, over [`E4M3_OVER_F16`](crate::weights::E4M3_OVER_F16).
#[inline(always)]
unsafe fn small(at: *const u8) -> __m256 {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(at.cast()));
        // The sign is extended to the left of the exponent, and masked between.
        let mask = _mm_set1_epi16(0xbf80_u16 as i16);
        _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16::<7>(codes), mask))
    }
}

/// Reads eight factors.
#[inline(always)]
unsafe fn factors(at: *const u8) -> __m256i {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())) }
}

/// Reads the codes of a stored panel.
pub(super) trait ReadCodes {
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
    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { nibbles(panel.add(layout.codes_at(Codes::Four, group)), step) }
    }
}

impl ReadCodes for E2m1 {
    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { looked_up(&E2M1_CODES, nibbles(panel.add(layout.codes_at(Codes::E2m1, group)), step)) }
    }
}

impl ReadCodes for Nvfp4 {
    const OFFSET: i32 = E2M1_OFFSET as i32;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this; the codes are the same.
        unsafe { E2m1::step(panel, layout, group, step) }
    }
}

impl ReadCodes for Iq4 {
    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { looked_up(&IQ4_CODES, nibbles(panel.add(layout.codes_at(Codes::Iq4, group)), step)) }
    }
}

impl ReadCodes for Five {
    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let [first, second] = nibbles(panel.add(layout.codes_at(Codes::Five, group)), step);
            let uppers = panel.add(layout.uppers_at(Codes::Five, group));
            [fifth(first, uppers, step, 0), fifth(second, uppers, step, 1)]
        }
    }
}

impl ReadCodes for Six {
    const OFFSET: i32 = HALVES_OFFSET;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let [first, second] = nibbles(panel.add(layout.codes_at(Codes::Six, group)), step);
            let uppers = panel.add(layout.uppers_at(Codes::Six, group));
            [sixth(first, uppers, step, 0), sixth(second, uppers, step, 1)]
        }
    }
}

impl ReadCodes for Eight {
    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { line(panel.add(layout.codes_at(Codes::Eight, group) + step * LINE)) }
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

/// Returns scales and minima of eight rows.
#[inline(always)]
unsafe fn pair_of(scales: Scales, at: *const u8, supers: *const u8, lanes: usize) -> (__m256, __m256) {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        match scales {
            Scales::Fixed(offset) => {
                let scale = halves(at, lanes);
                (scale, _mm256_mul_ps(scale, _mm256_set1_ps(offset)))
            }
            Scales::Two => (halves(at, lanes), halves(at, PANEL + lanes)),
            Scales::Super => {
                let negative = _mm256_sub_ps(_mm256_setzero_ps(), halves(supers, PANEL + lanes));
                let scale = _mm256_mul_ps(halves(supers, lanes), bytes(at.add(lanes)));
                (scale, _mm256_mul_ps(negative, bytes(at.add(PANEL + lanes))))
            }
            Scales::Halves => (halves(supers, lanes), _mm256_setzero_ps()),
            Scales::Pair => (_mm256_loadu_ps(supers.cast::<f32>().add(lanes)), _mm256_setzero_ps()),
            Scales::Signed => {
                let scale = _mm256_mul_ps(halves(supers, lanes), _mm256_cvtepi32_ps(factors(at.add(lanes))));
                (scale, _mm256_mul_ps(scale, _mm256_set1_ps(-f32::from(IQ4_OFFSET))))
            }
            Scales::Zero => below_zero(halves(at, lanes), at.add(2 * PANEL + lanes)),
            Scales::Wide => below_zero(_mm256_loadu_ps(at.cast::<f32>().add(lanes)), at.add(4 * PANEL + lanes)),
            Scales::Power => {
                let exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.add(lanes).cast()));
                // Half of 2^(exponent − 127). The two smallest are denormal.
                let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)));
                let denormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x20_0000), exponents);
                let is_normal = _mm256_cmpgt_epi32(exponents, _mm256_set1_epi32(1));
                let scale = _mm256_castsi256_ps(_mm256_blendv_epi8(denormal, normal, is_normal));
                (scale, _mm256_mul_ps(scale, _mm256_set1_ps(-f32::from(E2M1_OFFSET))))
            }
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

/// Returns scales with the minima that eight zero points make.
#[inline(always)]
unsafe fn below_zero(scale: __m256, zeros: *const u8) -> (__m256, __m256) {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe { (scale, _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), bytes(zeros)), scale)) }
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

/// Reads eight f16, from element `from` on.
#[inline(always)]
unsafe fn halves(at: *const u8, from: usize) -> __m256 {
    // SAFETY: the caller of `step` guarantees this.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.add(2 * from).cast())) }
}

/// Reads eight bytes.
#[inline(always)]
unsafe fn bytes(at: *const u8) -> __m256 {
    // SAFETY: the caller of `step` guarantees this.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()))) }
}

/// Prefetches a panel in parts, one for each group.
pub(super) struct Ahead {
    next: *const u8,
    /// Size of a part in bytes.
    bytes: usize,
}

impl Ahead {
    /// Begins a panel of this layout, `ahead` bytes after `panel`. It has no parts if `ahead` is 0.
    pub(super) fn new(panel: *const u8, layout: &Layout, ahead: usize) -> Self {
        let bytes = if ahead == 0 { 0 } else { layout.bytes / layout.groups() };
        Self { next: panel.wrapping_add(ahead), bytes }
    }

    /// Prefetches the next part.
    #[inline(always)]
    pub(super) fn prefetch(&mut self) {
        for at in (0..self.bytes).step_by(LINE) {
            // SAFETY: a prefetch is a hint and may have any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.next.wrapping_add(at).cast()) };
        }
        self.next = self.next.wrapping_add(self.bytes);
    }
}
