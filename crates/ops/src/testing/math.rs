//! The formulas that ops share, in f64.

use crate::{GluKind, NormKind, Rope, RopeStyle};

/// Rows of a buffer or a matrix.
pub(super) type Rows = Vec<Vec<f64>>;

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(super) fn mean(rows: &[Vec<f64>]) -> Vec<f64> {
    let sum = |i: usize| rows.iter().map(|row| row[i]).sum::<f64>();
    (0..rows[0].len()).map(|i| sum(i) / rows.len() as f64).collect()
}

pub(super) fn product(x: &Rows, weight: &Rows) -> Rows {
    x.iter().map(|row| weight.iter().map(|w| dot(row, w)).collect()).collect()
}

pub(super) fn add(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}

pub(super) fn cap(x: f64, cap: Option<f32>) -> f64 {
    cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
}

pub(super) fn normalise(
    kind: NormKind,
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    eps: f32,
    unit_offset: bool,
) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = match kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => x.iter().sum::<f64>() / n,
    };
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let root = (variance + f64::from(eps)).sqrt();
    let offset = if unit_offset { 1.0 } else { 0.0 };
    let bias = |i: usize| bias.map_or(0.0, |b| b[i]);
    x.iter().zip(weight).enumerate().map(|(i, (x, w))| (x - mean) / root * (w + offset) + bias(i)).collect()
}

/// Applies the rotary embedding to a head. `position` returns the row's position by stream.
pub(super) fn rotate(head: &mut [f64], rope: &Rope, position: impl Fn(usize) -> u32) {
    for (i, frequency) in rope.inv_freq.iter().enumerate() {
        let (a, b) = match rope.style {
            RopeStyle::NeoX => (i, i + rope.inv_freq.len()),
            RopeStyle::GptJ => (2 * i, 2 * i + 1),
        };
        let (sin, cos) = (f64::from(position(rope.stream(i))) * frequency).sin_cos();
        let (x, y) = (head[a], head[b]);
        head[a] = (x * cos - y * sin) * rope.magnitude;
        head[b] = (y * cos + x * sin) * rope.magnitude;
    }
}

pub(super) fn gated(kind: GluKind, gate: f64, up: f64) -> f64 {
    match kind {
        GluKind::ClampedSwiglu { alpha, limit } => {
            let [alpha, limit] = [alpha, limit].map(f64::from);
            let gate = gate.min(limit);
            (up.clamp(-limit, limit) + 1.0) * gate / (1.0 + (-alpha * gate).exp())
        }
        _ => activation(kind, gate) * up,
    }
}

pub(super) fn activation(kind: GluKind, x: f64) -> f64 {
    match kind {
        GluKind::Silu => x / (1.0 + (-x).exp()),
        GluKind::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        GluKind::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        GluKind::Tanh => x.tanh(),
        GluKind::ClampedSwiglu { .. } => unreachable!("a program has it only with a gate"),
    }
}

/// Computes the error function by its Taylor series; beyond 4 it is 1 to within 2e-8.
pub fn erf(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-17 {
        n += 1.0;
        term *= -x * x / n;
        sum += term / (2.0 * n + 1.0);
    }
    2.0 / std::f64::consts::PI.sqrt() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_have_their_published_values() {
        assert!((erf(0.5) - 0.520_499_877_813_046_5).abs() < 1e-14);
        assert!((erf(-2.0) + 0.995_322_265_018_952_7).abs() < 1e-13);
        assert!((erf(3.9) - 0.999_999_965_2).abs() < 1e-9);
        assert!((activation(GluKind::Gelu, 1.0) - 0.841_344_746_068_543).abs() < 1e-12);
        assert!((activation(GluKind::GeluTanh, 1.0) - 0.841_191_990_608_301_6).abs() < 1e-9);
        assert!((activation(GluKind::Silu, 1.0) - 0.731_058_578_630_005).abs() < 1e-12);
        let clamped = GluKind::ClampedSwiglu { alpha: 1.0, limit: 1.0 };
        assert!((gated(clamped, 7.0, -9.0)).abs() < 1e-12, "up is -1, plus 1");
        assert!((gated(clamped, 7.0, 9.0) - 2.0 * 0.731_058_578_630_005).abs() < 1e-12);
        assert!(
            (gated(clamped, -1.0, 0.5) + 1.5 * 0.268_941_421_369_995).abs() < 1e-12,
            "only large gates are limited"
        );
    }

    #[test]
    fn a_rotation_keeps_lengths_and_turns_by_the_angle() {
        let rope = Rope { style: RopeStyle::GptJ, inv_freq: vec![0.25], magnitude: 1.0, streams: vec![] };
        let mut head = [1.0, 0.0, 7.0];
        rotate(&mut head, &rope, |_| 2);
        assert!((head[0] - 0.5f64.cos()).abs() < 1e-15 && (head[1] - 0.5f64.sin()).abs() < 1e-15);
        assert_eq!(head[2], 7.0, "what is beyond the rotary part passes through");
    }
}
