//! The kernels in plain Rust, compiled for what every processor has and for AVX2.

use half::f16;

use super::{GROUP_CODES, GROUP_SCALES, Quant};
use crate::memory::LINE;
use crate::rows::{GROUP, LOW_BITS, fma};
use crate::weights::{Codes, Kind, Layout, PANEL, STEPS, Scales};

/// Codes to bytes, scales to f32.
pub(super) fn unpack(panel: &[u8], layout: &Layout, codes: &mut [u8], scales: &mut [f32]) {
    let Kind::Quant(codes_kind, scales_kind) = layout.kind else { unreachable!("only integers are unpacked") };
    let groups = codes.as_chunks_mut::<GROUP_CODES>().0.iter_mut().zip(scales.as_chunks_mut::<GROUP_SCALES>().0);
    for (group, (codes, scales)) in groups.enumerate() {
        unpack_codes(&panel[layout.codes_at(codes_kind, group)..], codes_kind, codes);
        if codes_kind == Codes::Five {
            let bits = &panel[layout.fifths_at(group)..][..LINE];
            for (i, code) in codes.iter_mut().enumerate() {
                *code |= (bits[i / 8] >> (i % 8) & 1) << 4;
            }
        }
        unpack_scales(panel, layout, scales_kind, group, scales);
    }
}

fn unpack_codes(packed: &[u8], kind: Codes, codes: &mut [u8; GROUP_CODES]) {
    match kind {
        Codes::Eight => codes.copy_from_slice(&packed[..GROUP_CODES]),
        Codes::Four | Codes::Five => {
            let (low, high) = codes.split_at_mut(GROUP_CODES / 2);
            for ((low, high), &byte) in low.iter_mut().zip(high).zip(packed) {
                (*low, *high) = (byte & 15, byte >> 4);
            }
        }
    }
}

fn unpack_scales(panel: &[u8], layout: &Layout, kind: Scales, group: usize, scales: &mut [f32; GROUP_SCALES]) {
    let half_at = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
    let at = layout.scales_at(kind, group);
    for row in 0..PANEL {
        let (scale, min) = match kind {
            Scales::Fixed(offset) => (half_at(at + 2 * row), offset * half_at(at + 2 * row)),
            Scales::Two => (half_at(at + 2 * row), half_at(at + 2 * (PANEL + row))),
            Scales::Super => {
                let supers = layout.supers_at(group);
                let (scale, min) = (f32::from(panel[at + row]), f32::from(panel[at + PANEL + row]));
                (half_at(supers + 2 * row) * scale, -half_at(supers + 2 * (PANEL + row)) * min)
            }
        };
        (scales[row], scales[PANEL + row]) = (scale, min);
    }
}

/// Rows from `first` on times an unpacked panel.
#[inline(always)]
pub(super) fn multiply_integers<const FMA: bool>(
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
            // Numbers of 16 bits, so that two products are one instruction.
            let a: [i16; GROUP] = std::array::from_fn(|k| (i16::from(a[k]) << LOW_BITS) + i16::from(a[GROUP + k]));
            let mut dots = [0i32; PANEL];
            for step in 0..STEPS {
                for (lane, dot) in dots.iter_mut().enumerate() {
                    for i in 0..4 {
                        *dot += i32::from(codes[(step * PANEL + lane) * 4 + i]) * i32::from(a[step * 4 + i]);
                    }
                }
            }
            for lane in 0..PANEL {
                let scaled = fma::<FMA>(dots[lane] as f32, scales[lane] * a_scale, sums[lane]);
                sums[lane] = fma::<FMA>(scales[PANEL + lane], a_sum, scaled);
            }
        }
        *result = sums;
    }
}

/// Up to as many rows as there are results times a panel of f32, f16 or bf16.
#[inline(always)]
pub(super) fn multiply_dense<const FMA: bool>(kind: Kind, panel: &[u8], x: &[&[f32]], results: &mut [[f32; PANEL]]) {
    for (x, result) in x.iter().zip(results) {
        let mut sums = [0.0; PANEL];
        for (k, &x) in x.iter().enumerate() {
            for (lane, sum) in sums.iter_mut().enumerate() {
                *sum = fma::<FMA>(element(kind, panel, k, lane), x, *sum);
            }
        }
        *result = sums;
    }
}

/// Input `k` of a row of a panel.
#[inline(always)]
fn element(kind: Kind, panel: &[u8], k: usize, lane: usize) -> f32 {
    let half_at = |index: usize| [panel[2 * index], panel[2 * index + 1]];
    match kind {
        Kind::F32 => {
            let at = 4 * (k * PANEL + lane);
            f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
        }
        Kind::F16 => f16::from_le_bytes(half_at(k * PANEL + lane)).to_f32(),
        Kind::Bf16 => {
            let bits = u16::from_le_bytes(half_at((k / 2 * PANEL + lane) * 2 + k % 2));
            f32::from_bits(u32::from(bits) << 16)
        }
        Kind::Quant(..) => unreachable!("integers are no plain elements"),
    }
}

/// One row of a panel that is no integers.
pub(super) fn read_dense(kind: Kind, panel: &[u8], lane: usize, out: &mut [f32]) {
    for (k, out) in out.iter_mut().enumerate() {
        *out = element(kind, panel, k, lane);
    }
}
