//! Tests of launches that take the place of several, and of those that begin before the one before has ended.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::Backend;
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow};
use octavo_ops::testing::{NormPlacement, PagedBatches, TestRng, TinyModel};

use crate::common::{BLOCKS, generate, loaded, wide};
use crate::config;

/// Numbers of launches of a step.
struct Launches {
    all: u64,
    /// Those that may begin before the one before has ended.
    early: u64,
}

/// Prefills five sequences, lets each of the given numbers of them decode, and returns the launches of the decode steps.
fn launches(config: &CudaConfig, model: &TinyModel, counts: &[usize]) -> Vec<Launches> {
    let control = Control::new();
    let mut backend = loaded(config.clone(), model, BLOCKS);
    let mut batches = PagedBatches::new(16, 2, BLOCKS, &mut TestRng(5));
    for _ in 0..5 {
        batches.add(TestRng(6).tokens(30, 101));
    }
    let mut found = Vec::new();
    for (i, &count) in std::iter::once(&5).chain(counts).enumerate() {
        let parts: Vec<_> = (0..count).map(|sequence| (sequence, if i == 0 { 20 } else { 1 })).collect();
        let mut batch = batches.step(&parts);
        batch.pooled_rows.clear();
        batch.sampled_rows = batch.query_start[1..].iter().map(|end| end - 1).collect();
        control.reset();
        backend.forward(&batch).unwrap();
        let params = SampleParams::default();
        backend.sample(&SampleBatch { rows: &vec![SampleRow::new(&params); count] }, &mut Vec::new()).unwrap();
        found.push(Launches { all: control.calls("cuLaunchKernelEx"), early: control.calls("programmatic launch") });
    }
    found.split_off(1)
}

#[test]
fn few_rows_need_no_launch_for_norms_activations_and_heads() {
    // Decode attention of a V100 does not complete heads.
    for (device, dtype, heads) in [(H200, Dtype::Bf16, 1), (V100, Dtype::F16, 0)] {
        let config = CudaConfig { device, dtype: Some(dtype), ..config() };
        let counts = |model: &TinyModel| {
            let found = launches(&config, model, &[1, 4, 5]);
            [found[0].all, found[1].all, found[2].all]
        };
        // Of each of two layers, two norms, the activation and the heads of q, k and v; and the last norm.
        let [one, four, five] = counts(&TinyModel { placement: NormPlacement::Sandwich, ..wide() });
        assert_eq!([four - one, five - four], [0, 2 * (3 + heads) + 1], "{dtype:?}");
        // Norms that add to the residual stream before stay: all but the first.
        let [one, four, five] = counts(&wide());
        assert_eq!([four - one, five - four], [0, 2 + 1 + 1 + 2 * heads], "{dtype:?}");
    }
}

#[test]
fn what_follows_a_kernel_may_begin_early_on_chips_that_can() {
    for (device, dtype, can) in [(H200, Dtype::Bf16, true), (V100, Dtype::F16, false)] {
        let config = CudaConfig { device, dtype: Some(dtype), ..config() };
        for Launches { all, early } in launches(&config, &wide(), &[1, 5]) {
            // The first kernels of the step and of sampling follow copies.
            let expected = if can { all - 2 } else { 0 };
            assert_eq!(early, expected, "{dtype:?}: {early} of {all}");
        }
    }
}

/// CUDA version of a driver that does not record launches which begin early.
const OLD_DRIVER: i32 = 12020;

#[test]
fn launches_in_turn_give_the_same_bits() {
    let control = Control::new();
    let usual = CudaConfig { dtype: Some(Dtype::Bf16), ..config() };
    let in_turn = CudaConfig { early_launches: false, ..usual.clone() };
    let mut expected = None;
    for (config, driver, can) in [(&usual, 0, true), (&in_turn, 0, false), (&usual, OLD_DRIVER, false)] {
        for graphs in [false, true] {
            control.reset();
            control.set_driver(driver);
            let mut backend = loaded(CudaConfig { graphs, ..config.clone() }, &wide(), BLOCKS);
            let bits = generate(&mut backend, || {});
            assert_eq!(control.calls("programmatic launch") > 0, can, "graphs: {graphs}, driver {driver}");
            assert!(*expected.get_or_insert_with(|| bits.clone()) == bits, "graphs: {graphs}, driver {driver}");
        }
    }
    control.reset();
}
