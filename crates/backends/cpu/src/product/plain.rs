//! The kernels in plain Rust. Those of integers serve processors without a kernel of their own.

use half::f16;
use octavo_ops::{e4m3, e8m0_halved};

use super::walk::{GROUP_CODES, GROUP_SCALES, Quant};
use crate::memory::LINE;
use crate::rows::{GROUP, LOW_BITS, fma};
use crate::weights::{
    Codes, E2M1_CODES, E2M1_OFFSET, E4M3_OVER_F16, HALVES_OFFSET, IQ4_CODES, IQ4_OFFSET, Layout, PANEL, PanelKind,
    STEPS, Scales,
};

/// Converts codes to bytes and scales to f32.
pub(super) fn unpack(panel: &[u8], layout: &Layout, codes: &mut [u8], scales: &mut [f32]) {
    let PanelKind::Quant(codes_kind, scales_kind) = layout.kind else { unreachable!("only integers are unpacked") };
    let groups = codes.as_chunks_mut::<GROUP_CODES>().0.iter_mut().zip(scales.as_chunks_mut::<GROUP_SCALES>().0);
    for (group, (codes, scales)) in groups.enumerate() {
        unpack_codes(panel, layout, codes_kind, group, codes);
        unpack_scales(panel, layout, scales_kind, group, scales);
    }
}

fn unpack_codes(panel: &[u8], layout: &Layout, kind: Codes, group: usize, codes: &mut [u8; GROUP_CODES]) {
    let packed = &panel[layout.codes_at(kind, group)..];
    match kind {
        Codes::Eight => codes.copy_from_slice(&packed[..GROUP_CODES]),
        Codes::Four | Codes::Five | Codes::Six | Codes::E2m1 | Codes::Iq4 => {
            let (low, high) = codes.split_at_mut(GROUP_CODES / 2);
            for ((low, high), &byte) in low.iter_mut().zip(high).zip(packed) {
                (*low, *high) = (byte & 15, byte >> 4);
            }
        }
    }
    let uppers = &panel[layout.uppers_at(kind, group)..];
    match kind {
        Codes::Four | Codes::Eight => {}
        Codes::E2m1 => codes.iter_mut().for_each(|code| *code = E2M1_CODES[usize::from(*code)]),
        Codes::Iq4 => codes.iter_mut().for_each(|code| *code = IQ4_CODES[usize::from(*code)]),
        Codes::Five => {
            for (i, code) in codes.iter_mut().enumerate() {
                *code |= (uppers[i / 8] >> (i % 8) & 1) << 4;
            }
        }
        Codes::Six => {
            for (step, codes) in codes.as_chunks_mut::<LINE>().0.iter_mut().enumerate() {
                let uppers = &uppers[step % 2 * LINE..][..LINE];
                for (code, upper) in codes.iter_mut().zip(uppers) {
                    *code |= (upper >> (step / 2 * 2) & 3) << 4;
                }
            }
        }
    }
}

fn unpack_scales(panel: &[u8], layout: &Layout, kind: Scales, group: usize, scales: &mut [f32; GROUP_SCALES]) {
    for row in 0..PANEL {
        (scales[row], scales[PANEL + row]) = scale_at(panel, layout, kind, group, row);
    }
}

/// Returns scale and minimum of a row in a group.
fn scale_at(panel: &[u8], layout: &Layout, kind: Scales, group: usize, row: usize) -> (f32, f32) {
    let half_at = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
    let at = layout.scales_at(kind, group);
    match kind {
        Scales::Fixed(offset) => (half_at(at + 2 * row), offset * half_at(at + 2 * row)),
        Scales::Two => (half_at(at + 2 * row), half_at(at + 2 * (PANEL + row))),
        Scales::Power => {
            let scale = e8m0_halved(panel[at + row]);
            (scale, -f32::from(E2M1_OFFSET) * scale)
        }
        Scales::Signed => {
            let scale = half_at(layout.supers_at(kind, group) + 2 * row) * f32::from(panel[at + row] as i8);
            (scale, -f32::from(IQ4_OFFSET) * scale)
        }
        Scales::Zero => {
            let scale = half_at(at + 2 * row);
            (scale, -f32::from(panel[at + 2 * PANEL + row]) * scale)
        }
        Scales::Wide => {
            let scale: [u8; 4] = std::array::from_fn(|i| panel[at + 4 * row + i]);
            let scale = f32::from_le_bytes(scale);
            (scale, -f32::from(panel[at + 4 * PANEL + row]) * scale)
        }
        Scales::Halves | Scales::Pair => unreachable!("such a group has two"),
        Scales::Super => {
            let supers = layout.supers_at(kind, group);
            let (scale, min) = (f32::from(panel[at + row]), f32::from(panel[at + PANEL + row]));
            (half_at(supers + 2 * row) * scale, -half_at(supers + 2 * (PANEL + row)) * min)
        }
    }
}

/// Joins the two parts of a group's codes to 16-bit numbers, of which one instruction multiplies two.
#[inline(always)]
fn joined(codes: &[i8; 2 * GROUP]) -> [i16; GROUP] {
    std::array::from_fn(|k| (i16::from(codes[k]) << LOW_BITS) + i16::from(codes[GROUP + k]))
}

/// Multiplies rows from `first` on with an unpacked panel.
pub(super) fn multiply_integers(
    codes: &[u8],
    scales: &[f32],
    input: &Quant<'_>,
    first: usize,
    tile: &mut [[f32; PANEL]],
) {
    for (row, result) in (first..).zip(tile) {
        let a = input.row(row);
        let a = a.codes.iter().zip(a.scales).zip(a.sums);
        let groups = codes.as_chunks::<GROUP_CODES>().0.iter().zip(scales.as_chunks::<GROUP_SCALES>().0);
        let mut sums = [0.0f32; PANEL];
        for (((a, &a_scale), &a_sum), (codes, scales)) in a.zip(groups) {
            let a = joined(a);
            let mut dots = [0i32; PANEL];
            for step in 0..STEPS {
                for (lane, dot) in dots.iter_mut().enumerate() {
                    for i in 0..4 {
                        *dot += i32::from(codes[(step * PANEL + lane) * 4 + i]) * i32::from(a[step * 4 + i]);
                    }
                }
            }
            for lane in 0..PANEL {
                let scaled = fma::<false>(dots[lane] as f32, scales[lane] * a_scale, sums[lane]);
                sums[lane] = fma::<false>(scales[PANEL + lane], a_sum, scaled);
            }
        }
        *result = sums;
    }
}

/// Multiplies rows from `first` on with a panel in its stored layout whose groups have a scale for each half. The exact
/// products of the halves times their factors are exact too, so a group has one number as in other formats, and no
/// minimum.
pub(super) fn multiply_halves(
    panel: &[u8],
    layout: &Layout,
    input: &Quant<'_>,
    first: usize,
    tile: &mut [[f32; PANEL]],
) {
    tile.iter_mut().for_each(|result| *result = [0.0; PANEL]);
    let mut codes = [0; GROUP_CODES];
    for group in 0..layout.groups() {
        unpack_codes(panel, layout, Codes::Six, group, &mut codes);
        let (scales, factors) = halves(panel, layout, group);
        for (row, result) in (first..).zip(tile.iter_mut()) {
            let row = input.row(row);
            let (a, a_scale) = (joined(&row.codes[group]), row.scales[group]);
            let mut dots = [0i32; PANEL];
            for (half, (factors, total)) in factors.iter().zip(row.totals[group]).enumerate() {
                let sums = half_sums(&codes, &a, half, -HALVES_OFFSET * total);
                for ((dot, sum), factor) in dots.iter_mut().zip(sums).zip(factors) {
                    *dot += sum * factor;
                }
            }
            for lane in 0..PANEL {
                result[lane] = fma::<false>(dots[lane] as f32, scales[lane] * a_scale, result[lane]);
            }
        }
    }
}

/// Multiplies rows from `first` on with a panel in its stored layout whose groups have an e4m3 scale for each half. Both halves are
/// added before the row's scale is applied; the factors of the panel's rows are left to the caller.
pub(super) fn multiply_pairs(
    panel: &[u8],
    layout: &Layout,
    input: &Quant<'_>,
    first: usize,
    tile: &mut [[f32; PANEL]],
) {
    tile.iter_mut().for_each(|result| *result = [0.0; PANEL]);
    let mut codes = [0; GROUP_CODES];
    for group in 0..layout.groups() {
        unpack_codes(panel, layout, Codes::E2m1, group, &mut codes);
        for (row, result) in (first..).zip(tile.iter_mut()) {
            let row = input.row(row);
            let (a, a_scale) = (joined(&row.codes[group]), row.scales[group]);
            let mut both = [0.0; PANEL];
            for (half, total) in row.totals[group].into_iter().enumerate() {
                let sums = half_sums(&codes, &a, half, -i32::from(E2M1_OFFSET) * total);
                for lane in 0..PANEL {
                    let scale = half_scale(panel, layout, (group, half), lane);
                    both[lane] = fma::<false>(sums[lane] as f32, scale, both[lane]);
                }
            }
            for lane in 0..PANEL {
                result[lane] = fma::<false>(both[lane], a_scale, result[lane]);
            }
        }
    }
}

/// Returns the products of half a group of codes with a row of activations, added to `first`.
fn half_sums(codes: &[u8; GROUP_CODES], row: &[i16; GROUP], half: usize, first: i32) -> [i32; PANEL] {
    let mut sums = [first; PANEL];
    for step in half * STEPS / 2..(half + 1) * STEPS / 2 {
        for (lane, sum) in sums.iter_mut().enumerate() {
            for i in 0..4 {
                *sum += i32::from(codes[(step * PANEL + lane) * 4 + i]) * i32::from(row[step * 4 + i]);
            }
        }
    }
    sums
}

/// Returns the scale of a row in half a group, before the factor of the row.
fn half_scale(panel: &[u8], layout: &Layout, (group, half): (usize, usize), row: usize) -> f32 {
    e4m3(panel[layout.scales_at(Scales::Pair, group) + half * PANEL + row]) / E4M3_OVER_F16
}

/// Returns the super-block's scales and the factors of the halves of a group.
fn halves(panel: &[u8], layout: &Layout, group: usize) -> ([f32; PANEL], [[i32; PANEL]; 2]) {
    let (supers, at) = (layout.supers_at(Scales::Halves, group), layout.scales_at(Scales::Halves, group));
    let scales =
        std::array::from_fn(|row| f16::from_le_bytes([panel[supers + 2 * row], panel[supers + 2 * row + 1]]).to_f32());
    let factors = [0, 1].map(|half| std::array::from_fn(|row| i32::from(panel[at + half * PANEL + row] as i8)));
    (scales, factors)
}

/// Reads one row of a panel of integers.
pub(super) fn read_quant(panel: &[u8], layout: &Layout, lane: usize, out: &mut [f32]) {
    let PanelKind::Quant(codes, scales) = layout.kind else { unreachable!("only integers are in groups") };
    for (group, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
        if scales == Scales::Halves {
            let (scales, factors) = halves(panel, layout, group);
            for (k, out) in out.iter_mut().enumerate() {
                let code = i32::from(code_at(panel, layout, codes, group, k, lane)) - HALVES_OFFSET;
                *out = scales[lane] * (factors[k * 2 / GROUP][lane] * code) as f32;
            }
        } else if scales == Scales::Pair {
            let factor = layout.row_factors(panel)[lane];
            for (k, out) in out.iter_mut().enumerate() {
                let code = i32::from(code_at(panel, layout, codes, group, k, lane)) - i32::from(E2M1_OFFSET);
                *out = half_scale(panel, layout, (group, k * 2 / GROUP), lane) * factor * code as f32;
            }
        } else {
            let (scale, min) = scale_at(panel, layout, scales, group, lane);
            for (k, out) in out.iter_mut().enumerate() {
                *out = scale * f32::from(code_at(panel, layout, codes, group, k, lane)) + min;
            }
        }
    }
}

/// Returns a code of a group: that of input `k` of a row.
fn code_at(panel: &[u8], layout: &Layout, kind: Codes, group: usize, k: usize, row: usize) -> u8 {
    let (packed, uppers) = (&panel[layout.codes_at(kind, group)..], &panel[layout.uppers_at(kind, group)..]);
    let (step, place) = (k / 4, row * 4 + k % 4);
    let nibble = || packed[step % (STEPS / 2) * LINE + place] >> (step / (STEPS / 2) * 4) & 15;
    match kind {
        Codes::Four => nibble(),
        Codes::E2m1 => E2M1_CODES[usize::from(nibble())],
        Codes::Iq4 => IQ4_CODES[usize::from(nibble())],
        Codes::Five => nibble() | (uppers[step * 8 + place / 8] >> (place % 8) & 1) << 4,
        Codes::Six => nibble() | (uppers[step % 2 * LINE + place] >> (step / 2 * 2) & 3) << 4,
        Codes::Eight => packed[step * LINE + place],
    }
}

/// Multiplies up to as many rows as there are results with a panel of f32, f16 or bf16.
///
/// Each kind has a loop of its own, whose lengths the compiler knows: it is vectorised, and weights are read once for four
/// rows.
#[inline(always)]
pub(super) fn multiply_dense(kind: PanelKind, panel: &[u8], x: &[&[f32]], results: &mut [[f32; PANEL]]) {
    for (x, results) in x.chunks(4).zip(results.chunks_mut(4)) {
        match kind {
            PanelKind::F32 => dense_rows::<1, { 4 * PANEL }>(panel, x, results, |step| {
                let (lanes, _) = step.as_chunks::<4>();
                [std::array::from_fn(|lane| f32::from_le_bytes(lanes[lane]))]
            }),
            PanelKind::F16 => dense_rows::<1, { 2 * PANEL }>(panel, x, results, |step| {
                let (lanes, _) = step.as_chunks::<2>();
                [std::array::from_fn(|lane| f16::from_le_bytes(lanes[lane]).to_f32())]
            }),
            // Two inputs of a row are beside each other: the halves of 32 bits.
            PanelKind::Bf16 => dense_rows::<2, { 4 * PANEL }>(panel, x, results, |step| {
                let (lanes, _) = step.as_chunks::<4>();
                let pairs: [u32; PANEL] = std::array::from_fn(|lane| u32::from_le_bytes(lanes[lane]));
                [pairs.map(|pair| f32::from_bits(pair << 16)), pairs.map(|pair| f32::from_bits(pair & 0xffff_0000))]
            }),
            PanelKind::Quant(..) | PanelKind::Packed(_) | PanelKind::Short => {
                unreachable!("only plain elements are multiplied as they are")
            }
        }
    }
}

/// Multiplies one to four rows with a panel. A step of the panel has `BYTES` bytes, from which `weights` makes those of
/// `DEPTH` inputs.
#[inline(always)]
fn dense_rows<const DEPTH: usize, const BYTES: usize>(
    panel: &[u8],
    x: &[&[f32]],
    results: &mut [[f32; PANEL]],
    weights: impl Fn(&[u8; BYTES]) -> [[f32; PANEL]; DEPTH],
) {
    let (steps, _) = panel.as_chunks::<BYTES>();
    match (x, results) {
        (&[a, b, c, d], [p, q, r, s]) => {
            let sums = dense_sums::<4, DEPTH, BYTES>(steps, [a, b, c, d], weights);
            [*p, *q, *r, *s] = sums;
        }
        (x, results) => {
            for (x, result) in x.iter().zip(results) {
                [*result] = dense_sums::<1, DEPTH, BYTES>(steps, [x], &weights);
            }
        }
    }
}

#[inline(always)]
fn dense_sums<const ROWS: usize, const DEPTH: usize, const BYTES: usize>(
    steps: &[[u8; BYTES]],
    x: [&[f32]; ROWS],
    weights: impl Fn(&[u8; BYTES]) -> [[f32; PANEL]; DEPTH],
) -> [[f32; PANEL]; ROWS] {
    let mut sums = [[0.0; PANEL]; ROWS];
    let whole = x[0].len() / DEPTH;
    let inputs: [&[[f32; DEPTH]]; ROWS] = x.map(|x| &x.as_chunks().0[..whole]);
    for (at, step) in steps[..whole].iter().enumerate() {
        let weights = weights(step);
        for (sums, inputs) in sums.iter_mut().zip(&inputs) {
            for (weights, &x) in weights.iter().zip(&inputs[at]) {
                add_scaled(sums, weights, x);
            }
        }
    }
    // The inputs of a last step that is not whole.
    for (sums, x) in sums.iter_mut().zip(x) {
        let rest = &x[whole * DEPTH..];
        if let Some(step) = steps.get(whole).filter(|_| !rest.is_empty()) {
            weights(step).iter().zip(rest).for_each(|(weights, &x)| add_scaled(sums, weights, x));
        }
    }
    sums
}

/// Adds weights, times an input, to sums.
#[inline(always)]
fn add_scaled(sums: &mut [f32; PANEL], weights: &[f32; PANEL], x: f32) {
    for (sum, weight) in sums.iter_mut().zip(weights) {
        *sum = fma::<false>(*weight, x, *sum);
    }
}

/// Returns input `k` of a row of a panel.
#[inline(always)]
fn element(kind: PanelKind, panel: &[u8], k: usize, lane: usize) -> f32 {
    let half_at = |index: usize| [panel[2 * index], panel[2 * index + 1]];
    match kind {
        PanelKind::F32 => {
            let at = 4 * (k * PANEL + lane);
            f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
        }
        PanelKind::F16 => f16::from_le_bytes(half_at(k * PANEL + lane)).to_f32(),
        PanelKind::Bf16 => {
            let bits = u16::from_le_bytes(half_at((k / 2 * PANEL + lane) * 2 + k % 2));
            f32::from_bits(u32::from(bits) << 16)
        }
        PanelKind::Quant(..) | PanelKind::Packed(_) | PanelKind::Short => {
            unreachable!("only plain elements are read as they are")
        }
    }
}

/// Reads one row of a panel that is not integers.
pub(super) fn read_dense(kind: PanelKind, panel: &[u8], lane: usize, out: &mut [f32]) {
    for (k, out) in out.iter_mut().enumerate() {
        *out = element(kind, panel, k, lane);
    }
}
