//! Integer products with AVX-512 VNNI.
//!
//! One register holds sixteen output rows, so nothing is added across lanes: an input is broadcast to all of them. A few rows are
//! multiplied with codes as they are read.

mod tile;

use std::arch::x86_64::*;

use super::outlying::outlying;
use super::pairs::{BLOCK_PANELS, Results, store};
use super::read::{
    E2m1, Eight, Five, Fixed, Four, Halves, Iq4, Packed, Pair, Power, ReadCodes, ReadScales, Signed, Six, Super, Two,
    Wide, Zero,
};
use super::walk::{GROUP_CODES, GROUP_SCALES, Quant};
use crate::memory::LINE;
use crate::rows::{GROUP, LOW_BITS};
use crate::weights::{Codes, E2M1_OFFSET, HALVES_OFFSET, Layout, PANEL, PanelKind, STEPS, Scales};

pub(super) use tile::{TILE_ROWS, Tile, multiply_tile};

/// Number of rows in a block: its sums with two panels and one step's operands fill the registers.
pub(super) const BLOCK_ROWS: usize = 4;

/// Calls a function with the types of a layout.
macro_rules! with_kind {
    ($kind:expr, $function:ident, ($($arg:expr),*)) => {
        match $kind {
            PanelKind::Quant(Codes::Four, Scales::Fixed(_)) => $function::<Four, Fixed>($($arg),*),
            PanelKind::Quant(Codes::Four, Scales::Two) => $function::<Four, Two>($($arg),*),
            PanelKind::Quant(Codes::Four, Scales::Super) => $function::<Four, Super>($($arg),*),
            PanelKind::Quant(Codes::Five, Scales::Fixed(_)) => $function::<Five, Fixed>($($arg),*),
            PanelKind::Quant(Codes::Five, Scales::Two) => $function::<Five, Two>($($arg),*),
            PanelKind::Quant(Codes::Five, Scales::Super) => $function::<Five, Super>($($arg),*),
            PanelKind::Quant(Codes::E2m1, Scales::Power) => $function::<E2m1, Power>($($arg),*),
            PanelKind::Quant(Codes::E2m1, Scales::Pair) => $function::<E2m1, Pair>($($arg),*),
            PanelKind::Quant(Codes::Iq4, Scales::Fixed(_)) => $function::<Iq4, Fixed>($($arg),*),
            PanelKind::Quant(Codes::Iq4, Scales::Signed) => $function::<Iq4, Signed>($($arg),*),
            PanelKind::Quant(Codes::Four, Scales::Zero) => $function::<Four, Zero>($($arg),*),
            PanelKind::Quant(Codes::Eight, Scales::Wide) => $function::<Eight, Wide>($($arg),*),
            PanelKind::Quant(Codes::Six, Scales::Halves) => $function::<Six, Halves>($($arg),*),
            PanelKind::Quant(Codes::Eight, Scales::Fixed(_)) => $function::<Eight, Fixed>($($arg),*),
            other => unreachable!("{other:?} is no kind of integers"),
        }
    };
}

use with_kind;

/// Multiplies up to [`BLOCK_ROWS`] rows, from `first` on, with panels in their stored layout. `ahead` prefetches the panels that
/// follow.
///
/// # Safety
/// AVX-512 with VNNI must be available, the panels must have this layout, and the input must have room for a block of
/// rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn packed(
    panels: [&[u8]; BLOCK_PANELS],
    layout: &Layout,
    input: &Quant<'_>,
    (first, count): (usize, usize),
    ahead: bool,
    results: &mut Results<BLOCK_ROWS>,
) {
    assert_eq!(input.cols, layout.cols);
    // SAFETY: the caller guarantees this.
    unsafe { with_kind!(layout.kind, packed_as, (panels, layout, input, (first, count), ahead, results)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn packed_as<C: ReadCodes, S: ReadScales>(
    panels: [&[u8]; BLOCK_PANELS],
    layout: &Layout,
    input: &Quant<'_>,
    (first, count): (usize, usize),
    ahead: bool,
    results: &mut Results<BLOCK_ROWS>,
) {
    // Written out: with link-time optimisation `map` has stayed a call here, and its result went through memory.
    let panels = [Packed::<C, S>::new(panels[0], layout), Packed::new(panels[1], layout)];
    // SAFETY: the caller guarantees this.
    unsafe {
        match (count, input.coarse) {
            // Reading weights takes as long as multiplying both parts.
            (1, _) => multiply::<_, _, 1, false>(panels, input, first, ahead, results),
            (2, false) => multiply::<_, _, 2, false>(panels, input, first, ahead, results),
            (_, false) => multiply::<_, _, BLOCK_ROWS, false>(panels, input, first, ahead, results),
            (2, true) => multiply::<_, _, 2, true>(panels, input, first, ahead, results),
            (_, true) => multiply::<_, _, BLOCK_ROWS, true>(panels, input, first, ahead, results),
        }
    }
}

/// Multiplies `ROWS` rows, from `first` on, with panels. With `COARSE` most groups have no high parts, which are not multiplied
/// then.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn multiply<C: ReadCodes, S: ReadScales, const ROWS: usize, const COARSE: bool>(
    panels: [Packed<'_, C, S>; BLOCK_PANELS],
    input: &Quant<'_>,
    first: usize,
    ahead: bool,
    results: &mut Results<BLOCK_ROWS>,
) {
    let groups = input.cols / GROUP;
    let (codes, scales, sums_of) = input.from(first);
    assert!(codes.len() >= ROWS * 2 * input.cols && scales.len() >= ROWS * groups && sums_of.len() >= ROWS * groups);
    let (totals, steps) = (input.totals_from(first), input.steps_from(first));
    assert!(totals.len() >= ROWS * groups && steps.len() >= ROWS * groups);
    let mut sums = [[_mm512_setzero_ps(); ROWS]; BLOCK_PANELS];
    for group in 0..groups {
        if ahead {
            panels.iter().for_each(|panel| panel.prefetch(group));
        }
        // SAFETY: the caller guarantees that the panels and the rows have these groups.
        unsafe {
            let (rows, stride) = (codes.as_ptr().add(group * 2 * GROUP), 2 * input.cols);
            let both = !COARSE || outlying::<ROWS>(steps.as_ptr().add(group), groups) != 0;
            let totals = (totals.as_ptr().add(group), groups);
            if S::PAIRED {
                let scales = (scales.as_ptr().add(group), totals.0, groups);
                if both {
                    add_pair::<C, S, ROWS, true>(panels, rows, stride, group, scales, &mut sums);
                } else {
                    add_pair::<C, S, ROWS, false>(panels, rows, stride, group, scales, &mut sums);
                }
                continue;
            }
            let dots = match (S::HALVES, both) {
                (true, true) => dots_of_halves::<C, S, ROWS, true>(panels, rows, stride, group, totals),
                (true, false) => dots_of_halves::<C, S, ROWS, false>(panels, rows, stride, group, totals),
                (false, true) => dots::<C, S, ROWS, true>(panels, rows, stride, group),
                (false, false) => dots::<C, S, ROWS, false>(panels, rows, stride, group),
            };
            for p in 0..BLOCK_PANELS {
                let (scale, min) = panels[p].scales(group);
                for r in 0..ROWS {
                    let at = r * groups + group;
                    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(*scales.get_unchecked(at)));
                    sums[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[p][r]), scale, sums[p][r]);
                    if !S::HALVES {
                        let sum = _mm512_set1_ps(*sums_of.get_unchecked(at));
                        sums[p][r] = _mm512_fmadd_ps(min, sum, sums[p][r]);
                    }
                }
            }
        }
    }
    // SAFETY: the instruction set is available.
    unsafe { store(sums, 0, results) };
}

/// Adds the products of some steps of a group with the low parts and, with `BOTH`, the high parts. The steps are written out, with
/// constant indices, so that the arrays are kept in registers.
macro_rules! steps {
    ($panels:ident, $group:ident, $rows:ident, $stride:ident, $high:ident, $low:ident, $($step:literal)*) => {{$(
        for p in 0..BLOCK_PANELS {
            let codes = $panels[p].step($group, $step);
            let shifted = if C::NARROW && BOTH { _mm512_slli_epi16::<LOW_BITS>(codes) } else { codes };
            for r in 0..ROWS {
                let at = $rows.add(r * $stride).cast::<i32>();
                if BOTH {
                    let a = _mm512_set1_epi32(at.add($step).read_unaligned());
                    let sum = if C::NARROW { &mut $low[p][r] } else { &mut $high[p][r] };
                    *sum = _mm512_dpbusd_epi32(*sum, shifted, a);
                }
                let b = _mm512_set1_epi32(at.add(STEPS + $step).read_unaligned());
                $low[p][r] = _mm512_dpbusd_epi32($low[p][r], codes, b);
            }
        }
    )*}};
}

/// Returns the exact products of a group with the rows, whose codes are `stride` bytes apart.
#[inline(always)]
unsafe fn dots<C: ReadCodes, S: ReadScales, const ROWS: usize, const BOTH: bool>(
    panels: [Packed<'_, C, S>; BLOCK_PANELS],
    rows: *const i8,
    stride: usize,
    group: usize,
) -> [[__m512i; ROWS]; BLOCK_PANELS] {
    const { assert!(STEPS == 8) };
    // SAFETY: the caller guarantees this; a group of a row has STEPS words of each part.
    unsafe {
        let mut high = [[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS];
        let mut low = high;
        steps!(panels, group, rows, stride, high, low, 0 1 2 3 4 5 6 7);
        joined::<C, ROWS, BOTH>(high, low)
    }
}

/// Returns the same for halves with factors: the products of each half, minus the offset of its codes, times the
/// factor. `totals` of the rows' halves have the given stride.
#[inline(always)]
unsafe fn dots_of_halves<C: ReadCodes, S: ReadScales, const ROWS: usize, const BOTH: bool>(
    panels: [Packed<'_, C, S>; BLOCK_PANELS],
    rows: *const i8,
    stride: usize,
    group: usize,
    (totals, apart): (*const [i32; 2], usize),
) -> [[__m512i; ROWS]; BLOCK_PANELS] {
    // SAFETY: the caller guarantees the instruction set.
    let zeros = unsafe { [[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS] };
    let mut dots = zeros;
    macro_rules! half {
        ($half:literal, $($step:literal)*) => {
            let (mut high, mut low) = (zeros, zeros);
            steps!(panels, group, rows, stride, high, low, $($step)*);
            let products = joined::<C, ROWS, BOTH>(high, low);
            for p in 0..BLOCK_PANELS {
                let factor = panels[p].factors(group)[$half];
                for r in 0..ROWS {
                    let offset = _mm512_set1_epi32(HALVES_OFFSET * (*totals.add(r * apart))[$half]);
                    let product = _mm512_mullo_epi32(_mm512_sub_epi32(products[p][r], offset), factor);
                    dots[p][r] = _mm512_add_epi32(dots[p][r], product);
                }
            }
        };
    }
    // SAFETY: the caller guarantees this; a group of a row has STEPS words of each part, and a total for each half.
    unsafe {
        half!(0, 0 1 2 3);
        half!(1, 4 5 6 7);
    }
    dots
}

/// Adds the products of a group whose halves have scales. Those of the rows, and the totals of their halves, have the given
/// stride.
#[inline(always)]
unsafe fn add_pair<C: ReadCodes, S: ReadScales, const ROWS: usize, const BOTH: bool>(
    panels: [Packed<'_, C, S>; BLOCK_PANELS],
    rows: *const i8,
    stride: usize,
    group: usize,
    (scales, totals, apart): (*const f32, *const [i32; 2], usize),
    sums: &mut [[__m512; ROWS]; BLOCK_PANELS],
) {
    // SAFETY: the caller guarantees the instruction set.
    let (zeros, mut both) =
        unsafe { ([[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS], [[_mm512_setzero_ps(); ROWS]; BLOCK_PANELS]) };
    macro_rules! half {
        ($half:literal, $($step:literal)*) => {
            let (mut high, mut low) = (zeros, zeros);
            steps!(panels, group, rows, stride, high, low, $($step)*);
            let products = joined::<C, ROWS, BOTH>(high, low);
            for p in 0..BLOCK_PANELS {
                let scale = panels[p].pair(group)[$half];
                for r in 0..ROWS {
                    let offset = _mm512_set1_epi32(i32::from(E2M1_OFFSET) * (*totals.add(r * apart))[$half]);
                    let product = _mm512_cvtepi32_ps(_mm512_sub_epi32(products[p][r], offset));
                    both[p][r] = _mm512_fmadd_ps(product, scale, both[p][r]);
                }
            }
        };
    }
    // SAFETY: the caller guarantees this; a group of a row has STEPS words of each part, and a total for each half.
    unsafe {
        half!(0, 0 1 2 3);
        half!(1, 4 5 6 7);
        for p in 0..BLOCK_PANELS {
            for r in 0..ROWS {
                sums[p][r] = _mm512_fmadd_ps(both[p][r], _mm512_set1_ps(*scales.add(r * apart)), sums[p][r]);
            }
        }
    }
}

/// Joins the products of the high and the low parts that `steps!` added, unless one sum has both.
#[inline]
#[target_feature(enable = "avx512f")]
fn joined<C: ReadCodes, const ROWS: usize, const BOTH: bool>(
    mut high: [[__m512i; ROWS]; BLOCK_PANELS],
    low: [[__m512i; ROWS]; BLOCK_PANELS],
) -> [[__m512i; ROWS]; BLOCK_PANELS] {
    if C::NARROW || !BOTH {
        return low;
    }
    for p in 0..BLOCK_PANELS {
        for r in 0..ROWS {
            high[p][r] = _mm512_add_epi32(_mm512_slli_epi32::<LOW_BITS>(high[p][r]), low[p][r]);
        }
    }
    high
}

/// Converts codes to bytes and scales to f32. If there is room for twice as many codes, 4-bit codes times 16 are stored
/// before them, group by group.
///
/// # Safety
/// AVX-512 must be available, and the panel must have this layout.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn unpack(panel: &[u8], layout: &Layout, codes: &mut [u8], scales: &mut [f32]) {
    let groups = layout.groups();
    assert!(scales.len() >= groups * GROUP_SCALES);
    let (codes_len, codes) = (codes.len(), codes.as_mut_ptr());
    let scales = scales.as_mut_ptr();
    // SAFETY: the caller guarantees this; there is room for every group, as asserted.
    unsafe {
        if codes_len >= 2 * groups * GROUP_CODES {
            with_kind!(layout.kind, unpack_as, (panel, layout, codes, 2 * GROUP_CODES, scales));
        } else {
            assert!(codes_len >= groups * GROUP_CODES);
            with_kind!(layout.kind, unpack_as, (panel, layout, codes, GROUP_CODES, scales));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn unpack_as<C: ReadCodes, S: ReadScales>(
    panel: &[u8],
    layout: &Layout,
    codes: *mut u8,
    stride: usize,
    scales: *mut f32,
) {
    let panel = Packed::<C, S>::new(panel, layout);
    for group in 0..layout.groups() {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = codes.add(group * stride);
            let last = at.add(stride - GROUP_CODES);
            for step in 0..STEPS {
                let codes = panel.step(group, step);
                if stride > GROUP_CODES {
                    _mm512_storeu_si512(at.add(step * LINE).cast(), _mm512_slli_epi16::<{ LOW_BITS }>(codes));
                }
                _mm512_storeu_si512(last.add(step * LINE).cast(), codes);
            }
            let (scale, min) = panel.scales(group);
            _mm512_storeu_ps(scales.add(group * GROUP_SCALES), scale);
            _mm512_storeu_ps(scales.add(group * GROUP_SCALES + PANEL), min);
        }
    }
}
