//! The common definition of the kernels.

use super::ROWS;
use crate::rows::{LANES, fma};

#[inline(always)]
pub(super) fn multiply_f32<const FMA: bool>(
    x: &[&[f32]; ROWS],
    panel: &[[f32; LANES]],
    sums: &mut [[f32; LANES]; ROWS],
) {
    *sums = multiply::<FMA, f32>(*x, panel);
}

#[inline(always)]
pub(super) fn multiply_bf16<const FMA: bool>(
    x: &[&[f32]; ROWS],
    panel: &[[u16; LANES]],
    sums: &mut [[f32; LANES]; ROWS],
) {
    *sums = multiply::<FMA, u16>(*x, panel);
}

/// Numbers of a panel: f32, or the bits of bf16.
trait Number: Copy {
    fn widen(self) -> f32;
}

impl Number for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Number for u16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
}

/// Returns the sums over the rows of a panel.
#[inline(always)]
fn multiply<const FMA: bool, T: Number>(x: [&[f32]; ROWS], panel: &[[T; LANES]]) -> [[f32; LANES]; ROWS] {
    let x = x.map(|row| &row[..panel.len()]);
    let mut sums = [[0.0f32; LANES]; ROWS];
    for (at, weights) in panel.iter().enumerate() {
        add::<FMA, T>(x, at, weights, &mut sums);
    }
    sums
}

/// Adds a row of a panel times element `at` of each row. It has no closures, because the compiler does not inline every one of
/// them into functions of an instruction set.
#[inline(always)]
fn add<const FMA: bool, T: Number>(
    x: [&[f32]; ROWS],
    at: usize,
    weights: &[T; LANES],
    sums: &mut [[f32; LANES]; ROWS],
) {
    let mut wide = [0.0; LANES];
    for (wide, weight) in wide.iter_mut().zip(weights) {
        *wide = weight.widen();
    }
    for row in 0..ROWS {
        for (sum, weight) in sums[row].iter_mut().zip(wide) {
            *sum = fma::<FMA>(x[row][at], weight, *sum);
        }
    }
}
