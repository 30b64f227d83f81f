//! Cost of a step: the bytes moved and the floating-point operations of every op.
//!
//! Bytes are the minimum that any implementation must move (each weight once, each activation read and written once,
//! the KV that attention reads and writes). FLOPs count a multiply-add as two. With a device's bandwidth and peak they
//! give the roofline bound of a step: `max(bytes / bandwidth, flops / peak)`.

mod adapters;
mod pricer;

pub use adapters::AdaptedRows;
pub use pricer::StepPricer;

use crate::{
    BufferId, Embed, EmbedTaps, ExpertLinear, ExpertSum, GateRows, HeadLinear, HeadShape, InjectMode, InjectRows,
    LatentPost, Linear, Logits, NormOp, Op, PoolKind, PoolRows, Program, QkvPost, Residual, Route, Rows, StepBatch,
    StorageType, TAPS, Weight, WeightId, expected_experts,
};

/// Bytes and FLOPs of an op or a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Number of weight bytes read.
    pub weight_bytes: u64,
    /// Number of KV-cache bytes read and written.
    pub kv_bytes: u64,
    /// Number of activation bytes read and written.
    pub activation_bytes: u64,
    /// Number of KV and activation bytes that are written; all other bytes are read.
    pub written_bytes: u64,
    /// Number of floating-point operations.
    pub flops: u64,
}

impl Cost {
    /// Returns the number of all bytes.
    pub const fn bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.activation_bytes
    }

    /// Returns the number of bytes that are read.
    pub const fn read_bytes(&self) -> u64 {
        self.bytes().saturating_sub(self.written_bytes)
    }

    /// Returns the roofline bound in seconds for a device with `bandwidth` bytes/s and `peak` FLOP/s.
    pub fn roofline_seconds(&self, bandwidth: f64, peak: f64) -> f64 {
        (self.bytes() as f64 / bandwidth).max(self.flops as f64 / peak)
    }

    /// Returns the roofline bound in seconds for a device whose caches may hold every activation: only weights and KV
    /// come from memory.
    pub fn bound_seconds(&self, peaks: &Peaks) -> f64 {
        let bytes = self.weight_bytes + self.kv_bytes;
        (bytes as f64 / peaks.bandwidth).max(self.flops as f64 / peaks.flops)
    }
}

/// Peak rates of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Floating-point operations per second of dense products, in the element type of the computation.
    pub flops: f64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.weight_bytes += other.weight_bytes;
        self.kv_bytes += other.kv_bytes;
        self.activation_bytes += other.activation_bytes;
        self.written_bytes += other.written_bytes;
        self.flops += other.flops;
    }
}

impl std::ops::Sub for Cost {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            weight_bytes: self.weight_bytes - other.weight_bytes,
            kv_bytes: self.kv_bytes - other.kv_bytes,
            activation_bytes: self.activation_bytes - other.activation_bytes,
            written_bytes: self.written_bytes - other.written_bytes,
            flops: self.flops - other.flops,
        }
    }
}

impl std::ops::Mul<u64> for Cost {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self {
            weight_bytes: self.weight_bytes * times,
            kv_bytes: self.kv_bytes * times,
            activation_bytes: self.activation_bytes * times,
            written_bytes: self.written_bytes * times,
            flops: self.flops * times,
        }
    }
}

/// Sizes of a step that determine its cost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Number of tokens T.
    pub tokens: usize,
    /// Number of rows R that reach the head.
    pub sampled: usize,
    /// Number of rows E whose hidden state is returned.
    pub pooled: usize,
    /// Number of rows that take encoder outputs.
    pub injected: usize,
    /// `(query rows, keys after the step)` of each sequence.
    pub sequences: Vec<(usize, usize)>,
    /// Rows with adapters.
    pub adapted: AdaptedRows,
}

impl StepShape {
    /// Returns the shape of a decode step of `sequences` sequences with `context` keys each.
    pub fn decode(sequences: usize, context: usize) -> Self {
        let rows = vec![(1, context); sequences];
        Self { tokens: sequences, sampled: sequences, sequences: rows, ..Self::default() }
    }

    /// Returns the shape of a prefill of one whole prompt of `tokens` tokens that samples one token.
    pub fn prefill(tokens: usize) -> Self {
        Self { tokens, sampled: 1, sequences: vec![(tokens, tokens)], ..Self::default() }
    }

    /// Returns the shape of an encoder's step over segments of the given numbers of rows.
    pub fn encode(segments: &[usize]) -> Self {
        let sequences = segments.iter().map(|&rows| (rows, rows)).collect();
        Self { tokens: segments.iter().sum(), sequences, ..Self::default() }
    }

    /// Returns the shape of a batch.
    pub fn from_batch(batch: &StepBatch) -> Self {
        let sequences =
            (0..batch.sequences()).map(|s| (batch.query_range(s).len(), batch.seq_lens[s] as usize)).collect();
        let (sampled, pooled) = (batch.sampled_rows.len(), batch.pooled_rows.len());
        let (injected, adapted) = (batch.injected.len(), AdaptedRows::from_batch(batch));
        Self { tokens: batch.tokens(), sampled, pooled, injected, sequences, adapted }
    }

    /// Returns the numbers of query-key pairs and of keys read by attention.
    fn attention(&self, sight: Sight) -> (u64, u64) {
        self.sequences.iter().fold((0, 0), |(pairs, keys), &(queries, context)| {
            let (more_pairs, more_keys) = sight.attended(queries, context);
            (pairs + more_pairs, keys + more_keys)
        })
    }
}

/// The keys that a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sight {
    /// Those up to its own, or a window of them. Those behind it in its span are not counted: their number does not grow
    /// with the sequence.
    Causal(Option<usize>),
    /// Those of its segment, or a window on each side.
    Both(Option<usize>),
}

impl Sight {
    /// Returns the numbers of query-key pairs and of keys read by the last `queries` of `context` tokens.
    fn attended(self, queries: usize, context: usize) -> (u64, u64) {
        let (queries, context) = (queries as u64, context as u64);
        match self {
            Self::Causal(window) => {
                let window = window.map_or(u64::MAX, |window| window as u64);
                let first = context - queries;
                // The query at position p sees p + 1 keys, or the window.
                let short = context.min(window).saturating_sub(first);
                let pairs = short * (2 * first + short + 1) / 2 + (queries - short) * window.min(context);
                (pairs, context - (first + 1).saturating_sub(window).min(context))
            }
            // A segment is whole. Its first and last queries see fewer keys on one side.
            Self::Both(Some(window)) if (window as u64) < context => {
                let window = window as u64;
                ((queries * (2 * window + 1)).saturating_sub(window * (window + 1)), context)
            }
            Self::Both(_) => (queries * context, context),
        }
    }
}

/// Element sizes that the backend chooses, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementBytes {
    /// Size of an activation.
    pub activation: u64,
    /// Size of an element of the KV cache.
    pub kv: u64,
    /// Size of eight weights that the checkpoint has in bf16: some backends keep them in fewer bits.
    pub eight_bf16: u64,
}

impl ElementBytes {
    /// Uses f32 throughout, as the candle backend does.
    pub const F32: Self = Self { activation: 4, kv: 4, eight_bf16: 16 };
    /// Uses 16 bits throughout.
    pub const HALF: Self = Self { activation: 2, kv: 2, eight_bf16: 16 };

    /// Returns the size of a weight in memory, and so of what a product reads.
    fn kept(&self, weight: &Weight) -> u64 {
        let bf16 = weight.parts.iter().filter(|part| part.storage == StorageType::BF16);
        let elements = bf16.map(|part| part.rows as u64 * weight.cols as u64).sum::<u64>();
        weight.kept_bytes().saturating_sub(elements / 8 * (16 - self.eight_bf16.min(16)))
    }
}

/// Returns the cost of one op in a step.
pub fn op_cost(program: &Program, op: &Op, step: &StepShape, size: ElementBytes) -> Cost {
    let pricer = Pricer { program, step, size };
    pricer.price(op)
}

/// Returns the cost of a whole step.
pub fn step_cost(program: &Program, step: &StepShape, size: ElementBytes) -> Cost {
    let mut total = Cost::default();
    for op in &program.ops {
        total += op_cost(program, op, step, size);
    }
    total
}

struct Pricer<'a> {
    program: &'a Program,
    step: &'a StepShape,
    size: ElementBytes,
}

impl Pricer<'_> {
    fn elements(&self, id: BufferId) -> u64 {
        let buffer = &self.program.buffers[id.0];
        (self.rows(id) * buffer.cols) as u64
    }

    fn rows(&self, id: BufferId) -> usize {
        match self.program.buffers[id.0].rows {
            Rows::Tokens => self.step.tokens,
            Rows::Sampled => self.step.sampled,
            Rows::Pooled => self.step.pooled,
            Rows::Merged => self.step.tokens / self.program.merge(),
            Rows::Routed(experts) => self.step.tokens * experts,
        }
    }

    fn activations(&self, ids: &[BufferId]) -> u64 {
        ids.iter().map(|&id| self.elements(id)).sum::<u64>() * self.size.activation
    }

    fn weight(&self, id: WeightId) -> &Weight {
        &self.program.weights[id.0]
    }

    /// Returns the size in bytes of weights so small that they are read once whatever the number of rows.
    fn vectors(&self, ids: impl IntoIterator<Item = WeightId>) -> u64 {
        ids.into_iter().map(|id| self.size.kept(self.weight(id))).sum()
    }

    fn price(&self, op: &Op) -> Cost {
        match op {
            Op::Embed(embed) => self.embed(embed),
            Op::Patches { out } => {
                let written_bytes = self.activations(&[*out]);
                // A patch has a byte for each element.
                let activation_bytes = written_bytes + self.elements(*out);
                Cost { activation_bytes, written_bytes, flops: 2 * self.elements(*out), ..Cost::default() }
            }
            Op::EmbedTaps(taps) => self.embed_taps(taps),
            Op::Norm(norm) => self.norm(norm),
            Op::Linear(linear) => self.linear(linear),
            Op::Lora(_) => self.at_site(op),
            Op::QkvPost(post) => self.qkv_post(post),
            Op::HeadLinear(linear) => self.head_linear(linear),
            Op::LatentPost(post) => self.latent_post(post),
            Op::PagedAttention(a) => {
                let cost = self.attention(a.heads, self.step.attention(Sight::Causal(a.window)), [a.q, a.out]);
                let sinks = self.vectors(a.sinks.filter(|_| self.rows(a.q) > 0));
                Cost { weight_bytes: sinks, ..cost }
            }
            Op::SegmentAttention(a) => {
                self.attention(a.heads, self.step.attention(Sight::Both(a.window)), [a.q, a.out])
            }
            Op::Act(a) => Cost {
                activation_bytes: self.activations(&[a.input, a.out]),
                written_bytes: self.activations(&[a.out]),
                flops: 5 * self.elements(a.out),
                ..Cost::default()
            },
            Op::MergeRows(merge) => Cost {
                activation_bytes: self.activations(&[merge.input, merge.out]),
                written_bytes: self.activations(&[merge.out]),
                ..Cost::default()
            },
            Op::StoreRows { input, .. } => {
                let written_bytes = self.activations(&[*input]);
                Cost { activation_bytes: 2 * written_bytes, written_bytes, ..Cost::default() }
            }
            Op::GateRows(gate) => self.gate_rows(gate),
            Op::Route(route) => {
                let mut cost = self.route(route);
                cost += self.at_site(op);
                cost
            }
            Op::ExpertLinear(linear) => self.expert_linear(linear),
            Op::ExpertSum(sum) => self.expert_sum(sum),
            Op::InjectRows(inject) => self.inject(inject),
            Op::Glu(g) => Cost {
                activation_bytes: self.activations(&[g.input, g.out]),
                written_bytes: self.activations(&[g.out]),
                flops: 6 * self.elements(g.out),
                ..Cost::default()
            },
            Op::GatherRows { out, .. } => {
                let written_bytes = self.activations(&[*out]);
                Cost { activation_bytes: 2 * written_bytes, written_bytes, ..Cost::default() }
            }
            Op::GatherColumns(gather) => {
                let written_bytes = self.activations(&[gather.out]);
                let weight_bytes = self.vectors(Some(gather.order).filter(|_| self.rows(gather.out) > 0));
                Cost { weight_bytes, activation_bytes: 2 * written_bytes, written_bytes, ..Cost::default() }
            }
            Op::PoolRows(pool) => self.pool_rows(pool),
            Op::Logits(logits) => self.logits(logits),
            Op::Sample { logits } => Cost { activation_bytes: 4 * self.elements(*logits), ..Cost::default() },
        }
    }

    fn at_site(&self, op: &Op) -> Cost {
        adapters::at_site(self.program, op, self.step.adapted, self.size)
    }

    fn embed(&self, e: &Embed) -> Cost {
        let table = self.weight(e.table);
        let row = self.size.kept(table) / table.rows.max(1) as u64;
        let out = self.activations(&[e.out]);
        Cost {
            weight_bytes: row * self.step.tokens as u64,
            activation_bytes: if e.add { 2 * out } else { out },
            written_bytes: out,
            ..Cost::default()
        }
    }

    /// A mean reads all rows of the step, as every sequence is pooled in the step that has its rows.
    fn pool_rows(&self, p: &PoolRows) -> Cost {
        let written_bytes = self.activations(&[p.out]);
        let (read, flops) = match p.kind {
            PoolKind::First => (written_bytes, 0),
            PoolKind::Mean => (self.activations(&[p.input]), self.elements(p.input)),
        };
        Cost { activation_bytes: read + written_bytes, written_bytes, flops, ..Cost::default() }
    }

    fn embed_taps(&self, taps: &EmbedTaps) -> Cost {
        let table = self.weight(taps.table);
        let row = self.size.kept(table) / table.rows.max(1) as u64;
        let out = self.activations(&[taps.out]);
        Cost {
            weight_bytes: row * (TAPS * self.step.tokens) as u64,
            activation_bytes: 2 * out,
            written_bytes: out,
            flops: 2 * TAPS as u64 * self.elements(taps.out),
            ..Cost::default()
        }
    }

    fn inject(&self, inject: &InjectRows) -> Cost {
        let elements = (self.step.injected * self.program.buffers[inject.out.0].cols) as u64;
        let (passes, flops) = match inject.mode {
            InjectMode::Replace => (2, 0),
            InjectMode::Add => (3, elements),
        };
        let written_bytes = elements * self.size.activation;
        Cost { activation_bytes: passes * written_bytes, written_bytes, flops, ..Cost::default() }
    }

    fn norm(&self, n: &NormOp) -> Cost {
        let updated = n.add.and_then(Residual::updated);
        let mut buffers = vec![n.input, n.out];
        buffers.extend(n.add.map(Residual::buffer).into_iter().chain(updated));
        let elements = self.elements(n.input);
        let weights = std::iter::once(n.weight).chain(n.bias).filter(|_| elements > 0);
        Cost {
            weight_bytes: self.vectors(weights),
            activation_bytes: self.activations(&buffers),
            written_bytes: self.activations(&[n.out]) + updated.map_or(0, |b| self.activations(&[b])),
            flops: elements * if n.add.is_some() { 5 } else { 4 },
            ..Cost::default()
        }
    }

    fn linear(&self, l: &Linear) -> Cost {
        let mut cost = self.matmul(l.weight, l.input, l.out);
        cost.weight_bytes += self.vectors(l.bias.filter(|_| self.rows(l.input) > 0));
        cost.activation_bytes += l.add.map_or(0, |b| self.activations(&[b]));
        cost
    }

    fn qkv_post(&self, q: &QkvPost) -> Cost {
        let kv_bytes = (self.step.tokens * q.heads.cache_cols()) as u64 * self.size.kv;
        Cost {
            weight_bytes: self.vectors(q.norm.iter().filter(|_| kv_bytes > 0).flat_map(|n| [n.q, n.k])),
            kv_bytes,
            activation_bytes: self.activations(&[q.input, q.out]),
            written_bytes: kv_bytes + self.activations(&[q.out]),
            flops: (self.step.tokens * (q.heads.q_cols() + q.heads.kv_cols())) as u64
                * if q.norm.is_some() { 7 } else { 3 },
        }
    }

    /// Counts the columns of the input and output that the products read and write.
    fn head_linear(&self, l: &HeadLinear) -> Cost {
        let weight = self.weight(l.weight);
        let rows = self.rows(l.input) as u64;
        let written_bytes = rows * weight.rows as u64 * self.size.activation;
        Cost {
            weight_bytes: if rows == 0 { 0 } else { self.size.kept(weight) },
            activation_bytes: rows * (l.heads * weight.cols) as u64 * self.size.activation + written_bytes,
            written_bytes,
            flops: 2 * rows * weight.elements() as u64,
            ..Cost::default()
        }
    }

    /// Counts the columns of q that are rotated, which are read from one buffer and written to another.
    fn latent_post(&self, p: &LatentPost) -> Cost {
        let tokens = self.step.tokens as u64;
        let kv_bytes = tokens * p.heads.cache_cols() as u64 * self.size.kv;
        let rotated = tokens * (p.heads.q * p.rotated()) as u64;
        Cost {
            weight_bytes: self.vectors(Some(p.norm).filter(|_| tokens > 0)),
            kv_bytes,
            activation_bytes: self.activations(&[p.kv]) + 2 * rotated * self.size.activation,
            written_bytes: kv_bytes + rotated * self.size.activation,
            flops: 3 * (rotated + tokens * p.rotated() as u64) + 4 * tokens * p.rank() as u64,
        }
    }

    fn logits(&self, l: &Logits) -> Cost {
        let mut cost = self.matmul(l.weight, l.input, l.out);
        // Logits are f32 regardless of the activation type.
        cost.written_bytes = 4 * self.elements(l.out);
        cost.activation_bytes = self.activations(&[l.input]) + cost.written_bytes;
        cost
    }

    fn matmul(&self, weight: WeightId, input: BufferId, out: BufferId) -> Cost {
        let w = self.weight(weight);
        let rows = self.rows(input) as u64;
        Cost {
            weight_bytes: if rows == 0 { 0 } else { self.size.kept(w) },
            activation_bytes: self.activations(&[input, out]),
            written_bytes: self.activations(&[out]),
            flops: 2 * rows * (w.rows * w.cols) as u64,
            ..Cost::default()
        }
    }

    fn gate_rows(&self, g: &GateRows) -> Cost {
        let written_bytes = self.activations(&[g.out]);
        let activation_bytes = self.activations(&[g.gate]) + 2 * written_bytes;
        Cost { activation_bytes, written_bytes, flops: self.elements(g.out), ..Cost::default() }
    }

    /// The product is that of a linear op. Each chosen expert has an index and a weight of 4 bytes each.
    fn route(&self, r: &Route) -> Cost {
        let weight = self.weight(r.weight);
        let rows = self.rows(r.input) as u64;
        let weights = [Some(r.weight), r.bias, r.correction].into_iter().flatten().filter(|_| rows > 0);
        let written_bytes = 8 * self.elements(r.out);
        Cost {
            weight_bytes: self.vectors(weights),
            activation_bytes: self.activations(&[r.input]) + written_bytes,
            written_bytes,
            flops: rows * (2 * weight.elements() + 6 * weight.rows) as u64,
            ..Cost::default()
        }
    }

    /// Counts the weights of the experts that the step is expected to use.
    fn expert_linear(&self, l: &ExpertLinear) -> Cost {
        let weight = self.weight(l.weight);
        let rows = self.rows(l.out) as u64;
        let used = expected_experts(l.experts, self.program.buffers[l.routing.0].cols, self.step.tokens);
        Cost {
            weight_bytes: used * expert_bytes(self.program, l, self.size),
            activation_bytes: self.activations(&[l.input, l.out]),
            written_bytes: self.activations(&[l.out]),
            flops: 2 * rows * (weight.elements() / l.experts.max(1)) as u64,
            ..Cost::default()
        }
    }

    fn expert_sum(&self, s: &ExpertSum) -> Cost {
        let added = s.add.map_or(0, |id| self.activations(&[id]));
        let written_bytes = self.activations(&[s.out]);
        Cost {
            activation_bytes: self.activations(&[s.input]) + added + written_bytes + 8 * self.elements(s.routing),
            written_bytes,
            flops: 2 * self.elements(s.input),
            ..Cost::default()
        }
    }

    /// Returns the cost of attention over numbers of query-key pairs and of keys.
    fn attention(&self, heads: HeadShape, (pairs, keys): (u64, u64), [q, out]: [BufferId; 2]) -> Cost {
        Cost {
            kv_bytes: keys * heads.cache_cols() as u64 * self.size.kv,
            activation_bytes: self.activations(&[q, out]),
            written_bytes: self.activations(&[out]),
            flops: pairs * attention_flops(heads),
            ..Cost::default()
        }
    }
}

/// Returns the number of operations for a pair of a query and a key: the score, and the sum of the values.
fn attention_flops(heads: HeadShape) -> u64 {
    2 * (heads.q_cols() + heads.out_cols()) as u64
}

/// Returns the size of the weights of one expert of an op.
fn expert_bytes(program: &Program, l: &ExpertLinear, size: ElementBytes) -> u64 {
    let bytes = |id: WeightId| size.kept(&program.weights[id.0]);
    (bytes(l.weight) + l.bias.map_or(0, bytes)) / l.experts.max(1) as u64
}
