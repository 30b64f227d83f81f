//! Scales of panels of integers with AVX2.

use std::arch::x86_64::*;
use std::ops::Range;

use super::LANES;
use super::integers::Dots;
use super::tile::{Group, Place};
use crate::weights::{E2M1_OFFSET, IQ4_OFFSET, PANEL, PanelKind, SUPER, Scales};

/// How sums of products become results. It is a type, so that a kernel has the code of one way only.
pub(super) trait Scaling {
    /// Scales that are read before their groups.
    type Block;

    const EMPTY: Self::Block;

    /// Number of groups in a block.
    const GROUPS: usize;

    /// Reads the scales of some groups, at most [`Scaling::GROUPS`].
    ///
    /// # Safety
    /// AVX2 and F16C must be available, and the panel must have these groups.
    unsafe fn read(place: Place<'_>, groups: Range<usize>, block: &mut Self::Block);

    /// Adds the products of a group with the first rows of `rows` to the results.
    ///
    /// # Safety
    /// AVX2, FMA and F16C must be available, the block must be the group's, and there must be so many rows.
    unsafe fn add<const N: usize>(
        group: &Scaled<'_, '_, Self::Block>,
        dots: &impl Dots,
        rows: Group,
        results: &mut [[f32; PANEL]; N],
    );
}

/// A group and where its scales are.
pub(super) struct Scaled<'a, 'b, B> {
    pub(super) place: Place<'a>,
    pub(super) index: usize,
    pub(super) block: &'b B,
    /// Offset of the codes if each half has a scale.
    pub(super) offset: i32,
}

/// Both halves of a group have its scale, and a minimum.
pub(super) struct Whole;

/// Each half has an integer that the scale of the super-block is multiplied with; there is no minimum.
pub(super) struct Factors;

/// Each half has a number that the factor of a row is multiplied with; there is no minimum.
pub(super) struct Numbers;

/// Scales and minima of eight groups.
#[repr(align(64))]
pub(super) struct WholeBlock([[[f32; PANEL]; 2]; SUPER]);

impl Scaling for Whole {
    type Block = WholeBlock;

    const EMPTY: WholeBlock = WholeBlock([[[0.0; PANEL]; 2]; SUPER]);
    const GROUPS: usize = SUPER;

    #[inline(always)]
    unsafe fn read(place: Place<'_>, groups: Range<usize>, block: &mut WholeBlock) {
        let Place { start, layout } = place;
        let PanelKind::Quant(_, scales) = layout.kind else { unreachable!("chosen by the kind") };
        macro_rules! each {
            (|$at:ident, $supers:ident, $lane:ident| $read:expr) => {
                for (group, [scale, minimum]) in groups.zip(&mut block.0) {
                    let $at = start.add(layout.scales_at(scales, group));
                    let $supers = start.add(layout.supers_at(scales, group));
                    for $lane in [0, LANES] {
                        let (a, b): (__m256, __m256) = $read;
                        _mm256_store_ps(scale.as_mut_ptr().add($lane), a);
                        _mm256_store_ps(minimum.as_mut_ptr().add($lane), b);
                    }
                }
            };
        }
        // SAFETY: the caller guarantees this; arrays of a panel have two registers.
        unsafe {
            match scales {
                Scales::Fixed(offset) => each!(|at, _supers, lane| times(halves(at, lane), offset)),
                Scales::Two => each!(|at, _supers, lane| (halves(at, lane), halves(at, PANEL + lane))),
                Scales::Super => each!(|at, supers, lane| {
                    let negative = _mm256_sub_ps(_mm256_setzero_ps(), halves(supers, PANEL + lane));
                    let scale = _mm256_mul_ps(halves(supers, lane), bytes(at.add(lane)));
                    (scale, _mm256_mul_ps(negative, bytes(at.add(PANEL + lane))))
                }),
                Scales::Signed => each!(|at, supers, lane| {
                    let factors = _mm256_cvtepi32_ps(factors(at.add(lane)));
                    times(_mm256_mul_ps(halves(supers, lane), factors), -f32::from(IQ4_OFFSET))
                }),
                Scales::Zero => {
                    each!(|at, _supers, lane| below_zero(halves(at, lane), at.add(2 * PANEL + lane)))
                }
                Scales::Wide => each!(|at, _supers, lane| {
                    below_zero(_mm256_loadu_ps(at.cast::<f32>().add(lane)), at.add(4 * PANEL + lane))
                }),
                Scales::Power => {
                    each!(|at, _supers, lane| times(powers(at.add(lane)), -f32::from(E2M1_OFFSET)))
                }
                Scales::Halves | Scales::Pair => unreachable!("their halves differ"),
            }
        }
    }

    #[inline(always)]
    unsafe fn add<const N: usize>(
        group: &Scaled<'_, '_, WholeBlock>,
        dots: &impl Dots,
        rows: Group,
        results: &mut [[f32; PANEL]; N],
    ) {
        // SAFETY: the caller guarantees this; arrays of a panel have two registers.
        unsafe {
            let [scales, minima] = group.block.0.get_unchecked(group.index % SUPER);
            let dots: [[__m256i; N]; 2] = dots.dots(rows, 0..2);
            for (r, result) in results.iter_mut().enumerate() {
                let (own, total) = (_mm256_set1_ps(rows.scale(r)), _mm256_set1_ps(rows.sum(r)));
                for (h, dots) in dots.iter().enumerate() {
                    let result = result.as_mut_ptr().add(h * LANES);
                    let scale = _mm256_mul_ps(own, _mm256_load_ps(scales.as_ptr().add(h * LANES)));
                    let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, _mm256_loadu_ps(result));
                    let minimum = _mm256_load_ps(minima.as_ptr().add(h * LANES));
                    _mm256_storeu_ps(result, _mm256_fmadd_ps(total, minimum, sum));
                }
            }
        }
    }
}

impl Scaling for Factors {
    type Block = ();

    const EMPTY: () = ();
    const GROUPS: usize = usize::MAX;

    unsafe fn read(_: Place<'_>, _: Range<usize>, (): &mut ()) {}

    #[inline(always)]
    unsafe fn add<const N: usize>(
        group: &Scaled<'_, '_, ()>,
        dots: &impl Dots,
        rows: Group,
        results: &mut [[f32; PANEL]; N],
    ) {
        let Place { start, layout } = group.place;
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = start.add(layout.scales_at(Scales::Halves, group.index));
            let supers = start.add(layout.supers_at(Scales::Halves, group.index));
            let mut sums = dots_of_half::<0, N>(dots, rows, group.offset);
            let others = dots_of_half::<1, N>(dots, rows, group.offset);
            for h in 0..2 {
                let both = [factors(at.add(h * LANES)), factors(at.add(PANEL + h * LANES))];
                for r in 0..N {
                    let sum = _mm256_mullo_epi32(sums[h][r], both[0]);
                    let other = _mm256_mullo_epi32(others[h][r], both[1]);
                    sums[h][r] = _mm256_add_epi32(sum, other);
                }
            }
            rows.add_scaled(sums, [halves(supers, 0), halves(supers, LANES)], results);
        }
    }
}

impl Scaling for Numbers {
    type Block = ();

    const EMPTY: () = ();
    const GROUPS: usize = usize::MAX;

    unsafe fn read(_: Place<'_>, _: Range<usize>, (): &mut ()) {}

    #[inline(always)]
    unsafe fn add<const N: usize>(
        group: &Scaled<'_, '_, ()>,
        dots: &impl Dots,
        rows: Group,
        results: &mut [[f32; PANEL]; N],
    ) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let scales = pair_scales(group.place, group.index, 1.0);
            let first = dots_of_half::<0, N>(dots, rows, group.offset);
            rows.add_halves([first, dots_of_half::<1, N>(dots, rows, group.offset)], scales, results);
        }
    }
}

/// Returns the products with the codes of half a group without their offset.
#[inline(always)]
unsafe fn dots_of_half<const HALF: usize, const N: usize>(
    dots: &impl Dots,
    rows: Group,
    offset: i32,
) -> [[__m256i; N]; 2] {
    // SAFETY: the caller guarantees this.
    unsafe {
        let mut dots = dots.dots::<N>(rows, HALF..HALF + 1);
        for r in 0..N {
            let offset = _mm256_set1_epi32(offset * rows.totals(r)[HALF]);
            for dots in &mut dots {
                dots[r] = _mm256_sub_epi32(dots[r], offset);
            }
        }
        dots
    }
}

/// Returns the scales of the halves of a group, before the factors of the rows: e4m3 numbers times `factor`.
///
/// # Safety
/// AVX2 and F16C must be available, and the panel must have this group, with [`Scales::Pair`].
#[inline(always)]
pub(super) unsafe fn pair_scales(place: Place<'_>, index: usize, factor: f32) -> [[__m256; 2]; 2] {
    // SAFETY: the caller guarantees this.
    unsafe {
        let (at, factor) = (place.start.add(place.layout.scales_at(Scales::Pair, index)), _mm256_set1_ps(factor));
        let ([a, b], [c, d]) = (small(at), small(at.add(PANEL)));
        [[_mm256_mul_ps(a, factor), _mm256_mul_ps(b, factor)], [_mm256_mul_ps(c, factor), _mm256_mul_ps(d, factor)]]
    }
}

/// Reads sixteen e4m3 numbers, over [`E4M3_OVER_F16`](crate::weights::E4M3_OVER_F16).
#[inline(always)]
unsafe fn small(at: *const u8) -> [__m256; 2] {
    // SAFETY: the caller of `pair_scales` guarantees this.
    unsafe {
        let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(at.cast()));
        // The sign is extended to the left of the exponent, and masked between.
        let mask = _mm256_set1_epi16(0xbf80_u16 as i16);
        let numbers = _mm256_and_si256(_mm256_slli_epi16::<7>(codes), mask);
        [_mm256_cvtph_ps(_mm256_castsi256_si128(numbers)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(numbers))]
    }
}

/// Returns eight scales, and as their minima multiples of them.
#[inline(always)]
unsafe fn times(scale: __m256, offset: f32) -> (__m256, __m256) {
    // SAFETY: the caller of `read` guarantees this.
    unsafe { (scale, _mm256_mul_ps(scale, _mm256_set1_ps(offset))) }
}

/// Returns eight scales with the minima that their zero points make.
#[inline(always)]
unsafe fn below_zero(scale: __m256, zeros: *const u8) -> (__m256, __m256) {
    // SAFETY: the caller of `read` guarantees this.
    unsafe { (scale, _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), bytes(zeros)), scale)) }
}

/// Reads eight exponents as halves of powers of two.
#[inline(always)]
unsafe fn powers(at: *const u8) -> __m256 {
    // SAFETY: the caller of `read` guarantees this.
    unsafe {
        // As the exponent of an f32, that of 2^(exponent − 127). Of the smallest power, the exponent is 0 and the first bit of
        // the mantissa is set.
        let exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()));
        let powers = _mm256_max_epi32(_mm256_slli_epi32::<23>(exponents), _mm256_set1_epi32(0x40_0000));
        _mm256_mul_ps(_mm256_castsi256_ps(powers), _mm256_set1_ps(0.5))
    }
}

/// Reads eight f16, from element `from` on.
#[inline(always)]
unsafe fn halves(at: *const u8, from: usize) -> __m256 {
    // SAFETY: the callers guarantee this.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.add(2 * from).cast())) }
}

/// Reads eight bytes.
#[inline(always)]
unsafe fn bytes(at: *const u8) -> __m256 {
    // SAFETY: the callers guarantee this.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()))) }
}

/// Reads eight factors.
#[inline(always)]
unsafe fn factors(at: *const u8) -> __m256i {
    // SAFETY: the callers guarantee this.
    unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())) }
}
