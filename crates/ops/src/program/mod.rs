//! A model as a flat list of fused ops over named buffers.

mod check;
mod experts;
mod heads;
mod latent;

use std::borrow::Cow;

use check::check_scales;
pub use heads::{HeadShape, Values};

use crate::{EmbedIds, KvPlace, Op, PagedAttention, ProgramError, QkvPost, Site, StorageType};

/// Index of a [`Buffer`] in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub usize);

/// Index of a [`Weight`] in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub usize);

/// Symbolic row count of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// T: the tokens of the step; in an encoder of images, their patches.
    Tokens,
    /// R: the rows that reach the head.
    Sampled,
    /// E: the rows whose hidden state is returned.
    Pooled,
    /// M: the rows of an encoder after [`Op::MergeRows`].
    Merged,
    /// k·T: a row for each token and each of its k experts.
    Routed(usize),
}

impl Rows {
    /// Returns the symbol: `T`, `R`, `E`, `M` or, for k = 8, `8T`.
    pub fn symbol(self) -> Cow<'static, str> {
        match self {
            Rows::Tokens => "T".into(),
            Rows::Sampled => "R".into(),
            Rows::Pooled => "E".into(),
            Rows::Merged => "M".into(),
            Rows::Routed(experts) => format!("{experts}T").into(),
        }
    }
}

/// Content of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Element {
    /// A number in the element type of the backend.
    #[default]
    Activation,
    /// An expert and its weight, in a form of the backend ([`Op::Route`]).
    Routing,
}

/// An intermediate result `[rows, cols]`. The backend chooses its element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Name for display: `x`, `qkv`, `logits`.
    pub name: String,
    /// Symbolic row count.
    pub rows: Rows,
    /// Number of columns.
    pub cols: usize,
    /// Content.
    pub element: Element,
}

/// One of several equal parts of a tensor: the matrix of an expert in a tensor of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slab {
    /// Index of the part.
    pub index: usize,
    /// Number of parts.
    pub count: usize,
}

/// Consecutive rows of a fused weight that are one tensor of the checkpoint, or a slab of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightPart {
    /// Name of the tensor in the checkpoint.
    pub tensor: String,
    /// Number of rows of the part.
    pub rows: usize,
    /// Storage type in the checkpoint.
    pub storage: StorageType,
    /// Place of the part in the tensor; `None` if it is the whole tensor.
    pub slab: Option<Slab>,
}

/// A weight `[rows, cols]` as a list of row parts, each with its own storage type. A vector has one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Name for display: `layers.0.qkv`.
    pub name: String,
    /// Number of output rows, the sum over the parts.
    pub rows: usize,
    /// Number of input columns.
    pub cols: usize,
    /// Parts in row order, never empty.
    pub parts: Vec<WeightPart>,
}

impl Weight {
    /// Returns the number of elements: rows · cols.
    pub fn elements(&self) -> usize {
        self.rows.saturating_mul(self.cols)
    }

    /// Returns the size in bytes in the checkpoint's storage types.
    pub fn bytes(&self) -> u64 {
        let part = |p: &WeightPart| {
            p.rows.checked_mul(self.cols).and_then(|n| p.storage.bytes_for(n)).unwrap_or_default() as u64
        };
        self.parts.iter().map(part).sum()
    }

    /// Returns the size in bytes in the memory of backends that keep the storage types, and so of what a product reads: the
    /// scale that all blocks of an NVFP4 matrix share is kept once for a row.
    pub fn kept_bytes(&self) -> u64 {
        let shared = |p: &WeightPart| match p.storage {
            StorageType::Nvfp4 => p.rows as u64 * (self.cols / p.storage.block_elements()).saturating_sub(1) as u64,
            _ => 0,
        };
        let shared = self.parts.iter().map(shared).sum::<u64>() * size_of::<f32>() as u64;
        self.bytes().saturating_sub(shared)
    }
}

/// Scales of the keys and values of a layer in a cache of 8-bit floating-point numbers (e4m3): a number `x` is stored as
/// the code of `x / scale`. Caches of other types have no use for them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    /// Scale of the keys.
    pub key: f32,
    /// Scale of the values: that of the keys, if values are a part of these.
    pub value: f32,
}

impl KvScales {
    /// The scales of a checkpoint without any.
    pub const ONE: Self = Self { key: 1.0, value: 1.0 };
}

/// Layers that share one block table.
#[derive(Clone, Debug, PartialEq)]
pub struct KvGroup {
    /// Head shapes, one per layer.
    pub layers: Vec<HeadShape>,
    /// Scales of keys and values, one per layer; empty if all are [`KvScales::ONE`].
    pub scales: Vec<KvScales>,
    /// Number of tokens that later queries can still see; `None` if unlimited.
    pub window: Option<usize>,
}

impl KvGroup {
    /// Returns the scales of the keys and values of a layer.
    pub fn scales(&self, layer: usize) -> KvScales {
        self.scales.get(layer).copied().unwrap_or(KvScales::ONE)
    }

    /// Returns the number of key and value elements of one token over all layers.
    pub fn elements_per_token(&self) -> usize {
        self.layers.iter().map(|heads| heads.cache_cols()).sum()
    }
}

/// Task of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// Predicts tokens: ends with `Sample`, and its attention is over the paged cache.
    Decoder,
    /// Computes rows of the media cache or vectors of texts: it samples nothing and has no cache, so a step has whole
    /// sequences only.
    Encoder,
    /// Computes vectors of texts with attention over the paged cache, and samples nothing.
    Embedder,
}

/// A model as a backend runs it: the forward part (up to `Logits`), then sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Name of the architecture, for display.
    pub name: String,
    /// Activations.
    pub buffers: Vec<Buffer>,
    /// Weights.
    pub weights: Vec<Weight>,
    /// KV groups.
    pub kv_groups: Vec<KvGroup>,
    /// Ops in execution order. The sampling part is the trailing [`Op::Sample`].
    pub ops: Vec<Op>,
    /// Weights to which adapters add; empty if there are no adapters ([`Program::with_adapters`]).
    pub sites: Vec<Site>,
    /// Whether the input of a product with a weight of [`StorageType::F8E4M3`](crate::StorageType::F8E4M3) may be rounded to
    /// that type, with one scale a row, as the makers of the checkpoint do.
    pub fp8_inputs: bool,
    /// Vocabulary size V, also the number of scores of a classifier's tokens; 0 for an encoder of images.
    pub vocab_size: usize,
    /// Task.
    kind: ProgramKind,
    /// Number of positions P.
    streams: usize,
    /// Number of rows that `MergeRows` makes one.
    merge: usize,
    /// Number of positions for which there are learned rows.
    learned_positions: Option<usize>,
    /// Number of token types; 0 if they make no difference.
    token_types: usize,
}

impl Program {
    /// Returns the size of all weights in the checkpoint's storage types, in bytes. A tied weight counts once.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(Weight::bytes).sum()
    }

    /// Returns the number of elements of all weights.
    pub fn parameters(&self) -> u64 {
        self.weights.iter().map(|w| w.elements() as u64).sum()
    }

    /// Returns the forward part: every op up to and including `Logits`.
    pub fn forward_ops(&self) -> &[Op] {
        match self.ops.split_last() {
            Some((Op::Sample { .. }, forward)) => forward,
            _ => &self.ops,
        }
    }

    /// Returns P, the number of positions of a token: 1 unless a rotary embedding uses more.
    pub fn position_streams(&self) -> usize {
        self.streams
    }

    /// Returns the task.
    pub fn kind(&self) -> ProgramKind {
        self.kind
    }

    /// Returns the number of consecutive rows that [`Op::MergeRows`] makes one: T / M.
    pub fn merge(&self) -> usize {
        self.merge
    }

    /// Returns the number of positions for which the program has learned rows; `None` if it has no such rows.
    pub fn learned_positions(&self) -> Option<usize> {
        self.learned_positions
    }

    /// Returns the number of token types that the program distinguishes; 0 if it reads none.
    pub fn token_types(&self) -> usize {
        self.token_types
    }

    /// Returns whether queries see the keys of their spans ([`StepBatch::seen_ends`](crate::StepBatch::seen_ends)). A step
    /// must then have the whole rest of a span.
    pub fn has_spans(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::PagedAttention(PagedAttention { spans: true, .. })))
    }

    /// Returns whether a vector depends on all rows of its sequence, so that a step must have them all.
    pub fn reduces_rows(&self) -> bool {
        self.kind == ProgramKind::Encoder || self.ops.iter().any(|op| matches!(op, Op::PoolRows(_)))
    }

    /// Returns the number of columns of the media cache that the program writes (an encoder) or reads (a decoder); 0 if
    /// it uses none.
    pub fn media_columns(&self) -> usize {
        let end = |op: &Op| match op {
            Op::StoreRows { input: id, column } => column + self.buffers[id.0].cols,
            Op::InjectRows(op) => op.column + self.buffers[op.out.0].cols,
            _ => 0,
        };
        self.ops.iter().map(end).max().unwrap_or(0)
    }

    /// Returns the layout of keys and values that live in the memory of the step: one layer for each distinct head shape,
    /// which the layers of the model use one after the other. Empty for a decoder.
    pub fn step_kv(&self) -> KvGroup {
        let mut layers = Vec::new();
        for op in &self.ops {
            if let Op::QkvPost(QkvPost { kv: KvPlace::Step, heads, .. }) = op
                && !layers.contains(heads)
            {
                layers.push(*heads);
            }
        }
        KvGroup { layers, scales: Vec::new(), window: None }
    }

    /// Returns the buffer `[E,H]` of the returned hidden states, which is the last buffer of pooled rows that is
    /// written; `None` if the model returns none.
    pub fn embedding(&self) -> Option<BufferId> {
        let mut written = self.ops.iter().rev().flat_map(Op::outputs);
        written.find(|id| self.buffers[id.0].rows == Rows::Pooled)
    }
}

/// Builds a [`Program`] and checks every shape. [`ProgramBuilder::finish`] reports the first defect.
#[derive(Debug)]
pub struct ProgramBuilder {
    program: Program,
    written: Vec<bool>,
    error: Option<ProgramError>,
}

impl ProgramBuilder {
    /// Creates an empty decoder for a vocabulary of `vocab_size` entries.
    pub fn new(name: impl Into<String>, vocab_size: usize) -> Self {
        Self::of_kind(name.into(), vocab_size, ProgramKind::Decoder, 1)
    }

    /// Creates an empty encoder of images, whose `MergeRows` makes `merge` rows one.
    pub fn encoder(name: impl Into<String>, merge: usize) -> Self {
        Self::of_kind(name.into(), 0, ProgramKind::Encoder, merge.max(1))
    }

    /// Creates an empty program that returns vectors of texts, for a vocabulary of `vocab_size` entries: an encoder, or
    /// an embedder, whose attention is over the paged cache.
    pub fn texts(name: impl Into<String>, vocab_size: usize, kind: ProgramKind) -> Self {
        Self::of_kind(name.into(), vocab_size, kind, 1)
    }

    fn of_kind(name: String, vocab_size: usize, kind: ProgramKind, merge: usize) -> Self {
        let program = Program {
            name,
            buffers: Vec::new(),
            weights: Vec::new(),
            kv_groups: Vec::new(),
            ops: Vec::new(),
            sites: Vec::new(),
            fp8_inputs: false,
            vocab_size,
            kind,
            streams: 1,
            merge,
            learned_positions: None,
            token_types: 0,
        };
        Self { program, written: Vec::new(), error: None }
    }

    /// Declares an activation.
    pub fn buffer(&mut self, name: impl Into<String>, rows: Rows, cols: usize) -> BufferId {
        self.declare(Buffer { name: name.into(), rows, cols, element: Element::Activation })
    }

    /// Declares the experts `[T,k]` of each token.
    pub fn routing(&mut self, name: impl Into<String>, experts: usize) -> BufferId {
        self.declare(Buffer { name: name.into(), rows: Rows::Tokens, cols: experts, element: Element::Routing })
    }

    fn declare(&mut self, buffer: Buffer) -> BufferId {
        self.program.buffers.push(buffer);
        self.written.push(false);
        BufferId(self.program.buffers.len() - 1)
    }

    /// Returns the number of columns of a declared buffer.
    pub fn buffer_cols(&self, id: BufferId) -> usize {
        self.cols(id)
    }

    /// Declares a weight of `cols` columns made of `parts`.
    pub fn weight(&mut self, name: impl Into<String>, cols: usize, parts: Vec<WeightPart>) -> WeightId {
        let name = name.into();
        if parts.is_empty() {
            self.fail(ProgramError::Invalid(format!("weight '{name}' has no parts")));
        }
        if let Some(part) = parts.iter().find(|p| p.storage.bytes_for(cols).is_none()) {
            let block = part.storage.block_elements();
            self.fail(ProgramError::Invalid(format!(
                "tensor '{}': rows of {cols} elements do not fill {} blocks of {block}",
                part.tensor, part.storage
            )));
        }
        let rows = parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.rows));
        let elements = rows.and_then(|rows| rows.checked_mul(cols));
        // The largest element has four bytes.
        if elements.and_then(|n| n.checked_mul(4)).is_none() {
            self.fail(ProgramError::Invalid(format!("weight '{name}' of {cols} columns is too large")));
        }
        let rows = rows.unwrap_or(0);
        self.program.weights.push(Weight { name, rows, cols, parts });
        WeightId(self.program.weights.len() - 1)
    }

    /// Declares a KV group.
    pub fn kv_group(&mut self, group: KvGroup) -> usize {
        if let Err(error) = check_scales(&group) {
            self.fail(error);
        }
        self.program.kv_groups.push(group);
        self.program.kv_groups.len() - 1
    }

    /// Appends an op.
    pub fn push(&mut self, op: Op) {
        if let Err(error) = self.check(&op) {
            self.fail(error);
        }
        for out in op.outputs() {
            self.written[out.0] = true;
        }
        if let Some(rope) = op.rope() {
            let last = rope.streams.iter().max().copied().unwrap_or(0);
            self.program.streams = self.program.streams.max(1 + last);
        }
        if let Op::Embed(embed) = &op {
            let rows = self.program.weights[embed.table.0].rows;
            match embed.ids {
                EmbedIds::Tokens => {}
                EmbedIds::Positions { offset } => {
                    self.program.learned_positions = Some(rows.saturating_sub(offset));
                }
                EmbedIds::Types => self.program.token_types = rows,
            }
        }
        self.program.ops.push(op);
    }

    /// Returns the program, or the first defect found.
    pub fn finish(mut self) -> Result<Program, ProgramError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        self.check_end()?;
        Ok(self.program)
    }

    fn fail(&mut self, error: ProgramError) {
        self.error.get_or_insert(error);
    }

    fn cols(&self, id: BufferId) -> usize {
        self.program.buffers[id.0].cols
    }
}
