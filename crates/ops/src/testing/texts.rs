//! Random encoders of texts, and the tests that every backend must pass with them.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::model::Build;
use super::reference::vectors;
use super::suite::Suite;
use super::{MemoryWeights, Rounding, TestRng, TinyModel};
use crate::{
    Act, Backend, BufferId, Embed, EmbedIds, Glu, GluKind, HeadShape, KvPlace, NormKind, Op, PoolKind, PoolRows,
    Program, ProgramBuilder, ProgramError, ProgramKind, QkvPost, Rope, RopeStyle, Rows, SegmentAttention, StepBatch,
};

/// Number of learned positions of a random encoder.
const POSITIONS: usize = 70;

/// Shape of a random encoder of texts. Every field is a feature that some architecture has.
#[derive(Clone, Debug, PartialEq)]
pub struct TinyTexts {
    /// Sizes and options of the layers; what only a decoder has is ignored.
    pub layers: TinyModel,
    /// Row of the first learned position, if there are learned positions (RoBERTa's begin after some).
    pub offset: Option<usize>,
    /// Number of token types; 0 if there are none.
    pub types: usize,
    /// Whether a norm follows each sum (BERT), instead of preceding each block (ModernBERT).
    pub norms_sums: bool,
    /// Whether the MLP has a gate.
    pub gated: bool,
    /// Tokens on each side that the queries of every second layer see.
    pub window: Option<usize>,
    /// Reduction of the rows; the last row if there is none.
    pub pool: Option<PoolKind>,
    /// Number of scores of a classifier.
    pub classes: Option<usize>,
}

impl TinyTexts {
    /// Returns the program and its weights.
    pub fn build(&self) -> Result<(Program, MemoryWeights), ProgramError> {
        let m = &self.layers;
        let mut b = Build::with(m, ProgramBuilder::texts("tiny texts", m.vocab_size, ProgramKind::Encoder));
        let x = b.builder.buffer("x", Rows::Tokens, m.hidden);
        let y = b.builder.buffer("y", Rows::Tokens, m.hidden);
        let table = b.matrix("embed", &[m.vocab_size], m.hidden, 1.0);
        let mut embed = |table, ids, add| b.builder.push(Op::Embed(Embed { table, ids, scale: 1.0, add, out: x }));
        embed(table, EmbedIds::Tokens, false);
        if let Some(offset) = self.offset {
            let table = b.matrix("positions", &[offset + POSITIONS], m.hidden, 1.0);
            let ids = EmbedIds::Positions { offset };
            b.builder.push(Op::Embed(Embed { table, ids, scale: 1.0, add: true, out: x }));
        }
        if self.types > 0 {
            let table = b.matrix("types", &[self.types], m.hidden, 1.0);
            b.builder.push(Op::Embed(Embed { table, ids: EmbedIds::Types, scale: 1.5, add: true, out: x }));
        }
        b.norm("embedded", x, None, x);
        for layer in 0..m.layers.len() {
            self.layer(&mut b, layer, x, y);
        }
        self.head(&mut b, x);
        b.done()
    }

    fn layer(&self, b: &mut Build<'_>, layer: usize, x: BufferId, y: BufferId) {
        let (m, heads) = (&self.layers, self.layers.heads);
        let mut buffer = |name: &str, cols| b.builder.buffer(format!("{name}.{layer}"), Rows::Tokens, cols);
        let [qkv, q, o] =
            [("qkv", heads.qkv_cols()), ("q", heads.q_cols()), ("o", heads.q_cols())].map(|(n, c)| buffer(n, c));
        let (up, hidden) = (buffer("up", if self.gated { 2 * m.inner } else { m.inner }), buffer("h", m.inner));
        let input = self.before(b, &format!("{layer}.in"), x, y);
        b.linear(&format!("{layer}.qkv"), &[heads.q_cols(), heads.kv_cols(), heads.kv_cols()], input, None, qkv);
        let rope = m.rope.clone();
        b.builder.push(Op::QkvPost(QkvPost { input: qkv, out: q, heads, norm: None, rope, kv: KvPlace::Step }));
        let scale = 1.0 / (heads.dim as f32).sqrt();
        let window = self.window.filter(|_| layer.is_multiple_of(2));
        b.builder.push(Op::SegmentAttention(SegmentAttention { q, out: o, heads, scale, window }));
        self.after(b, &format!("{layer}.out"), o, (x, y));
        let input = self.before(b, &format!("{layer}.mid"), x, y);
        if self.gated {
            b.linear(&format!("{layer}.up"), &[m.inner, m.inner], input, None, up);
            b.builder.push(Op::Glu(Glu { kind: m.glu, input: up, out: hidden }));
        } else {
            b.linear(&format!("{layer}.up"), &[m.inner], input, None, up);
            b.builder.push(Op::Act(Act { kind: m.glu, input: up, out: hidden }));
        }
        self.after(b, &format!("{layer}.down"), hidden, (x, y));
    }

    /// Appends the norm before a block, if there is one, and returns the block's input.
    fn before(&self, b: &mut Build<'_>, name: &str, x: BufferId, y: BufferId) -> BufferId {
        if self.norms_sums {
            return x;
        }
        b.norm(name, x, None, y);
        y
    }

    /// Appends the last product of a block, which is added to the residual stream, and the norm of the sum.
    fn after(&self, b: &mut Build<'_>, name: &str, input: BufferId, (x, y): (BufferId, BufferId)) {
        if !self.norms_sums {
            return b.linear(name, &[self.layers.hidden], input, Some(x), x);
        }
        b.linear(name, &[self.layers.hidden], input, Some(x), y);
        b.norm(name, y, None, x);
    }

    fn head(&self, b: &mut Build<'_>, x: BufferId) {
        let m = &self.layers;
        b.norm("last", x, None, x);
        let pooled = b.builder.buffer("pooled", Rows::Pooled, m.hidden);
        b.builder.push(match self.pool {
            Some(kind) => Op::PoolRows(PoolRows { kind, input: x, out: pooled }),
            None => Op::GatherRows { input: x, out: pooled },
        });
        if let Some(classes) = self.classes {
            let dense = b.builder.buffer("dense", Rows::Pooled, m.hidden);
            let scores = b.builder.buffer("scores", Rows::Pooled, classes);
            b.linear("dense", &[m.hidden], pooled, None, dense);
            b.builder.push(Op::Act(Act { kind: GluKind::Tanh, input: dense, out: dense }));
            b.linear("classes", &[classes], dense, None, scores);
        }
    }

    /// Returns a step of random texts of the given lengths. A text is a function of its seed. With `tokens`, a vector
    /// of each token is returned in place of one of each text.
    pub fn batch(&self, texts: &[(u64, usize)], tokens: bool) -> StepBatch {
        let mut batch = StepBatch { query_start: vec![0], ..StepBatch::default() };
        for (slot, &(seed, length)) in texts.iter().enumerate() {
            let mut rng = TestRng(seed);
            batch.token_ids.extend(rng.tokens(length, self.layers.vocab_size));
            batch.positions.extend(0..length as u32);
            if self.types > 0 {
                batch.token_types.extend((0..length).map(|_| rng.below(self.types) as u32));
            }
            let end = batch.token_ids.len() as u32;
            let start = end - length as u32;
            batch.query_start.push(end);
            batch.seq_lens.push(length as u32);
            batch.seats.push(slot as u32);
            let pooled = if tokens { start..end } else { end - 1..end };
            batch.pooled_lens.extend(pooled.clone().map(|_| if tokens { 1 } else { length as u32 }));
            batch.pooled_rows.extend(pooled);
        }
        batch
    }
}

/// Generates encoders of texts with odd sizes.
pub fn text_models() -> impl Strategy<Value = TinyTexts> {
    let sizes = (8usize..40, 1usize..40, 1usize..3, 1usize..3, 2usize..20);
    let norm = prop_oneof![Just(NormKind::Rms), Just(NormKind::Layer)];
    let glu = prop_oneof![Just(GluKind::Silu), Just(GluKind::Gelu), Just(GluKind::GeluTanh)];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let positions = (proptest::option::of(0usize..4), 0usize..3);
    let pool = prop_oneof![Just(None), Just(Some(PoolKind::First)), Just(Some(PoolKind::Mean))];
    let head = (pool, proptest::option::of(1usize..5), proptest::option::of(0usize..30));
    (sizes, norm, glu, flags, positions, head, any::<u64>()).prop_map(
        |((hidden, inner, kv, group, dim), norm, glu, flags, (offset, types), (pool, classes, window), seed)| {
            let (biases, rotates, norms_sums, gated) = flags;
            let inv_freq = (0..(dim / 2).min(4)).map(|pair| 0.4f64.powi(pair as i32)).collect();
            let rope = rotates.then_some(Rope { style: RopeStyle::NeoX, inv_freq, magnitude: 1.0, streams: vec![] });
            let heads = HeadShape::new(kv * group, kv, dim);
            let layers = TinyModel { hidden, inner, heads, rope, norm, glu, biases, seed, ..TinyModel::default() };
            TinyTexts { layers, offset, types, norms_sums, gated, window, pool, classes }
        },
    )
}

/// Returns a model with the head size and the window of published encoders.
pub fn windowed_texts() -> TinyTexts {
    let heads = HeadShape::new(1, 1, 64);
    TinyTexts {
        layers: TinyModel {
            hidden: 64,
            inner: 96,
            heads,
            layers: vec![0],
            norm: NormKind::Layer,
            ..TinyModel::default()
        },
        offset: None,
        types: 0,
        norms_sums: false,
        gated: true,
        window: Some(64),
        pool: Some(PoolKind::Mean),
        classes: None,
    }
}

fn run(backend: &mut dyn Backend, batch: &StepBatch) -> Vec<u32> {
    backend.forward(batch).expect("the step runs");
    let mut out = vec![0.5];
    backend.embeddings(&mut out).expect("there are vectors");
    out.iter().map(|x| x.to_bits()).collect()
}

impl Suite<'_> {
    /// Checks that the vectors of texts and of their tokens are close to the exact f64 results.
    pub fn texts_are_near(
        &self,
        model: &TinyTexts,
        rounding: Rounding,
        margin: f64,
        texts: &[usize],
    ) -> Result<(), TestCaseError> {
        let (program, weights) = model.build().expect("the encoder is well formed");
        let mut backend = self.loaded(&program, &weights);
        let texts: Vec<_> = texts.iter().enumerate().map(|(at, &rows)| (model.layers.seed ^ at as u64, rows)).collect();
        for tokens in [false, true] {
            let batch = model.batch(&texts, tokens);
            let found = run(&mut *backend, &batch);
            let (exact, disturbed) = vectors(&program, &weights, &batch, (rounding, model.layers.seed));
            prop_assert_eq!(found.len(), exact.len() * exact[0].len());
            let found: Vec<&[u32]> = found.chunks(exact[0].len()).collect();
            self.near(&found, &exact, disturbed.iter(), margin)?;
        }
        Ok(())
    }

    /// Checks that the bits of a text's vector do not depend on the texts beside it.
    pub fn texts_have_the_same_bits(&self, model: &TinyTexts, texts: &[usize]) -> Result<(), TestCaseError> {
        let (program, weights) = model.build().expect("the encoder is well formed");
        let mut backend = self.loaded(&program, &weights);
        let texts: Vec<_> = texts.iter().enumerate().map(|(at, &rows)| (at as u64, rows)).collect();
        let together = run(&mut *backend, &model.batch(&texts, false));
        let mut alone = Vec::new();
        for &text in texts.iter().rev() {
            alone.push(run(&mut *backend, &model.batch(&[text], false)));
        }
        alone.reverse();
        prop_assert_eq!(alone.concat(), together);
        Ok(())
    }

    /// Checks that a malformed step of texts gives an error and that the next one runs.
    pub fn malformed_texts_are_errors(&self) {
        let model = TinyTexts { offset: Some(2), types: 2, ..windowed_texts() };
        let (program, weights) = model.build().expect("the encoder is well formed");
        let mut backend = self.loaded(&program, &weights);
        let name = backend.name();
        type Spoil = fn(&mut StepBatch);
        let spoilt: [(&str, Spoil); 8] = [
            ("positions", |b| b.positions.truncate(3)),
            ("a token id beyond the vocabulary", |b| b.token_ids[3] = 50),
            ("a part of a sequence", |b| b.seq_lens[0] = 6),
            ("the numbers of pooled rows", |b| b.pooled_lens.truncate(1)),
            ("a number of pooled rows", |b| b.pooled_lens[0] = 6),
            ("a position beyond the table", |b| b.positions[1] = POSITIONS as u32),
            ("token types", |b| b.token_types.clear()),
            ("a token type beyond the table", |b| b.token_types[7] = 2),
        ];
        let sound = model.batch(&[(1, 5), (2, 3)], false);
        for (what, spoil) in spoilt {
            let mut batch = sound.clone();
            spoil(&mut batch);
            let message = backend.forward(&batch).expect_err("the batch is malformed").to_string();
            assert_eq!(message, format!("the {name} backend failed: the batch is malformed: {what}"));
        }
        assert_eq!(run(&mut *backend, &sound).len(), 2 * 64);
    }
}
