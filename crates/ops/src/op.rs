//! The op set. T = tokens in the step (in an encoder of images, their patches), S = sequences, R = rows that need logits,
//! E = rows whose hidden state is returned, M = merged rows of an encoder, k·T = rows of a mixture of k experts per token;
//! activations are row-major `[rows, cols]`.

use crate::adapter::{Lora, LoraInput};
use crate::attention::{KvPlace, PagedAttention, QkvPost, Rope, SegmentAttention};
use crate::columns::GatherColumns;
use crate::experts::{ExpertLinear, ExpertSum, GateRows, Route};
use crate::latent::{HeadLinear, LatentPost};
use crate::program::{BufferId, HeadShape, WeightId};

/// One fused operation of a [`Program`](crate::Program).
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Rows of a table by the tokens of the step, see [`Embed`].
    Embed(Embed),
    /// `patches[T,K] → out[T,K]`: the patches of the step's images, normalised by channel
    /// ([`EncodeBatch`](crate::EncodeBatch)).
    Patches {
        /// Output `[T,K]`; K holds the channels of a patch one after the other.
        out: BufferId,
    },
    /// Learned positions of patches, see [`EmbedTaps`].
    EmbedTaps(EmbedTaps),
    /// Normalisation with an optional residual, see [`NormOp`].
    Norm(NormOp),
    /// Matrix product with a (fused) weight, see [`Linear`].
    Linear(Linear),
    /// What adapters add to a product, see [`Lora`].
    Lora(Lora),
    /// Split, q/k norm, rotary embedding and KV write, see [`QkvPost`].
    QkvPost(QkvPost),
    /// Matrix products of each head with a matrix of its own, see [`HeadLinear`].
    HeadLinear(HeadLinear),
    /// Norm, rotary embedding and KV write of latent attention, see [`LatentPost`].
    LatentPost(LatentPost),
    /// Attention over the paged cache, see [`PagedAttention`].
    PagedAttention(PagedAttention),
    /// Attention within the segments of the step, see [`SegmentAttention`].
    SegmentAttention(SegmentAttention),
    /// Gated activation, see [`Glu`].
    Glu(Glu),
    /// Plain activation, see [`Act`].
    Act(Act),
    /// Gate of whole rows, see [`GateRows`].
    GateRows(GateRows),
    /// Choice of the experts of each token, see [`Route`].
    Route(Route),
    /// Matrix products with the weights of the chosen experts, see [`ExpertLinear`].
    ExpertLinear(ExpertLinear),
    /// Weighted sum over the experts of each token, see [`ExpertSum`].
    ExpertSum(ExpertSum),
    /// Consecutive rows as one, see [`MergeRows`].
    MergeRows(MergeRows),
    /// `input[M,C] → columns of the media cache`: writes each row to the row of the cache that the batch names.
    StoreRows {
        /// Input `[M,C]`.
        input: BufferId,
        /// First column in the cache.
        column: usize,
    },
    /// Encoder outputs in place of, or added to, rows of the residual stream, see [`InjectRows`].
    InjectRows(InjectRows),
    /// `input[T,H] → out[R,H]`: selects the rows that are sampled or need log-probabilities, which reach the head.
    /// `input[T,H] → out[E,H]`: selects the rows whose hidden state is returned ([`StepBatch::pooled_rows`]
    /// (crate::StepBatch::pooled_rows)), which need no head. The row count of `out` determines which of the two applies.
    GatherRows {
        /// Input `[T,H]`.
        input: BufferId,
        /// Output `[R,H]` or `[E,H]`.
        out: BufferId,
    },
    /// Columns in another order, see [`GatherColumns`].
    GatherColumns(GatherColumns),
    /// Reduction of the rows of a sequence to one, see [`PoolRows`].
    PoolRows(PoolRows),
    /// The language-model head, see [`Logits`].
    Logits(Logits),
    /// `logits[R,V] → ids[R]` and log-probabilities: penalties, bias, mask, temperature, min-p, top-k, top-p and
    /// sampling ([`crate::sampling`]).
    Sample {
        /// Logits `[R,V]`, f32.
        logits: BufferId,
    },
}

impl Op {
    /// Returns the name of the op.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Embed(_) => "Embed",
            Op::Patches { .. } => "Patches",
            Op::EmbedTaps(_) => "EmbedTaps",
            Op::Norm(_) => "Norm",
            Op::Linear(_) => "Linear",
            Op::Lora(_) => "Lora",
            Op::QkvPost(_) => "QkvPost",
            Op::HeadLinear(_) => "HeadLinear",
            Op::LatentPost(_) => "LatentPost",
            Op::PagedAttention(_) => "PagedAttention",
            Op::SegmentAttention(_) => "SegmentAttention",
            Op::Glu(_) => "Glu",
            Op::Act(_) => "Act",
            Op::GateRows(_) => "GateRows",
            Op::Route(_) => "Route",
            Op::ExpertLinear(_) => "ExpertLinear",
            Op::ExpertSum(_) => "ExpertSum",
            Op::MergeRows(_) => "MergeRows",
            Op::StoreRows { .. } => "StoreRows",
            Op::InjectRows(_) => "InjectRows",
            Op::GatherRows { .. } => "GatherRows",
            Op::GatherColumns(_) => "GatherColumns",
            Op::PoolRows(_) => "PoolRows",
            Op::Logits(_) => "Logits",
            Op::Sample { .. } => "Sample",
        }
    }

    /// Returns the buffers that the op reads, including a buffer that is updated in place.
    pub fn inputs(&self) -> Vec<BufferId> {
        match self {
            Self::Patches { .. } => vec![],
            Self::Embed(op) => {
                if op.add {
                    vec![op.out]
                } else {
                    vec![]
                }
            }
            Self::PoolRows(op) => vec![op.input],
            Self::EmbedTaps(op) => vec![op.out],
            Self::Norm(op) => std::iter::once(op.input).chain(op.add.map(Residual::buffer)).collect(),
            Self::Linear(op) => std::iter::once(op.input).chain(op.add).collect(),
            Self::Lora(op) => match op.input {
                LoraInput::Rows(input) => vec![input, op.out],
                LoraInput::Tokens => vec![op.out],
                LoraInput::Experts { input, routing } => vec![input, routing, op.out],
            },
            Self::QkvPost(op) => vec![op.input],
            Self::HeadLinear(op) => vec![op.input],
            Self::LatentPost(op) => vec![op.q, op.kv, op.out],
            Self::PagedAttention(op) => vec![op.q],
            Self::SegmentAttention(op) => vec![op.q],
            Self::Glu(op) => vec![op.input],
            Self::Act(op) => vec![op.input],
            Self::GateRows(op) => vec![op.out, op.gate],
            Self::Route(op) => vec![op.input],
            Self::ExpertLinear(op) => vec![op.input, op.routing],
            Self::ExpertSum(op) => [op.input, op.routing].into_iter().chain(op.add).collect(),
            Self::MergeRows(op) => vec![op.input],
            Self::GatherRows { input, .. } | Self::StoreRows { input, .. } => vec![*input],
            Self::GatherColumns(op) => vec![op.input],
            Self::InjectRows(op) => vec![op.out],
            Self::Logits(op) => vec![op.input],
            Self::Sample { logits } => vec![*logits],
        }
    }

    /// Returns the buffers that the op writes: its output first, then the residual that a norm updates.
    pub fn outputs(&self) -> Vec<BufferId> {
        match self {
            Self::Patches { out } | Self::GatherRows { out, .. } => vec![*out],
            Self::GatherColumns(op) => vec![op.out],
            Self::MergeRows(op) => vec![op.out],
            Self::Embed(op) => vec![op.out],
            Self::PoolRows(op) => vec![op.out],
            Self::EmbedTaps(op) => vec![op.out],
            Self::Norm(op) => std::iter::once(op.out).chain(op.add.and_then(Residual::updated)).collect(),
            Self::Linear(op) => vec![op.out],
            Self::Lora(op) => vec![op.out],
            Self::QkvPost(op) => vec![op.out],
            Self::HeadLinear(op) => vec![op.out],
            Self::LatentPost(op) => vec![op.out],
            Self::PagedAttention(op) => vec![op.out],
            Self::SegmentAttention(op) => vec![op.out],
            Self::Glu(op) => vec![op.out],
            Self::Act(op) => vec![op.out],
            Self::GateRows(op) => vec![op.out],
            Self::Route(op) => vec![op.out],
            Self::ExpertLinear(op) => vec![op.out],
            Self::ExpertSum(op) => vec![op.out],
            Self::InjectRows(op) => vec![op.out],
            Self::Logits(op) => vec![op.out],
            Self::StoreRows { .. } | Self::Sample { .. } => vec![],
        }
    }

    /// Returns the rotary embedding that the op applies.
    pub fn rope(&self) -> Option<&Rope> {
        match self {
            Self::QkvPost(op) => op.rope.as_ref(),
            Self::LatentPost(op) => Some(&op.rope),
            _ => None,
        }
    }

    /// Returns the place to which the op writes keys and values, and their heads.
    pub fn written_kv(&self) -> Option<(KvPlace, HeadShape)> {
        match self {
            Self::QkvPost(op) => Some((op.kv, op.heads)),
            Self::LatentPost(op) => Some((KvPlace::Cache { group: op.group, layer: op.layer }, op.heads)),
            _ => None,
        }
    }
}

/// Source of the rows that an [`Embed`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbedIds {
    /// The token ids. The table has a row for each entry of the vocabulary.
    Tokens,
    /// The positions of the tokens plus `offset` (learned positions; RoBERTa's begin after the id of its padding).
    Positions {
        /// Row of position 0.
        offset: usize,
    },
    /// The types of the tokens, which distinguish the texts of a pair (BERT).
    Types,
}

/// `out[T,H] = scale · table[ids]`, or `out += scale · table[ids]` with `add`.
#[derive(Clone, Debug, PartialEq)]
pub struct Embed {
    /// Table `[rows,H]`, possibly quantised. Rows are read directly from storage.
    pub table: WeightId,
    /// Rows to read.
    pub ids: EmbedIds,
    /// Factor of a row (1 for most models, √H for Gemma).
    pub scale: f32,
    /// Whether the rows are added to the output, which they replace otherwise.
    pub add: bool,
    /// Output `[T,H]`.
    pub out: BufferId,
}

/// Reduction of rows to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// The first row (the token `[CLS]` of BERT).
    First,
    /// The mean of all rows, summed in their order.
    Mean,
}

/// `input[T,H] → out[E,H]`: row e is a reduction of [`StepBatch::pooled_lens`](crate::StepBatch::pooled_lens) rows, of
/// which [`StepBatch::pooled_rows`](crate::StepBatch::pooled_rows) is the last.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolRows {
    /// Reduction.
    pub kind: PoolKind,
    /// Input `[T,H]`.
    pub input: BufferId,
    /// Output `[E,H]`.
    pub out: BufferId,
}

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `y = x / sqrt(mean(x²) + eps) · w`.
    Rms,
    /// `y = (x − mean(x)) / sqrt(var(x) + eps) · w + b`.
    Layer,
}

/// Place of the residual connection of a [`NormOp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// `residual ← residual + input`, `out ← norm(residual)`: the norm before a block (pre-norm), fused with the
    /// addition of the block before it. The residual buffer is updated in place.
    Before(BufferId),
    /// `out ← residual + norm(input)`: the norm of a block's output (post-norm: Gemma, OLMo 2). `out` may be the
    /// residual buffer itself.
    After(BufferId),
}

impl Residual {
    /// Returns the residual stream `[.,H]`.
    pub const fn buffer(self) -> BufferId {
        match self {
            Self::Before(id) | Self::After(id) => id,
        }
    }

    /// Returns the residual stream if it is updated in place.
    pub const fn updated(self) -> Option<BufferId> {
        match self {
            Self::Before(id) => Some(id),
            Self::After(_) => None,
        }
    }
}

/// `input[.,H] (+ residual) → out[.,H] (+ the new residual)`: a norm, with a residual connection before or after it.
#[derive(Clone, Debug, PartialEq)]
pub struct NormOp {
    /// RMS or layer norm.
    pub kind: NormKind,
    /// Weight `[H]`.
    pub weight: WeightId,
    /// Bias `[H]`; layer norm only.
    pub bias: Option<WeightId>,
    /// Value added under the root.
    pub eps: f32,
    /// Multiplies by `1 + w` (Gemma) instead of `w`.
    pub unit_offset: bool,
    /// Input `[.,H]`.
    pub input: BufferId,
    /// Residual stream `[.,H]`, and whether it is added before or after the norm.
    pub add: Option<Residual>,
    /// Output `[.,H]`. It may be any of the inputs.
    pub out: BufferId,
}

/// `input[.,K] → out[.,N]`: `out = scale · (input · Wᵀ (+ bias)) (+ add)`.
///
/// A fused weight (qkv, gate-up) is a [`Weight`](crate::Weight) with several row parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Weight `[N,K]`.
    pub weight: WeightId,
    /// Bias `[N]`.
    pub bias: Option<WeightId>,
    /// Factor of the product and its bias (1 for most models, the residual multiplier for Granite).
    pub scale: f32,
    /// Input `[.,K]`.
    pub input: BufferId,
    /// Buffer of the output's shape that the epilogue adds to the output. It may be `out` itself.
    pub add: Option<BufferId>,
    /// Output `[.,N]`.
    pub out: BufferId,
}

/// `input[T,C] → out[M,f·C]` or `out[M,C]`: each f consecutive rows become one, f being the program's
/// [`merge`](crate::Program::merge).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeRows {
    /// Input `[T,C]`.
    pub input: BufferId,
    /// Output `[M,f·C]` or `[M,C]`.
    pub out: BufferId,
    /// How rows become one.
    pub kind: MergeKind,
}

/// How [`MergeRows`] makes rows one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeKind {
    /// One after the other.
    Concatenated,
    /// Their mean, added in order.
    Mean,
}

impl MergeKind {
    /// Returns the number of columns that `merge` rows of `cols` columns become.
    pub const fn cols(self, cols: usize, merge: usize) -> usize {
        match self {
            Self::Concatenated => cols.saturating_mul(merge),
            Self::Mean => cols,
        }
    }
}

/// The activation of a [`Glu`] or an [`Act`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GluKind {
    /// `x · sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit by the error function.
    Gelu,
    /// Gaussian error linear unit by its tanh approximation.
    GeluTanh,
    /// Hyperbolic tangent, for [`Act`] only.
    Tanh,
    /// The gated activation of GPT-OSS, for [`Glu`] only: `(u + 1) · g · sigmoid(alpha · g)` with
    /// `g = min(gate, limit)` and `u = min(max(up, −limit), limit)`.
    ClampedSwiglu {
        /// Factor of the gate in the sigmoid.
        alpha: f32,
        /// Limit of gate and up; positive.
        limit: f32,
    },
}

/// `gate_up[.,2I] → out[.,I]`: `act(gate) · up`, gate in the first I columns. [`GluKind::ClampedSwiglu`] changes up too.
#[derive(Clone, Debug, PartialEq)]
pub struct Glu {
    /// Activation of the gate.
    pub kind: GluKind,
    /// Input `[.,2I]`.
    pub input: BufferId,
    /// Output `[.,I]`.
    pub out: BufferId,
}

/// `input[R,H] → out[R,V]`, always f32: `softcap(scale · input · Wᵀ)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// Weight `[V,H]`: the embedding table if the two are tied.
    pub weight: WeightId,
    /// Input `[R,H]`.
    pub input: BufferId,
    /// Output `[R,V]`.
    pub out: BufferId,
    /// Factor of the logits.
    pub scale: f32,
    /// Cap of the logits: `cap · tanh(x / cap)`.
    pub softcap: Option<f32>,
}

/// `input[.,I] → out[.,I]`: `act(input)`. The output may be the input.
#[derive(Clone, Debug, PartialEq)]
pub struct Act {
    /// Activation.
    pub kind: GluKind,
    /// Input `[.,I]`.
    pub input: BufferId,
    /// Output `[.,I]`.
    pub out: BufferId,
}

/// `out[T,H] += Σ weight · table[row]` over the [`Tap`](crate::Tap)s of each row: learned positions, resampled for the
/// grid of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedTaps {
    /// Table `[positions,H]`.
    pub table: WeightId,
    /// Rows `[T,H]`, read and written.
    pub out: BufferId,
}

/// Effect of [`InjectRows`] on a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectMode {
    /// The row becomes that of the cache.
    Replace,
    /// The row of the cache is added.
    Add,
}

/// `out[T,H]`, in place: the rows that the batch names take H columns of their row of the media cache.
#[derive(Clone, Debug, PartialEq)]
pub struct InjectRows {
    /// Rows `[T,H]`, read and written.
    pub out: BufferId,
    /// First column in the cache.
    pub column: usize,
    /// Effect on the rows.
    pub mode: InjectMode,
}
