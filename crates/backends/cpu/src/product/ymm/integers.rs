//! Panels of integers.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::LANES;
use super::read::{self, GroupScales, Halves, ReadCodes, Stored};
use super::tile::{Group, Multiplied, Panel, Place};
use crate::weights::{Layout, PANEL, PanelKind, Scales};

/// Exact products of a group's codes with those of a few rows.
pub(super) trait Dots {
    /// Returns the products of some halves of the inputs with rows whose group is at these addresses.
    ///
    /// # Safety
    /// The instruction set must be available, and each address must have [`ROW_BYTES`](super::ROW_BYTES) bytes.
    unsafe fn dots<const N: usize>(&self, rows: [*const u8; N], halves: Range<usize>) -> [[__m256i; N]; 2];
}

/// A way to multiply codes.
pub(super) trait Way {
    /// Memory of an unpacked group.
    type Unpacked;

    const EMPTY: Self::Unpacked;

    /// Returns codes that are unpacked while they are multiplied.
    fn stored<C: ReadCodes>(codes: Stored<'_, C>) -> impl Dots;

    /// Unpacks codes.
    ///
    /// # Safety
    /// The instruction set must be available.
    unsafe fn unpack<C: ReadCodes>(codes: Stored<'_, C>, unpacked: &mut Self::Unpacked) -> impl Dots;
}

/// Panels of integers in their stored layout.
pub(super) struct Integers<'a, C, W> {
    place: Place<'a>,
    scales: Scales,
    kind: PhantomData<(C, W)>,
}

impl<'a, C, W> Integers<'a, C, W> {
    pub(super) fn new(panel: &[u8], layout: &'a Layout) -> Self {
        let PanelKind::Quant(_, scales) = layout.kind else { unreachable!("chosen by the kind") };
        Self { place: Place { start: panel.as_ptr(), layout }, scales, kind: PhantomData }
    }
}

impl<C: ReadCodes, W> Integers<'_, C, W> {
    #[inline(always)]
    fn codes(&self, group: usize) -> Stored<'_, C> {
        Stored { panel: self.place.start, layout: self.place.layout, group, codes: PhantomData }
    }

    /// # Safety
    /// AVX2 and F16C must be available, and the panel must have this group.
    #[inline(always)]
    unsafe fn with_scales<D>(&self, group: usize, dots: D) -> IntegerGroup<C, D> {
        // SAFETY: the caller guarantees this.
        let scales = unsafe { read::scales(self.place.start, self.place.layout, self.scales, group) };
        IntegerGroup { dots, scales, codes: PhantomData }
    }
}

impl<C: ReadCodes, W: Way> Panel for Integers<'_, C, W> {
    type Unpacked = W::Unpacked;

    const EMPTY: W::Unpacked = W::EMPTY;

    fn place(&self) -> Place<'_> {
        self.place
    }

    #[inline(always)]
    unsafe fn group(&self, group: usize) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        unsafe { self.with_scales(group, W::stored(self.codes(group))) }
    }

    #[inline(always)]
    unsafe fn unpack(&self, group: usize, unpacked: &mut W::Unpacked) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        unsafe { self.with_scales(group, W::unpack(self.codes(group), unpacked)) }
    }
}

/// A group of integers and its scales.
struct IntegerGroup<C, D> {
    dots: D,
    scales: GroupScales,
    codes: PhantomData<C>,
}

impl<C: ReadCodes, D: Dots> Multiplied for IntegerGroup<C, D> {
    #[inline(always)]
    unsafe fn add<const N: usize>(&self, rows: Group, results: &mut [[f32; PANEL]; N]) {
        let GroupScales { scales, minima, halves } = &self.scales;
        // SAFETY: the caller guarantees this; arrays of a panel have two registers.
        unsafe {
            match halves {
                Halves::Alike => {
                    let dots: [[__m256i; N]; 2] = self.dots.dots(rows.all_codes(), 0..2);
                    for (h, dots) in dots.into_iter().enumerate() {
                        for (r, (dots, result)) in dots.into_iter().zip(&mut *results).enumerate() {
                            let result = result.as_mut_ptr().add(h * LANES);
                            let scale = _mm256_mul_ps(scales[h], _mm256_set1_ps(rows.scale(r)));
                            let mut sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, _mm256_loadu_ps(result));
                            sum = _mm256_fmadd_ps(minima[h], _mm256_set1_ps(rows.sum(r)), sum);
                            _mm256_storeu_ps(result, sum);
                        }
                    }
                }
                Halves::Factors(factors) => {
                    let mut sums = self.dots_of_half::<0, N>(rows);
                    let others = self.dots_of_half::<1, N>(rows);
                    for h in 0..2 {
                        for r in 0..N {
                            let sum = _mm256_mullo_epi32(sums[h][r], factors[0][h]);
                            let other = _mm256_mullo_epi32(others[h][r], factors[1][h]);
                            sums[h][r] = _mm256_add_epi32(sum, other);
                        }
                    }
                    rows.add_scaled(sums, *scales, results);
                }
                Halves::Numbers(numbers) => {
                    rows.add_scaled(self.dots_of_half::<0, N>(rows), numbers[0], results);
                    rows.add_scaled(self.dots_of_half::<1, N>(rows), numbers[1], results);
                }
            }
        }
    }
}

impl<C: ReadCodes, D: Dots> IntegerGroup<C, D> {
    /// Returns the products with the codes of half a group without their offset.
    #[inline(always)]
    unsafe fn dots_of_half<const HALF: usize, const N: usize>(&self, rows: Group) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let mut dots = self.dots.dots::<N>(rows.all_codes(), HALF..HALF + 1);
            for r in 0..N {
                let offset = _mm256_set1_epi32(C::OFFSET * rows.totals(r)[HALF]);
                for dots in &mut dots {
                    dots[r] = _mm256_sub_epi32(dots[r], offset);
                }
            }
            dots
        }
    }
}
