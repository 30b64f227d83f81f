//! Tests that every backend must pass.

use std::borrow::Cow;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::math::Rows;
use super::reference::Reference;
use super::{MemoryWeights, NormPlacement, PagedBatches, QkNormWidth, Rounding, Scales, TestRng, TinyModel};
use crate::sampling::{SampleBatch, SampleParams, SampleRow, SampledToken, Sampler};
use crate::{
    Backend, BackendError, Embed, EmbedIds, GluKind, HeadShape, KvScales, NormKind, Op, Program, Rope, RopeStyle,
    StepBatch, StorageType, TensorData, WeightError,
};

pub(super) const BLOCK: usize = 16;
pub(super) const BLOCKS: usize = 160;

/// A backend under test.
pub struct Suite<'a> {
    /// Creates a backend without a model.
    pub backend: &'a dyn Fn() -> Box<dyn Backend>,
    /// Limit on a result's error against f64, relative to the largest result, beyond the effect of rounding.
    pub worst: f64,
    /// Limit on the mean of these errors.
    pub mean: f64,
    /// Limit on the error of log-probabilities of given logits, relative to 1 and to themselves; 0 for a backend that lets the
    /// reference compute them.
    pub logprobs: f32,
}

/// Errors of results relative to the largest: the worst one and the mean.
struct Errors {
    worst: f64,
    mean: f64,
}

impl Errors {
    fn between(found: impl Iterator<Item = f64>, expected: &[Vec<f64>]) -> Self {
        let expected = expected.iter().flatten();
        let largest = expected.clone().fold(1.0f64, |m, x| m.max(x.abs()));
        let differences: Vec<f64> = found.zip(expected).map(|(x, expected)| (x - expected).abs() / largest).collect();
        // `f64::max` would ignore NaN.
        let worst = differences.iter().fold(0.0, |m: f64, &x| if m >= x { m } else { x });
        Self { worst, mean: differences.iter().sum::<f64>() / differences.len() as f64 }
    }
}

fn tiny() -> (Program, MemoryWeights) {
    TinyModel::default().build().expect("the default model is well formed")
}

fn first_batch(tokens: usize) -> StepBatch {
    let mut batches = PagedBatches::new(BLOCK, 1, 8, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(tokens, 50));
    batches.step(&[(sequence, tokens)])
}

/// Returns the logits of a step's rows, then the hidden state of each, as bits.
pub(super) fn run(backend: &mut dyn Backend, program: &Program, batch: &StepBatch) -> Vec<Vec<u32>> {
    backend.forward(batch).expect("the step runs");
    let logits = backend.logits().expect("there are logits");
    let mut hidden = vec![0.5];
    backend.embeddings(&mut hidden).expect("there are hidden states");
    let width = hidden.len() / batch.pooled_rows.len().max(1);
    let rows = logits.chunks(program.vocab_size).zip(hidden.chunks(width.max(1)));
    rows.map(|(logits, hidden)| logits.iter().chain(hidden).map(|x| x.to_bits()).collect()).collect()
}

/// Draws the parts of a step: some sequences decode a token, others compute a chunk.
pub(super) fn draw_parts(batches: &PagedBatches, sequences: usize, rng: &mut TestRng) -> Vec<(usize, usize)> {
    let mut parts = Vec::new();
    for sequence in 0..sequences {
        let left = batches.left(sequence);
        if left > 0 && rng.below(4) > 0 {
            let decode = rng.below(2) == 0;
            let count = if decode { 1 } else { 1 + rng.below(left) };
            parts.push((sequence, batches.whole_spans(sequence, count)));
        }
    }
    parts
}

/// Checks that the rows of a step, whose parts begin at `starts`, have the bits of their sequences alone.
pub(super) fn same_rows(
    rows: &[Vec<u32>],
    parts: &[(usize, usize)],
    starts: &[usize],
    expected: &[Vec<Vec<u32>>],
) -> Result<(), TestCaseError> {
    let mut rows = rows.iter();
    for (&(sequence, count), &start) in parts.iter().zip(starts) {
        for position in start..start + count {
            let expected = &expected[sequence][position];
            prop_assert_eq!(rows.next(), Some(expected), "sequence {}, position {}", sequence, position);
        }
    }
    Ok(())
}

impl Suite<'_> {
    pub(super) fn loaded(&self, program: &Program, weights: &MemoryWeights) -> Box<dyn Backend> {
        let mut backend = (self.backend)();
        backend.load(program, weights, &mut |_| {}).expect("the weights are loaded");
        backend.allocate_kv(BLOCK, BLOCKS).expect("there is memory");
        backend
    }

    /// Returns the logits and hidden states of every token of a sequence that runs alone and is prefilled in one step.
    pub(super) fn alone(&self, program: &Program, weights: &MemoryWeights, tokens: &[u32]) -> Vec<Vec<u32>> {
        let mut batches = PagedBatches::for_program(program, BLOCK, BLOCKS, &mut TestRng(1));
        let sequence = batches.add(tokens.to_vec());
        let batch = batches.step(&[(sequence, tokens.len())]);
        run(&mut *self.loaded(program, weights), program, &batch)
    }

    /// Checks that every row of a sequence is close to the exact f64 result, for a backend that computes and stores in
    /// f32.
    pub fn near_reference(&self, model: &TinyModel, tokens: usize) -> Result<(), TestCaseError> {
        self.near_meaning(&Reference::new(model, tokens, Rounding::F32), 0.0)
    }

    /// Checks that every row's error is at most `margin` times that of the worst disturbed run, because the backend's
    /// own rounding is another random disturbance.
    pub fn near_meaning(&self, reference: &Reference, margin: f64) -> Result<(), TestCaseError> {
        let Reference { program, weights, tokens, .. } = reference;
        prop_assume!(reference.chooses_clearly(0.1 * self.worst), "rounding may change the choice of experts");
        self.near_rows(reference, &self.alone(program, weights, tokens), margin)
    }

    /// Checks the errors of the logits and hidden states of every token.
    pub(super) fn near_rows(
        &self,
        reference: &Reference,
        found: &[Vec<u32>],
        margin: f64,
    ) -> Result<(), TestCaseError> {
        let Reference { program, tokens, exact, disturbed, .. } = reference;
        prop_assert_eq!(found.len(), tokens.len());
        let width = program.vocab_size + exact.hidden[0].len();
        prop_assert!(found.iter().all(|row| row.len() == width));
        let (logits, hidden): (Vec<_>, Vec<_>) = found.iter().map(|row| row.split_at(program.vocab_size)).unzip();
        self.near(&logits, &exact.logits, disturbed.iter().map(|meaning| &meaning.logits), margin)?;
        self.near(&hidden, &exact.hidden, disturbed.iter().map(|meaning| &meaning.hidden), margin)
    }

    /// Checks the errors. `disturbed` are the results under random rounding errors.
    pub(super) fn near<'a>(
        &self,
        found: &[&[u32]],
        expected: &[Vec<f64>],
        disturbed: impl Iterator<Item = &'a Rows>,
        margin: f64,
    ) -> Result<(), TestCaseError> {
        let Errors { worst, mean } =
            Errors::between(found.iter().copied().flatten().map(|&bits| f64::from(f32::from_bits(bits))), expected);
        let (mut allowed_worst, mut allowed_mean) = (self.worst, self.mean);
        for rows in disturbed {
            let explained = Errors::between(rows.iter().flatten().copied(), expected);
            allowed_worst = allowed_worst.max(self.worst + margin * explained.worst);
            allowed_mean = allowed_mean.max(self.mean + margin * explained.mean);
        }
        prop_assert!(
            worst < allowed_worst && mean < allowed_mean,
            "the rows are off by {worst}, {mean} in the mean; {allowed_worst} and {allowed_mean} are allowed"
        );
        Ok(())
    }

    /// Divides sequences into random steps and compares every row's bits with those of the sequence alone.
    pub fn same_bits(&self, model: &TinyModel, seed: u64) -> Result<(), TestCaseError> {
        let (program, weights) = &model.build().expect("the model is well formed");
        let mut rng = TestRng(seed);
        let mut batches = PagedBatches::for_program(program, BLOCK, BLOCKS, &mut rng);
        let mut backend = self.loaded(program, weights);
        let mut expected = Vec::new();
        for _ in 0..3 {
            let length = 1 + rng.below(40);
            let tokens = rng.tokens(length, program.vocab_size);
            expected.push(self.alone(program, weights, &tokens));
            batches.add(tokens);
        }
        // The sequence shares the blocks of the first once they are computed.
        let mut sharing = None;
        while (0..expected.len()).any(|s| batches.left(s) > 0) || sharing.is_none() {
            if batches.left(0) == 0 && sharing.is_none() {
                let tokens = first_then(&batches, &mut rng, program.vocab_size);
                expected.push(self.alone(program, weights, &tokens));
                sharing = Some(batches.add_sharing(0, tokens));
            }
            let parts = draw_parts(&batches, expected.len(), &mut rng);
            let starts: Vec<_> = parts.iter().map(|&(sequence, _)| batches.computed(sequence)).collect();
            let batch = batches.step(&parts);
            same_rows(&run(&mut *backend, program, &batch), &parts, &starts, &expected)?;
        }
        Ok(())
    }

    /// Checks that a checkpoint which does not match its program gives an error that describes the mismatch.
    pub fn unfit_checkpoints_are_errors(&self) {
        assert_eq!(self.load_error(|w| drop(w.tensors.remove("last.0"))), "the checkpoint has no tensor 'last.0'");
        let edit = |f: fn(&mut TensorData<'static>)| {
            move |w: &mut MemoryWeights| f(w.tensors.get_mut("last.0").expect("the tensor is there"))
        };
        let prefix = "tensor 'last.0' of the checkpoint is unusable: ";
        let message = self.load_error(edit(|t| t.storage = StorageType::F16));
        assert_eq!(message, format!("{prefix}it is stored as F16, expected F32"));
        let message = self.load_error(edit(|t| t.shape = vec![12, 48]));
        assert_eq!(message, format!("{prefix}its shape is [12, 48], expected [24, 24]"));
        let message = self.load_error(edit(|t| t.shape = vec![usize::MAX, 24]));
        assert!(message.starts_with(&format!("{prefix}its shape is")), "{message}");
        let message = self.load_error(edit(|t| t.bytes = Cow::Owned(vec![0; 100])));
        assert_eq!(message, format!("{prefix}it holds 100 bytes, its shape needs 2304"));
        let (program, _) = tiny();
        let error = (self.backend)().load(&program, &MemoryWeights::default(), &mut |_| {}).err();
        assert!(matches!(error, Some(BackendError::Weight(WeightError::Missing(name))) if name == "embed.0"));
    }

    fn load_error(&self, spoil: impl Fn(&mut MemoryWeights)) -> String {
        let (program, mut weights) = tiny();
        spoil(&mut weights);
        (self.backend)().load(&program, &weights, &mut |_| {}).expect_err("it does not fit").to_string()
    }

    /// Checks that progress counts the checkpoint's bytes.
    pub fn progress_is_in_bytes(&self) {
        let (program, weights) = tiny();
        let mut seen = Vec::new();
        let mut backend = (self.backend)();
        assert_eq!(backend.weight_bytes(), 0);
        backend.load(&program, &weights, &mut |bytes| seen.push(bytes)).expect("it fits");
        assert!(seen.is_sorted());
        assert_eq!(seen.last(), Some(&program.weight_bytes()));
        assert!(backend.weight_bytes() >= program.weight_bytes());
    }

    /// Checks that a weight too large to allocate gives an error.
    pub fn too_large_weights_are_errors(&self) {
        let mut b = crate::ProgramBuilder::new("large", 1 << 30);
        let x = b.buffer("x", crate::Rows::Sampled, 1 << 28);
        let y = b.buffer("y", crate::Rows::Tokens, 1 << 28);
        let logits = b.buffer("logits", crate::Rows::Sampled, 1 << 30);
        let part = crate::WeightPart { tensor: "t".into(), rows: 1 << 30, storage: StorageType::F32, slab: None };
        let table = b.weight("table", 1 << 28, vec![part]);
        b.push(Op::Embed(Embed { table, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: y }));
        b.push(Op::GatherRows { input: y, out: x });
        b.push(Op::Logits(crate::Logits { weight: table, input: x, out: logits, scale: 1.0, softcap: None }));
        b.push(Op::Sample { logits });
        let program = b.finish().expect("the program is well formed");
        let error = (self.backend)()
            .load(&program, &MemoryWeights::default(), &mut |_| {})
            .expect_err("there is no room")
            .to_string();
        assert!(error.starts_with("not enough memory for weight 'table': 1152921504606846976 bytes"), "{error}");
    }

    /// Checks that an impossible KV cache gives an error and that a possible one works afterwards.
    pub fn impossible_caches_are_errors(&self) {
        let (program, weights) = tiny();
        let mut backend = self.loaded(&program, &weights);
        let name = backend.name();
        let error = backend.allocate_kv(24, 10).expect_err("no such size").to_string();
        let sizes = backend.block_sizes();
        assert_eq!(error, format!("the {name} backend does not support KV blocks of 24 tokens; it supports {sizes:?}"));
        for blocks in [1 << 45, usize::MAX] {
            let error = backend.allocate_kv(BLOCK, blocks).expect_err("there is no room");
            assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
        }
        assert!((self.backend)().allocate_kv(BLOCK, 4).is_err(), "no model");
        backend.allocate_kv(BLOCK, 8).expect("there is room");
        backend.forward(&first_batch(20)).expect("the step runs");
    }

    /// Checks that a malformed batch gives an error and that the next one runs.
    pub fn malformed_batches_are_errors(&self) {
        let (program, weights) = tiny();
        let mut backend = (self.backend)();
        backend.load(&program, &weights, &mut |_| {}).expect("it fits");
        assert!(backend.forward(&first_batch(20)).is_err(), "no KV cache yet");
        backend.allocate_kv(BLOCK, 8).expect("there is room");
        type Spoil = fn(&mut StepBatch);
        let spoilt: [(&str, Spoil); 10] = [
            ("positions", |b| b.positions.truncate(19)),
            ("a token id beyond the vocabulary", |b| b.token_ids[3] = 50),
            ("a slot beyond the KV cache", |b| b.slot_mapping[0][3] = 128),
            ("a block beyond the KV cache", |b| assert!(b.block_tables[0].change(0, 1, [8]))),
            ("a sequence longer than its table", |b| b.seq_lens[0] = 33),
            ("a sequence shorter than its rows", |b| b.seq_lens[0] = 19),
            ("a sampled row", |b| b.sampled_rows[0] = 20),
            ("a pooled row", |b| b.pooled_rows[0] = 20),
            ("the last query start", |b| b.query_start[1] = 19),
            ("the number of KV groups", |b| b.slot_mapping.clear()),
        ];
        let name = backend.name();
        for (what, spoil) in spoilt {
            let mut batch = first_batch(20);
            spoil(&mut batch);
            let message = backend.forward(&batch).expect_err("the batch is malformed").to_string();
            assert_eq!(message, format!("the {name} backend failed: the batch is malformed: {what}"));
        }
        backend.forward(&first_batch(20)).expect("the step runs");
        assert_eq!(backend.logits().expect("there are logits").len(), 20 * 50);
    }

    /// Checks that a step may sample nothing.
    pub fn nothing_may_be_sampled(&self) {
        let (program, weights) = tiny();
        let mut backend = self.loaded(&program, &weights);
        let mut batch = first_batch(20);
        batch.sampled_rows.clear();
        backend.forward(&batch).expect("the step runs");
        assert_eq!(backend.logits().expect("there are none").len(), 0);
        let mut out = Vec::new();
        backend.sample(&SampleBatch { rows: &[] }, &mut out).expect("nothing is sampled");
        assert_eq!(out.len(), 0);
        let params = SampleParams::default();
        let row = SampleRow::new(&params);
        let error = backend.sample(&SampleBatch { rows: &[row] }, &mut out).expect_err("there is no row").to_string();
        let name = backend.name();
        assert_eq!(error, format!("the {name} backend failed: 1 rows to sample, but the forward pass left 0"));
    }

    /// Checks greedy rows beside others, with few rows and with many, whatever path the backend takes.
    pub fn greedy_tokens_are_the_largest_logits(&self) {
        for vocab_size in [50, 2048] {
            let model = TinyModel { vocab_size, ..TinyModel::default() };
            let (program, weights) = model.build().expect("the model is well formed");
            let mut backend = self.loaded(&program, &weights);
            for tokens in [1, 3, 40] {
                let drawn = SampleParams { temperature: 1.0, seed: 7, ..SampleParams::default() };
                let params = [SampleParams::default(), drawn, SampleParams { logprobs: Some(2), ..drawn }];
                let mut forbidden = Vec::new();
                // Then the tokens are forbidden, and once more those that take their place.
                for _ in 0..3 {
                    backend.forward(&first_batch(tokens)).expect("the step runs");
                    let logits = backend.logits().expect("there are logits");
                    let of_row = |row: usize| forbidden.get(row).map_or(&[][..], |ids: &Vec<u32>| ids);
                    let row = |row| SampleRow { forbidden: of_row(row), ..SampleRow::new(&params[row % 3]) };
                    let rows: Vec<_> = (0..tokens).map(row).collect();
                    let (mut found, mut expected) = (Vec::new(), Vec::new());
                    backend.sample(&SampleBatch { rows: &rows }, &mut found).expect("rows are sampled");
                    Sampler::new().sample_batch(&logits, &SampleBatch { rows: &rows }, &mut expected);
                    assert_eq!(found.len(), expected.len());
                    found.iter().zip(&expected).for_each(|(found, expected)| self.assert_alike(found, expected));
                    forbidden.resize(tokens, Vec::new());
                    forbidden.iter_mut().zip(&expected).for_each(|(ids, token)| ids.push(token.id));
                }
            }
        }
    }

    /// Checks that two tokens and their log-probabilities are the same, within the limit.
    fn assert_alike(&self, found: &SampledToken, expected: &SampledToken) {
        let named = |token: &SampledToken| {
            let tops = |top: &[(u32, f32)]| top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            (token.id, token.logprobs.as_ref().map(|of| (of.rank, tops(&of.top))))
        };
        assert_eq!(named(found), named(expected));
        for (found, expected) in found.logprobs.iter().zip(&expected.logprobs) {
            let pairs = found.top.iter().zip(&expected.top).map(|(found, expected)| (found.1, expected.1));
            for (found, expected) in pairs.chain([(found.logprob, expected.logprob)]) {
                let limit = self.logprobs * (1.0 + expected.abs());
                assert!(found == expected || (found - expected).abs() <= limit, "{found} in place of {expected}");
            }
        }
    }

    /// Checks that hidden states are returned whether rows reach the head or not.
    pub fn hidden_states_need_no_head(&self) {
        let (program, weights) = tiny();
        let mut backend = self.loaded(&program, &weights);
        let mut batch = first_batch(20);
        let mut hidden = |batch: &StepBatch| {
            backend.forward(batch).expect("the step runs");
            let mut out = Vec::new();
            backend.embeddings(&mut out).expect("there are hidden states");
            (out, backend.logits().expect("there may be none").len())
        };
        let (all, _) = hidden(&batch);
        batch.sampled_rows.clear();
        batch.pooled_rows = vec![3, 19];
        let (some, logits) = hidden(&batch);
        let width = all.len() / 20;
        assert_eq!(some, [&all[3 * width..4 * width], &all[19 * width..]].concat());
        assert_eq!(logits, 0);
        batch.pooled_rows.clear();
        assert_eq!(hidden(&batch).0.len(), 0, "those of an earlier step are gone");
    }

    /// Checks that copied blocks give the same results as the originals.
    pub fn copied_blocks_hold_the_same_keys(&self) {
        let (program, weights) = tiny();
        let mut backend = self.loaded(&program, &weights);
        let mut batches = PagedBatches::new(BLOCK, 1, 8, &mut TestRng(3));
        let sequence = batches.add(TestRng(4).tokens(33, 50));
        backend.forward(&batches.step(&[(sequence, 32)])).expect("the step runs");
        let mut last = batches.step(&[(sequence, 1)]);
        backend.forward(&last).expect("the step runs");
        let expected = backend.logits().expect("there are logits");
        let table = last.tables(0).row(0).to_vec();
        let pairs: Vec<_> = table.iter().map(|&id| (id, id + 20)).collect();
        backend.copy_blocks(&pairs).expect("the blocks exist");
        // The originals are overwritten.
        let mut other = batches.clone();
        let scribble = other.add_sharing(sequence, TestRng(9).tokens(33, 50));
        let mut overwrite = other.step(&[(scribble, 33)]);
        overwrite.block_tables[0].change(scribble as u32, 0, table.iter().copied());
        let slot = |p: usize| table[p / BLOCK] * BLOCK as u32 + (p % BLOCK) as u32;
        overwrite.slot_mapping[0] = (0..33).map(slot).collect();
        backend.forward(&overwrite).expect("the step runs");
        last.block_tables[0].change(sequence as u32, 0, table.iter().map(|id| id + 20));
        last.slot_mapping[0].iter_mut().for_each(|slot| *slot += 20 * BLOCK as u32);
        backend.forward(&last).expect("the step runs");
        assert_eq!(backend.logits().expect("there are logits"), expected);
        assert!(backend.copy_blocks(&[(0, BLOCKS as u32)]).is_err());
    }

    /// Checks that every row of a sequence is close to the result of another backend, whose own error against f64 is
    /// small.
    pub fn near_other(&self, other: &Self, model: &TinyModel, tokens: usize) -> Result<(), TestCaseError> {
        let (program, weights) = model.build().expect("the model is well formed");
        let tokens = TestRng(model.seed ^ 1).tokens(tokens, model.vocab_size);
        let [found, expected] = [self, other].map(|suite| suite.alone(&program, &weights, &tokens));
        let wide = |row: &Vec<u32>| row.iter().map(|&bits| f64::from(f32::from_bits(bits))).collect();
        let expected: Vec<Vec<f64>> = expected.iter().map(wide).collect();
        self.near(&found.iter().map(|row| &row[..]).collect::<Vec<_>>(), &expected, std::iter::empty(), 0.0)
    }

    /// Checks that a token whose values are NaN, for instance after an overflow, affects no earlier row, because other
    /// sequences may share the blocks of those rows.
    pub fn what_is_no_number_reaches_no_row_before_it(&self, model: &TinyModel) {
        const BAD: usize = 7;
        let model = TinyModel { tied: false, ..model.clone() };
        let (program, mut weights) = model.build().expect("the model is well formed");
        let table = weights.tensors.get_mut("embed.0").expect("the tensor is there");
        let row = model.hidden * size_of::<f32>();
        table.bytes.to_mut()[BAD * row..(BAD + 1) * row].fill(0xff);
        let mut tokens = TestRng(5).tokens(40, BAD);
        for at in [1, 13, 39] {
            let [expected, found] = [0, BAD as u32].map(|token| {
                tokens[at] = token;
                self.alone(&program, &weights, &tokens)
            });
            tokens[at] = 0;
            assert_eq!(found[..at], expected[..at], "before {at}");
            let is_nan = |bits: &u32| f32::from_bits(*bits).is_nan();
            for (row, found) in found.iter().enumerate().skip(at) {
                assert!(found.iter().all(is_nan), "row {row}, from {at} on");
            }
        }
    }

    /// Runs the tests that do not depend on the model's shape.
    pub fn contract(&self) {
        self.unfit_checkpoints_are_errors();
        self.progress_is_in_bytes();
        self.too_large_weights_are_errors();
        self.impossible_caches_are_errors();
        self.malformed_batches_are_errors();
        self.nothing_may_be_sampled();
        self.greedy_tokens_are_the_largest_logits();
        self.hidden_states_need_no_head();
        self.copied_blocks_hold_the_same_keys();
    }
}

/// Returns the tokens of the first sequence, followed by random ones.
fn first_then(batches: &PagedBatches, rng: &mut TestRng, vocab_size: usize) -> Vec<u32> {
    let more = 1 + rng.below(20);
    let mut tokens = batches.tokens(0).to_vec();
    tokens.extend(rng.tokens(more, vocab_size));
    tokens
}

/// Returns one layer with the sizes of a real small model, at which products take their blocked and parallel paths.
pub fn real_sizes(vocab_size: usize) -> TinyModel {
    TinyModel {
        vocab_size,
        hidden: 576,
        inner: 1536,
        heads: HeadShape::new(9, 3, 64),
        layers: vec![0],
        ..TinyModel::default()
    }
}

/// Generates style, pairs, magnitude and position streams.
fn ropes() -> impl Strategy<Value = Option<(RopeStyle, usize, f64, Vec<usize>)>> {
    let style = prop_oneof![Just(RopeStyle::NeoX), Just(RopeStyle::GptJ)];
    let streams = prop_oneof![2 => Just(Vec::new()), 1 => proptest::collection::vec(0usize..3, 4)];
    proptest::option::weighted(0.85, (style, 1usize..=4, prop_oneof![Just(1.0), 0.5f64..1.5], streams))
}

fn glus() -> impl Strategy<Value = GluKind> {
    // The limits are so small that gates and ups exceed them.
    let clamped = (0.5f32..2.0, 0.1f32..2.0).prop_map(|(alpha, limit)| GluKind::ClampedSwiglu { alpha, limit });
    prop_oneof![Just(GluKind::Silu), Just(GluKind::Gelu), Just(GluKind::GeluTanh), clamped]
}

fn placements() -> impl Strategy<Value = NormPlacement> {
    prop_oneof![2 => Just(NormPlacement::Pre), 1 => Just(NormPlacement::Post), 1 => Just(NormPlacement::Sandwich)]
}

fn scales() -> impl Strategy<Value = Scales> {
    let factor = || prop_oneof![Just(1.0f32), 0.3f32..4.0];
    (factor(), factor(), factor(), factor()).prop_map(|(embedding, attention, residual, logits)| Scales {
        embedding,
        attention,
        residual,
        logits,
    })
}

/// Generates models with every feature and with odd sizes.
pub fn models() -> impl Strategy<Value = TinyModel> {
    let sizes = (1usize..40, 1usize..50, 1usize..60, 1usize..4, 1usize..4, 4usize..20);
    let windows = proptest::collection::vec(proptest::option::of(1usize..40), 1..3);
    let norm = prop_oneof![3 => Just(NormKind::Rms), 1 => Just(NormKind::Layer)];
    let qk_norm = prop_oneof![Just(None), Just(Some(QkNormWidth::Head)), Just(Some(QkNormWidth::Row))];
    let rarely = || proptest::bool::weighted(0.3);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), rarely(), rarely());
    let caps = (proptest::option::of(1.0f32..30.0), proptest::option::of(1.0f32..30.0));
    let norms = (norm, placements());
    (sizes, windows, ropes(), glus(), norms, qk_norm, flags, caps, scales(), any::<u64>()).prop_map(
        |(sizes, windows, rope, glu, (norm, placement), qk_norm, flags, caps, scales, seed)| {
            let (hidden, inner, vocab_size, kv, group, dim) = sizes;
            let layers = (0..windows.len() + 1).map(|layer| layer % windows.len()).collect();
            let rope = rope.map(|(style, pairs, magnitude, mut streams)| {
                let pairs = pairs.min(dim / 2);
                streams.truncate(pairs);
                Rope { style, inv_freq: (0..pairs).map(|i| 0.3f64.powi(i as i32)).collect(), magnitude, streams }
            });
            TinyModel {
                vocab_size,
                hidden,
                inner,
                heads: HeadShape::new(kv * group, kv, dim),
                layers,
                windows,
                latent: None,
                rope,
                qk_norm,
                norm,
                placement,
                unit_offset: flags.0,
                biases: flags.1,
                tied: flags.2,
                glu,
                experts: None,
                sinks: flags.3,
                spans: flags.4,
                attention_softcap: caps.0,
                logits_softcap: caps.1,
                scales,
                kv_scales: KvScales::ONE,
                media: 0,
                ordered: flags.5,
                storage: StorageType::F32,
                seed,
            }
        },
    )
}
