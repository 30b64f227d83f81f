//! The loops over the groups of a panel and the rows of a tile.

use std::arch::x86_64::*;
use std::ops::Range;

use super::read::Ahead;
use super::{LANES, ROW_BYTES, TileRows};
use crate::memory::Level;
use crate::product::outlying::outlying;
use crate::weights::{Layout, PANEL};

/// A group of a few rows: the places of the first row's. It has no references because the compiler would keep arrays of
/// them in memory.
#[derive(Clone, Copy)]
pub(super) struct Group {
    pub(super) codes: *const u8,
    pub(super) scales: *const f32,
    pub(super) sums: *const f32,
    pub(super) totals: *const [i32; 2],
    pub(super) steps: *const u8,
    /// Number of groups of a row.
    pub(super) groups: usize,
}

impl Group {
    /// Returns the place of a row's codes.
    #[inline(always)]
    pub(super) fn codes(self, row: usize) -> *const u8 {
        self.codes.wrapping_add(row * self.groups * ROW_BYTES)
    }

    /// Returns the places of the codes of the first rows.
    #[inline(always)]
    pub(super) fn all_codes<const N: usize>(self) -> [*const u8; N] {
        let mut all = [std::ptr::null(); N];
        for (row, codes) in all.iter_mut().enumerate() {
            *codes = self.codes(row);
        }
        all
    }

    /// Returns the scale of a row.
    ///
    /// # Safety
    /// The row must exist.
    #[inline(always)]
    pub(super) unsafe fn scale(self, row: usize) -> f32 {
        // SAFETY: the caller guarantees this.
        unsafe { self.scales.add(row * self.groups).read() }
    }

    /// Returns the sum of a row.
    ///
    /// # Safety
    /// The row must exist.
    #[inline(always)]
    pub(super) unsafe fn sum(self, row: usize) -> f32 {
        // SAFETY: the caller guarantees this.
        unsafe { self.sums.add(row * self.groups).read() }
    }

    /// Returns the sums of the codes of a row's halves.
    ///
    /// # Safety
    /// The row must exist.
    #[inline(always)]
    pub(super) unsafe fn totals(self, row: usize) -> [i32; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { self.totals.add(row * self.groups).read() }
    }

    /// Returns the steps in which any of the first rows has a high part, as bits.
    ///
    /// # Safety
    /// There must be so many rows.
    #[inline(always)]
    pub(super) unsafe fn outlying<const N: usize>(self) -> u8 {
        // SAFETY: the caller guarantees this.
        unsafe { outlying::<N>(self.steps, self.groups) }
    }

    /// Adds sums of products with the first rows, times the scales of both, to the results.
    ///
    /// # Safety
    /// AVX2 and FMA must be available, and there must be so many rows.
    #[inline(always)]
    pub(super) unsafe fn add_scaled<const N: usize>(
        self,
        sums: [[__m256i; N]; 2],
        scales: [__m256; 2],
        results: &mut [[f32; PANEL]; N],
    ) {
        for (r, result) in results.iter_mut().enumerate() {
            // SAFETY: the caller guarantees this; arrays of a panel have two registers.
            unsafe {
                let own = _mm256_set1_ps(self.scale(r));
                for h in 0..2 {
                    let (at, scale) = (result.as_mut_ptr().add(h * LANES), _mm256_mul_ps(scales[h], own));
                    let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[h][r]), scale, _mm256_loadu_ps(at));
                    _mm256_storeu_ps(at, sum);
                }
            }
        }
    }

    /// Adds sums of products of the halves of a group with the first rows, each half times its scales and then both times the rows'
    /// scales, to the results.
    ///
    /// # Safety
    /// AVX2 and FMA must be available, and there must be so many rows.
    #[inline(always)]
    pub(super) unsafe fn add_halves<const N: usize>(
        self,
        sums: [[[__m256i; N]; 2]; 2],
        scales: [[__m256; 2]; 2],
        results: &mut [[f32; PANEL]; N],
    ) {
        for (r, result) in results.iter_mut().enumerate() {
            // SAFETY: the caller guarantees this; arrays of a panel have two registers.
            unsafe {
                let own = _mm256_set1_ps(self.scale(r));
                for h in 0..2 {
                    let at = result.as_mut_ptr().add(h * LANES);
                    let first = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[0][h][r]), scales[0][h]);
                    let both = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[1][h][r]), scales[1][h], first);
                    _mm256_storeu_ps(at, _mm256_fmadd_ps(both, own, _mm256_loadu_ps(at)));
                }
            }
        }
    }

    /// Returns a group further on.
    #[inline(always)]
    fn group(self, index: usize) -> Self {
        Self {
            codes: self.codes.wrapping_add(index * ROW_BYTES),
            scales: self.scales.wrapping_add(index),
            sums: self.sums.wrapping_add(index),
            totals: self.totals.wrapping_add(index),
            steps: self.steps.wrapping_add(index),
            groups: self.groups,
        }
    }

    /// Returns the rows from `row` on.
    #[inline(always)]
    fn from(self, row: usize) -> Self {
        Self {
            codes: self.codes(row),
            scales: self.scales.wrapping_add(row * self.groups),
            sums: self.sums.wrapping_add(row * self.groups),
            totals: self.totals.wrapping_add(row * self.groups),
            steps: self.steps.wrapping_add(row * self.groups),
            groups: self.groups,
        }
    }
}

/// A panel in memory.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) start: *const u8,
    pub(super) layout: &'a Layout,
}

/// A group of a panel that rows are multiplied with.
pub(super) trait Multiplied {
    /// Adds the products with the first rows of `rows` to the results.
    ///
    /// # Safety
    /// The instruction set must be available, and there must be so many rows.
    unsafe fn add<const N: usize>(&self, rows: Group, results: &mut [[f32; PANEL]; N]);
}

/// A panel in its stored layout.
pub(super) trait Panel {
    /// Memory of an unpacked group.
    type Unpacked;

    /// Memory of the scales of [`Panel::BLOCK`] groups, if they are read before these.
    type Scales;

    /// Number of groups whose scales are read at once.
    const BLOCK: usize;

    /// Number of cache lines to prefetch for a group.
    const LINES: usize;

    const EMPTY: (Self::Unpacked, Self::Scales);

    /// Returns where the panel is.
    fn place(&self) -> Place<'_>;

    /// Puts results in the order of the panel's rows, if its groups have them in another.
    ///
    /// # Safety
    /// The instruction set must be available.
    unsafe fn put_in_order(_: &mut [[f32; PANEL]]) {}

    /// Reads the scales of some groups, at most [`Panel::BLOCK`].
    ///
    /// # Safety
    /// The instruction set must be available, and the panel must have these groups.
    unsafe fn read_scales(&self, groups: Range<usize>, scales: &mut Self::Scales);

    /// Returns a group that is unpacked while it is multiplied.
    ///
    /// # Safety
    /// The instruction set must be available, and the panel must have this group, whose scales these are.
    unsafe fn group(&self, index: usize, scales: &Self::Scales) -> impl Multiplied;

    /// Unpacks a group.
    ///
    /// # Safety
    /// The instruction set must be available, and the panel must have this group, whose scales these are.
    unsafe fn unpack(&self, index: usize, scales: &Self::Scales, unpacked: &mut Self::Unpacked) -> impl Multiplied;
}

/// Multiplies the rows of a tile with a panel, up to `ROWS` at once. `ahead` prefetches the panel at that distance in bytes,
/// unless it is 0.
///
/// # Safety
/// The instruction set must be available, and the panel must have its layout.
#[inline(always)]
pub(super) unsafe fn multiply<P: Panel, const ROWS: usize>(
    panel: &P,
    rows: &TileRows<'_>,
    ahead: usize,
    results: &mut [[f32; PANEL]],
) {
    let first = rows.first_group();
    let Place { start, layout } = panel.place();
    assert!(results.len() == rows.count && first.groups == layout.groups());
    let ahead = Ahead::new(start, layout, ahead);
    results.fill([0.0; PANEL]);
    // SAFETY: the caller guarantees this; the rows have the layout's groups.
    unsafe {
        if results.len() > ROWS {
            multiply_many::<P, ROWS>(panel, ahead, first, results);
        } else if let Some(results) = results.first_chunk_mut::<4>() {
            multiply_few(panel, ahead, first, results);
        } else if let Some(results) = results.first_chunk_mut::<3>() {
            multiply_few(panel, ahead, first, results);
        } else if let Some(results) = results.first_chunk_mut::<2>() {
            multiply_few(panel, ahead, first, results);
        } else if let Some(results) = results.first_chunk_mut::<1>() {
            multiply_few(panel, ahead, first, results);
        }
        P::put_in_order(results);
    }
}

/// Returns the groups whose scales are read at once.
#[inline(always)]
fn blocks<P: Panel>(groups: usize) -> impl Iterator<Item = Range<usize>> {
    (0..groups).step_by(P::BLOCK).map(move |first| first..first.saturating_add(P::BLOCK).min(groups))
}

/// Multiplies a few rows with groups as they are read.
#[inline(always)]
unsafe fn multiply_few<P: Panel, const N: usize>(
    panel: &P,
    mut ahead: Ahead,
    rows: Group,
    results: &mut [[f32; PANEL]; N],
) {
    let (_, mut scales) = P::EMPTY;
    for groups in blocks::<P>(rows.groups) {
        // SAFETY: the caller guarantees this.
        unsafe {
            panel.read_scales(groups.clone(), &mut scales);
            for index in groups {
                ahead.prefetch(Level::Second, P::LINES);
                panel.group(index, &scales).add(rows.group(index), results);
            }
        }
    }
}

/// Multiplies rows with groups that are unpacked once for all.
#[inline(always)]
unsafe fn multiply_many<P: Panel, const ROWS: usize>(
    panel: &P,
    mut ahead: Ahead,
    rows: Group,
    results: &mut [[f32; PANEL]],
) {
    let (mut unpacked, mut scales) = P::EMPTY;
    for groups in blocks::<P>(rows.groups) {
        // SAFETY: the caller guarantees this.
        unsafe {
            panel.read_scales(groups.clone(), &mut scales);
            for index in groups {
                // Memory has answered before the next part is asked for, because a part is multiplied with many rows.
                ahead.prefetch(Level::First, P::LINES);
                let group = panel.unpack(index, &scales, &mut unpacked);
                multiply_group::<ROWS>(&group, rows.group(index), results);
            }
        }
    }
}

/// Multiplies rows with a group.
#[inline(always)]
unsafe fn multiply_group<const ROWS: usize>(group: &impl Multiplied, rows: Group, results: &mut [[f32; PANEL]]) {
    let (whole, rest) = results.as_chunks_mut::<ROWS>();
    // SAFETY: the caller guarantees this.
    unsafe {
        for (index, results) in whole.iter_mut().enumerate() {
            group.add(rows.from(index * ROWS), results);
        }
        let others = rows.from(whole.len() * ROWS);
        if let Some(results) = rest.first_chunk_mut::<3>() {
            group.add(others, results);
        } else if let Some(results) = rest.first_chunk_mut::<2>() {
            group.add(others, results);
        } else if let Some(results) = rest.first_chunk_mut::<1>() {
            group.add(others, results);
        }
    }
}
