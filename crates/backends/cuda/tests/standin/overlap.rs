//! Tests of steps that are launched before the tokens of the one before are known.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow};
use octavo_ops::testing::TinyModel;
use octavo_ops::{Backend, StepBatch, StorageType};

use crate::common::overlap::{Generation, STEPS, ahead, one_by_one, take};
use crate::common::{BLOCKS, loaded, wide};
use crate::config;

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

/// A piece of work takes a millisecond of the stand-in.
#[test]
fn the_time_of_a_step_is_the_device_s_own() {
    let mut backend = loaded(CudaConfig { dtype: Some(Dtype::Bf16), graphs: true, ..config() }, &wide(), BLOCKS);
    assert_eq!(backend.step_time(), None);
    let mut generation = Generation::new(&[]);
    let mut times = Vec::new();
    for step in 0..STEPS {
        generation.start(&mut backend, step, &StepBatch::drawn);
        // The device is given work of others, and its tokens are taken late.
        backend.copy_blocks(&vec![(1, 2); step]).unwrap();
        if step > 0 {
            take(&mut backend);
            times.push(backend.step_time().unwrap());
        }
    }
    let decode = times[STEPS - 2];
    assert!(times[1..].iter().all(|time| *time == decode) && decode.as_millis() > 0, "{times:?}");
}

/// The biases exceed the memory, so the row is sampled on the host.
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
