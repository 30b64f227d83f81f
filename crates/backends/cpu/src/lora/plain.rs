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
    *sums = multiply::<FMA, _>(x, panel, |x| x);
}

#[inline(always)]
pub(super) fn multiply_bf16<const FMA: bool>(
    x: [&[f32]; ROWS],
    panel: &[[u16; LANES]],
    sums: &mut [[f32; LANES]; ROWS],
) {
    *sums = multiply::<FMA, _>(x, panel, |bits| bf16::from_bits(bits).to_f32());
}

/// Returns the sums over the rows of a panel. Even and odd rows are added apart, so that an addition waits for few others.
#[inline(always)]
fn multiply<const FMA: bool, T: Copy>(
    x: [&[f32]; ROWS],
    panel: &[[T; LANES]],
    widen: impl Fn(T) -> f32,
) -> [[f32; LANES]; ROWS] {
    let x = x.map(|row| &row[..panel.len()]);
    let mut sums = [[[0.0f32; LANES]; ROWS]; 2];
    let (pairs, last) = panel.as_chunks::<2>();
    for (pair, weights) in pairs.iter().enumerate() {
        for half in 0..2 {
            let weights = weights[half].map(&widen);
            for row in 0..ROWS {
                let x = x[row][2 * pair + half];
                for lane in 0..LANES {
                    sums[half][row][lane] = fma::<FMA>(x, weights[lane], sums[half][row][lane]);
                }
            }
        }
    }
    for weights in last {
        let weights = weights.map(&widen);
        for row in 0..ROWS {
            let x = x[row][panel.len() - 1];
            for lane in 0..LANES {
                sums[0][row][lane] = fma::<FMA>(x, weights[lane], sums[0][row][lane]);
            }
        }
    }
    let [mut even, odd] = sums;
    for (even, odd) in even.as_flattened_mut().iter_mut().zip(odd.as_flattened()) {
        *even += odd;
    }
    even
}
