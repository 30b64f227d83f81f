//! The common definition of the kernels.

use half::bf16;
use octavo_ops::sampling::largest_value;
use octavo_ops::{GluKind, NormKind, RopeStyle};

use super::math::{erf, exp, fma, round, tanh};
use super::{
    ALL_STEPS, GROUP, LANES, LARGEST_CODE, LARGEST_OTHER, LARGEST_OUTLIER, LARGEST_PART, LOW_BITS, Norm, QuantRow,
};

/// Returns the sum of `f` over the elements: sixteen partial sums, added pairwise.
#[inline(always)]
fn sum<const FMA: bool>(x: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] = f(chunk[lane], sums[lane]);
        }
    }
    for (lane, &x) in rest.iter().enumerate() {
        sums[lane] = f(x, sums[lane]);
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    sums[0]
}

#[inline(always)]
pub(super) fn norm<const FMA: bool>(x: &[f32], norm: Norm<'_>, out: &mut [f32]) {
    let count = x.len() as f32;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => sum::<FMA>(x, |x, sum| sum + x) / count,
    };
    let squares = sum::<FMA>(x, |x, sum| fma::<FMA>(x - mean, x - mean, sum));
    let factor = 1.0 / (squares / count + norm.eps).sqrt();
    match norm.bias {
        None => {
            for ((out, &x), &weight) in out.iter_mut().zip(x).zip(norm.weight) {
                *out = (x - mean) * factor * weight;
            }
        }
        Some(bias) => {
            for (((out, &x), &weight), &bias) in out.iter_mut().zip(x).zip(norm.weight).zip(bias) {
                *out = fma::<FMA>((x - mean) * factor, weight, bias);
            }
        }
    }
}

#[inline(always)]
pub(super) fn add<const FMA: bool>(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

#[inline(always)]
pub(super) fn scale<const FMA: bool>(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

#[inline(always)]
pub(super) fn softcap<const FMA: bool>(x: &mut [f32], cap: f32) {
    let inverse = 1.0 / cap;
    for x in x {
        *x = cap * tanh::<FMA>(*x * inverse);
    }
}

#[inline(always)]
pub(super) fn glu<const FMA: bool>(kind: GluKind, gate: &[f32], up: &[f32], out: &mut [f32]) {
    // Each activation has its own loop, because a branch inside would prevent vectorisation.
    match kind {
        GluKind::Silu => gated(gate, up, out, |gate, up| silu::<FMA>(gate) * up),
        GluKind::Gelu => gated(gate, up, out, |gate, up| gelu::<FMA>(gate) * up),
        GluKind::GeluTanh => gated(gate, up, out, |gate, up| gelu_tanh::<FMA>(gate) * up),
        GluKind::Tanh => gated(gate, up, out, |gate, up| tanh::<FMA>(gate) * up),
        GluKind::ClampedSwiglu { alpha, limit } => {
            gated(gate, up, out, |gate, up| clamped_swiglu::<FMA>(gate, up, alpha, limit));
        }
    }
}

#[inline(always)]
pub(super) fn act<const FMA: bool>(kind: GluKind, x: &mut [f32]) {
    match kind {
        GluKind::Silu => x.iter_mut().for_each(|x| *x = silu::<FMA>(*x)),
        GluKind::Gelu => x.iter_mut().for_each(|x| *x = gelu::<FMA>(*x)),
        GluKind::GeluTanh => x.iter_mut().for_each(|x| *x = gelu_tanh::<FMA>(*x)),
        GluKind::Tanh => x.iter_mut().for_each(|x| *x = tanh::<FMA>(*x)),
        GluKind::ClampedSwiglu { .. } => unreachable!("a program has it only with a gate"),
    }
}

#[inline(always)]
fn silu<const FMA: bool>(x: f32) -> f32 {
    x / (1.0 + exp::<FMA>(-x))
}

#[inline(always)]
fn clamped_swiglu<const FMA: bool>(gate: f32, up: f32, alpha: f32, limit: f32) -> f32 {
    // `f32::min` would replace NaN.
    let gate = if gate > limit { limit } else { gate };
    let up = if up > limit { limit } else { up };
    let up = if up < -limit { -limit } else { up };
    (up + 1.0) * gate / (1.0 + exp::<FMA>(-alpha * gate))
}

#[inline(always)]
fn gelu<const FMA: bool>(x: f32) -> f32 {
    0.5 * x * (1.0 + erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2))
}

#[inline(always)]
fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh::<FMA>(ROOT * fma::<FMA>(0.044_715 * x * x, x, x)))
}

#[inline(always)]
pub(super) fn add_scaled<const FMA: bool>(x: &mut [f32], y: &[f32], factor: f32) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x = fma::<FMA>(factor, y, *x);
    }
}

#[inline(always)]
pub(super) fn normalise<const FMA: bool>(bytes: &[u8], shift: f32, divisor: f32, out: &mut [f32]) {
    for (out, &byte) in out.iter_mut().zip(bytes) {
        *out = (f32::from(byte) - shift) / divisor;
    }
}

#[inline(always)]
fn gated(gate: &[f32], up: &[f32], out: &mut [f32], value: impl Fn(f32, f32) -> f32) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = value(gate, up);
    }
}

#[inline(always)]
pub(super) fn rotate<const FMA: bool>(style: RopeStyle, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let turn = |x: &mut f32, y: &mut f32, cos: f32, sin: f32| {
        (*x, *y) = (fma::<FMA>(*x, cos, -(*y * sin)), fma::<FMA>(*y, cos, *x * sin));
    };
    let rotary = 2 * cos.len();
    match style {
        RopeStyle::NeoX => {
            let (first, second) = head[..rotary].split_at_mut(cos.len());
            for (((x, y), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                turn(x, y, cos, sin);
            }
        }
        RopeStyle::GptJ => {
            for (([x, y], &cos), &sin) in head[..rotary].as_chunks_mut().0.iter_mut().zip(cos).zip(sin) {
                turn(x, y, cos, sin);
            }
        }
    }
}

#[inline(always)]
pub(super) fn quantise_plain<const FMA: bool>(x: &[f32], coarse: bool, out: QuantRow<'_>) {
    if coarse {
        quantised::<true>(x, out);
    } else {
        quantised::<false>(x, out);
    }
}

#[inline(always)]
fn quantised<const COARSE: bool>(x: &[f32], out: QuantRow<'_>) {
    // A mask selects the elements of the first half: one loop over a group is vectorised, two over its halves are not.
    const FIRST_HALF: [i32; GROUP] = {
        let mut mask = [0; GROUP];
        let mut k = 0;
        while k < GROUP / 2 {
            mask[k] = -1;
            k += 1;
        }
        mask
    };
    let groups = x.as_chunks::<GROUP>().0.iter().zip(out.codes.as_chunks_mut::<{ 2 * GROUP }>().0);
    let groups = groups.zip(out.scales).zip(out.sums).zip(out.totals).zip(out.steps);
    for (((((x, codes), scale), sum), totals), steps) in groups {
        let (high, low) = codes.split_at_mut(GROUP);
        let (largest, outlying) = if COARSE { coarse_range(x) } else { (largest_of(x), ALL_STEPS) };
        let mut split = [0; GROUP];
        for (step, split) in split.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *split = [-i32::from(outlying >> step & 1); 4];
        }
        *steps = outlying;
        let most = if COARSE { LARGEST_PART } else { LARGEST_CODE };
        let inverse = if largest > 0.0 { most / largest } else { 0.0 };
        let (mut total, mut first) = (0i32, 0i32);
        for ((((high, low), &x), in_first), split) in high.iter_mut().zip(low).zip(x).zip(FIRST_HALF).zip(split) {
            let code = round(x * inverse).1;
            let upper = (code.wrapping_add(1 << (LOW_BITS - 1)) >> LOW_BITS) & split;
            *high = upper as i8;
            *low = code.wrapping_sub(upper << LOW_BITS) as i8;
            total = code.wrapping_add(total);
            first = (code & in_first).wrapping_add(first);
        }
        *scale = largest / most;
        *sum = *scale * total as f32;
        *totals = [first, total.wrapping_sub(first)];
    }
}

/// Returns the largest magnitude of a group that is not NaN.
#[inline(always)]
fn largest_of(x: &[f32; GROUP]) -> f32 {
    let mut largest = [0.0f32; LANES];
    for half in x.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            // `f32::max` would have to check for NaN.
            let magnitude = half[lane].abs();
            largest[lane] = if magnitude > largest[lane] { magnitude } else { largest[lane] };
        }
    }
    largest.into_iter().fold(0.0, |a, b| if b > a { b } else { a })
}

/// Returns the magnitude of a coarse group that becomes the largest part, and an outlying step as a bit.
#[inline(always)]
fn coarse_range(x: &[f32; GROUP]) -> (f32, u8) {
    let mut steps = [0.0f32; GROUP / 4];
    for (step, x) in steps.iter_mut().zip(x.as_chunks::<4>().0) {
        *step = x.iter().fold(0.0, |a, b| if b.abs() > a { b.abs() } else { a });
    }
    let largest = steps.iter().fold(0.0, |a, &b| if b > a { b } else { a });
    let outlies = steps.map(|step| step > LARGEST_OTHER * largest);
    if outlies.iter().filter(|outlies| **outlies).count() != 1 {
        return (largest, 0);
    }
    let (mut others, mut outlying) = (largest / LARGEST_OUTLIER, 0);
    for (index, (step, outlies)) in steps.into_iter().zip(outlies).enumerate() {
        if outlies {
            outlying |= 1 << index;
        } else if step > others {
            others = step;
        }
    }
    (others, outlying)
}

#[inline(always)]
pub(super) fn join<const FMA: bool>(codes: &[i8], words: &mut [i16]) {
    joined(codes, words, |four| four);
}

#[inline(always)]
pub(super) fn join_crossed<const FMA: bool>(codes: &[i8], words: &mut [i16]) {
    joined(codes, words, |[a, b, c, d]| [a, c, b, d]);
}

/// Joins codes four by four. What reorders them is a part of this loop: in a loop of its own, the compiler does not vectorise it.
#[inline(always)]
fn joined(codes: &[i8], words: &mut [i16], order: impl Fn([i16; 4]) -> [i16; 4]) {
    for (codes, words) in codes.as_chunks::<{ 2 * GROUP }>().0.iter().zip(words.as_chunks_mut::<GROUP>().0) {
        let (high, low) = codes.split_at(GROUP);
        let fours = high.as_chunks::<4>().0.iter().zip(low.as_chunks::<4>().0);
        for ((high, low), words) in fours.zip(words.as_chunks_mut::<4>().0) {
            let joined = std::array::from_fn(|k| (i16::from(high[k]) << LOW_BITS) + i16::from(low[k]));
            *words = order(joined);
        }
    }
}

#[inline(always)]
pub(super) fn to_bf16<const FMA: bool>(x: &[f32], out: &mut [u16]) {
    for (out, &x) in out.iter_mut().zip(x) {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        *out = if x.is_nan() { bf16::NAN.to_bits() } else { rounded };
    }
}

/// Each step is one loop over all elements, which the compiler vectorises.
#[inline(always)]
pub(super) fn code<const FMA: bool>(x: &[f32], codes: &mut [i8], scale: &mut f32) {
    const LARGEST: f32 = 127.0;
    let mut largest = [0.0f32; LANES];
    for chunk in x.chunks(LANES) {
        for (largest, x) in largest.iter_mut().zip(chunk) {
            let magnitude = x.abs();
            *largest = if magnitude > *largest { magnitude } else { *largest };
        }
    }
    let largest = largest.into_iter().fold(0.0, |a, b| if b > a { b } else { a });
    let inverse = if largest > 0.0 { LARGEST / largest } else { 0.0 };
    for (code, &x) in codes.iter_mut().zip(x) {
        *code = round(x * inverse).1 as i8;
    }
    *scale = largest / LARGEST;
}

#[inline(always)]
pub(super) fn widen<const FMA: bool>(words: &[u32], out: &mut [u32]) {
    // An 8-bit integer is exact in bf16, which is the upper half of its f32.
    widen_by(words, out, |word, byte| (((word << (24 - 8 * byte)) as i32 >> 24) as f32).to_bits());
}

#[inline(always)]
pub(super) fn widen_e4m3<const FMA: bool>(words: &[u32], out: &mut [u32]) {
    widen_by(words, out, |word, byte| {
        let code = word >> (8 * byte);
        let magnitude = code & 0x7f;
        // The exponent moves to its place with the other bias. Denormal numbers are multiples of the least of them.
        let normal = (magnitude << 20) + (120 << 23);
        let denormal = (magnitude as i32 as f32 / 512.0).to_bits();
        let bits = if magnitude < 8 { denormal } else { normal };
        (if magnitude == 0x7f { f32::NAN.to_bits() } else { bits }) | (code & 0x80) << 24
    });
}

#[inline(always)]
pub(super) fn to_e4m3<const FMA: bool>(x: &[f32], scale: f32, codes: &mut [i8]) {
    x.iter().zip(codes).for_each(|(&x, code)| *code = octavo_ops::to_e4m3(x / scale) as i8);
}

/// Widens by a function that returns the bits of a byte of a word as f32, of which the lower half is 0.
#[inline(always)]
fn widen_by(words: &[u32], out: &mut [u32], float: impl Fn(u32, u32) -> u32) {
    let pair = |word: u32, byte: u32| float(word, byte) >> 16 | float(word, byte + 1);
    for (words, out) in words.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<{ 2 * LANES }>().0) {
        let (first, second) = out.split_at_mut(LANES);
        for lane in 0..LANES {
            first[lane] = pair(words[lane], 0);
        }
        for lane in 0..LANES {
            second[lane] = pair(words[lane], 2);
        }
    }
}

#[inline(always)]
pub(super) fn multiply<const FMA: bool>(x: &mut [f32], factors: &[f32]) {
    for (x, factor) in x.iter_mut().zip(factors) {
        *x *= factor;
    }
}

#[inline(always)]
pub(super) fn largest<const FMA: bool>(x: &[f32], found: &mut f32) {
    *found = largest_value(x);
}
