//! Exact results of every op, in the most literal f64.

use super::adapters::{self, AdaptedInput};
use super::attention::Attention;
use super::math::{Rows, activation, add, cap, gated, mean, normalise, product, rotate};
use super::{MemoryWeights, TestRng, TinyModel, experts, latent, position, seen_end};
use crate::{
    AdapterSource, BufferId, Embed, EmbedIds, EmbedTaps, EncodeBatch, InjectMode, InjectRows, InjectedRow, KvPlace,
    LatentPost, Linear, Logits, Lora, LoraInput, MergeKind, NormKind, NormOp, Op, PagedAttention, PoolKind, PoolRows,
    Program, QkvPost, Residual, Route, SegmentAttention, StepBatch, WeightError, WeightId, WeightSource,
};

/// Number of disturbed runs. The worst of them bounds the effect of rounding on a model.
const DISTURBED: u64 = 8;

/// Maximum error of the queries, keys and values of attention.
///
/// Most backends store keys and values in fewer bits than they compute with. The effect on the results depends on the
/// model: a norm over few columns may amplify it a hundredfold. It is therefore measured by disturbing the exact
/// results to the same extent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounding {
    /// Error relative to each number.
    relative: f64,
    /// Error relative to the largest number of the head.
    of_largest: f64,
}

impl Rounding {
    /// No significant rounding: arithmetic in f32.
    pub const F32: Self = Self { relative: 0.0, of_largest: 0.0 };
    /// Rounding to bf16, which has 8 bits of fraction including the implicit one.
    pub const BF16: Self = Self { relative: 1.0 / 256.0, of_largest: 0.0 };
    /// Rounding of keys and values to multiples of 1/127 of the head's largest, and of queries to bf16.
    pub const INT8: Self = Self { relative: 1.0 / 256.0, of_largest: 1.0 / 254.0 };
    /// Rounding of keys and values to e4m3, which has 4 bits of fraction including the implicit one.
    pub const FP8: Self = Self { relative: 1.0 / 16.0, of_largest: 0.0 };
}

/// A model, a sequence and the exact results, in f64.
pub struct Reference {
    pub(super) program: Program,
    pub(super) weights: MemoryWeights,
    pub(super) tokens: Vec<u32>,
    pub(super) exact: Meaning,
    /// Results under random rounding errors.
    pub(super) disturbed: Vec<Meaning>,
}

impl Reference {
    /// Computes the results for `tokens` random tokens.
    ///
    /// # Panics
    /// Panics if the model is malformed or its weights are not stored as F32.
    pub fn new(model: &TinyModel, tokens: usize, rounding: Rounding) -> Self {
        Self::with(model, tokens, rounding, Extras::default())
    }

    /// Computes the results for `tokens` random tokens, all of which have an adapter.
    pub(super) fn with_adapter(
        model: &TinyModel,
        tokens: usize,
        rounding: Rounding,
        adapter: &dyn AdapterSource,
    ) -> Self {
        Self::with(model, tokens, rounding, Extras { adapter: Some(adapter), ..Extras::default() })
    }

    /// Computes the results for `tokens` random tokens, with what some models take beside them.
    pub(super) fn with(model: &TinyModel, tokens: usize, rounding: Rounding, extras: Extras<'_>) -> Self {
        let Extras { media, injected, adapter } = extras;
        let (mut program, weights) = model.build().expect("the model is well formed");
        if adapter.is_some() {
            program = program.with_adapters();
        }
        let tokens = TestRng(model.seed ^ 1).tokens(tokens, model.vocab_size);
        let streams = program.position_streams();
        let positions =
            (0..streams).map(|stream| (0..tokens.len()).map(|place| position(place, stream)).collect()).collect();
        let input = Input { tokens: &tokens, positions, injected: &injected, segments: None, encode: None, adapter };
        let meaning =
            |disturbance| meaning(&program, &weights, &input, media.clone(), disturbance).expect("the weights are F32");
        let exact = meaning(None);
        let disturbed = disturbances(rounding, model.seed).map(|disturbance| meaning(Some(disturbance))).collect();
        Self { program, weights, tokens, exact, disturbed }
    }
}

/// Input of a model beside the tokens.
#[derive(Default)]
pub(super) struct Extras<'a> {
    /// The media cache.
    pub(super) media: Rows,
    /// Rows that take rows of the media cache.
    pub(super) injected: Vec<InjectedRow>,
    /// The adapter of all rows.
    pub(super) adapter: Option<&'a dyn AdapterSource>,
}

impl Reference {
    /// Returns whether rounding errors several times those of the disturbed runs leave the choice of experts as it is.
    /// The result of another choice is another one. `least` is the smallest difference of scores that counts as clear.
    pub(super) fn chooses_clearly(&self, least: f64) -> bool {
        const MARGIN: f64 = 3.0;
        self.exact.gaps.iter().enumerate().all(|(index, gap)| {
            let moved = self.disturbed.iter().filter_map(|run| run.gaps.get(index)).map(|other| (gap - other).abs());
            *gap > least + MARGIN * moved.fold(0.0, f64::max)
        })
    }
}

/// Results of a program for a sequence, by token.
pub(super) struct Meaning {
    /// Logits. Row t is the distribution of token t + 1.
    pub logits: Rows,
    /// Hidden states; empty if the program returns none.
    pub hidden: Rows,
    /// The media cache after an encoder.
    pub media: Rows,
    /// Difference between the scores of the last expert that was chosen and the first that was not, for each choice.
    pub gaps: Vec<f64>,
}

/// Input of a program: a whole sequence, or the segments of an encoder's batch.
struct Input<'a> {
    tokens: &'a [u32],
    /// Positions by stream and row.
    positions: Vec<Vec<u32>>,
    injected: &'a [InjectedRow],
    /// The rows of an encoder, divided into segments.
    segments: Option<&'a StepBatch>,
    encode: Option<&'a EncodeBatch>,
    /// The adapter of all rows.
    adapter: Option<&'a dyn AdapterSource>,
}

/// Computes the media cache of `rows` rows after an encoder's batch, exactly and under random rounding errors.
///
/// # Panics
/// Panics if a weight is not stored as F32.
pub(super) fn encoded(
    program: &Program,
    weights: &dyn WeightSource,
    batch: &EncodeBatch,
    rows: usize,
    (rounding, seed): (Rounding, u64),
) -> (Rows, Vec<Rows>) {
    let tokens = &batch.rows.token_ids;
    let positions = batch.rows.positions.chunks(tokens.len().max(1)).map(<[u32]>::to_vec).collect();
    let input =
        Input { tokens, positions, injected: &[], segments: Some(&batch.rows), encode: Some(batch), adapter: None };
    let media = vec![vec![0.0; program.media_columns()]; rows];
    let run =
        |disturbance| meaning(program, weights, &input, media.clone(), disturbance).expect("the weights are F32").media;
    (run(None), disturbances(rounding, seed).map(|disturbance| run(Some(disturbance))).collect())
}

/// Computes the vectors of a step of texts, exactly and under random rounding errors.
///
/// # Panics
/// Panics if a weight is not stored as F32.
pub(super) fn vectors(
    program: &Program,
    weights: &dyn WeightSource,
    batch: &StepBatch,
    (rounding, seed): (Rounding, u64),
) -> (Rows, Vec<Rows>) {
    let tokens = &batch.token_ids;
    let positions = vec![batch.positions.clone()];
    let input = Input { tokens, positions, injected: &[], segments: Some(batch), encode: None, adapter: None };
    let run =
        |disturbance| meaning(program, weights, &input, Rows::new(), disturbance).expect("the weights are F32").hidden;
    (run(None), disturbances(rounding, seed).map(|disturbance| run(Some(disturbance))).collect())
}

/// Returns the disturbances that show the effect of rounding.
fn disturbances(rounding: Rounding, seed: u64) -> impl Iterator<Item = Disturbance> {
    let draws = if rounding == Rounding::F32 { 0 } else { DISTURBED };
    (0..draws).map(move |draw| Disturbance { rounding, rng: TestRng(seed ^ (2 + draw)), is_shared: draw % 2 == 0 })
}

/// Generates random errors within a [`Rounding`].
struct Disturbance {
    rounding: Rounding,
    rng: TestRng,
    /// Whether all tokens get the same error, because equal tokens are rounded alike.
    is_shared: bool,
}

impl Disturbance {
    /// Disturbs one layer's queries, keys or values, by token.
    pub(super) fn disturb(&mut self, rows: &mut Rows, dim: usize) {
        let Rounding { relative, of_largest } = self.rounding;
        let start = self.rng.clone();
        for row in rows {
            if self.is_shared {
                self.rng = start.clone();
            }
            for head in row.chunks_mut(dim) {
                let largest = head.iter().fold(0.0f64, |m, x| m.max(x.abs()));
                for x in head {
                    *x += f64::from(self.rng.signed()) * (relative * x.abs() + of_largest * largest);
                }
            }
        }
    }
}

/// Computes the results of a program, exactly or with disturbance.
///
/// Nothing is paged: keys and values are lists.
fn meaning(
    program: &Program,
    weights: &dyn WeightSource,
    input: &Input<'_>,
    media: Rows,
    disturbance: Option<Disturbance>,
) -> Result<Meaning, WeightError> {
    let mut interpreter = Interpreter {
        input,
        disturbance,
        media,
        gaps: Vec::new(),
        step_kv: Default::default(),
        weights: program.weights.iter().map(|w| read(w, weights)).collect::<Result<_, _>>()?,
        buffers: vec![Rows::new(); program.buffers.len()],
        kv: program.kv_groups.iter().map(|g| vec![(Rows::new(), Rows::new()); g.layers.len()]).collect(),
    };
    let mut out = BufferId(0);
    for op in program.forward_ops() {
        out = interpreter.run(program, op).unwrap_or(out);
    }
    let hidden = program.embedding().map(|id| interpreter.buffer(id).clone()).unwrap_or_default();
    let media = std::mem::take(&mut interpreter.media);
    let gaps = std::mem::take(&mut interpreter.gaps);
    Ok(Meaning { logits: std::mem::take(&mut interpreter.buffers[out.0]), hidden, media, gaps })
}

/// Reads a weight as rows.
fn read(weight: &crate::Weight, source: &dyn WeightSource) -> Result<Rows, WeightError> {
    let mut values = Vec::new();
    for part in &weight.parts {
        let data = part.read(weight.cols, source)?;
        values.extend(data.bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))));
    }
    Ok(values.chunks(weight.cols).map(<[f64]>::to_vec).collect())
}

struct Interpreter<'a> {
    input: &'a Input<'a>,
    /// The media cache.
    media: Rows,
    /// [`Meaning::gaps`] so far.
    gaps: Vec<f64>,
    /// Keys and values in the memory of the step.
    step_kv: (Rows, Rows),
    disturbance: Option<Disturbance>,
    weights: Vec<Rows>,
    buffers: Vec<Rows>,
    /// Keys and values, by group and layer.
    kv: Vec<Vec<(Rows, Rows)>>,
}

impl Interpreter<'_> {
    fn weight(&self, id: WeightId) -> &Rows {
        &self.weights[id.0]
    }

    fn vector(&self, id: WeightId) -> Vec<f64> {
        self.weight(id).concat()
    }

    fn buffer(&self, id: BufferId) -> &Rows {
        &self.buffers[id.0]
    }

    /// Runs an op and returns the buffer that it writes.
    fn run(&mut self, program: &Program, op: &Op) -> Option<BufferId> {
        let (merge, cols) = (program.merge(), |id: BufferId| program.buffers[id.0].cols);
        let (out, rows) = match op {
            Op::Embed(op) => (op.out, self.embed(op)),
            Op::Patches { out } => (*out, self.patches()),
            Op::EmbedTaps(op) => (op.out, self.embed_taps(op)),
            Op::MergeRows(op) => {
                let rows = self.buffer(op.input).chunks(merge);
                let merged = match op.kind {
                    MergeKind::Concatenated => rows.map(<[_]>::concat).collect(),
                    MergeKind::Mean => rows.map(mean).collect(),
                };
                (op.out, merged)
            }
            Op::StoreRows { input, column } => {
                self.store(*input, *column);
                return None;
            }
            Op::InjectRows(op) => (op.out, self.inject(op)),
            Op::Norm(op) => (op.out, self.norm(op)),
            Op::Linear(op) => (op.out, self.linear(op)),
            Op::Lora(op) => (op.out, self.lora(program, op)),
            Op::QkvPost(op) => (op.out, self.qkv_post(op)),
            Op::HeadLinear(op) => {
                (op.out, latent::head_linear(op, self.buffer(op.input), self.weight(op.weight), cols(op.out)))
            }
            Op::LatentPost(op) => (op.out, self.latent_post(op)),
            Op::PagedAttention(op) => (op.out, self.attention(op)),
            Op::SegmentAttention(op) => (op.out, self.segment_attention(op)),
            Op::Act(op) => {
                let row = |row: &Vec<f64>| row.iter().map(|x| activation(op.kind, *x)).collect();
                (op.out, self.buffer(op.input).iter().map(row).collect())
            }
            Op::Glu(op) => {
                let half = |row: &Vec<f64>| {
                    let (gate, up) = row.split_at(row.len() / 2);
                    gate.iter().zip(up).map(|(g, u)| gated(op.kind, *g, *u)).collect()
                };
                (op.out, self.buffer(op.input).iter().map(half).collect())
            }
            Op::GateRows(op) => {
                let gate = |(row, gate): (&Vec<f64>, &Vec<f64>)| {
                    let factor = 1.0 / (1.0 + (-gate[0]).exp());
                    row.iter().map(|x| factor * x).collect()
                };
                (op.out, self.buffer(op.out).iter().zip(self.buffer(op.gate)).map(gate).collect())
            }
            Op::Route(op) => (op.out, self.route(program, op)),
            Op::ExpertLinear(op) => {
                let bias = op.bias.map(|id| self.vector(id)).unwrap_or_default();
                let (input, routing) = (self.buffer(op.input), self.buffer(op.routing));
                (op.out, experts::expert_linear(op, input, routing, self.weight(op.weight), &bias))
            }
            Op::ExpertSum(op) => {
                let sum = experts::expert_sum(op, self.buffer(op.input), self.buffer(op.routing));
                (op.out, op.add.map_or(sum.clone(), |addend| add(&sum, self.buffer(addend))))
            }
            // Every row of a decoder is sampled and returned.
            Op::GatherRows { input, out } => match self.input.segments {
                Some(batch) => {
                    (*out, batch.pooled_rows.iter().map(|&r| self.buffer(*input)[r as usize].clone()).collect())
                }
                None => (*out, self.buffer(*input).clone()),
            },
            Op::GatherColumns(op) => {
                let order = self.vector(op.order);
                let row = |row: &Vec<f64>| order.iter().map(|&column| row[column as usize]).collect();
                (op.out, self.buffer(op.input).iter().map(row).collect())
            }
            Op::PoolRows(op) => (op.out, self.pool_rows(op)),
            Op::Logits(op) => (op.out, self.logits(op)),
            Op::Sample { logits } => (*logits, self.buffer(*logits).clone()),
        };
        self.buffers[out.0] = rows;
        Some(out)
    }

    fn embed(&self, op: &Embed) -> Rows {
        let ids: Vec<usize> = match op.ids {
            EmbedIds::Tokens => self.input.tokens.iter().map(|&id| id as usize).collect(),
            EmbedIds::Positions { offset } => self.input.positions[0].iter().map(|&p| p as usize + offset).collect(),
            EmbedIds::Types => self.segments().token_types.iter().map(|&id| id as usize).collect(),
        };
        let row = |id: &usize| self.weight(op.table)[*id].iter().map(|x| x * f64::from(op.scale)).collect();
        let rows = ids.iter().map(row).collect();
        if op.add { add(self.buffer(op.out), &rows) } else { rows }
    }

    fn pool_rows(&self, op: &PoolRows) -> Rows {
        let batch = self.segments();
        let reduced = |(&last, &len): (&u32, &u32)| {
            let rows = &self.buffer(op.input)[(last + 1 - len) as usize..=last as usize];
            match op.kind {
                PoolKind::First => rows[0].clone(),
                PoolKind::Mean => (0..rows[0].len())
                    .map(|col| rows.iter().map(|row| row[col]).sum::<f64>() / rows.len() as f64)
                    .collect(),
            }
        };
        batch.pooled_rows.iter().zip(&batch.pooled_lens).map(reduced).collect()
    }

    fn segments(&self) -> &StepBatch {
        self.input.segments.expect("an encoder has segments")
    }

    fn encode(&self) -> &EncodeBatch {
        self.input.encode.expect("an encoder has its batch")
    }

    fn patches(&self) -> Rows {
        let EncodeBatch { patches, channels, .. } = self.encode();
        let cols = patches.len() / self.input.tokens.len();
        let value = |(at, &byte): (usize, &u8)| {
            let channel = channels[at / (cols / channels.len())];
            (f64::from(byte) - f64::from(channel.shift)) / f64::from(channel.divisor)
        };
        patches.chunks(cols).map(|patch| patch.iter().enumerate().map(value).collect()).collect()
    }

    fn embed_taps(&self, op: &EmbedTaps) -> Rows {
        let mut rows = self.buffer(op.out).clone();
        for (row, taps) in rows.iter_mut().zip(&self.encode().taps) {
            for tap in taps {
                for (x, t) in row.iter_mut().zip(&self.weight(op.table)[tap.row as usize]) {
                    *x += f64::from(tap.weight) * t;
                }
            }
        }
        rows
    }

    fn store(&mut self, input: BufferId, column: usize) {
        for (row, &at) in self.encode().store_rows.clone().iter().enumerate() {
            let values = self.buffers[input.0][row].clone();
            self.media[at as usize][column..column + values.len()].copy_from_slice(&values);
        }
    }

    fn inject(&self, op: &InjectRows) -> Rows {
        let mut rows = self.buffer(op.out).clone();
        for InjectedRow { row, media } in self.input.injected {
            let row = &mut rows[*row as usize];
            let values = &self.media[*media as usize][op.column..op.column + row.len()];
            for (x, value) in row.iter_mut().zip(values) {
                *x = if op.mode == InjectMode::Add { *x + value } else { *value };
            }
        }
        rows
    }

    fn segment_attention(&self, op: &SegmentAttention) -> Rows {
        let (keys, values) = &self.step_kv;
        let batch = self.segments();
        let rows =
            (0..batch.sequences()).flat_map(|s| batch.query_range(s).map(move |row| (row, batch.query_range(s))));
        let attention = Attention { heads: op.heads, scale: op.scale, softcap: None };
        rows.map(|(row, segment)| {
            let seen = match op.window {
                Some(w) => row.saturating_sub(w).max(segment.start)..(row + w + 1).min(segment.end),
                None => segment,
            };
            let seen = (&keys[seen.clone()], &values[seen]);
            let heads = self.buffer(op.q)[row].chunks(op.heads.dim).enumerate();
            heads.flat_map(|(head, q)| attention.attend(q, head, seen, None)).collect()
        })
        .collect()
    }

    fn norm(&mut self, op: &NormOp) -> Rows {
        let mut read = op.input;
        if let Some(Residual::Before(residual)) = op.add {
            self.buffers[residual.0] = add(self.buffer(residual), self.buffer(op.input));
            read = residual;
        }
        let bias = op.bias.map(|id| self.vector(id));
        let weight = self.vector(op.weight);
        let row = |row: &Vec<f64>| normalise(op.kind, row, &weight, bias.as_deref(), op.eps, op.unit_offset);
        let rows = self.buffer(read).iter().map(row).collect();
        match op.add {
            Some(Residual::After(residual)) => add(&rows, self.buffer(residual)),
            _ => rows,
        }
    }

    fn route(&mut self, program: &Program, op: &Route) -> Rows {
        let mut logits = product(self.buffer(op.input), self.weight(op.weight));
        let bias = op.bias.map(|id| self.vector(id)).unwrap_or_default();
        for row in &mut logits {
            row.iter_mut().zip(&bias).for_each(|(x, bias)| *x += bias);
        }
        if let (Some(adapter), Some(site)) = (self.input.adapter, op.site) {
            for (row, input) in logits.iter_mut().zip(self.buffer(op.input)) {
                adapters::add(program, adapter, (site, 0), &AdaptedInput::Values(input), 1.0, row);
            }
        }
        let chosen = program.buffers[op.out.0].cols;
        let correction = op.correction.map(|id| self.vector(id)).unwrap_or_default();
        let rows = logits.iter().map(|logits| experts::route(op, logits, &correction, chosen));
        let (rows, gaps): (Rows, Vec<f64>) = rows.unzip();
        self.gaps.extend(gaps);
        rows
    }

    fn linear(&self, op: &Linear) -> Rows {
        let mut rows = product(self.buffer(op.input), self.weight(op.weight));
        if let Some(bias) = op.bias {
            let bias = self.vector(bias);
            rows = rows.iter().map(|row| row.iter().zip(&bias).map(|(x, b)| x + b).collect()).collect();
        }
        rows.iter_mut().flatten().for_each(|x| *x *= f64::from(op.scale));
        if let Some(addend) = op.add {
            rows = add(&rows, self.buffer(addend));
        }
        rows
    }

    fn lora(&self, program: &Program, op: &Lora) -> Rows {
        let mut rows = self.buffer(op.out).clone();
        let Some(adapter) = self.input.adapter else { return rows };
        let count = rows.len();
        for (index, row) in rows.iter_mut().enumerate() {
            let (expert, input) = match op.input {
                LoraInput::Tokens => (0, AdaptedInput::Token(self.input.tokens[index] as usize)),
                LoraInput::Rows(input) => (0, AdaptedInput::Values(&self.buffer(input)[index])),
                LoraInput::Experts { input, routing } => {
                    let (input, routing) = (self.buffer(input), self.buffer(routing));
                    let chosen = count / routing.len();
                    let expert = routing[index / chosen][2 * (index % chosen)] as usize;
                    // The input has a row for each token, or one for each pair.
                    (expert, AdaptedInput::Values(&input[index * input.len() / count]))
                }
            };
            adapters::add(program, adapter, (op.site, expert), &input, op.scale, row);
        }
        rows
    }

    fn logits(&self, op: &Logits) -> Rows {
        let rows = product(self.buffer(op.input), self.weight(op.weight));
        let value = |x: &f64| cap(x * f64::from(op.scale), op.softcap);
        rows.iter().map(|row| row.iter().map(value).collect()).collect()
    }

    fn qkv_post(&mut self, op: &QkvPost) -> Rows {
        let (q_cols, kv_cols) = (op.heads.q_cols(), op.heads.kv_cols());
        let (mut q_rows, mut keys, mut values) = (Rows::new(), Rows::new(), Rows::new());
        for (index, row) in self.buffer(op.input).iter().enumerate() {
            let (q, kv) = row.split_at(q_cols);
            let (k, v) = kv.split_at(kv_cols);
            let [q, k] = [(q, op.norm.as_ref().map(|n| n.q)), (k, op.norm.as_ref().map(|n| n.k))].map(|(x, weight)| {
                let mut x = x.to_vec();
                if let (Some(norm), Some(weight)) = (&op.norm, weight) {
                    let weight = self.vector(weight);
                    let parts = x.chunks(weight.len());
                    let parts = parts.map(|p| normalise(NormKind::Rms, p, &weight, None, norm.eps, norm.unit_offset));
                    x = parts.flatten().collect();
                }
                if let Some(rope) = &op.rope {
                    let position = |stream: usize| self.input.positions[stream][index];
                    x.chunks_mut(op.heads.dim).for_each(|head| rotate(head, rope, position));
                }
                x
            });
            q_rows.push(q);
            keys.push(k);
            values.push(v.to_vec());
        }
        if let Some(disturbance) = &mut self.disturbance {
            for rows in [&mut q_rows, &mut keys, &mut values] {
                disturbance.disturb(rows, op.heads.dim);
            }
        }
        match op.kv {
            KvPlace::Cache { group, layer } => self.kv[group][layer] = (keys, values),
            KvPlace::Step => self.step_kv = (keys, values),
        }
        q_rows
    }

    fn latent_post(&mut self, op: &LatentPost) -> Rows {
        let position = |row: usize, stream: usize| self.input.positions[stream][row];
        let (q, kv, out) = (self.buffer(op.q), self.buffer(op.kv), self.buffer(op.out));
        let (mut out, mut keys) = latent::latent_post(op, (q, kv, out), &self.vector(op.norm), position);
        if let Some(disturbance) = &mut self.disturbance {
            disturbance.disturb(&mut out, op.heads.dim);
            disturbance.disturb(&mut keys, op.heads.dim);
        }
        // The values are the first elements of the keys.
        let values = keys.iter().map(|key| key[..op.rank()].to_vec()).collect();
        self.kv[op.group][op.layer] = (keys, values);
        out
    }

    fn attention(&self, op: &PagedAttention) -> Rows {
        let (keys, values) = &self.kv[op.group][op.layer];
        let sinks = op.sinks.map(|id| self.vector(id));
        let attention = Attention { heads: op.heads, scale: op.scale, softcap: op.softcap };
        let row = |(position, q): (usize, &Vec<f64>)| {
            let first = op.window.map_or(0, |w| (position + 1).saturating_sub(w));
            let end = if op.spans { seen_end(position, keys.len()) } else { position + 1 };
            let seen = (&keys[first..end], &values[first..end]);
            let heads = q.chunks(op.heads.dim).enumerate();
            let attend = |(head, q): (usize, &[f64])| {
                let sink = sinks.as_ref().map(|sinks| sinks[head]);
                attention.attend(q, head, seen, sink)
            };
            heads.flat_map(attend).collect()
        };
        self.buffer(op.q).iter().enumerate().map(row).collect()
    }
}
