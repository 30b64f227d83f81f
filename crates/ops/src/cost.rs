//! What a step costs: bytes moved and floating-point operations of every op, so that a program prices itself.
//!
//! Bytes are the least that any implementation must move (each weight once, each activation read and written once, the
//! KV that attention reads and writes); FLOPs count a multiply-add as two. Together with a device's bandwidth and peak
//! they give the roofline bound of a step: `max(bytes / bandwidth, flops / peak)`.

use crate::{HeadShape, Op, Program, Rows, StepBatch};

/// Bytes and FLOPs of an op or a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Weight bytes read.
    pub weight_bytes: u64,
    /// KV-cache bytes read and written.
    pub kv_bytes: u64,
    /// Activation bytes read and written.
    pub activation_bytes: u64,
    /// Floating-point operations.
    pub flops: u64,
}

impl Cost {
    /// All bytes.
    pub const fn bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.activation_bytes
    }

    /// The least time in seconds on a device of `bandwidth` bytes/s and `peak` FLOP/s.
    pub fn roofline_seconds(&self, bandwidth: f64, peak: f64) -> f64 {
        (self.bytes() as f64 / bandwidth).max(self.flops as f64 / peak)
    }
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.weight_bytes += other.weight_bytes;
        self.kv_bytes += other.kv_bytes;
        self.activation_bytes += other.activation_bytes;
        self.flops += other.flops;
    }
}

/// The sizes of a step that its cost depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// T.
    pub tokens: usize,
    /// R.
    pub sampled: usize,
    /// E.
    pub pooled: usize,
    /// `(query rows, keys after the step)` of each sequence.
    pub sequences: Vec<(usize, usize)>,
}

impl StepShape {
    /// A decode step of `sequences` sequences with `context` keys each.
    pub fn decode(sequences: usize, context: usize) -> Self {
        Self { tokens: sequences, sampled: sequences, pooled: 0, sequences: vec![(1, context); sequences] }
    }

    /// One prompt of `tokens` tokens, whole, that samples one token.
    pub fn prefill(tokens: usize) -> Self {
        Self { tokens, sampled: 1, pooled: 0, sequences: vec![(tokens, tokens)] }
    }

    /// The shape of a batch.
    pub fn of(batch: &StepBatch) -> Self {
        let sequences =
            (0..batch.sequences()).map(|s| (batch.query_range(s).len(), batch.seq_lens[s] as usize)).collect();
        let (sampled, pooled) = (batch.sampled_rows.len(), batch.pooled_rows.len());
        Self { tokens: batch.tokens(), sampled, pooled, sequences }
    }

    /// Query-key pairs of causal attention, and keys read, under a sliding window.
    fn attention(&self, window: Option<usize>) -> (u64, u64) {
        let window = window.unwrap_or(usize::MAX);
        let (mut pairs, mut keys) = (0u64, 0u64);
        for &(queries, context) in &self.sequences {
            let first = context - queries;
            pairs += (first..context).map(|p| (p + 1).min(window) as u64).sum::<u64>();
            keys += (context - (first + 1).saturating_sub(window)) as u64;
        }
        (pairs, keys)
    }
}

/// Element sizes that are the backend's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementBytes {
    /// Of an activation.
    pub activation: u64,
    /// Of the KV cache.
    pub kv: u64,
}

impl ElementBytes {
    /// f32 throughout, as the candle backend.
    pub const F32: Self = Self { activation: 4, kv: 4 };
    /// 16 bits throughout.
    pub const HALF: Self = Self { activation: 2, kv: 2 };
}

/// The cost of one op on a step.
pub fn op_cost(program: &Program, op: &Op, step: &StepShape, size: ElementBytes) -> Cost {
    let pricer = Pricer { program, step, size };
    pricer.price(op)
}

/// The cost of a whole step.
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
    fn elements(&self, id: crate::BufferId) -> u64 {
        let buffer = &self.program.buffers[id.0];
        (self.rows(id) * buffer.cols) as u64
    }

    fn rows(&self, id: crate::BufferId) -> usize {
        match self.program.buffers[id.0].rows {
            Rows::Tokens => self.step.tokens,
            Rows::Sampled => self.step.sampled,
            Rows::Pooled => self.step.pooled,
        }
    }

    fn activations(&self, ids: &[crate::BufferId]) -> u64 {
        ids.iter().map(|&id| self.elements(id)).sum::<u64>() * self.size.activation
    }

    fn weight(&self, id: crate::WeightId) -> &crate::Weight {
        &self.program.weights[id.0]
    }

    /// Bytes of weights that are small enough to be read once whatever the rows.
    fn vectors(&self, ids: impl IntoIterator<Item = crate::WeightId>) -> u64 {
        ids.into_iter().map(|id| self.weight(id).bytes()).sum()
    }

    fn price(&self, op: &Op) -> Cost {
        match op {
            Op::Embed { table, out, .. } => {
                let table = self.weight(*table);
                let row = table.bytes() / table.rows.max(1) as u64;
                Cost {
                    weight_bytes: row * self.step.tokens as u64,
                    activation_bytes: self.activations(&[*out]),
                    ..Cost::default()
                }
            }
            Op::Norm(n) => {
                let mut buffers = vec![n.input, n.out];
                buffers.extend(n.add.iter().flat_map(|&b| [b, b]));
                let elements = self.elements(n.input);
                let weights = std::iter::once(n.weight).chain(n.bias).filter(|_| elements > 0);
                Cost {
                    weight_bytes: self.vectors(weights),
                    activation_bytes: self.activations(&buffers),
                    flops: elements * if n.add.is_some() { 5 } else { 4 },
                    ..Cost::default()
                }
            }
            Op::Linear(l) => {
                let mut cost = self.matmul(l.weight, l.input, l.out);
                cost.weight_bytes += self.vectors(l.bias);
                cost.activation_bytes += l.add.map_or(0, |b| self.activations(&[b]));
                cost
            }
            Op::QkvPost(q) => Cost {
                weight_bytes: self.vectors(q.norm.iter().flat_map(|n| [n.q, n.k])),
                kv_bytes: (self.step.tokens * 2 * q.heads.kv_cols()) as u64 * self.size.kv,
                activation_bytes: self.activations(&[q.input, q.out]),
                flops: (self.step.tokens * (q.heads.q_cols() + q.heads.kv_cols())) as u64
                    * if q.norm.is_some() { 7 } else { 3 },
            },
            Op::PagedAttention(a) => self.attention(a.heads, a.window, &[a.q, a.out]),
            Op::Glu(g) => Cost {
                activation_bytes: self.activations(&[g.input, g.out]),
                flops: 6 * self.elements(g.out),
                ..Cost::default()
            },
            Op::GatherRows { out, .. } => Cost { activation_bytes: 2 * self.activations(&[*out]), ..Cost::default() },
            Op::Logits(l) => {
                let mut cost = self.matmul(l.weight, l.input, l.out);
                // Logits are f32 whatever the activations are.
                cost.activation_bytes = self.activations(&[l.input]) + 4 * self.elements(l.out);
                cost
            }
            Op::Sample { logits } => Cost { activation_bytes: 4 * self.elements(*logits), ..Cost::default() },
        }
    }

    fn matmul(&self, weight: crate::WeightId, input: crate::BufferId, out: crate::BufferId) -> Cost {
        let w = self.weight(weight);
        let rows = self.rows(input) as u64;
        Cost {
            weight_bytes: if rows == 0 { 0 } else { w.bytes() },
            activation_bytes: self.activations(&[input, out]),
            flops: 2 * rows * (w.rows * w.cols) as u64,
            ..Cost::default()
        }
    }

    fn attention(&self, heads: HeadShape, window: Option<usize>, io: &[crate::BufferId]) -> Cost {
        let (pairs, keys) = self.step.attention(window);
        Cost {
            kv_bytes: keys * 2 * heads.kv_cols() as u64 * self.size.kv,
            activation_bytes: self.activations(io),
            flops: 4 * pairs * heads.q_cols() as u64,
            ..Cost::default()
        }
    }
}
