//! The common definition of the kernels.

use half::bf16;

use super::ROWS;
use crate::rows::{LANES, fma};

#[inline(always)]
pub(super) fn multiply_f32<const FMA: bool>(
    x: [&[f32]; ROWS],
    panel: &[[f32; LANES]],
    sums: &mut [[f32; LANES]; ROWS],
) {
    *sums = multiply::<FMA, 1, _>(x, panel, |x| x);
}

#[inline(always)]
pub(super) fn multiply_bf16<const FMA: bool>(
    x: [&[f32]; ROWS],
    panel: &[[u16; LANES]],
    sums: &mut [[f32; LANES]; ROWS],
) {
    *sums = multiply::<FMA, 1, _>(x, panel, |bits| bf16::from_bits(bits).to_f32());
}

#[inline(always)]
pub(super) fn multiply_f32_apart<const FMA: bool>(
    x: [&[f32]; ROWS],
    panel: &[[f32; LANES]],
    sums: &mut [[f32; LANES]; ROWS],
) {
    *sums = multiply::<FMA, 2, _>(x, panel, |x| x);
}

#[inline(always)]
pub(super) fn multiply_bf16_apart<const FMA: bool>(
    x: [&[f32]; ROWS],
    panel: &[[u16; LANES]],
    sums: &mut [[f32; LANES]; ROWS],
) {
    *sums = multiply::<FMA, 2, _>(x, panel, |bits| bf16::from_bits(bits).to_f32());
}

/// Returns the sums over the rows of a panel. The rows are added in `CHAINS` sums by turns, so that an addition waits for as
/// many fewer others.
#[inline(always)]
fn multiply<const FMA: bool, const CHAINS: usize, T: Copy>(
    x: [&[f32]; ROWS],
    panel: &[[T; LANES]],
    widen: impl Fn(T) -> f32,
) -> [[f32; LANES]; ROWS] {
    let x = x.map(|row| &row[..panel.len()]);
    let mut sums = [[[0.0f32; LANES]; ROWS]; CHAINS];
    let (turns, last) = panel.as_chunks::<CHAINS>();
    for (turn, weights) in turns.iter().enumerate() {
        for chain in 0..CHAINS {
            add::<FMA>(x.map(|row| row[CHAINS * turn + chain]), weights[chain].map(&widen), &mut sums[chain]);
        }
    }
    for (chain, weights) in last.iter().enumerate() {
        let at = turns.len() * CHAINS + chain;
        add::<FMA>(x.map(|row| row[at]), weights.map(&widen), &mut sums[chain]);
    }
    let mut first = sums[0];
    for other in &sums[1..] {
        for (sum, more) in first.as_flattened_mut().iter_mut().zip(other.as_flattened()) {
            *sum += more;
        }
    }
    first
}

/// Adds a row of a panel times an element of each row.
#[inline(always)]
fn add<const FMA: bool>(x: [f32; ROWS], weights: [f32; LANES], sums: &mut [[f32; LANES]; ROWS]) {
    for (x, sums) in x.into_iter().zip(sums) {
        for (sum, weight) in sums.iter_mut().zip(weights) {
            *sum = fma::<FMA>(x, weight, *sum);
        }
    }
}
