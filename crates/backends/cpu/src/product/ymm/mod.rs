//! Integer products with AVX2, and with AVX-VNNI where the processor has it.
//!
//! A group of a panel is unpacked to bytes in the first-level cache and multiplied with up to sixteen rows from there. One
//! register holds eight output rows, so nothing is added across lanes: four inputs of a row are broadcast to all of them.
//! All sums within a group are exact, so that a row's bits are those of every other kernel.

mod read;

use std::arch::x86_64::*;
use std::ops::Range;

use super::Quant;
use crate::activation::TILE;
use crate::memory::{LINE, Lines};
use crate::rows::{GROUP, LOW_BITS};
use crate::weights::{Codes, HALVES_OFFSET, Kind, Layout, PANEL, STEPS, Scales};
use read::Group;

/// Number of output rows in a register, of which a panel needs two.
const LANES: usize = 8;

/// Number of rows that are multiplied with a register of codes: their sums fill the registers.
const ROWS: usize = 4;

/// Size of a group of a row in bytes: high and low parts, or integers of 16 bits.
const ROW_BYTES: usize = 2 * GROUP;

/// Products of a group's codes with those of a few rows.
trait Multiply {
    /// Returns the exact products of some steps of eight output rows, the first half of the panel or the second, with rows
    /// whose group is at these addresses.
    ///
    /// # Safety
    /// The instruction set must be available, and each address must have [`ROW_BYTES`] bytes.
    unsafe fn dots<const N: usize>(
        codes: &[[u8; LINE]; STEPS],
        half: usize,
        rows: [*const u8; N],
        steps: Range<usize>,
    ) -> [__m256i; N];
}

/// Bytes times the high and the low parts, pairs of products in 16 bits. The sum of `STEPS` products of the high parts
/// does not saturate.
struct Bytes<const STEPS: usize, const COARSE: bool>;

/// Codes of any width in 16 bits times rows in 16 bits.
struct Words;

/// Bytes times the high and the low parts, four products in 32 bits: AVX-VNNI.
struct Vnni<const COARSE: bool>;

impl<const PAUSE: usize, const COARSE: bool> Multiply for Bytes<PAUSE, COARSE> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(
        codes: &[[u8; LINE]; STEPS],
        half: usize,
        rows: [*const u8; N],
        steps: Range<usize>,
    ) -> [__m256i; N] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let zeros = [_mm256_setzero_si256(); N];
            let (mut dots, mut low) = (zeros, zeros);
            for from in steps.clone().step_by(PAUSE) {
                let mut high = zeros;
                for step in from..(from + PAUSE).min(steps.end) {
                    let codes = register(codes, half, step);
                    for r in 0..N {
                        let products = _mm256_maddubs_epi16(codes, four(rows[r], step));
                        high[r] = _mm256_add_epi16(high[r], products);
                        if !COARSE {
                            // Low parts are at most 8 in magnitude: their sums need no pause.
                            let products = _mm256_maddubs_epi16(codes, four(rows[r], STEPS + step));
                            low[r] = _mm256_add_epi16(low[r], products);
                        }
                    }
                }
                for r in 0..N {
                    let products = _mm256_madd_epi16(high[r], _mm256_set1_epi16(1 << LOW_BITS));
                    dots[r] = _mm256_add_epi32(dots[r], products);
                }
            }
            if !COARSE {
                for r in 0..N {
                    dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(low[r], _mm256_set1_epi16(1)));
                }
            }
            dots
        }
    }
}

impl Multiply for Words {
    #[inline(always)]
    unsafe fn dots<const N: usize>(
        codes: &[[u8; LINE]; STEPS],
        half: usize,
        rows: [*const u8; N],
        steps: Range<usize>,
    ) -> [__m256i; N] {
        // SAFETY: the caller guarantees this.
        unsafe {
            // The first and the second pair of inputs of each output row, as 16 bits; −1 is a byte of zero.
            let [first, second] = [[0, -1, 1, -1], [2, -1, 3, -1]].map(|pair: [i8; 4]| {
                let mut bytes = [[0i8; 4]; LANES];
                for (lane, bytes) in bytes.iter_mut().enumerate() {
                    *bytes = pair.map(|byte| if byte < 0 { byte } else { byte + (lane % 4 * 4) as i8 });
                }
                _mm256_loadu_si256(bytes.as_ptr().cast())
            });
            let mut dots = [_mm256_setzero_si256(); N];
            for step in steps {
                let codes = register(codes, half, step);
                let pairs = [_mm256_shuffle_epi8(codes, first), _mm256_shuffle_epi8(codes, second)];
                for r in 0..N {
                    for (index, pair) in pairs.into_iter().enumerate() {
                        let products = _mm256_madd_epi16(pair, four(rows[r], 2 * step + index));
                        dots[r] = _mm256_add_epi32(dots[r], products);
                    }
                }
            }
            dots
        }
    }
}

impl<const COARSE: bool> Multiply for Vnni<COARSE> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(
        codes: &[[u8; LINE]; STEPS],
        half: usize,
        rows: [*const u8; N],
        steps: Range<usize>,
    ) -> [__m256i; N] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let zeros = [_mm256_setzero_si256(); N];
            let (mut high, mut low) = (zeros, zeros);
            for step in steps {
                let codes = register(codes, half, step);
                for r in 0..N {
                    high[r] = _mm256_dpbusd_avx_epi32(high[r], codes, four(rows[r], step));
                    if !COARSE {
                        low[r] = _mm256_dpbusd_avx_epi32(low[r], codes, four(rows[r], STEPS + step));
                    }
                }
            }
            for r in 0..N {
                high[r] = _mm256_add_epi32(_mm256_slli_epi32::<{ LOW_BITS as i32 }>(high[r]), low[r]);
            }
            high
        }
    }
}

/// Returns the codes of four inputs of eight output rows.
#[inline(always)]
unsafe fn register(codes: &[[u8; LINE]; STEPS], half: usize, step: usize) -> __m256i {
    // SAFETY: a line has the codes of sixteen output rows; the caller guarantees the instruction set.
    unsafe { _mm256_loadu_si256(codes.get_unchecked(step).as_ptr().add(half * LINE / 2).cast()) }
}

/// Broadcasts a word of a row.
#[inline(always)]
unsafe fn four(row: *const u8, word: usize) -> __m256i {
    // SAFETY: the caller guarantees that the row has it, and the instruction set.
    unsafe { _mm256_set1_epi32(row.cast::<i32>().add(word).read_unaligned()) }
}

/// Rows of a tile for one panel after the other.
pub(super) struct TileRows<'a> {
    input: Quant<'a>,
    first: usize,
    count: usize,
    /// The rows in 16 bits, if panels are multiplied as such.
    words: Option<&'a [i16]>,
}

/// Returns whether codes of this layout are multiplied in 16 bits, unless there is AVX-VNNI.
fn needs_words(layout: &Layout) -> bool {
    matches!(layout.kind, Kind::Quant(Codes::Six | Codes::Eight, _))
}

impl<'a> TileRows<'a> {
    /// Prepares `count` rows from `first` on, at most [`TILE`].
    pub(super) fn new(
        vnni: bool,
        layout: &Layout,
        input: Quant<'a>,
        (first, count): (usize, usize),
        scratch: &'a mut Lines<i16>,
    ) -> Self {
        assert!(count <= TILE && input.cols == layout.cols);
        let words = (!vnni && needs_words(layout)).then(|| {
            scratch.reserve_zeroed(TILE * input.cols);
            for (row, words) in (first..first + count).zip(scratch.chunks_exact_mut(input.cols)) {
                // SAFETY: AVX2 is available wherever these kernels are chosen.
                unsafe { join(input.row(row).codes, words) };
            }
            &scratch[..count * input.cols]
        });
        Self { input, first, count, words }
    }
}

/// Joins the parts of a row's codes to 16 bits.
#[target_feature(enable = "avx2")]
fn join(codes: &[[i8; ROW_BYTES]], words: &mut [i16]) {
    for (codes, words) in codes.iter().zip(words.as_chunks_mut::<GROUP>().0) {
        for (k, word) in words.iter_mut().enumerate() {
            *word = (i16::from(codes[k]) << LOW_BITS) + i16::from(codes[GROUP + k]);
        }
    }
}

/// Multiplies the rows of a tile with a panel in its stored layout. `ahead` prefetches the panel at that distance in
/// bytes, unless it is 0.
///
/// # Safety
/// AVX2, FMA and F16C must be available, and the panel must have this layout.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn multiply(
    panel: &[u8],
    layout: &Layout,
    rows: &TileRows<'_>,
    ahead: usize,
    results: &mut [[f32; PANEL]],
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        match (layout.kind, rows.input.coarse) {
            (Kind::Quant(Codes::Four, _), false) => tile::<Bytes<8, false>>(panel, layout, rows, ahead, results),
            (Kind::Quant(Codes::Four, _), true) => tile::<Bytes<8, true>>(panel, layout, rows, ahead, results),
            (Kind::Quant(Codes::Five | Codes::Fp4, _), false) => {
                tile::<Bytes<4, false>>(panel, layout, rows, ahead, results);
            }
            (Kind::Quant(Codes::Five | Codes::Fp4, _), true) => {
                tile::<Bytes<4, true>>(panel, layout, rows, ahead, results);
            }
            (Kind::Quant(Codes::Six | Codes::Eight, _), _) => tile::<Words>(panel, layout, rows, ahead, results),
            (other, _) => unreachable!("{other:?} is no kind of integers"),
        }
    }
}

/// [`multiply`] with AVX-VNNI.
///
/// # Safety
/// AVX2, FMA, F16C and AVX-VNNI must be available, and the panel must have this layout.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn multiply_vnni(
    panel: &[u8],
    layout: &Layout,
    rows: &TileRows<'_>,
    ahead: usize,
    results: &mut [[f32; PANEL]],
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        if rows.input.coarse {
            tile::<Vnni<true>>(panel, layout, rows, ahead, results);
        } else {
            tile::<Vnni<false>>(panel, layout, rows, ahead, results);
        }
    }
}

#[inline(always)]
unsafe fn tile<M: Multiply>(
    panel: &[u8],
    layout: &Layout,
    rows: &TileRows<'_>,
    ahead: usize,
    results: &mut [[f32; PANEL]],
) {
    assert!(panel.len() >= layout.bytes && results.len() == rows.count);
    let Kind::Quant(codes, scales) = layout.kind else { unreachable!("chosen by the kind") };
    let groups = layout.groups();
    let (row_codes, row_scales, row_sums) = rows.input.from(rows.first);
    let row_totals = rows.input.totals_from(rows.first);
    let row_codes = rows.words.map_or(row_codes.as_ptr().cast::<u8>(), |words| words.as_ptr().cast());
    let mut unpacked = Group::EMPTY;
    results.fill([0.0; PANEL]);
    for group in 0..groups {
        // SAFETY: the caller guarantees this; the rows and the panel have this group.
        unsafe {
            read::group(panel.as_ptr(), layout, (codes, scales), group, &mut unpacked);
            if ahead > 0 {
                read::prefetch(panel.as_ptr().wrapping_add(ahead), layout, group);
            }
            let rest = results.len() / ROWS * ROWS;
            let at = |row: usize| row * groups + group;
            let row = |row: usize| Row {
                codes: row_codes.add(at(row) * ROW_BYTES),
                scale: row_scales.as_ptr().add(at(row)).read(),
                sum: row_sums.as_ptr().add(at(row)).read(),
                totals: row_totals.as_ptr().add(at(row)).read(),
            };
            let (whole, single) = results.split_at_mut(rest);
            for (index, results) in whole.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
                let rows: [Row; ROWS] = std::array::from_fn(|r| row(index * ROWS + r));
                add_group::<M, ROWS>(&unpacked, scales, &rows, results);
            }
            for (index, result) in single.iter_mut().enumerate() {
                add_group::<M, 1>(&unpacked, scales, &[row(rest + index)], std::array::from_mut(result));
            }
        }
    }
}

/// A group of a row.
#[derive(Clone, Copy)]
struct Row {
    codes: *const u8,
    scale: f32,
    sum: f32,
    /// Sums of the codes of the halves.
    totals: [i32; 2],
}

/// Adds the products of a group to the results.
#[inline(always)]
unsafe fn add_group<M: Multiply, const N: usize>(
    group: &Group,
    scales: Scales,
    rows: &[Row; N],
    results: &mut [[f32; PANEL]; N],
) {
    let addresses = rows.map(|row| row.codes);
    for half in 0..PANEL / LANES {
        // SAFETY: the caller guarantees this; arrays of a panel have two registers.
        unsafe {
            let at = half * LANES;
            let has_factors = matches!(scales, Scales::Halves);
            let dots = if has_factors {
                let mut dots = [_mm256_setzero_si256(); N];
                for part in 0..2 {
                    let products =
                        M::dots(&group.codes, half, addresses, part * STEPS / 2..(part + 1) * STEPS / 2);
                    let factor = _mm256_loadu_si256(group.factors[part].as_ptr().add(at).cast());
                    for r in 0..N {
                        let offset = _mm256_set1_epi32(HALVES_OFFSET * rows[r].totals[part]);
                        let product = _mm256_mullo_epi32(_mm256_sub_epi32(products[r], offset), factor);
                        dots[r] = _mm256_add_epi32(dots[r], product);
                    }
                }
                dots
            } else {
                M::dots(&group.codes, half, addresses, 0..STEPS)
            };
            let scale = _mm256_loadu_ps(group.scales.as_ptr().add(at));
            let min = _mm256_loadu_ps(group.minima.as_ptr().add(at));
            for r in 0..N {
                let result = results[r].as_mut_ptr().add(at);
                let scale = _mm256_mul_ps(scale, _mm256_set1_ps(rows[r].scale));
                let mut sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, _mm256_loadu_ps(result));
                if !has_factors {
                    sum = _mm256_fmadd_ps(min, _mm256_set1_ps(rows[r].sum), sum);
                }
                _mm256_storeu_ps(result, sum);
            }
        }
    }
}
