//! A model as a flat list of fused ops over named buffers.

use crate::{Act, Glu, GluKind, KvPlace, Linear, Op, ProgramError, QkvPost, StorageType};

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
}

impl Rows {
    /// Returns the symbol: `T`, `R`, `E` or `M`.
    pub const fn symbol(self) -> &'static str {
        match self {
            Rows::Tokens => "T",
            Rows::Sampled => "R",
            Rows::Pooled => "E",
            Rows::Merged => "M",
        }
    }
}

/// An activation `[rows, cols]`. The backend chooses its element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Name for display: `x`, `qkv`, `logits`.
    pub name: String,
    /// Symbolic row count.
    pub rows: Rows,
    /// Number of columns.
    pub cols: usize,
}

/// Consecutive rows of a fused weight that are one tensor of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightPart {
    /// Name of the tensor in the checkpoint.
    pub tensor: String,
    /// Number of rows of the part.
    pub rows: usize,
    /// Storage type in the checkpoint.
    pub storage: StorageType,
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
}

/// Query and key-value heads of an attention layer. Sizes that overflow saturate, so that they match no other size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Number of query heads Hq.
    pub q: usize,
    /// Number of key-value heads Hkv, a divisor of Hq.
    pub kv: usize,
    /// Number of elements D of a head.
    pub dim: usize,
}

impl HeadShape {
    /// Returns the number of columns of q: Hq·D.
    pub const fn q_cols(self) -> usize {
        self.q.saturating_mul(self.dim)
    }

    /// Returns the number of columns of k and of v: Hkv·D.
    pub const fn kv_cols(self) -> usize {
        self.kv.saturating_mul(self.dim)
    }

    /// Returns the number of columns of the fused projection.
    pub const fn qkv_cols(self) -> usize {
        self.q_cols().saturating_add(self.kv_cols().saturating_mul(2))
    }
}

/// Layers that share one block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// Head shapes, one per layer.
    pub layers: Vec<HeadShape>,
    /// Number of tokens that later queries can still see; `None` if unlimited.
    pub window: Option<usize>,
}

impl KvGroup {
    /// Returns the number of key and value elements of one token over all layers.
    pub fn elements_per_token(&self) -> usize {
        self.layers.iter().map(|heads| 2 * heads.kv_cols()).sum()
    }
}

/// Task of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// Predicts tokens: ends with `Sample`, and its attention is over the paged cache.
    Decoder,
    /// Computes rows of the media cache or hidden states: it samples nothing and has no cache.
    Encoder,
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
    /// Vocabulary size V; 0 for an encoder of images.
    pub vocab_size: usize,
    /// Task.
    kind: ProgramKind,
    /// Number of positions P.
    streams: usize,
    /// Number of rows that `MergeRows` makes one.
    merge: usize,
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
        KvGroup { layers, window: None }
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

    fn of_kind(name: String, vocab_size: usize, kind: ProgramKind, merge: usize) -> Self {
        let program = Program {
            name,
            buffers: Vec::new(),
            weights: Vec::new(),
            kv_groups: Vec::new(),
            ops: Vec::new(),
            vocab_size,
            kind,
            streams: 1,
            merge,
        };
        Self { program, written: Vec::new(), error: None }
    }

    /// Declares an activation.
    pub fn buffer(&mut self, name: impl Into<String>, rows: Rows, cols: usize) -> BufferId {
        self.program.buffers.push(Buffer { name: name.into(), rows, cols });
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
        if let Op::QkvPost(QkvPost { rope: Some(rope), .. }) = &op {
            let last = rope.streams.iter().max().copied().unwrap_or(0);
            self.program.streams = self.program.streams.max(1 + last);
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

    /// Checks that the program has the result of its kind.
    fn check_end(&self) -> Result<(), ProgramError> {
        let has_result = match self.program.kind {
            ProgramKind::Decoder => matches!(self.program.ops.last(), Some(Op::Sample { .. })),
            ProgramKind::Encoder => {
                let stores = |op: &Op| matches!(op, Op::StoreRows { .. });
                self.program.ops.iter().any(stores) || self.program.embedding().is_some()
            }
        };
        let rule = match self.program.kind {
            ProgramKind::Decoder => "a decoder program ends with Sample",
            ProgramKind::Encoder => "an encoder program stores rows or returns hidden states",
        };
        if has_result { Ok(()) } else { Err(ProgramError::Invalid(rule.into())) }
    }

    fn fail(&mut self, error: ProgramError) {
        self.error.get_or_insert(error);
    }

    fn check(&self, op: &Op) -> Result<(), ProgramError> {
        let index = self.program.ops.len();
        for input in op.inputs() {
            if !self.written[input.0] {
                let buffer = self.program.buffers[input.0].name.clone();
                return Err(ProgramError::ReadBeforeWrite { op: index, name: op.name(), buffer });
            }
        }
        for (what, found, expected) in self.column_rules(op) {
            if found != expected {
                return Err(ProgramError::Shape { op: index, name: op.name(), what: what.into(), found, expected });
            }
        }
        self.check_kind(op)?;
        self.check_activation(op)?;
        self.check_rows(op)?;
        self.check_order(op)?;
        self.check_heads(op)
    }

    fn cols(&self, id: BufferId) -> usize {
        self.program.buffers[id.0].cols
    }

    fn of(&self, id: WeightId) -> &Weight {
        &self.program.weights[id.0]
    }

    /// Returns `(what, found, expected)` for every pair of column counts that must agree in an op.
    fn column_rules(&self, op: &Op) -> Vec<(&'static str, usize, usize)> {
        match op {
            Op::Embed { table, out, .. } => vec![
                ("the output", self.cols(*out), self.of(*table).cols),
                ("the table's rows", self.of(*table).rows, self.program.vocab_size),
            ],
            Op::Norm(n) => {
                let cols = self.cols(n.input);
                let elements = |id| self.of(id).elements();
                let mut rules = vec![("the weight", elements(n.weight), cols), ("the output", self.cols(n.out), cols)];
                rules.extend(n.add.map(|r| ("the residual", self.cols(r.buffer()), cols)));
                rules.extend(n.bias.map(|b| ("the bias", elements(b), cols)));
                rules
            }
            Op::Patches { .. } | Op::StoreRows { .. } | Op::InjectRows(_) => vec![],
            Op::EmbedTaps(e) => vec![("the output", self.cols(e.out), self.of(e.table).cols)],
            Op::Linear(l) => self.linear_rules(l),
            Op::QkvPost(q) => vec![
                ("the input", self.cols(q.input), q.heads.qkv_cols()),
                ("the output", self.cols(q.out), q.heads.q_cols()),
            ],
            Op::PagedAttention(a) => {
                let cols = a.heads.q_cols();
                let mut rules = vec![("q", self.cols(a.q), cols), ("the output", self.cols(a.out), cols)];
                rules.extend(a.sinks.map(|id| ("the sinks", self.of(id).elements(), a.heads.q)));
                rules
            }
            Op::SegmentAttention(a) => {
                vec![("q", self.cols(a.q), a.heads.q_cols()), ("the output", self.cols(a.out), a.heads.q_cols())]
            }
            Op::Glu(g) => vec![("the input", self.cols(g.input), self.cols(g.out).saturating_mul(2))],
            Op::Act(a) => vec![("the output", self.cols(a.out), self.cols(a.input))],
            Op::MergeRows { input, out } => {
                vec![("the output", self.cols(*out), self.cols(*input).saturating_mul(self.program.merge))]
            }
            Op::GatherRows { input, out } => vec![("the output", self.cols(*out), self.cols(*input))],
            Op::Logits(l) => vec![
                ("the input", self.cols(l.input), self.of(l.weight).cols),
                ("the weight's rows", self.of(l.weight).rows, self.program.vocab_size),
                ("the output", self.cols(l.out), self.program.vocab_size),
            ],
            Op::Sample { logits } => vec![("the logits", self.cols(*logits), self.program.vocab_size)],
        }
    }

    fn linear_rules(&self, l: &Linear) -> Vec<(&'static str, usize, usize)> {
        let weight = self.of(l.weight);
        let mut rules =
            vec![("the input", self.cols(l.input), weight.cols), ("the output", self.cols(l.out), weight.rows)];
        rules.extend(l.bias.map(|b| ("the bias", self.of(b).elements(), weight.rows)));
        rules.extend(l.add.map(|b| ("the epilogue's addend", self.cols(b), weight.rows)));
        rules
    }

    /// Checks that a decoder uses the cache and an encoder does not.
    fn check_kind(&self, op: &Op) -> Result<(), ProgramError> {
        let only = match op {
            Op::PagedAttention(_)
            | Op::QkvPost(QkvPost { kv: KvPlace::Cache { .. }, .. })
            | Op::InjectRows(_)
            | Op::Logits(_)
            | Op::Sample { .. } => ProgramKind::Decoder,
            Op::SegmentAttention(_)
            | Op::QkvPost(QkvPost { kv: KvPlace::Step, .. })
            | Op::Patches { .. }
            | Op::EmbedTaps(_)
            | Op::MergeRows { .. }
            | Op::StoreRows { .. } => ProgramKind::Encoder,
            _ => return Ok(()),
        };
        if only == self.program.kind {
            return Ok(());
        }
        let name = match self.program.kind {
            ProgramKind::Decoder => "a decoder",
            ProgramKind::Encoder => "an encoder",
        };
        Err(ProgramError::Invalid(format!("op {} ({}) has no meaning in {name}", self.program.ops.len(), op.name())))
    }

    /// Checks the parameters of an activation.
    fn check_activation(&self, op: &Op) -> Result<(), ProgramError> {
        let reason = match op {
            Op::Act(Act { kind: GluKind::ClampedSwiglu { .. }, .. }) => "ClampedSwiglu needs a gate".into(),
            Op::Glu(Glu { kind: GluKind::ClampedSwiglu { alpha, limit }, .. })
                if !alpha.is_finite() || limit.is_nan() || *limit <= 0.0 =>
            {
                format!(
                    "the activation has the factor {alpha} and the limit {limit}, expected a number and a positive one"
                )
            }
            _ => return Ok(()),
        };
        Err(ProgramError::Invalid(format!("op {} ({}): {reason}", self.program.ops.len(), op.name())))
    }

    /// Checks that every op keeps the rows of its input, except for the ops that gather or merge rows.
    fn check_rows(&self, op: &Op) -> Result<(), ProgramError> {
        let (from, to) = match op {
            Op::Embed { .. }
            | Op::Patches { .. }
            | Op::EmbedTaps(_)
            | Op::InjectRows(_)
            | Op::QkvPost(_)
            | Op::PagedAttention(_)
            | Op::SegmentAttention(_) => (Some(Rows::Tokens), Rows::Tokens),
            Op::MergeRows { .. } => (Some(Rows::Tokens), Rows::Merged),
            Op::StoreRows { .. } => (Some(Rows::Merged), Rows::Merged),
            Op::GatherRows { out, .. } => match self.program.buffers[out.0].rows {
                Rows::Pooled => (Some(Rows::Tokens), Rows::Pooled),
                Rows::Tokens | Rows::Sampled | Rows::Merged => (Some(Rows::Tokens), Rows::Sampled),
            },
            Op::Logits(_) | Op::Sample { .. } => (Some(Rows::Sampled), Rows::Sampled),
            Op::Norm(_) | Op::Linear(_) | Op::Glu(_) | Op::Act(_) => {
                let rows = op.inputs().first().map(|id| self.program.buffers[id.0].rows);
                (rows, rows.unwrap_or(Rows::Tokens))
            }
        };
        let pairs =
            op.inputs().into_iter().map(|id| (id, from)).chain(op.outputs().into_iter().map(|id| (id, Some(to))));
        for (id, expected) in pairs {
            let Buffer { name, rows, .. } = &self.program.buffers[id.0];
            if let Some(expected) = expected.filter(|expected| expected != rows) {
                return Err(ProgramError::Invalid(format!(
                    "op {} ({}): buffer '{name}' has {} rows, expected {}",
                    self.program.ops.len(),
                    op.name(),
                    rows.symbol(),
                    expected.symbol()
                )));
            }
        }
        Ok(())
    }

    /// Checks that nothing follows `Sample` and that attention reads a layer which has been written.
    fn check_order(&self, op: &Op) -> Result<(), ProgramError> {
        if let Some(Op::Sample { .. }) = self.program.ops.last() {
            return Err(ProgramError::Invalid(format!("{} follows Sample, which must be the last op", op.name())));
        }
        let invalid = |reason: String| Err(ProgramError::Invalid(reason));
        match op {
            Op::PagedAttention(a) => {
                let place = KvPlace::Cache { group: a.group, layer: a.layer };
                let writes = |op: &Op| matches!(op, Op::QkvPost(q) if q.kv == place);
                match self.program.ops.iter().any(writes) {
                    true => Ok(()),
                    false => invalid(format!(
                        "PagedAttention reads KV group {}, layer {} before any op writes it",
                        a.group, a.layer
                    )),
                }
            }
            Op::SegmentAttention(a) => {
                let written = self.program.ops.iter().rev().find_map(|op| match op {
                    Op::QkvPost(q) => Some(q.heads),
                    _ => None,
                });
                match written {
                    Some(heads) if heads == a.heads => Ok(()),
                    found => {
                        invalid(format!("SegmentAttention reads keys of {:?}, the last op wrote {found:?}", a.heads))
                    }
                }
            }
            _ => Ok(()),
        }
    }

    fn check_heads(&self, op: &Op) -> Result<(), ProgramError> {
        let (place, heads) = match op {
            Op::QkvPost(q) => (q.kv, q.heads),
            Op::PagedAttention(a) => (KvPlace::Cache { group: a.group, layer: a.layer }, a.heads),
            Op::SegmentAttention(a) => (KvPlace::Step, a.heads),
            _ => return Ok(()),
        };
        let invalid = |reason: String| {
            let place = match place {
                KvPlace::Cache { group, layer } => format!("KV group {group}, layer {layer}"),
                KvPlace::Step => "the step".into(),
            };
            Err(ProgramError::Invalid(format!("{} of {place}: {reason}", op.name())))
        };
        if let KvPlace::Cache { group, layer } = place {
            let declared = self.program.kv_groups.get(group).and_then(|g| g.layers.get(layer));
            if declared != Some(&heads) {
                return invalid(format!("{heads:?} does not match {declared:?}"));
            }
        }
        if heads.dim == 0 || heads.kv == 0 || heads.q == 0 || !heads.q.is_multiple_of(heads.kv) {
            return invalid(format!("{heads:?} is not a whole number of query heads for each KV head"));
        }
        match op {
            Op::QkvPost(q) => self.check_qkv_post(q).or_else(invalid),
            Op::PagedAttention(a) => match (self.program.kv_groups[a.group].window, a.window) {
                (Some(kept), window) if window.is_none_or(|w| w > kept) => {
                    invalid(format!("the group keeps {kept} tokens, the op reads {window:?}"))
                }
                (_, Some(0)) => invalid("a window of no tokens".into()),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn check_qkv_post(&self, op: &QkvPost) -> Result<(), String> {
        let HeadShape { dim, .. } = op.heads;
        if let Some(rope) = op.rope.as_ref().filter(|rope| rope.rotary_dim() > dim || rope.rotary_dim() == 0) {
            return Err(format!("a rotary embedding of {} elements in heads of {dim}", rope.rotary_dim()));
        }
        let sizes = op.rope.as_ref().map(|rope| (rope.streams.len(), rope.inv_freq.len()));
        if let Some((streams, pairs)) = sizes.filter(|&(streams, pairs)| streams != 0 && streams != pairs) {
            return Err(format!("a rotary embedding that names the positions of {streams} of its {pairs} pairs"));
        }
        if let Some(norm) = &op.norm {
            let widths = [norm.q, norm.k].map(|id| self.of(id).elements());
            let whole = [op.heads.q_cols(), op.heads.kv_cols()];
            if widths != [dim, dim] && widths != whole {
                return Err(format!("norms of {widths:?} elements, expected {dim} each or {whole:?}"));
            }
        }
        Ok(())
    }
}
