//! Compares tokens sampled on the device with those of the scalar definition for the same logits.

use octavo_backend_cuda::CudaConfig;
use octavo_ops::Backend;
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow, SampledToken, Sampler, TokenCounts};
use octavo_ops::testing::{PagedBatches, TestRng, TinyModel};

use crate::common::loaded;
use crate::config;

const VOCAB: usize = 150;

/// Data that a row borrows.
struct Row {
    params: SampleParams,
    counts: TokenCounts,
    bias: Vec<(u32, f32)>,
    forbidden: Vec<u32>,
    mask: Option<Vec<u32>>,
    forced: Option<u32>,
    listed: Vec<u32>,
}

fn row(rng: &mut TestRng) -> Row {
    let mut maybe = |one_in: usize| rng.below(one_in) == 0;
    let params = SampleParams {
        temperature: if maybe(3) { 0.0 } else { 0.8 },
        top_k: if maybe(2) { 7 } else { 0 },
        top_p: if maybe(2) { 0.8 } else { 1.0 },
        min_p: if maybe(3) { 0.05 } else { 0.0 },
        presence_penalty: if maybe(3) { 0.5 } else { 0.0 },
        frequency_penalty: if maybe(3) { 0.25 } else { 0.0 },
        repetition_penalty: if maybe(3) { 1.3 } else { 1.0 },
        seed: 0,
        logprobs: if maybe(2) { Some(5) } else { None },
    };
    let [biased, forbidding, masked, forced, listing] = [3, 3, 3, 6, 4].map(&mut maybe);
    let mut ids = |count: usize| rng.tokens(count, VOCAB);
    let counts = TokenCounts::new(&ids(20), &ids(10));
    let bias = if biased { ids(4).into_iter().map(|id| (id, 1.5)).collect() } else { Vec::new() };
    let forbidden = if forbidding { ids(5) } else { Vec::new() };
    let mask = masked.then(|| (0..VOCAB.div_ceil(32)).map(|_| rng.next_u64() as u32).collect());
    let forced = forced.then(|| rng.below(VOCAB) as u32);
    let listed = if listing { rng.tokens(6, VOCAB) } else { Vec::new() };
    Row { params: SampleParams { seed: rng.next_u64(), ..params }, counts, bias, forbidden, mask, forced, listed }
}

impl Row {
    fn borrowed(&self, output_position: u32) -> SampleRow<'_> {
        SampleRow {
            output_position,
            counts: self.params.needs_counts().then_some(&self.counts),
            logit_bias: &self.bias,
            forbidden: &self.forbidden,
            mask: self.mask.as_deref(),
            forced: self.forced,
            logprob_ids: &self.listed,
            ..SampleRow::new(&self.params)
        }
    }
}

fn same(found: &SampledToken, expected: &SampledToken) -> bool {
    let near = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-4 * b.abs().max(1.0);
    found.id == expected.id
        && match (&found.logprobs, &expected.logprobs) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                near(a.logprob, b.logprob)
                    && a.rank == b.rank
                    && a.top.len() == b.top.len()
                    && a.top.iter().zip(&b.top).all(|(a, b)| a.0 == b.0 && near(a.1, b.1))
            }
            _ => false,
        }
}

#[test]
fn draws_are_those_of_the_definition() {
    let model = TinyModel { vocab_size: VOCAB, ..TinyModel::default() };
    // The second configuration has hardly any memory for the rows' lists, so the host samples.
    for max_rows in [256, 24] {
        let mut backend = loaded(CudaConfig { max_rows, ..config() }, &model, 64);
        let mut rng = TestRng(77);
        let mut batches = PagedBatches::new(16, 1, 64, &mut rng);
        let mut sampler = Sampler::new();
        for _ in 0..6 {
            let tokens = rng.tokens(24, VOCAB);
            let sequence = batches.add(tokens);
            let mut batch = batches.step(&[(sequence, 24)]);
            batch.pooled_rows.clear();
            backend.forward(&batch).unwrap();
            let logits = backend.logits().unwrap();
            let rows: Vec<Row> = (0..24).map(|_| row(&mut rng)).collect();
            let rows: Vec<_> = rows.iter().zip(0..).map(|(row, position)| row.borrowed(position)).collect();
            let (mut found, mut expected) = (Vec::new(), Vec::new());
            backend.sample(&SampleBatch { rows: &rows }, &mut found).unwrap();
            sampler.sample_batch(&logits, &SampleBatch { rows: &rows }, &mut expected);
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(same(found, expected), "row {at}: {found:?}, expected {expected:?}");
            }
        }
    }
}

#[test]
fn a_row_that_reports_the_whole_vocabulary_is_served() {
    let model = TinyModel { vocab_size: VOCAB, ..TinyModel::default() };
    let mut backend = loaded(CudaConfig { max_rows: 4, ..config() }, &model, 8);
    let mut batches = PagedBatches::new(16, 1, 8, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(20, VOCAB));
    let mut batch = batches.step(&[(sequence, 20)]);
    batch.pooled_rows.clear();
    batch.sampled_rows = vec![5, 19];
    backend.forward(&batch).unwrap();
    let (all, greedy) = (SampleParams { logprobs: Some(VOCAB as u32), ..Default::default() }, SampleParams::default());
    let rows = [SampleRow::new(&all), SampleRow::new(&greedy)];
    let mut out = Vec::new();
    backend.sample(&SampleBatch { rows: &rows }, &mut out).unwrap();
    assert_eq!(out[0].logprobs.as_ref().unwrap().top.len(), VOCAB);
    assert_eq!(out[1].logprobs, None);
}

/// Three sequences draw in turn, of which one is replaced, and one has a row with a draft.
#[test]
fn penalties_count_what_was_generated_since_the_first_draw() {
    let model = TinyModel { vocab_size: VOCAB, ..TinyModel::default() };
    let mut backend = loaded(config(), &model, 64);
    let mut rng = TestRng(31);
    let mut batches = PagedBatches::new(16, 1, 64, &mut rng);
    let mut sampler = Sampler::new();
    let mut counts = [0, 1, 2].map(|_| TokenCounts::new(&rng.tokens(9, VOCAB), &[]));
    let params =
        SampleParams { presence_penalty: 0.5, frequency_penalty: 0.7, repetition_penalty: 1.4, ..Default::default() };
    for step in 0..8_u32 {
        let sequence = batches.add(rng.tokens(4, VOCAB));
        let mut batch = batches.step(&[(sequence, 4)]);
        batch.pooled_rows.clear();
        backend.forward(&batch).unwrap();
        let logits = backend.logits().unwrap();
        if step == 5 {
            counts[1] = TokenCounts::new(&rng.tokens(5, VOCAB), &[8, 8]);
        }
        let draft = counts[2].with(7);
        let of = [(0, &counts[0]), (1, &counts[1]), (2, &counts[2]), (2, &draft)];
        let row =
            |(seat, counts)| SampleRow { seat, counts: Some(counts), output_position: step, ..SampleRow::new(&params) };
        let (rows, mut found, mut expected) = (of.map(row), Vec::new(), Vec::new());
        backend.sample(&SampleBatch { rows: &rows }, &mut found).unwrap();
        sampler.sample_batch(&logits, &SampleBatch { rows: &rows }, &mut expected);
        let ids = |tokens: &[SampledToken]| tokens.iter().map(|token| token.id).collect::<Vec<_>>();
        assert_eq!(ids(&found), ids(&expected), "step {step}");
        counts.iter_mut().zip(&found).for_each(|(counts, token)| counts.push(token.id));
    }
}
