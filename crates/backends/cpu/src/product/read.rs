//! Reading of integer panels with AVX-512.

use std::arch::x86_64::*;
use std::hint::unreachable_unchecked;
use std::marker::PhantomData;

use super::pairs::BLOCK_PANELS;
use crate::memory::{LINE, Level, prefetch};
use crate::weights::{Codes, E2M1_CODES, E2M1_OFFSET, IQ4_CODES, IQ4_OFFSET, Layout, PANEL, PanelKind, STEPS, Scales};

/// Reads the codes of a stored panel.
pub(super) trait ReadCodes: Copy {
    /// Whether codes have 4 bits, so that codes times 16 still fit a byte.
    const NARROW: bool;

    /// # Safety
    /// The conditions of [`Packed::step`] apply.
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> __m512i;

    /// Returns the place of a group's codes, if they are stored as their steps are, one after the other.
    fn stored(_panel: *const u8, _layout: &Layout, _group: usize) -> Option<*const u8> {
        None
    }
}

/// Reads the scales of a stored panel.
pub(super) trait ReadScales: Copy {
    /// Whether each half of a group has a factor and there is no minimum.
    const HALVES: bool = false;

    /// Whether each half of a group has a scale and there is no minimum.
    const PAIRED: bool = false;

    /// # Safety
    /// The conditions of [`Packed::step`] apply.
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512);

    /// # Safety
    /// The conditions of [`Packed::step`] apply.
    unsafe fn factors(_: *const u8, _: &Layout, _: usize) -> [__m512i; 2] {
        unreachable!("a group has one scale")
    }

    /// Returns the scales of a group's halves, before the factors of the rows.
    ///
    /// # Safety
    /// The conditions of [`Packed::step`] apply.
    unsafe fn pair(_: *const u8, _: &Layout, _: usize) -> [__m512; 2] {
        unreachable!("a group has one scale")
    }
}

/// A panel in its stored layout.
pub(super) struct Packed<'a, C, S> {
    at: *const u8,
    layout: &'a Layout,
    kind: PhantomData<(C, S)>,
}

impl<C, S> Clone for Packed<'_, C, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C, S> Copy for Packed<'_, C, S> {}

impl<'a, C: ReadCodes, S: ReadScales> Packed<'a, C, S> {
    pub(super) fn new(panel: &'a [u8], layout: &'a Layout) -> Self {
        assert!(panel.len() >= layout.bytes);
        Self { at: panel.as_ptr(), layout, kind: PhantomData }
    }
}

impl<C: ReadCodes, S: ReadScales> Packed<'_, C, S> {
    /// Returns the codes of four inputs of a group: one register of words, one for each row.
    ///
    /// # Safety
    /// AVX-512 F and BW must be available, and the panel must have this group.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn step(self, group: usize, step: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        unsafe { C::step(self.at, self.layout, group, step) }
    }

    /// Returns the place of a group's codes, if they are stored as their steps are.
    #[inline]
    pub(super) fn stored(self, group: usize) -> Option<*const u8> {
        C::stored(self.at, self.layout, group)
    }

    /// Returns the scales and minima of a group.
    ///
    /// # Safety
    /// The conditions of [`Packed::step`] apply.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn scales(self, group: usize) -> (__m512, __m512) {
        // SAFETY: the caller guarantees this.
        unsafe { S::scales(self.at, self.layout, group) }
    }

    /// Returns the factors of a group's halves, if it has any.
    ///
    /// # Safety
    /// The conditions of [`Packed::step`] apply.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn factors(self, group: usize) -> [__m512i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { S::factors(self.at, self.layout, group) }
    }

    /// Returns the scales of a group's halves, if it has any, before the factors of the rows.
    ///
    /// # Safety
    /// The conditions of [`Packed::step`] apply.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn pair(self, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { S::pair(self.at, self.layout, group) }
    }

    /// Prefetches this group of the panel that is multiplied next.
    #[inline]
    pub(super) fn prefetch(self, group: usize) {
        let (bytes, groups) = (self.layout.bytes, self.layout.groups());
        let lines = (bytes / groups).div_ceil(LINE);
        let from = self.at.wrapping_add(BLOCK_PANELS * bytes + group * (bytes / groups));
        for line in 0..lines {
            prefetch(Level::Second, from.wrapping_add(line * LINE));
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Four;
#[derive(Clone, Copy)]
pub(super) struct Five;
#[derive(Clone, Copy)]
pub(super) struct Six;
#[derive(Clone, Copy)]
pub(super) struct Eight;
#[derive(Clone, Copy)]
pub(super) struct Fixed;
#[derive(Clone, Copy)]
pub(super) struct Two;
#[derive(Clone, Copy)]
pub(super) struct Super;
#[derive(Clone, Copy)]
pub(super) struct Halves;
#[derive(Clone, Copy)]
pub(super) struct E2m1;
#[derive(Clone, Copy)]
pub(super) struct Iq4;
#[derive(Clone, Copy)]
pub(super) struct Signed;
#[derive(Clone, Copy)]
pub(super) struct Zero;
#[derive(Clone, Copy)]
pub(super) struct Wide;
#[derive(Clone, Copy)]
pub(super) struct Power;
#[derive(Clone, Copy)]
pub(super) struct Pair;

impl ReadCodes for Four {
    const NARROW: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        unsafe { nibbles(panel.add(layout.codes_at(Codes::Four, group)), step) }
    }
}

impl ReadCodes for Five {
    const NARROW: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        unsafe {
            let codes = nibbles(panel.add(layout.codes_at(Codes::Five, group)), step);
            let fifths = panel.add(layout.uppers_at(Codes::Five, group)).cast::<u64>().add(step).read_unaligned();
            _mm512_mask_add_epi8(codes, fifths, codes, _mm512_set1_epi8(16))
        }
    }
}

impl ReadCodes for Six {
    const NARROW: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        let (codes, uppers) = unsafe {
            let uppers = panel.add(layout.uppers_at(Codes::Six, group) + step % 2 * LINE);
            (nibbles(panel.add(layout.codes_at(Codes::Six, group)), step), line(uppers))
        };
        // The upper bits move to bits 4 and 5; bits from the neighbouring byte are next to them and are masked.
        let uppers = match step / 2 {
            0 => _mm512_slli_epi16::<4>(uppers),
            1 => _mm512_slli_epi16::<2>(uppers),
            2 => uppers,
            _ => _mm512_srli_epi16::<2>(uppers),
        };
        _mm512_or_si512(codes, _mm512_and_si512(uppers, _mm512_set1_epi8(0x30)))
    }
}

impl ReadCodes for Eight {
    const NARROW: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        unsafe { line(panel.add(layout.codes_at(Codes::Eight, group) + step * LINE)) }
    }

    #[inline]
    fn stored(panel: *const u8, layout: &Layout, group: usize) -> Option<*const u8> {
        Some(panel.wrapping_add(layout.codes_at(Codes::Eight, group)))
    }
}

impl ReadCodes for E2m1 {
    const NARROW: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        unsafe { looked_up(&E2M1_CODES, nibbles(panel.add(layout.codes_at(Codes::E2m1, group)), step)) }
    }
}

impl ReadCodes for Iq4 {
    const NARROW: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        unsafe { looked_up(&IQ4_CODES, nibbles(panel.add(layout.codes_at(Codes::Iq4, group)), step)) }
    }
}

impl ReadScales for Signed {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let factors = _mm_loadu_si128(panel.add(layout.scales_at(Scales::Signed, group)).cast());
            let factors = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(factors));
            let scale = _mm512_mul_ps(halves(panel.add(layout.supers_at(Scales::Signed, group))), factors);
            (scale, _mm512_mul_ps(scale, _mm512_set1_ps(-f32::from(IQ4_OFFSET))))
        }
    }
}

impl ReadScales for Zero {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = panel.add(layout.scales_at(Scales::Zero, group));
            below_zero(halves(at), at.add(2 * PANEL))
        }
    }
}

impl ReadScales for Wide {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = panel.add(layout.scales_at(Scales::Wide, group));
            below_zero(_mm512_loadu_ps(at.cast()), at.add(4 * PANEL))
        }
    }
}

impl ReadScales for Power {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: the caller guarantees this.
        let exponents =
            unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(panel.add(layout.scales_at(Scales::Power, group)).cast())) };
        // Half of 2^(exponent − 127). The two smallest are denormal.
        let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(exponents, _mm512_set1_epi32(1)));
        let denormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x20_0000), exponents);
        let is_denormal = _mm512_cmplt_epi32_mask(exponents, _mm512_set1_epi32(2));
        let scale = _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, is_denormal, denormal));
        (scale, _mm512_mul_ps(scale, _mm512_set1_ps(-f32::from(E2M1_OFFSET))))
    }
}

impl ReadScales for Fixed {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        let PanelKind::Quant(_, kind @ Scales::Fixed(offset)) = layout.kind else {
            // SAFETY: the caller guarantees that the panel has this layout. A panic here would be checked for each group.
            unsafe { unreachable_unchecked() }
        };
        // SAFETY: the caller guarantees this.
        let scale = unsafe { halves(panel.add(layout.scales_at(kind, group))) };
        (scale, _mm512_mul_ps(scale, _mm512_set1_ps(offset)))
    }
}

impl ReadScales for Two {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = panel.add(layout.scales_at(Scales::Two, group));
            (halves(at), halves(at.add(2 * PANEL)))
        }
    }
}

impl ReadScales for Super {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = panel.add(layout.scales_at(Scales::Super, group));
            let supers = panel.add(layout.supers_at(Scales::Super, group));
            let negative = _mm512_sub_ps(_mm512_setzero_ps(), halves(supers.add(2 * PANEL)));
            let scale = _mm512_mul_ps(halves(supers), bytes(at));
            (scale, _mm512_mul_ps(negative, bytes(at.add(PANEL))))
        }
    }
}

impl ReadScales for Halves {
    const HALVES: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: the caller guarantees this.
        (unsafe { halves(panel.add(layout.supers_at(Scales::Halves, group))) }, _mm512_setzero_ps())
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn factors(panel: *const u8, layout: &Layout, group: usize) -> [__m512i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = panel.add(layout.scales_at(Scales::Halves, group));
            [at, at.add(PANEL)].map(|at| _mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))
        }
    }
}

impl ReadScales for Pair {
    const PAIRED: bool = true;

    unsafe fn scales(_: *const u8, _: &Layout, _: usize) -> (__m512, __m512) {
        unreachable!("each half has its own")
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pair(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = panel.add(layout.scales_at(Scales::Pair, group));
            [small(at), small(at.add(PANEL))]
        }
    }
}

/// Reads sixteen e4m3 numbers, over [`E4M3_OVER_F16`](crate::weights::E4M3_OVER_F16).
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn small(at: *const u8) -> __m512 {
    // SAFETY: the caller guarantees this.
    let codes = unsafe { _mm256_cvtepi8_epi16(_mm_loadu_si128(at.cast())) };
    // The sign is extended to the left of the exponent, and masked between.
    let mask = _mm256_set1_epi16(0xbf80_u16 as i16);
    _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16::<7>(codes), mask))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn line(at: *const u8) -> __m512i {
    // SAFETY: the caller guarantees this.
    unsafe { _mm512_loadu_si512(at.cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn nibbles(at: *const u8, step: usize) -> __m512i {
    // SAFETY: the caller guarantees this.
    let packed = unsafe { line(at.add(step % (STEPS / 2) * LINE)) };
    let shifted = if step < STEPS / 2 { packed } else { _mm512_srli_epi16::<4>(packed) };
    _mm512_and_si512(shifted, _mm512_set1_epi8(15))
}

/// Replaces codes by the values of a table.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn looked_up(table: &[u8; 16], codes: __m512i) -> __m512i {
    // SAFETY: the table has sixteen bytes.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes)
}

/// Returns scales with the minima that sixteen zero points make.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn below_zero(scale: __m512, zeros: *const u8) -> (__m512, __m512) {
    // SAFETY: the caller guarantees this.
    let zeros = unsafe { bytes(zeros) };
    (scale, _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), zeros), scale))
}

/// Reads sixteen f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller guarantees this.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Reads sixteen bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn bytes(at: *const u8) -> __m512 {
    // SAFETY: the caller guarantees this.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()))) }
}
