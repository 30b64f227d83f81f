//! Ops of attention: the heads of q, k and v, and attention with and without a cache.

use crate::program::{BufferId, HeadShape, WeightId};

/// Layout of the rotated pairs in a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs `(i, i + rotary_dim/2)`, as in Hugging Face checkpoints.
    NeoX,
    /// Pairs `(2i, 2i + 1)`, as in GGUF files of the `llama` architecture, whose q and k rows are permuted accordingly.
    GptJ,
}

/// Rotary position embedding. The model folds scaling schemes (linear, Llama 3, YaRN, per-frequency factors) into
/// `inv_freq` and `magnitude`, so a backend knows none of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Layout of the pairs.
    pub style: RopeStyle,
    /// Radians per position for each of the `rotary_dim / 2` pairs, in f64 because long positions need the precision.
    pub inv_freq: Vec<f64>,
    /// Factor of cosine and sine (YaRN's attention factor; 1 otherwise).
    pub magnitude: f64,
    /// Index of the token position that rotates each pair (mrope: time, height and width of an image's patch, in the
    /// order in which the model divides its heads). If empty, the first position rotates all pairs.
    pub streams: Vec<usize>,
}

impl Rope {
    /// Returns the number of leading elements of each head that are rotated; the rest pass through.
    pub fn rotary_dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Returns the index of the token position that rotates a pair.
    pub fn stream(&self, pair: usize) -> usize {
        self.streams.get(pair).copied().unwrap_or(0)
    }
}

/// RMS norm of q and k before the rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct QkNorm {
    /// Weight `[D]` shared by the heads, or `[Hq·D]` over the whole width.
    pub q: WeightId,
    /// Weight `[D]` or `[Hkv·D]`.
    pub k: WeightId,
    /// Value added under the root.
    pub eps: f32,
    /// Multiplies by `1 + w`.
    pub unit_offset: bool,
}

/// Place of the keys and values of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPlace {
    /// The paged cache, by slot: later steps see them.
    Cache {
        /// KV group of the layer.
        group: usize,
        /// Index of the layer within the group.
        layer: usize,
    },
    /// Memory of the step, for encoders: the next [`SegmentAttention`] sees them, later steps do not.
    Step,
}

/// `qkv[T,(Hq + 2·Hkv)·D] → q[T,Hq·D]`; k and v are written to the paged cache or to the memory of the step.
#[derive(Clone, Debug, PartialEq)]
pub struct QkvPost {
    /// Input `[T,(Hq + 2·Hkv)·D]`: q, then k, then v.
    pub input: BufferId,
    /// Output `[T,Hq·D]`.
    pub out: BufferId,
    /// Head counts and size.
    pub heads: HeadShape,
    /// Norm of q and k, if the model has one.
    pub norm: Option<QkNorm>,
    /// Rotary embedding, if this layer has one.
    pub rope: Option<Rope>,
    /// Place to which k and v are written.
    pub kv: KvPlace,
}

/// `q[T,Hq·D] → out[T,Hq·Dv]`: causal attention over the block tables of one KV group, for prefill chunks and decode
/// rows together. A query at position p sees keys `max(0, p + 1 − window) ..= p`. Dv is the size of a value, which is D
/// unless the values are the first elements of the keys ([`Values`](crate::Values)).
#[derive(Clone, Debug, PartialEq)]
pub struct PagedAttention {
    /// Queries `[T,Hq·D]`.
    pub q: BufferId,
    /// Output `[T,Hq·Dv]`.
    pub out: BufferId,
    /// Head counts and sizes; query head h reads KV head `h / (Hq / Hkv)`.
    pub heads: HeadShape,
    /// Factor of the scores, usually `1/√D`.
    pub scale: f32,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Whether a query also sees the keys behind its own, up to the end of its span
    /// ([`StepBatch::seen_ends`](crate::StepBatch::seen_ends)).
    pub spans: bool,
    /// Cap of the scores: `cap · tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
    /// Attention sinks `[Hq]`: one more score for each query head, neither scaled nor capped. It takes part in the
    /// maximum and the sum of the softmax, and its share of the output is dropped.
    pub sinks: Option<WeightId>,
    /// KV group of the layer.
    pub group: usize,
    /// Index of the layer within the group.
    pub layer: usize,
}

impl PagedAttention {
    /// Returns the keys that a query sees.
    pub const fn sight(&self) -> Sight {
        if self.spans { Sight::Spans } else { Sight::Causal }
    }
}

/// The keys that queries see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Those up to their own.
    Causal,
    /// Those up to the end of their span, if that is behind their own.
    Spans,
    /// Those of the whole sequence.
    Both,
}

impl Sight {
    /// Returns the first and the last key that a query sees. `place` is its own place, `len` the number of keys of its
    /// sequence, `seen_end` its element of [`StepBatch::seen_ends`](crate::StepBatch::seen_ends). `window` is the number
    /// of keys up to its own that it sees at most; with [`Sight::Both`], that on each side of its own.
    pub fn keys(self, place: usize, len: usize, seen_end: usize, window: Option<usize>) -> (usize, usize) {
        let window = window.unwrap_or(usize::MAX);
        let first = (place + 1).saturating_sub(window);
        match self {
            Self::Causal => (first, place),
            Self::Spans => (first, seen_end.saturating_sub(1).clamp(place, len.max(place + 1) - 1)),
            Self::Both => (place.saturating_sub(window), place.saturating_add(window).min(len.max(1) - 1)),
        }
    }
}

/// `q[T,Hq·D] → out[T,Hq·D]`: attention without a cache, in both directions. A query sees every key of its segment, a
/// sequence of the step, or those of a window. The keys and values are those that the last [`QkvPost`] has written to
/// the memory of the step.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentAttention {
    /// Queries `[T,Hq·D]`.
    pub q: BufferId,
    /// Output `[T,Hq·D]`.
    pub out: BufferId,
    /// Head counts and size; query head h reads KV head `h / (Hq / Hkv)`.
    pub heads: HeadShape,
    /// Factor of the scores, usually `1/√D`.
    pub scale: f32,
    /// Number of tokens that a query sees on each side of its own: the keys at `i − window ..= i + window`.
    pub window: Option<usize>,
}
