//! Rotary embedding: base, scaling scheme, and the frequencies that follow from them.
//!
//! All scaling schemes end as one list of angles a position and one factor on cosine and sine, so that no backend knows
//! any of them.

use std::f64::consts::TAU;

use octavo_ops::{Rope, RopeStyle};

use super::ConfigError;

/// The rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// How pairs lie in a head; a property of the checkpoint's format.
    pub style: RopeStyle,
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Leading elements of a head that are rotated; even.
    pub rotary_dim: usize,
    /// How the frequencies are stretched for contexts longer than those of pre-training.
    pub scaling: RopeScaling,
}

/// Published ways to stretch the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// Stretch.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, smooth in between.
    Llama3 {
        /// Stretch of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of pre-training.
        original_context: f64,
    },
    /// YaRN: a linear ramp between stretched and kept frequencies, and a factor on cosine and sine.
    Yarn {
        /// Stretch.
        factor: f64,
        /// Rotations over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which it is stretched.
        beta_slow: f64,
        /// Context length of pre-training.
        original_context: f64,
        /// Factor on cosine and sine.
        attention_factor: f64,
        /// Round the ramp's ends outwards to whole pairs.
        truncate: bool,
    },
}

impl RopeConfig {
    /// Checks that every frequency will be a finite number.
    pub(super) fn check(&self, head_dim: usize) -> Result<(), ConfigError> {
        let fail = |what: String| Err(ConfigError::Invalid(format!("rotary embedding: {what}")));
        if self.rotary_dim == 0 || self.rotary_dim > head_dim || !self.rotary_dim.is_multiple_of(2) {
            return fail(format!("{} of {head_dim} elements of a head cannot be rotated in pairs", self.rotary_dim));
        }
        if !(self.theta.is_finite() && self.theta > 1.0) {
            return fail(format!("the base is {}, but it must be a number above 1", self.theta));
        }
        let positive: &[(&str, f64)] = match &self.scaling {
            RopeScaling::None => &[],
            RopeScaling::Linear { factor } => &[("factor", *factor)],
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => &[
                ("factor", *factor),
                ("low_freq_factor", *low_freq_factor),
                ("high_freq_factor − low_freq_factor", high_freq_factor - low_freq_factor),
                ("original_max_position_embeddings", *original_context),
            ],
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, attention_factor, .. } => &[
                ("factor", *factor),
                ("beta_fast", *beta_fast),
                ("beta_slow", *beta_slow),
                ("original_max_position_embeddings", *original_context),
                ("attention_factor", *attention_factor),
            ],
        };
        match positive.iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            Some((name, value)) => fail(format!("{name} is {value}, but it must be above 0")),
            None => Ok(()),
        }
    }

    /// The frequencies as the backends take them. `factors` (GGUF's `rope_freqs.weight`), where a file has them, divide
    /// the unscaled frequencies pair by pair.
    pub fn frequencies(&self, factors: Option<&[f32]>) -> Rope {
        let pairs = self.rotary_dim / 2;
        let base = (0..pairs).map(|i| self.theta.powf(-2.0 * i as f64 / self.rotary_dim as f64));
        let mut inv_freq: Vec<f64> = base.collect();
        if let Some(factors) = factors {
            inv_freq.iter_mut().zip(factors).for_each(|(f, &factor)| *f /= f64::from(factor));
        }
        let mut magnitude = 1.0;
        match self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => inv_freq.iter_mut().for_each(|f| *f /= factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                for f in &mut inv_freq {
                    let rotations = original_context * *f / TAU;
                    let kept = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = kept.clamp(0.0, 1.0);
                    *f = (1.0 - kept) * *f / factor + kept * *f;
                }
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, attention_factor, truncate } => {
                let (low, high) = self.yarn_ramp(beta_fast, beta_slow, original_context, truncate);
                for (i, f) in inv_freq.iter_mut().enumerate() {
                    let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    *f = stretched * *f / factor + (1.0 - stretched) * *f;
                }
                magnitude = attention_factor;
            }
        }
        Rope { style: self.style, inv_freq, magnitude, streams: Vec::new() }
    }

    /// First and last pair of YaRN's ramp: where a frequency makes `fast` and `slow` rotations over the original context.
    fn yarn_ramp(&self, fast: f64, slow: f64, context: f64, truncate: bool) -> (f64, f64) {
        let dim = self.rotary_dim as f64;
        let pair = |rotations: f64| dim * (context / (rotations * TAU)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (pair(fast), pair(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // A ramp of no width would divide by zero; the published code widens it by this much.
        if low == high { (low, high + 0.001) } else { (low, high) }
    }
}

/// The attention factor of the YaRN paper.
pub(super) fn yarn_magnitude(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}
