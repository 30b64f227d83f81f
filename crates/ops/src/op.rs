//! The op set. T = tokens in the step, S = sequences, R = rows that need logits, E = rows whose hidden state is returned;
//! activations are row-major `[rows, cols]`.

use crate::program::{BufferId, HeadShape, WeightId};

/// One fused operation of a [`Program`](crate::Program).
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `ids[T] → out[T,H]`: row `ids[t]` of the table, times `scale` (1 for most models, √H for Gemma).
    Embed {
        /// `[V,H]`, possibly quantised; rows are read straight from storage.
        table: WeightId,
        /// Factor on the row.
        scale: f32,
        /// `[T,H]`.
        out: BufferId,
    },
    /// Normalisation with an optional residual, see [`NormOp`].
    Norm(NormOp),
    /// Matrix product with a (fused) weight, see [`Linear`].
    Linear(Linear),
    /// Split, q/k norm, rotary embedding and KV write, see [`QkvPost`].
    QkvPost(QkvPost),
    /// Attention over the paged cache, see [`PagedAttention`].
    PagedAttention(PagedAttention),
    /// Gated activation, see [`Glu`].
    Glu(Glu),
    /// `input[T,H] → out[R,H]`: only the rows that are sampled or asked for log-probabilities reach the head.
    /// `input[T,H] → out[E,H]`: only the rows whose hidden state is returned, which need no head. Which of the two is the
    /// row count of `out`.
    GatherRows {
        /// `[T,H]`.
        input: BufferId,
        /// `[R,H]` or `[E,H]`.
        out: BufferId,
    },
    /// The language-model head, see [`Logits`].
    Logits(Logits),
    /// `logits[R,V] → ids[R]` and log-probabilities: penalties, bias, mask, temperature, min-p, top-k, top-p, draw
    /// ([`crate::sampling`]).
    Sample {
        /// `[R,V]`, f32.
        logits: BufferId,
    },
}

impl Op {
    /// The op's name as in the design's table.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "Embed",
            Op::Norm(_) => "Norm",
            Op::Linear(_) => "Linear",
            Op::QkvPost(_) => "QkvPost",
            Op::PagedAttention(_) => "PagedAttention",
            Op::Glu(_) => "Glu",
            Op::GatherRows { .. } => "GatherRows",
            Op::Logits(_) => "Logits",
            Op::Sample { .. } => "Sample",
        }
    }

    /// The buffers that it reads; one that is updated in place is among them.
    pub fn inputs(&self) -> Vec<BufferId> {
        match self {
            Self::Embed { .. } => vec![],
            Self::Norm(op) => std::iter::once(op.input).chain(op.add).collect(),
            Self::Linear(op) => std::iter::once(op.input).chain(op.add).collect(),
            Self::QkvPost(op) => vec![op.input],
            Self::PagedAttention(op) => vec![op.q],
            Self::Glu(op) => vec![op.input],
            Self::GatherRows { input, .. } => vec![*input],
            Self::Logits(op) => vec![op.input],
            Self::Sample { logits } => vec![*logits],
        }
    }

    /// The buffers that it writes, its own output first; then the residual that a norm updates.
    pub fn outputs(&self) -> Vec<BufferId> {
        match self {
            Self::Embed { out, .. } | Self::GatherRows { out, .. } => vec![*out],
            Self::Norm(op) => std::iter::once(op.out).chain(op.add).collect(),
            Self::Linear(op) => vec![op.out],
            Self::QkvPost(op) => vec![op.out],
            Self::PagedAttention(op) => vec![op.out],
            Self::Glu(op) => vec![op.out],
            Self::Logits(op) => vec![op.out],
            Self::Sample { .. } => vec![],
        }
    }
}

/// Which mean is taken out of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `y = x / sqrt(mean(x²) + eps) · w`.
    Rms,
    /// `y = (x − mean(x)) / sqrt(var(x) + eps) · w + b`.
    Layer,
}

/// `input[.,H] (+ residual) → out[.,H] (+ the new residual)`.
///
/// With `add`, `residual ← residual + input` comes first and the norm reads the new residual; the residual buffer is
/// updated in place. Without it the norm reads `input` alone.
#[derive(Clone, Debug, PartialEq)]
pub struct NormOp {
    /// RMS or layer norm.
    pub kind: NormKind,
    /// `[H]`.
    pub weight: WeightId,
    /// `[H]`; layer norm only.
    pub bias: Option<WeightId>,
    /// Added under the root.
    pub eps: f32,
    /// Multiply by `1 + w` (Gemma) in place of `w`.
    pub unit_offset: bool,
    /// `[.,H]`.
    pub input: BufferId,
    /// The residual stream `[.,H]`, read and written.
    pub add: Option<BufferId>,
    /// `[.,H]`.
    pub out: BufferId,
}

/// `input[.,K] → out[.,N]`: `out = input · Wᵀ (+ bias) (+ add)`.
///
/// A fused weight (qkv, gate-up) is one [`Weight`](crate::Weight) of several row parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// `[N,K]`.
    pub weight: WeightId,
    /// `[N]`.
    pub bias: Option<WeightId>,
    /// `[.,K]`.
    pub input: BufferId,
    /// Epilogue: a buffer of the output's shape that is added to it. May be `out` itself.
    pub add: Option<BufferId>,
    /// `[.,N]`.
    pub out: BufferId,
}

/// How the rotated pairs lie in a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs `(i, i + rotary_dim/2)`: Hugging Face checkpoints.
    NeoX,
    /// Pairs `(2i, 2i + 1)`: GGUF files of the `llama` architecture, whose q and k rows are permuted for it.
    GptJ,
}

/// Rotary position embedding. Scaling schemes (linear, Llama 3, YaRN, per-frequency factors) are folded into
/// `inv_freq` and `magnitude` by the model, so a backend knows none of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Pairing.
    pub style: RopeStyle,
    /// Radians a position for each of the `rotary_dim / 2` pairs. f64: angles at long positions need it.
    pub inv_freq: Vec<f64>,
    /// Factor on cosine and sine (YaRN's attention factor; 1 otherwise).
    pub magnitude: f64,
    /// Which of a token's positions turns each pair (mrope: time, height and width of an image's patch, in whatever
    /// order a model cuts its heads); empty: the first turns all.
    pub streams: Vec<usize>,
}

impl Rope {
    /// Leading elements of each head that are rotated; the rest pass through.
    pub fn rotary_dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Which of a token's positions turns a pair.
    pub fn stream(&self, pair: usize) -> usize {
        self.streams.get(pair).copied().unwrap_or(0)
    }
}

/// RMS norm of q and k before the rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct QkNorm {
    /// `[D]` shared by the heads, or `[Hq·D]` over the whole width.
    pub q: WeightId,
    /// `[D]` or `[Hkv·D]`.
    pub k: WeightId,
    /// Added under the root.
    pub eps: f32,
    /// Multiply by `1 + w`.
    pub unit_offset: bool,
}

/// `qkv[T,(Hq + 2·Hkv)·D] → q[T,Hq·D]`; k and v are written to the paged cache by slot.
#[derive(Clone, Debug, PartialEq)]
pub struct QkvPost {
    /// `[T,(Hq + 2·Hkv)·D]`: q, then k, then v.
    pub input: BufferId,
    /// `[T,Hq·D]`.
    pub out: BufferId,
    /// Head counts and size.
    pub heads: HeadShape,
    /// Norm of q and k, if the model has one.
    pub norm: Option<QkNorm>,
    /// Rotary embedding, if this layer has one.
    pub rope: Option<Rope>,
    /// KV group of the layer.
    pub group: usize,
    /// Layer within the group.
    pub layer: usize,
}

/// `q[T,Hq·D] → out[T,Hq·D]`: causal attention over the block tables of one KV group, prefill chunks and decode rows
/// mixed. A query at position p sees keys `max(0, p + 1 − window) ..= p`.
#[derive(Clone, Debug, PartialEq)]
pub struct PagedAttention {
    /// `[T,Hq·D]`.
    pub q: BufferId,
    /// `[T,Hq·D]`.
    pub out: BufferId,
    /// Head counts and size; query head h reads KV head `h / (Hq / Hkv)`.
    pub heads: HeadShape,
    /// Factor on the scores, usually `1/√D`.
    pub scale: f32,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// `cap · tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
    /// KV group of the layer.
    pub group: usize,
    /// Layer within the group.
    pub layer: usize,
}

/// The activation of a [`Glu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GluKind {
    /// `x · sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit by the error function.
    Gelu,
    /// Its tanh approximation.
    GeluTanh,
}

/// `gate_up[.,2I] → out[.,I]`: `act(gate) · up`, gate in the first I columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Glu {
    /// Activation of the gate.
    pub kind: GluKind,
    /// `[.,2I]`.
    pub input: BufferId,
    /// `[.,I]`.
    pub out: BufferId,
}

/// `input[R,H] → out[R,V]`, always f32: `softcap(scale · input · Wᵀ)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// `[V,H]`; the embedding table where the two are tied.
    pub weight: WeightId,
    /// `[R,H]`.
    pub input: BufferId,
    /// `[R,V]`.
    pub out: BufferId,
    /// Factor on the logits.
    pub scale: f32,
    /// `cap · tanh(x / cap)`.
    pub softcap: Option<f32>,
}
