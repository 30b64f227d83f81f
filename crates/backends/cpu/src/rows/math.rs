//! Elementary functions without branches, so that loops over them can be vectorised.

/// Computes `a · b + c`, fused if the instruction set supports it.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Returns the nearest integer, ties to even, of a number below 2^22 in magnitude. The result is arbitrary for other
/// numbers and NaN.
///
/// Adding 1.5 · 2^23 to a number removes its fraction and puts its integer into the last bits of the sum.
#[inline(always)]
pub(super) fn round(x: f32) -> (f32, i32) {
    const MAGIC: f32 = 12_582_912.0;
    let sum = x + MAGIC;
    (sum - MAGIC, (sum.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32))
}

/// Computes `e^x` to within two units in the last place; 0 below −87.3, where the result would be denormal, and ∞ above
/// 88.7.
///
/// Uses `e^x = 2^n · e^r` with `n` the nearest integer to `x / ln 2` and `|r| ≤ ln 2 / 2`. `e^r` is computed by its
/// Taylor polynomial of degree 7, whose error is below 2^-27 there.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    // ln 2 is split in two parts, the first with few bits, so that n · HIGH is exact.
    const HIGH: f32 = 0.693_359_4;
    const LOW: f32 = -2.121_944_4e-4;
    const LEAST: f32 = -87.3;
    const MOST: f32 = 88.7;
    // These comparisons compile to single instructions; NaN stays NaN.
    let clamped = if x < LEAST { LEAST } else { x };
    let clamped = if clamped > MOST { MOST } else { clamped };
    let (n, exponent) = round(clamped * std::f32::consts::LOG2_E);
    let r = fma::<FMA>(n, -LOW, fma::<FMA>(n, -HIGH, clamped));
    // The polynomial is written out, because a nested loop would not be vectorised.
    let sum = fma::<FMA>(r, 1.0 / 5040.0, 1.0 / 720.0);
    let sum = fma::<FMA>(sum, r, 1.0 / 120.0);
    let sum = fma::<FMA>(sum, r, 1.0 / 24.0);
    let sum = fma::<FMA>(sum, r, 1.0 / 6.0);
    let sum = fma::<FMA>(sum, r, 0.5);
    let sum = fma::<FMA>(sum, r, 1.0);
    let sum = fma::<FMA>(sum, r, 1.0);
    // The power has two factors, because 2^128 exceeds f32.
    let half = exponent >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let value = sum * power(half) * power(exponent.wrapping_sub(half));
    let value = if x < LEAST { 0.0 } else { value };
    if x > MOST { f32::INFINITY } else { value }
}

/// Computes the hyperbolic tangent to within a few units in the last place of 1.
#[inline(always)]
pub(crate) fn tanh<const FMA: bool>(x: f32) -> f32 {
    // Near 0 the difference below would lose all its bits, so the series is used there.
    let square = x * x;
    let series = x * fma::<FMA>(square, fma::<FMA>(square, 2.0 / 15.0, -1.0 / 3.0), 1.0);
    let far = 1.0 - 2.0 / (exp::<FMA>(2.0 * x) + 1.0);
    if x.abs() < 0.1 { series } else { far }
}

/// Computes the error function to within 2e-7: Abramowitz and Stegun, 7.1.26.
#[inline(always)]
pub(super) fn erf<const FMA: bool>(x: f32) -> f32 {
    let t = 1.0 / fma::<FMA>(0.327_591_1, x.abs(), 1.0);
    let sum = fma::<FMA>(t, 1.061_405_4, -1.453_152_1);
    let sum = fma::<FMA>(sum, t, 1.421_413_8);
    let sum = fma::<FMA>(sum, t, -0.284_496_72);
    let sum = fma::<FMA>(sum, t, 0.254_829_6);
    let value = 1.0 - sum * t * exp::<FMA>(-x * x);
    value.copysign(x)
}
