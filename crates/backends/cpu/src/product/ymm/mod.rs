//! Integer products with AVX2, and with AVX-VNNI where the processor has it.
//!
//! One register holds eight output rows, so nothing is added across lanes: four inputs of a row are broadcast to all of them.
//! A single row is multiplied with codes as they are read. For more rows, a group of a panel is unpacked to bytes in the
//! first-level cache first. All sums within a group are exact, so that a row's bits are those of every other kernel.

mod numbers;
mod read;

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::walk::Quant;
use crate::activation::TILE;
use crate::memory::Lines;
use crate::rows::{GROUP, LOW_BITS};
use crate::weights::{Codes, E2M1_OFFSET, HALVES_OFFSET, Layout, PANEL, PanelKind, STEPS, Scales};
use read::{Bytewise, E2m1, Eight, Five, Four, GroupScales, Iq4, Nvfp4, ReadCodes, Six, Steps, Stored};

/// Number of output rows in a register, of which a panel needs two.
const LANES: usize = 8;

/// Number of rows that are multiplied at once: their sums, and a step's codes and inputs, fill the registers.
const ROWS: usize = 2;

/// Size of a group of a row in bytes: high and low parts, or integers of 16 bits.
const ROW_BYTES: usize = 2 * GROUP;

/// Products of a group's codes with those of a few rows.
trait Multiply {
    /// Returns the exact products of some steps of a group with rows whose group is at these addresses.
    ///
    /// # Safety
    /// The instruction set must be available, and each address must have [`ROW_BYTES`] bytes.
    unsafe fn dots<const N: usize>(codes: &impl Steps, rows: [*const u8; N], steps: Range<usize>) -> [[__m256i; N]; 2];
}

/// Bytes times the high and the low parts, pairs of products in 16 bits. The sum of `PAUSE` products of the high parts
/// does not saturate.
struct Bytes<const PAUSE: usize, const COARSE: bool>;

/// Codes of any width in 16 bits times rows in 16 bits.
struct Words;

/// A register of bytes.
#[repr(align(32))]
struct Register([i8; 4 * LANES]);

/// Order of the bytes of the first and of the second pair of inputs of each output row, as 16 bits. An index of −1 is a
/// byte of zero.
static PAIRS: [Register; 2] = {
    let mut orders = [const { Register([-1; 4 * LANES]) }; 2];
    let mut word = 0;
    while word < 2 * LANES {
        let from = (word / 2 % 4 * 4 + word % 2) as i8;
        orders[0].0[2 * word] = from;
        orders[1].0[2 * word] = from + 2;
        word += 1;
    }
    orders
};

/// Bytes times the high and the low parts, four products in 32 bits: AVX-VNNI.
struct Vnni<const COARSE: bool>;

impl<const PAUSE: usize, const COARSE: bool> Multiply for Bytes<PAUSE, COARSE> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(codes: &impl Steps, rows: [*const u8; N], steps: Range<usize>) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let zeros = [[_mm256_setzero_si256(); N]; 2];
            let (mut dots, mut low) = (zeros, zeros);
            for from in steps.clone().step_by(PAUSE) {
                let mut high = zeros;
                for step in from..(from + PAUSE).min(steps.end) {
                    let codes = codes.step(step);
                    for r in 0..N {
                        let a = four(rows[r], step);
                        for h in 0..2 {
                            high[h][r] = _mm256_add_epi16(high[h][r], _mm256_maddubs_epi16(codes[h], a));
                        }
                        if COARSE {
                            continue;
                        }
                        // Low parts are at most 8 in magnitude: their sums need no pause.
                        let a = four(rows[r], STEPS + step);
                        for h in 0..2 {
                            low[h][r] = _mm256_add_epi16(low[h][r], _mm256_maddubs_epi16(codes[h], a));
                        }
                    }
                }
                for h in 0..2 {
                    for r in 0..N {
                        let products = _mm256_madd_epi16(high[h][r], _mm256_set1_epi16(1 << LOW_BITS));
                        dots[h][r] = _mm256_add_epi32(dots[h][r], products);
                    }
                }
            }
            if !COARSE {
                for h in 0..2 {
                    for r in 0..N {
                        let products = _mm256_madd_epi16(low[h][r], _mm256_set1_epi16(1));
                        dots[h][r] = _mm256_add_epi32(dots[h][r], products);
                    }
                }
            }
            dots
        }
    }
}

impl Multiply for Words {
    #[inline(always)]
    unsafe fn dots<const N: usize>(codes: &impl Steps, rows: [*const u8; N], steps: Range<usize>) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let mut dots = [[_mm256_setzero_si256(); N]; 2];
            for step in steps {
                let codes = codes.step(step);
                for (index, order) in PAIRS.iter().enumerate() {
                    let order = _mm256_load_si256(order.0.as_ptr().cast());
                    for h in 0..2 {
                        let pair = _mm256_shuffle_epi8(codes[h], order);
                        for r in 0..N {
                            let products = _mm256_madd_epi16(pair, four(rows[r], 2 * step + index));
                            dots[h][r] = _mm256_add_epi32(dots[h][r], products);
                        }
                    }
                }
            }
            dots
        }
    }
}

impl<const COARSE: bool> Multiply for Vnni<COARSE> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(codes: &impl Steps, rows: [*const u8; N], steps: Range<usize>) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let zeros = [[_mm256_setzero_si256(); N]; 2];
            let (mut high, mut low) = (zeros, zeros);
            for step in steps {
                let codes = codes.step(step);
                for r in 0..N {
                    let a = four(rows[r], step);
                    for h in 0..2 {
                        high[h][r] = _mm256_dpbusd_avx_epi32(high[h][r], codes[h], a);
                    }
                    if COARSE {
                        continue;
                    }
                    let a = four(rows[r], STEPS + step);
                    for h in 0..2 {
                        low[h][r] = _mm256_dpbusd_avx_epi32(low[h][r], codes[h], a);
                    }
                }
            }
            for h in 0..2 {
                for r in 0..N {
                    high[h][r] = _mm256_add_epi32(_mm256_slli_epi32::<{ LOW_BITS as i32 }>(high[h][r]), low[h][r]);
                }
            }
            high
        }
    }
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

/// Returns whether codes of this layout are multiplied in 16 bits. With AVX-VNNI, only the values of tables are.
fn needs_words(vnni: bool, layout: &Layout) -> bool {
    let is_wide = matches!(layout.kind, PanelKind::Quant(Codes::Six | Codes::Eight | Codes::Iq4, _));
    is_wide && !vnni || matches!(layout.kind, PanelKind::Packed(_))
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
        let words = needs_words(vnni, layout).then(|| {
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
    macro_rules! tile {
        ($codes:ty, $pause:literal) => {
            if rows.input.coarse {
                tile::<$codes, Bytes<$pause, true>>(panel, layout, rows, ahead, results)
            } else {
                tile::<$codes, Bytes<$pause, false>>(panel, layout, rows, ahead, results)
            }
        };
    }
    // SAFETY: the caller guarantees this.
    unsafe {
        match layout.kind {
            PanelKind::Quant(Codes::Four, _) => tile!(Four, 8),
            PanelKind::Quant(Codes::Five, _) => tile!(Five, 4),
            PanelKind::Quant(Codes::E2m1, Scales::Pair) => tile!(Nvfp4, 4),
            PanelKind::Quant(Codes::E2m1, _) => tile!(E2m1, 4),
            PanelKind::Quant(Codes::Iq4, _) => tile::<Iq4, Words>(panel, layout, rows, ahead, results),
            PanelKind::Quant(Codes::Six, _) => tile::<Six, Words>(panel, layout, rows, ahead, results),
            PanelKind::Quant(Codes::Eight, _) => tile::<Eight, Words>(panel, layout, rows, ahead, results),
            PanelKind::Packed(kind) => numbers::multiply(kind, panel, layout, rows, ahead, results),
            other => unreachable!("{other:?} is no kind of integers"),
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
    macro_rules! tile {
        ($codes:ty) => {
            if rows.input.coarse {
                tile::<$codes, Vnni<true>>(panel, layout, rows, ahead, results)
            } else {
                tile::<$codes, Vnni<false>>(panel, layout, rows, ahead, results)
            }
        };
    }
    // SAFETY: the caller guarantees this.
    unsafe {
        match layout.kind {
            PanelKind::Quant(Codes::Four, _) => tile!(Four),
            PanelKind::Quant(Codes::Five, _) => tile!(Five),
            PanelKind::Quant(Codes::E2m1, Scales::Pair) => tile!(Nvfp4),
            PanelKind::Quant(Codes::E2m1, _) => tile!(E2m1),
            PanelKind::Quant(Codes::Iq4, _) => tile!(Iq4),
            PanelKind::Quant(Codes::Six, _) => tile!(Six),
            PanelKind::Quant(Codes::Eight, _) => tile!(Eight),
            PanelKind::Packed(kind) => numbers::multiply(kind, panel, layout, rows, ahead, results),
            other => unreachable!("{other:?} is no kind of integers"),
        }
    }
}

#[inline(always)]
unsafe fn tile<C: ReadCodes, M: Multiply>(
    panel: &[u8],
    layout: &Layout,
    rows: &TileRows<'_>,
    ahead: usize,
    results: &mut [[f32; PANEL]],
) {
    assert!(panel.len() >= layout.bytes && results.len() == rows.count);
    let PanelKind::Quant(_, scales) = layout.kind else { unreachable!("chosen by the kind") };
    let (panel, groups) = (panel.as_ptr(), layout.groups());
    let (row_codes, row_scales, row_sums) = rows.input.from(rows.first);
    let row_totals = rows.input.totals_from(rows.first);
    let row_codes = rows.words.map_or(row_codes.as_ptr().cast::<u8>(), |words| words.as_ptr().cast());
    let mut codes = Bytewise::EMPTY;
    let mut ahead = read::Ahead::new(panel, layout, ahead);
    results.fill([0.0; PANEL]);
    let (whole, single) = results.as_chunks_mut::<ROWS>();
    for group in 0..groups {
        // SAFETY: the caller guarantees this; the rows and the panel have this group.
        unsafe {
            ahead.prefetch();
            let scales = read::scales(panel, layout, scales, group);
            let row = |row: usize| {
                let at = row * groups + group;
                Row {
                    codes: row_codes.add(at * ROW_BYTES),
                    scale: row_scales.as_ptr().add(at).read(),
                    sum: row_sums.as_ptr().add(at).read(),
                    totals: row_totals.as_ptr().add(at).read(),
                }
            };
            if !whole.is_empty() {
                codes.fill::<C>(panel, layout, group);
            }
            for (index, results) in whole.iter_mut().enumerate() {
                let first = index * ROWS;
                let rows: [Row; ROWS] = [row(first), row(first + 1)];
                add_group::<C, M, ROWS>(&codes, &scales, &rows, results);
            }
            for (index, result) in single.iter_mut().enumerate() {
                let rows = [row(whole.len() * ROWS + index)];
                let stored = Stored { panel, layout, group, codes: PhantomData::<C> };
                add_group::<C, M, 1>(&stored, &scales, &rows, std::array::from_mut(result));
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
unsafe fn add_group<C: ReadCodes, M: Multiply, const N: usize>(
    codes: &impl Steps,
    scales: &GroupScales,
    rows: &[Row; N],
    results: &mut [[f32; PANEL]; N],
) {
    let mut addresses = [std::ptr::null(); N];
    for (address, row) in addresses.iter_mut().zip(rows) {
        *address = row.codes;
    }
    // SAFETY: the caller guarantees this; arrays of a panel have two registers.
    unsafe {
        if C::PAIRED {
            if let Some(pair) = &scales.pair {
                add_half::<M, 0, N>(codes, pair[0], addresses, rows, results);
                add_half::<M, 1, N>(codes, pair[1], addresses, rows, results);
            }
            return;
        }
        let dots = match &scales.factors {
            None => M::dots(codes, addresses, 0..STEPS),
            Some(factors) => {
                let mut dots = [[_mm256_setzero_si256(); N]; 2];
                for (part, factors) in factors.iter().enumerate() {
                    let steps = part * STEPS / 2..(part + 1) * STEPS / 2;
                    let products = M::dots(codes, addresses, steps);
                    for r in 0..N {
                        let offset = _mm256_set1_epi32(HALVES_OFFSET * rows[r].totals[part]);
                        for h in 0..2 {
                            let product = _mm256_sub_epi32(products[h][r], offset);
                            let product = _mm256_mullo_epi32(product, factors[h]);
                            dots[h][r] = _mm256_add_epi32(dots[h][r], product);
                        }
                    }
                }
                dots
            }
        };
        for (h, dots) in dots.into_iter().enumerate() {
            for r in 0..N {
                let result = results[r].as_mut_ptr().add(h * LANES);
                let scale = _mm256_mul_ps(scales.scales[h], _mm256_set1_ps(rows[r].scale));
                let mut sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, _mm256_loadu_ps(result));
                if scales.factors.is_none() {
                    sum = _mm256_fmadd_ps(scales.minima[h], _mm256_set1_ps(rows[r].sum), sum);
                }
                _mm256_storeu_ps(result, sum);
            }
        }
    }
}

/// Adds the products of half a group, which has these scales.
#[inline(always)]
unsafe fn add_half<M: Multiply, const HALF: usize, const N: usize>(
    codes: &impl Steps,
    scales: [__m256; 2],
    addresses: [*const u8; N],
    rows: &[Row; N],
    results: &mut [[f32; PANEL]; N],
) {
    // SAFETY: the caller guarantees this; arrays of a panel have two registers.
    unsafe {
        let products = M::dots(codes, addresses, HALF * STEPS / 2..(HALF + 1) * STEPS / 2);
        for r in 0..N {
            let offset = _mm256_set1_epi32(i32::from(E2M1_OFFSET) * rows[r].totals[HALF]);
            for h in 0..2 {
                let result = results[r].as_mut_ptr().add(h * LANES);
                let scale = _mm256_mul_ps(scales[h], _mm256_set1_ps(rows[r].scale));
                let product = _mm256_cvtepi32_ps(_mm256_sub_epi32(products[h][r], offset));
                _mm256_storeu_ps(result, _mm256_fmadd_ps(product, scale, _mm256_loadu_ps(result)));
            }
        }
    }
}
