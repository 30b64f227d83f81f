//! Attention in f64.

use super::math::{cap, dot};
use crate::HeadShape;

/// The attention of a layer, whatever its queries see.
pub(super) struct Attention {
    pub(super) heads: HeadShape,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
}

impl Attention {
    /// Returns the output of a query head that sees the given keys and values.
    pub(super) fn attend(
        &self,
        q: &[f64],
        head: usize,
        (keys, values): (&[Vec<f64>], &[Vec<f64>]),
        sink: Option<f64>,
    ) -> Vec<f64> {
        let kv_head = head / (self.heads.q / self.heads.kv);
        let of = |row: &Vec<f64>, dim: usize| row[kv_head * dim..(kv_head + 1) * dim].to_vec();
        let score = |k| cap(dot(q, &of(k, q.len())) * f64::from(self.scale), self.softcap);
        let scores: Vec<f64> = keys.iter().map(score).collect();
        // The exponential of a large score overflows even in f64.
        let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
        let mut out = vec![0.0; self.heads.value_dim()];
        for (weight, value) in weights.iter().zip(values) {
            for (o, v) in out.iter_mut().zip(of(value, self.heads.value_dim())) {
                *o += weight / sum * v;
            }
        }
        out
    }
}
