//! Decoding with each step launched after, or before, the wait for the one before.

use octavo_backend_cuda::CudaBackend;
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow, SampledToken, TokenCounts};
use octavo_ops::testing::{PagedBatches, TestRng};
use octavo_ops::{Backend, StepBatch};

use super::BLOCKS;

/// Number of decode steps.
pub(crate) const STEPS: usize = 6;

/// A generation of three sequences, of which the first and the last have penalties, and the last has these biases.
pub(crate) struct Generation<'a> {
    pub(crate) batches: PagedBatches,
    bias: &'a [(u32, f32)],
    /// Counts of the tokens that are known.
    counts: [TokenCounts; 3],
}

impl Generation<'_> {
    pub(crate) fn new(bias: &[(u32, f32)]) -> Generation<'_> {
        let mut batches = PagedBatches::new(16, 2, BLOCKS, &mut TestRng(5));
        let (mut rng, mut counts) = (TestRng(6), Vec::new());
        for length in [20, 3, 33] {
            // The tokens that are generated are filled in later.
            let mut tokens = rng.tokens(length, 101);
            counts.push(TokenCounts::new(&tokens, &[]));
            tokens.resize(length + STEPS, 0);
            batches.add(tokens);
        }
        Generation { batches, bias, counts: counts.try_into().expect("three") }
    }

    /// Returns the order of the sequences, which changes from step to step.
    pub(crate) fn order(step: usize) -> [usize; 3] {
        [[0, 1, 2], [2, 0, 1], [1, 2, 0]][step % 3]
    }

    /// Counts the tokens of a step.
    fn know(&mut self, step: usize, tokens: &[u32]) {
        Self::order(step).into_iter().zip(tokens).for_each(|(s, &token)| self.counts[s].push(token));
    }

    /// Starts a step: the prompts, or one token of each sequence, which `token` returns by its row in the step before.
    pub(crate) fn start(&mut self, backend: &mut CudaBackend, step: usize, token: &dyn Fn(u32) -> u32) {
        let order = Self::order(step);
        let parts = order.map(|s| (s, if step == 0 { [20, 3, 33][s] } else { 1 }));
        let mut batch = self.batches.step(&parts);
        batch.pooled_rows.clear();
        batch.sampled_rows = batch.query_start[1..].iter().map(|end| end - 1).collect();
        let before = Self::order(step.max(1) - 1);
        let row = |s: usize| before.iter().position(|&other| other == s).unwrap() as u32;
        if step > 0 {
            batch.token_ids = order.iter().map(|&s| token(row(s))).collect();
        }
        // A token that is referred to by its row is not known.
        let pending = |s: usize| Some(row(s)).filter(|&row| step > 0 && token(row) == StepBatch::drawn(row));
        backend.forward(&batch).expect("the step runs");
        let drawn = |s: usize| SampleParams { temperature: 0.8, seed: s as u64, ..SampleParams::default() };
        let greedy = SampleParams { frequency_penalty: 1.5, presence_penalty: 0.5, ..SampleParams::default() };
        let params = [greedy, drawn(1), SampleParams { repetition_penalty: 1.7, ..drawn(2) }];
        let counts = &self.counts;
        let rows = order.map(|s| SampleRow {
            output_position: step as u32,
            seat: s as u32,
            counts: params[s].needs_counts().then_some(&counts[s]),
            pending: pending(s).filter(|_| params[s].needs_counts()),
            logit_bias: if s == 2 { self.bias } else { &[] },
            ..SampleRow::new(&params[s])
        });
        backend.start_sampling(&SampleBatch { rows: &rows }).expect("it is sampled");
    }
}

/// Takes the tokens of the oldest step.
pub(crate) fn take(backend: &mut CudaBackend) -> Vec<u32> {
    let mut tokens: Vec<SampledToken> = Vec::new();
    backend.take_tokens(&mut tokens).expect("the step has tokens");
    tokens.iter().map(|token| token.id).collect()
}

/// Waits for each step before the next.
pub(crate) fn one_by_one(backend: &mut CudaBackend, bias: &[(u32, f32)]) -> Vec<Vec<u32>> {
    let mut generation = Generation::new(bias);
    let mut tokens: Vec<Vec<u32>> = Vec::new();
    for step in 0..=STEPS {
        let before = tokens.last().cloned().unwrap_or_default();
        generation.start(backend, step, &|row| before[row as usize]);
        tokens.push(take(backend));
        generation.know(step, tokens.last().expect("the step's"));
    }
    tokens
}

/// Launches each step before the tokens of the one before are taken.
pub(crate) fn ahead(backend: &mut CudaBackend, bias: &[(u32, f32)]) -> Vec<Vec<u32>> {
    let mut generation = Generation::new(bias);
    let mut tokens = Vec::new();
    for step in 0..=STEPS {
        generation.start(backend, step, &StepBatch::drawn);
        if step > 0 {
            tokens.push(take(backend));
            generation.know(step - 1, tokens.last().expect("the step's"));
        }
    }
    tokens.push(take(backend));
    tokens
}
