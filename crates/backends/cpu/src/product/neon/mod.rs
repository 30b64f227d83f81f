//! Products with NEON: integers with or without dot products and matrix products, and floating-point numbers.
//!
//! One register holds four output rows, so nothing is added across lanes except pairs without dot products. A single row
//! is multiplied with codes as they are read. For more rows, a group of a panel is unpacked to bytes in the first-level
//! cache first. All sums within a group are exact, so that a row's bits are those of every other kernel.

pub(crate) mod bf16;
mod dense;
mod multiply;
mod read;

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

use super::output::Output;
use super::walk::{Quant, Range, Tile};
use crate::Isa;
use crate::activation::TILE;
use crate::rows::GROUP;
use crate::weights::{Codes, E2M1_OFFSET, HALVES_OFFSET, Layout, PANEL, PanelKind, Panels, Part};
pub(super) use dense::dense;
use multiply::{Bytes, Dots, Fours, Inputs, Matrices, Multiply};
use read::{Bytewise, E2m1, Eight, Five, Four, GroupScales, Iq4, REGISTERS, ReadCodes, Six, Steps, Stored};

/// Number of output rows in a register.
const LANES: usize = 4;

/// Number of rows that are multiplied at once: their sums, and a step's codes and inputs, fill the registers.
const ROWS: usize = 2;

/// Size of a group of a row in bytes: high and low parts.
const ROW_BYTES: usize = 2 * GROUP;

/// Multiplies any number of rows with panels of integers, which are unpacked group by group for each tile of rows.
///
/// # Safety
/// The instruction set must be available, and be NEON or one that includes it.
pub(super) unsafe fn integers(
    isa: Isa,
    part: &Part,
    panels: Range,
    input: Quant<'_>,
    rows: Range,
    output: &Output<'_>,
) {
    let layout = &part.layout;
    let mut tile = Tile([[0.0; PANEL]; TILE]);
    for first in rows.clone().step_by(TILE) {
        let count = (rows.end - first).min(TILE);
        let tile_rows = TileRows::new(layout, input, (first, count));
        let results = &mut tile.0[..count];
        for panel in panels.clone() {
            output.prefetch(first..first + count, panel..panel + 1);
            // SAFETY: the caller guarantees this; the panel has this layout.
            unsafe {
                match isa {
                    Isa::I8mm | Isa::I8mmBf16 => multiply_i8mm(part.panel(panel), layout, tile_rows, results),
                    Isa::Dotprod => multiply_dotprod(part.panel(panel), layout, tile_rows, results),
                    _ => multiply(part.panel(panel), layout, tile_rows, results),
                }
            }
            output.store(first, panel, results);
        }
    }
}

/// Multiplies rows in bf16 with panels of bf16.
///
/// # Safety
/// NEON with bf16 must be available.
pub(super) unsafe fn bf16_rows(
    weights: Panels<'_>,
    panels: Range,
    (input, stride): (&[u16], usize),
    rows: Range,
    output: &Output<'_>,
) {
    let cols = weights.layout.cols;
    let mut results = [[0.0; PANEL]; bf16::ROWS];
    for panel in panels {
        for first in rows.clone().step_by(bf16::ROWS) {
            let results = &mut results[..(rows.end - first).min(bf16::ROWS)];
            // SAFETY: the caller guarantees this.
            unsafe { bf16::multiply(weights.panel(panel), cols, (&input[first * stride..], stride), results) };
            output.store(first, panel, results);
        }
    }
}

/// Rows of a tile for one panel after the other.
#[derive(Clone, Copy)]
struct TileRows<'a> {
    input: Quant<'a>,
    first: usize,
    count: usize,
}

impl<'a> TileRows<'a> {
    /// Returns `count` rows from `first` on, at most [`TILE`].
    fn new(layout: &Layout, input: Quant<'a>, (first, count): (usize, usize)) -> Self {
        assert!(count <= TILE && input.cols == layout.cols);
        Self { input, first, count }
    }
}

/// Chooses the kernel for a layout and the precision of the rows. `$one` multiplies a single row, `$two` a pair.
macro_rules! tiles {
    ($panel:ident, $layout:ident, $rows:ident, $results:ident, |$codes:ident, $coarse:ident| $one:ty, $two:ty) => {{
        macro_rules! tile {
            ($type:ty) => {{
                type $codes = $type;
                if $rows.input.coarse {
                    const $coarse: bool = true;
                    tile::<$codes, $one, $two>($panel, $layout, $rows, $results)
                } else {
                    const $coarse: bool = false;
                    tile::<$codes, $one, $two>($panel, $layout, $rows, $results)
                }
            }};
        }
        match $layout.kind {
            PanelKind::Quant(Codes::Four, _) => tile!(Four),
            PanelKind::Quant(Codes::Five, _) => tile!(Five),
            PanelKind::Quant(Codes::E2m1, _) => tile!(E2m1),
            PanelKind::Quant(Codes::Iq4, _) => tile!(Iq4),
            PanelKind::Quant(Codes::Six, _) => tile!(Six),
            PanelKind::Quant(Codes::Eight, _) => tile!(Eight),
            other => unreachable!("{other:?} is no kind of integers"),
        }
    }};
}

/// Multiplies the rows of a tile with a panel in its stored layout.
///
/// # Safety
/// NEON must be available, and the panel must have this layout.
#[target_feature(enable = "neon")]
unsafe fn multiply(panel: &[u8], layout: &Layout, rows: TileRows<'_>, results: &mut [[f32; PANEL]]) {
    // SAFETY: the caller guarantees this.
    unsafe { tiles!(panel, layout, rows, results, |C, COARSE| Bytes<C, COARSE>, Bytes<C, COARSE>) }
}

/// [`multiply`] with dot products.
///
/// # Safety
/// NEON and its dot products must be available, and the panel must have this layout.
#[target_feature(enable = "neon,dotprod")]
unsafe fn multiply_dotprod(panel: &[u8], layout: &Layout, rows: TileRows<'_>, results: &mut [[f32; PANEL]]) {
    // SAFETY: the caller guarantees this.
    unsafe { tiles!(panel, layout, rows, results, |C, COARSE| Fours<COARSE>, Fours<COARSE>) }
}

/// [`multiply`] with dot products for a single row and matrix products for pairs. For a single row, bringing its codes into
/// the order of matrix products would take as many instructions as it saves.
///
/// # Safety
/// NEON, its dot products and its matrix products must be available, and the panel must have this layout.
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn multiply_i8mm(panel: &[u8], layout: &Layout, rows: TileRows<'_>, results: &mut [[f32; PANEL]]) {
    // SAFETY: the caller guarantees this.
    unsafe { tiles!(panel, layout, rows, results, |C, COARSE| Fours<COARSE>, Matrices<COARSE>) }
}

#[inline(always)]
unsafe fn tile<C: ReadCodes, One: Multiply, Two: Multiply>(
    panel: &[u8],
    layout: &Layout,
    rows: TileRows<'_>,
    results: &mut [[f32; PANEL]],
) {
    assert!(panel.len() >= layout.bytes && results.len() == rows.count);
    let PanelKind::Quant(_, scales) = layout.kind else { unreachable!("chosen by the kind") };
    let (panel, groups) = (panel.as_ptr(), layout.groups());
    let (row_codes, row_scales, row_sums) = rows.input.from(rows.first);
    let (row_totals, row_steps) = (rows.input.totals_from(rows.first), rows.input.steps_from(rows.first));
    let mut codes = Bytewise::EMPTY;
    results.fill([0.0; PANEL]);
    let (whole, single) = results.as_chunks_mut::<ROWS>();
    for group in 0..groups {
        // SAFETY: the caller guarantees this; the rows and the panel have this group.
        unsafe {
            let scales = read::scales(panel, layout, scales, group);
            let row = |row: usize| {
                let at = row * groups + group;
                Row {
                    codes: row_codes.as_ptr().add(at * ROW_BYTES),
                    scale: row_scales.as_ptr().add(at).read(),
                    sum: row_sums.as_ptr().add(at).read(),
                    totals: row_totals.as_ptr().add(at).read(),
                    steps: row_steps.as_ptr().add(at).read(),
                }
            };
            if !whole.is_empty() {
                codes.fill::<C, Two::Order>(panel, layout, group);
            }
            for (index, results) in whole.iter_mut().enumerate() {
                let first = index * ROWS;
                let rows: [Row; ROWS] = [row(first), row(first + 1)];
                add_group::<C, Two, ROWS>(&codes, &scales, &rows, results);
            }
            if let Some(result) = single.first_mut() {
                let rows = [row(whole.len() * ROWS)];
                let stored = Stored { panel, layout, group, codes: PhantomData::<C> };
                add_group::<C, One, 1>(&stored, &scales, &rows, std::array::from_mut(result));
            }
        }
    }
}

/// A group of a row.
#[derive(Clone, Copy)]
struct Row {
    codes: *const i8,
    scale: f32,
    sum: f32,
    /// Sums of the codes of the halves.
    totals: [i32; 2],
    /// The steps that have high parts, as bits.
    steps: u8,
}

/// Adds the products of a group to the results.
#[inline(always)]
unsafe fn add_group<C: ReadCodes, M: Multiply, const N: usize>(
    codes: &impl Steps,
    scales: &GroupScales,
    rows: &[Row; N],
    results: &mut [[f32; PANEL]; N],
) {
    let mut inputs = Inputs { rows: [std::ptr::null(); N], both: false };
    for (address, row) in inputs.rows.iter_mut().zip(rows) {
        *address = row.codes;
        inputs.both |= row.steps != 0;
    }
    // SAFETY: the caller guarantees this; arrays of a panel have four registers.
    unsafe {
        if let Some(pair) = &scales.pair {
            let mut both = [[vdupq_n_f32(0.0); N]; REGISTERS];
            add_scaled_half::<C, M, 0, N>(codes, pair[0], rows, inputs, &mut both);
            add_scaled_half::<C, M, 1, N>(codes, pair[1], rows, inputs, &mut both);
            for (q, both) in both.into_iter().enumerate() {
                for r in 0..N {
                    let result = results[r].as_mut_ptr().add(q * LANES);
                    vst1q_f32(result, vfmaq_n_f32(vld1q_f32(result), both[r], rows[r].scale));
                }
            }
            return;
        }
        let dots = match &scales.factors {
            None => {
                let mut dots = M::dots(codes, inputs, 0..2);
                if C::OFFSET != 0 {
                    for r in 0..N {
                        let offset = vdupq_n_s32(C::OFFSET * (rows[r].totals[0] + rows[r].totals[1]));
                        for dots in &mut dots {
                            dots[r] = vaddq_s32(dots[r], offset);
                        }
                    }
                }
                dots
            }
            Some(factors) => {
                let mut dots: Dots<N> = [[vdupq_n_s32(0); N]; REGISTERS];
                add_half::<C, M, 0, N>(codes, factors[0], rows, inputs, &mut dots);
                add_half::<C, M, 1, N>(codes, factors[1], rows, inputs, &mut dots);
                dots
            }
        };
        for (q, dots) in dots.into_iter().enumerate() {
            for r in 0..N {
                let result = results[r].as_mut_ptr().add(q * LANES);
                let scale = vmulq_n_f32(scales.scales[q], rows[r].scale);
                let mut sum = vfmaq_f32(vld1q_f32(result), vcvtq_f32_s32(dots[r]), scale);
                if scales.factors.is_none() {
                    sum = vfmaq_n_f32(sum, scales.minima[q], rows[r].sum);
                }
                vst1q_f32(result, sum);
            }
        }
    }
}

/// Adds the products of half a group times its factors.
#[inline(always)]
unsafe fn add_half<C: ReadCodes, M: Multiply, const HALF: usize, const N: usize>(
    codes: &impl Steps,
    factors: [int32x4_t; REGISTERS],
    rows: &[Row; N],
    inputs: Inputs<N>,
    dots: &mut Dots<N>,
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        let products = M::dots(codes, inputs, HALF..HALF + 1);
        for r in 0..N {
            let offset = vdupq_n_s32((C::OFFSET - HALVES_OFFSET) * rows[r].totals[HALF]);
            for q in 0..REGISTERS {
                let product = vaddq_s32(products[q][r], offset);
                dots[q][r] = vmlaq_s32(dots[q][r], product, factors[q]);
            }
        }
    }
}

/// Adds the products of half a group times its scales.
#[inline(always)]
unsafe fn add_scaled_half<C: ReadCodes, M: Multiply, const HALF: usize, const N: usize>(
    codes: &impl Steps,
    scales: [float32x4_t; REGISTERS],
    rows: &[Row; N],
    inputs: Inputs<N>,
    both: &mut [[float32x4_t; N]; REGISTERS],
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        let products = M::dots(codes, inputs, HALF..HALF + 1);
        for r in 0..N {
            let offset = vdupq_n_s32((C::OFFSET - i32::from(E2M1_OFFSET)) * rows[r].totals[HALF]);
            for q in 0..REGISTERS {
                let product = vcvtq_f32_s32(vaddq_s32(products[q][r], offset));
                both[q][r] = vfmaq_f32(both[q][r], product, scales[q]);
            }
        }
    }
}

/// Converts f16. The intrinsic is not stable in the oldest supported version of Rust.
#[inline]
#[target_feature(enable = "neon")]
fn widened(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the instruction only computes with its registers.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}
