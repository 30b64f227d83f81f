//! Rotary embedding: base, scaling scheme and the resulting frequencies.
//!
//! Every scaling scheme results in one list of angles per position and one factor of cosine and sine, so that backends
//! need not know the schemes.

use std::f64::consts::TAU;

use octavo_ops::{Rope, RopeStyle};

use super::ConfigError;

/// The rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Layout of the pairs in a head, a property of the checkpoint's format.
    pub style: RopeStyle,
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Number of leading elements of a head that are rotated; even.
    pub rotary_dim: usize,
    /// Scaling of the frequencies for contexts longer than those of pre-training.
    pub scaling: RopeScaling,
    /// Division of the pairs among a token's positions; `None` if a token has one position.
    pub sections: Option<RopeSections>,
}

/// Division of the pairs of a head among time, height and width (mrope).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeSections {
    /// Number of pairs that each of the positions turns.
    pub sizes: [usize; 3],
    /// Whether the pairs take turns (Qwen3-VL) instead of following each other (Qwen2.5-VL).
    pub interleaved: bool,
}

impl RopeSections {
    /// Returns the index of the position that turns a pair.
    fn stream(self, pair: usize) -> usize {
        let [time, height, width] = self.sizes;
        match pair % 3 {
            1 if self.interleaved && pair < 3 * height => 1,
            2 if self.interleaved && pair < 3 * width => 2,
            _ if self.interleaved || pair < time => 0,
            _ if pair < time + height => 1,
            _ => 2,
        }
    }

    /// Checks that each position turns its number of pairs.
    fn check(self, pairs: usize) -> Result<(), ConfigError> {
        let sum = self.sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size));
        let mut counts = [0; 3];
        if sum == Some(pairs) {
            (0..pairs).for_each(|pair| counts[self.stream(pair)] += 1);
        }
        if counts == self.sizes {
            return Ok(());
        }
        let sizes = self.sizes;
        Err(ConfigError::Invalid(format!("'mrope_section' {sizes:?} does not divide the {pairs} pairs of a head")))
    }
}

/// Published schemes of frequency scaling.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Divides every frequency by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Llama 3.1: divides low frequencies by `factor`, keeps high ones and interpolates in between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are scaled.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of pre-training.
        original_context: f64,
    },
    /// YaRN: a linear ramp between scaled and unscaled frequencies, and a factor of cosine and sine.
    Yarn {
        /// Divisor of the scaled frequencies.
        factor: f64,
        /// Number of rotations over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Number of rotations below which it is scaled.
        beta_slow: f64,
        /// Context length of pre-training.
        original_context: f64,
        /// Factor of cosine and sine.
        attention_factor: f64,
        /// Whether the ends of the ramp are rounded outwards to whole pairs.
        truncate: bool,
    },
    /// Phi-3: divides each frequency by its own number, and a factor of cosine and sine.
    LongRope {
        /// Divisors within the original context; empty if a GGUF file has them as a tensor.
        short: Vec<f64>,
        /// Divisors beyond it; empty like the others.
        long: Vec<f64>,
        /// Context length of pre-training.
        original_context: f64,
        /// Context length that is served. It decides on the divisors of all positions.
        context: usize,
        /// Factor of cosine and sine.
        attention_factor: f64,
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
        if let Some(sections) = self.sections {
            sections.check(self.rotary_dim / 2)?;
        }
        let lists: &[&[f64]] = match &self.scaling {
            RopeScaling::LongRope { short, long, .. } => &[short, long],
            _ => &[],
        };
        for list in lists.iter().filter(|list| !list.is_empty()) {
            if list.len() != self.rotary_dim / 2 || !list.iter().all(|factor| factor.is_finite() && *factor > 0.0) {
                let pairs = self.rotary_dim / 2;
                return fail(format!("its lists of factors must be {pairs} numbers above 0, one for each pair"));
            }
        }
        let positive: &[(&str, f64)] = match &self.scaling {
            RopeScaling::None => &[],
            RopeScaling::LongRope { original_context, attention_factor, .. } => {
                &[("original_max_position_embeddings", *original_context), ("attention_factor", *attention_factor)]
            }
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

    /// Sets the context length that is served.
    pub(super) fn serve(&mut self, tokens: usize) {
        if let RopeScaling::LongRope { context, .. } = &mut self.scaling {
            *context = tokens;
        }
    }

    /// Returns whether the served context is longer than that of pre-training, if the two have factors of their own.
    pub(crate) fn is_long(&self) -> Option<bool> {
        match self.scaling {
            RopeScaling::LongRope { context, original_context, .. } => Some(context as f64 > original_context),
            _ => None,
        }
    }

    /// Returns the frequencies in the form that backends use. `factors` (a tensor of a GGUF file), if present, divide the
    /// unscaled frequencies pair by pair.
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
            RopeScaling::LongRope { ref short, ref long, attention_factor, .. } => {
                let divisors = if self.is_long() == Some(true) { long } else { short };
                inv_freq.iter_mut().zip(divisors).for_each(|(f, divisor)| *f /= divisor);
                magnitude = attention_factor;
            }
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
        let streams = self.sections.map(|sections| (0..pairs).map(|pair| sections.stream(pair)).collect());
        Rope { style: self.style, inv_freq, magnitude, streams: streams.unwrap_or_default() }
    }

    /// Returns the first and last pair of YaRN's ramp, whose frequencies make `fast` and `slow` rotations over the
    /// original context.
    fn yarn_ramp(&self, fast: f64, slow: f64, context: f64, truncate: bool) -> (f64, f64) {
        let dim = self.rotary_dim as f64;
        let pair = |rotations: f64| dim * (context / (rotations * TAU)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (pair(fast), pair(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // A ramp of width zero would divide by zero; the published code widens it by this amount.
        if low == high { (low, high + 0.001) } else { (low, high) }
    }
}

/// Returns the attention factor of the YaRN paper.
pub(crate) fn yarn_magnitude(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}
