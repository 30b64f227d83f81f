//! A step that is launched before the tokens of the one before are known.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, V100};
use octavo_backend_cuda::{CudaBackend, CudaConfig, Dtype};
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow, SampledToken};
use octavo_ops::testing::{PagedBatches, TestRng, TinyModel};
use octavo_ops::{Backend, StepBatch, StorageType};

use crate::{config, loaded, wide};

const BLOCKS: usize = 64;
const STEPS: usize = 6;

/// What a test asks of three sequences, of which the last brings these biases.
struct Generation<'a> {
    batches: PagedBatches,
    bias: &'a [(u32, f32)],
}

impl Generation<'_> {
    fn new(bias: &[(u32, f32)]) -> Generation<'_> {
        let mut batches = PagedBatches::new(16, 2, BLOCKS, &mut TestRng(5));
        let mut rng = TestRng(6);
        for length in [20, 3, 33] {
            // The tokens that are generated are filled in.
            let mut tokens = rng.tokens(length, 101);
            tokens.resize(length + STEPS, 0);
            batches.add(tokens);
        }
        Generation { batches, bias }
    }

    /// Sequences change places from step to step.
    fn order(step: usize) -> [usize; 3] {
        [[0, 1, 2], [2, 0, 1], [1, 2, 0]][step % 3]
    }

    /// Starts a step: the prompts, or a token of each sequence, which `token` gives by its row in the step before.
    fn start(&mut self, backend: &mut CudaBackend, step: usize, token: &dyn Fn(u32) -> u32) {
        let order = Self::order(step);
        let parts = order.map(|s| (s, if step == 0 { [20, 3, 33][s] } else { 1 }));
        let mut batch = self.batches.step(&parts);
        batch.pooled_rows.clear();
        batch.sampled_rows = batch.query_start[1..].iter().map(|end| end - 1).collect();
        if step > 0 {
            let before = Self::order(step - 1);
            let row = |s: usize| before.iter().position(|&other| other == s).unwrap() as u32;
            batch.token_ids = order.iter().map(|&s| token(row(s))).collect();
        }
        backend.forward(&batch).expect("the step runs");
        let drawn = |s: usize| SampleParams { temperature: 0.8, seed: s as u64, ..SampleParams::default() };
        let params = [SampleParams::default(), drawn(1), drawn(2)];
        let rows = order.map(|s| SampleRow {
            output_position: step as u32,
            logit_bias: if s == 2 { self.bias } else { &[] },
            ..SampleRow::new(&params[s])
        });
        backend.start_sampling(&SampleBatch { rows: &rows }).expect("it is sampled");
    }
}

fn take(backend: &mut CudaBackend) -> Vec<u32> {
    let mut tokens: Vec<SampledToken> = Vec::new();
    backend.take_tokens(&mut tokens).expect("the step has tokens");
    tokens.iter().map(|token| token.id).collect()
}

/// Each step waits for the one before.
fn one_by_one(backend: &mut CudaBackend, bias: &[(u32, f32)]) -> Vec<Vec<u32>> {
    let mut generation = Generation::new(bias);
    let mut tokens: Vec<Vec<u32>> = Vec::new();
    for step in 0..=STEPS {
        let before = tokens.last().cloned().unwrap_or_default();
        generation.start(backend, step, &|row| before[row as usize]);
        tokens.push(take(backend));
    }
    tokens
}

/// Each step is launched before the tokens of the one before are taken.
fn ahead(backend: &mut CudaBackend, bias: &[(u32, f32)]) -> Vec<Vec<u32>> {
    let mut generation = Generation::new(bias);
    let mut tokens = Vec::new();
    for step in 0..=STEPS {
        generation.start(backend, step, &StepBatch::drawn);
        if step > 0 {
            tokens.push(take(backend));
        }
    }
    tokens.push(take(backend));
    tokens
}

#[test]
fn tokens_are_the_same_whether_anybody_waits_or_not() {
    let quantised = TinyModel { vocab_size: 256, hidden: 256, inner: 512, storage: StorageType::Q8_0, ..wide() };
    for (device, dtype, model) in
        [(H200, Dtype::Bf16, wide()), (V100, Dtype::F16, wide()), (H200, Dtype::F32, quantised)]
    {
        for graphs in [true, false] {
            let config = CudaConfig { device, dtype: Some(dtype), graphs, ..config() };
            let mut backend = loaded(config, &model, BLOCKS);
            let expected = one_by_one(&mut backend, &[]);
            assert_eq!(ahead(&mut backend, &[]), expected, "{dtype:?}, graphs: {graphs}");
        }
    }
}

#[test]
fn nobody_waits_for_the_device_but_who_takes_tokens() {
    let control = Control::new();
    let mut backend = loaded(CudaConfig { dtype: Some(Dtype::Bf16), graphs: true, ..config() }, &wide(), BLOCKS);
    control.reset();
    ahead(&mut backend, &[]);
    assert_eq!(control.calls("cuStreamSynchronize"), 0);
    assert_eq!(control.calls("cuGraphLaunch"), STEPS as u64);
}

/// More biases than there is memory for: the row is drawn on the host.
#[test]
fn what_the_host_draws_is_the_next_step_s_token_too() {
    let mut backend = loaded(CudaConfig { dtype: Some(Dtype::Bf16), graphs: true, ..config() }, &wide(), BLOCKS);
    let mut bias = vec![(7, 0.0); 1 << 18];
    bias.push((9, 100.0));
    let expected = one_by_one(&mut backend, &bias);
    assert_eq!(ahead(&mut backend, &bias), expected);
    let biased =
        |(step, tokens): (usize, &Vec<u32>)| tokens[Generation::order(step).iter().position(|&s| s == 2).unwrap()] == 9;
    assert!(expected.iter().enumerate().all(biased), "{expected:?}");
}

#[test]
fn no_more_than_two_steps_are_under_way() {
    let mut backend = loaded(CudaConfig { dtype: Some(Dtype::Bf16), ..config() }, &wide(), BLOCKS);
    let mut out = Vec::new();
    let error = backend.take_tokens(&mut out).unwrap_err().to_string();
    assert_eq!(error, "the cuda backend failed: no step is being sampled");
    let mut generation = Generation::new(&[]);
    generation.start(&mut backend, 0, &StepBatch::drawn);
    generation.start(&mut backend, 1, &StepBatch::drawn);
    let params = SampleParams::default();
    let error = backend.start_sampling(&SampleBatch { rows: &[SampleRow::new(&params); 3] }).unwrap_err().to_string();
    assert_eq!(error, "the cuda backend failed: the tokens of the step before the last have not been taken");
    assert_eq!((take(&mut backend).len(), take(&mut backend).len()), (3, 3));
}

#[test]
fn a_token_that_no_row_drew_is_an_error() {
    let mut backend = loaded(CudaConfig { dtype: Some(Dtype::Bf16), ..config() }, &wide(), BLOCKS);
    let mut generation = Generation::new(&[]);
    generation.start(&mut backend, 0, &StepBatch::drawn);
    let mut batch = generation.batches.step(&[(0, 1)]);
    batch.token_ids = vec![StepBatch::drawn(3)];
    let error = backend.forward(&batch).unwrap_err().to_string();
    assert_eq!(error, "the cuda backend failed: the batch is malformed: a token that was not drawn");
}
