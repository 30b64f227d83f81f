//! AVX-512 with VNNI.
//!
//! One register holds sixteen output rows, so nothing is ever added across lanes: an input is broadcast to all of them.

use std::arch::x86_64::*;

use super::{GROUP_CODES, GROUP_SCALES, PIECE_PANELS, Quant, SKINNY_ROWS};
use crate::activation::Quantised;
use crate::memory::LINE;
use crate::rows::LOW_BITS;
use crate::weights::{Codes, Kind, Layout, PANEL, STEPS, Scales};

/// How a group's codes are read.
trait ReadCodes {
    /// One register a step.
    ///
    /// # Safety
    /// AVX-512 F and BW must be available, and the panel must be one of this layout.
    unsafe fn read(panel: *const u8, layout: &Layout, group: usize) -> [__m512i; STEPS];
}

/// How a group's scales are read.
trait ReadScales {
    /// Scales and minima.
    ///
    /// # Safety
    /// As for [`ReadCodes::read`].
    unsafe fn read(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512);
}

struct Four;
struct Five;
struct Eight;
struct Fixed;
struct Two;
struct Super;

impl ReadCodes for Four {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn read(panel: *const u8, layout: &Layout, group: usize) -> [__m512i; STEPS] {
        // SAFETY: as the caller promises.
        unsafe { nibbles(panel.add(layout.codes_at(Codes::Four, group))) }
    }
}

impl ReadCodes for Five {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn read(panel: *const u8, layout: &Layout, group: usize) -> [__m512i; STEPS] {
        // SAFETY: as the caller promises.
        unsafe {
            let mut codes = nibbles(panel.add(layout.codes_at(Codes::Five, group)));
            let masks = panel.add(layout.fifths_at(group)).cast::<u64>();
            let fifth = _mm512_set1_epi8(16);
            for (step, codes) in codes.iter_mut().enumerate() {
                *codes = _mm512_mask_add_epi8(*codes, masks.add(step).read_unaligned(), *codes, fifth);
            }
            codes
        }
    }
}

impl ReadCodes for Eight {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn read(panel: *const u8, layout: &Layout, group: usize) -> [__m512i; STEPS] {
        // SAFETY: as the caller promises.
        unsafe {
            let codes = panel.add(layout.codes_at(Codes::Eight, group));
            std::array::from_fn(|step| line(codes.add(step * LINE)))
        }
    }
}

impl ReadScales for Fixed {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn read(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        let Kind::Quant(_, kind @ Scales::Fixed(offset)) = layout.kind else { unreachable!("chosen by the kind") };
        // SAFETY: as the caller promises.
        let scale = unsafe { halves(panel.add(layout.scales_at(kind, group))) };
        (scale, _mm512_mul_ps(scale, _mm512_set1_ps(offset)))
    }
}

impl ReadScales for Two {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn read(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: as the caller promises.
        unsafe {
            let at = panel.add(layout.scales_at(Scales::Two, group));
            (halves(at), halves(at.add(2 * PANEL)))
        }
    }
}

impl ReadScales for Super {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn read(panel: *const u8, layout: &Layout, group: usize) -> (__m512, __m512) {
        // SAFETY: as the caller promises.
        unsafe {
            let at = panel.add(layout.scales_at(Scales::Super, group));
            let supers = panel.add(layout.supers_at(group));
            let negative = _mm512_sub_ps(_mm512_setzero_ps(), halves(supers.add(2 * PANEL)));
            let scale = _mm512_mul_ps(halves(supers), bytes(at));
            (scale, _mm512_mul_ps(negative, bytes(at.add(PANEL))))
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn line(at: *const u8) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe { _mm512_loadu_si512(at.cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn nibbles(at: *const u8) -> [__m512i; STEPS] {
    let mask = _mm512_set1_epi8(15);
    // SAFETY: as the caller promises.
    let packed: [__m512i; STEPS / 2] = std::array::from_fn(|i| unsafe { line(at.add(i * LINE)) });
    std::array::from_fn(|step| {
        let packed = packed[step % (STEPS / 2)];
        let shifted = if step < STEPS / 2 { packed } else { _mm512_srli_epi16::<4>(packed) };
        _mm512_and_si512(shifted, mask)
    })
}

/// Sixteen f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Sixteen bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn bytes(at: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()))) }
}

/// Calls a function with the types of a layout.
macro_rules! with_kind {
    ($kind:expr, $function:ident, ($($arg:expr),*)) => {
        match $kind {
            Kind::Quant(Codes::Four, Scales::Fixed(_)) => $function::<Four, Fixed>($($arg),*),
            Kind::Quant(Codes::Four, Scales::Two) => $function::<Four, Two>($($arg),*),
            Kind::Quant(Codes::Four, Scales::Super) => $function::<Four, Super>($($arg),*),
            Kind::Quant(Codes::Five, Scales::Fixed(_)) => $function::<Five, Fixed>($($arg),*),
            Kind::Quant(Codes::Five, Scales::Two) => $function::<Five, Two>($($arg),*),
            Kind::Quant(Codes::Five, Scales::Super) => $function::<Five, Super>($($arg),*),
            Kind::Quant(Codes::Eight, Scales::Fixed(_)) => $function::<Eight, Fixed>($($arg),*),
            other => unreachable!("{other:?} is no kind of integers"),
        }
    };
}

/// A few rows, from `first` on, times a panel as it is stored.
///
/// # Safety
/// AVX-512 with VNNI must be available, and the panel must be one of this layout.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn skinny(
    panel: &[u8],
    layout: &Layout,
    input: &Quant<'_>,
    first: usize,
    results: &mut [[f32; PANEL]],
) {
    assert!(panel.len() >= layout.bytes && input.cols == layout.cols);
    // SAFETY: as the caller promises.
    unsafe { with_kind!(layout.kind, skinny_as, (panel, layout, input, first, results)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn skinny_as<C: ReadCodes, S: ReadScales>(
    panel: &[u8],
    layout: &Layout,
    input: &Quant<'_>,
    first: usize,
    results: &mut [[f32; PANEL]],
) {
    // SAFETY: as the caller promises.
    unsafe {
        match results.len() {
            1 => skinny_rows::<C, S, 1>(panel, layout, input, first, results),
            2 => skinny_rows::<C, S, 2>(panel, layout, input, first, results),
            3 => skinny_rows::<C, S, 3>(panel, layout, input, first, results),
            SKINNY_ROWS => skinny_rows::<C, S, SKINNY_ROWS>(panel, layout, input, first, results),
            count => unreachable!("{count} rows are not few"),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn skinny_rows<C: ReadCodes, S: ReadScales, const ROWS: usize>(
    panel: &[u8],
    layout: &Layout,
    input: &Quant<'_>,
    first: usize,
    results: &mut [[f32; PANEL]],
) {
    let rows: [_; ROWS] = std::array::from_fn(|i| input.row(first + i));
    let mut sums = [_mm512_setzero_ps(); ROWS];
    for group in 0..layout.groups() {
        // SAFETY: as the caller promises; rows have as many groups as the layout.
        unsafe {
            let codes = C::read(panel.as_ptr(), layout, group);
            let scales = S::read(panel.as_ptr(), layout, group);
            for (sum, row) in sums.iter_mut().zip(&rows) {
                *sum = add_group(*sum, &codes, scales, row, group);
            }
        }
    }
    for (result, sum) in results.iter_mut().zip(sums) {
        // SAFETY: a result has sixteen elements.
        unsafe { _mm512_storeu_ps(result.as_mut_ptr(), sum) };
    }
}

/// Adds a group's product with a row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_group(
    sum: __m512,
    codes: &[__m512i; STEPS],
    (scale, min): (__m512, __m512),
    row: &Quantised<'_>,
    group: usize,
) -> __m512 {
    let high = row.codes[group].as_ptr().cast::<i32>();
    let (mut high_dot, mut low_dot) = (_mm512_setzero_si512(), _mm512_setzero_si512());
    for (step, &codes) in codes.iter().enumerate() {
        // SAFETY: a group has STEPS times four codes, in each part.
        let [high, low] = unsafe { [step, STEPS + step].map(|at| _mm512_set1_epi32(high.add(at).read_unaligned())) };
        high_dot = _mm512_dpbusd_epi32(high_dot, codes, high);
        low_dot = _mm512_dpbusd_epi32(low_dot, codes, low);
    }
    let dot = _mm512_add_epi32(_mm512_slli_epi32::<LOW_BITS>(high_dot), low_dot);
    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(row.scales[group]));
    let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum);
    _mm512_fmadd_ps(min, _mm512_set1_ps(row.sums[group]), sum)
}

/// Codes to bytes, scales to f32. Into twice as many codes go those of 4 bits times 16 first, group by group.
///
/// # Safety
/// As for [`skinny`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn unpack(panel: &[u8], layout: &Layout, codes: &mut [u8], scales: &mut [f32]) {
    let groups = layout.groups();
    assert!(panel.len() >= layout.bytes && scales.len() >= groups * GROUP_SCALES);
    let (codes_len, codes) = (codes.len(), codes.as_mut_ptr());
    let scales = scales.as_mut_ptr();
    // SAFETY: as the caller promises; there is room for every group, as asserted.
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
    for group in 0..layout.groups() {
        // SAFETY: as the caller promises.
        unsafe {
            let at = codes.add(group * stride);
            let last = at.add(stride - GROUP_CODES);
            for (step, codes) in C::read(panel.as_ptr(), layout, group).into_iter().enumerate() {
                if stride > GROUP_CODES {
                    _mm512_storeu_si512(at.add(step * LINE).cast(), _mm512_slli_epi16::<{ LOW_BITS }>(codes));
                }
                _mm512_storeu_si512(last.add(step * LINE).cast(), codes);
            }
            let (scale, min) = S::read(panel.as_ptr(), layout, group);
            _mm512_storeu_ps(scales.add(group * GROUP_SCALES), scale);
            _mm512_storeu_ps(scales.add(group * GROUP_SCALES + PANEL), min);
        }
    }
}

/// A tile of rows, from `first` on, times an unpacked panel.
///
/// # Safety
/// AVX-512 with VNNI must be available.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn integers(
    codes: &[u8],
    scales: &[f32],
    input: &Quant<'_>,
    first: usize,
    tile: &mut [[f32; PANEL]],
) {
    const ROWS: usize = 4;
    for (index, results) in tile.chunks_mut(ROWS).enumerate() {
        let row = |i: usize| input.row(first + index * ROWS + i.min(results.len() - 1));
        let rows: [_; ROWS] = std::array::from_fn(row);
        let mut sums = [_mm512_setzero_ps(); ROWS];
        let groups = codes.as_chunks::<GROUP_CODES>().0.iter().zip(scales.as_chunks::<GROUP_SCALES>().0);
        for (group, (codes, scales)) in groups.enumerate() {
            // SAFETY: a group has STEPS lines of codes, sixteen scales and sixteen minima; rows have as many groups.
            unsafe {
                let codes: [__m512i; STEPS] = std::array::from_fn(|step| line(codes.as_ptr().add(step * LINE)));
                let scales = (_mm512_loadu_ps(scales.as_ptr()), _mm512_loadu_ps(scales.as_ptr().add(PANEL)));
                for (sum, row) in sums.iter_mut().zip(&rows) {
                    *sum = add_group(*sum, &codes, scales, row, group);
                }
            }
        }
        for (result, sum) in results.iter_mut().zip(sums) {
            // SAFETY: a result has sixteen elements.
            unsafe { _mm512_storeu_ps(result.as_mut_ptr(), sum) };
        }
    }
}

/// A few rows times a few panels of f32, f16 or bf16.
///
/// # Safety
/// AVX-512 must be available; every panel must hold as many inputs as the rows.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn dense<const ROWS: usize>(
    kind: Kind,
    panels: &[&[u8]; PIECE_PANELS],
    x: &[&[f32]],
    results: &mut [[[f32; PANEL]; ROWS]; PIECE_PANELS],
) {
    let panels = panels.map(<[u8]>::as_ptr);
    // SAFETY: as the caller promises.
    unsafe {
        match x {
            [a] => dense_rows(kind, panels, [a], results),
            [a, b] => dense_rows(kind, panels, [a, b], results),
            [a, b, c] => dense_rows(kind, panels, [a, b, c], results),
            [a, b, c, d] => dense_rows(kind, panels, [a, b, c, d], results),
            _ => unreachable!("{} rows are not few", x.len()),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn dense_rows<const M: usize, const ROWS: usize>(
    kind: Kind,
    panels: [*const u8; PIECE_PANELS],
    x: [&[f32]; M],
    results: &mut [[[f32; PANEL]; ROWS]; PIECE_PANELS],
) {
    let mut sums = [[_mm512_setzero_ps(); M]; PIECE_PANELS];
    let cols = x[0].len();
    // SAFETY: rows have `cols` elements, panels as many inputs of sixteen rows.
    unsafe {
        macro_rules! add {
            ($k:expr, |$panel:ident| $weights:expr) => {
                for (sums, &$panel) in sums.iter_mut().zip(&panels) {
                    let weights = $weights;
                    for (sum, x) in sums.iter_mut().zip(&x) {
                        *sum = _mm512_fmadd_ps(weights, _mm512_set1_ps(*x.get_unchecked($k)), *sum);
                    }
                }
            };
        }
        match kind {
            Kind::F32 => {
                for k in 0..cols {
                    add!(k, |panel| _mm512_loadu_ps(panel.cast::<f32>().add(k * PANEL)));
                }
            }
            Kind::F16 => {
                for k in 0..cols {
                    add!(k, |panel| halves(panel.add(k * 2 * PANEL)));
                }
            }
            Kind::Bf16 => {
                for pair in 0..cols / 2 {
                    add!(2 * pair, |panel| even(line(panel.add(pair * LINE))));
                    add!(2 * pair + 1, |panel| odd(line(panel.add(pair * LINE))));
                }
                if !cols.is_multiple_of(2) {
                    add!(cols - 1, |panel| even(line(panel.add(cols / 2 * LINE))));
                }
            }
            Kind::Quant(..) => unreachable!("integers are no plain elements"),
        }
    }
    for (results, sums) in results.iter_mut().zip(sums) {
        for (result, sum) in results.iter_mut().zip(sums) {
            // SAFETY: a result has sixteen elements.
            unsafe { _mm512_storeu_ps(result.as_mut_ptr(), sum) };
        }
    }
}

/// The even ones of 32 bf16, as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn even(pairs: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))
}

/// The odd ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn odd(pairs: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000u32 as i32)))
}
