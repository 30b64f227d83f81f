//! Mixtures of experts: the products of each expert with the rows that chose it.

use candle_core::{Device, Result, Tensor};
use octavo_ops::{ChoiceScratch, Route};

use crate::dense;

/// The experts of each token and their weights `[T,k]`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routing {
    experts: Vec<u32>,
    weights: Vec<f32>,
    /// Number of experts of a token k.
    chosen: usize,
}

impl Routing {
    /// Returns the rows of a token and their experts.
    pub(crate) fn rows_of(&self, token: usize) -> impl Iterator<Item = (usize, usize)> {
        let rows = token * self.chosen..(token + 1) * self.chosen;
        rows.map(|row| (row, self.experts[row] as usize))
    }

    /// Chooses `chosen` experts for each token from logits `[T,E]`. `correction` is empty or `[E]`.
    pub(crate) fn choose(op: &Route, logits: &Tensor, correction: &[f32], chosen: usize) -> Result<Self> {
        let (tokens, count) = logits.dims2()?;
        let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        let mut routing = Self { experts: vec![0; tokens * chosen], weights: vec![0.0; tokens * chosen], chosen };
        let mut scratch = ChoiceScratch::default();
        let places = routing.experts.chunks_mut(chosen).zip(routing.weights.chunks_mut(chosen));
        for (logits, (experts, weights)) in logits.chunks(count).zip(places) {
            op.choose(logits, correction, &mut scratch, experts, weights);
        }
        Ok(routing)
    }

    /// Computes the row `[N]` of each token and expert from the token's row or from the row of both. `weight` is
    /// `[E·N,K]`, `bias` `[E·N]`.
    pub(crate) fn products(
        &self,
        input: &Tensor,
        count: usize,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let width = weight.dim(0)? / count;
        // The input has a row for each token, or one for each pair.
        let share = self.experts.len() / input.dim(0)?;
        let mut out = vec![0.0f32; self.experts.len() * width];
        for expert in 0..count {
            let rows: Vec<usize> =
                (0..self.experts.len()).filter(|&row| self.experts[row] as usize == expert).collect();
            if rows.is_empty() {
                continue;
            }
            let sources: Vec<u32> = rows.iter().map(|row| (row / share) as u32).collect();
            let slab = weight.narrow(0, expert * width, width)?;
            let mut y = dense::matmul(&dense::gather(input, &sources)?, &slab)?;
            if let Some(bias) = bias {
                y = y.broadcast_add(&bias.flatten_all()?.narrow(0, expert * width, width)?)?;
            }
            let y: Vec<f32> = y.flatten_all()?.to_vec1()?;
            for (row, y) in rows.iter().zip(y.chunks(width)) {
                out[row * width..][..width].copy_from_slice(y);
            }
        }
        Tensor::from_vec(out, (self.experts.len(), width), &Device::Cpu)
    }

    /// Computes the weighted sum of the rows of each token.
    pub(crate) fn sum(&self, input: &Tensor) -> Result<Tensor> {
        let cols = input.dim(1)?;
        let rows: Vec<f32> = input.flatten_all()?.to_vec1()?;
        let mut out = vec![0.0; rows.len() / self.chosen];
        let tokens = rows.chunks(self.chosen * cols).zip(self.weights.chunks(self.chosen));
        for (out, (rows, weights)) in out.chunks_mut(cols).zip(tokens) {
            for (row, weight) in rows.chunks(cols).zip(weights) {
                out.iter_mut().zip(row).for_each(|(out, x)| *out += weight * x);
            }
        }
        Tensor::from_vec(out, (rows.len() / self.chosen / cols, cols), &Device::Cpu)
    }
}
