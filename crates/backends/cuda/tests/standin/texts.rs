//! Tests of models that return vectors: encoders of texts and embedders.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::testing::{Rounding, TinyTexts, text_models, windowed_texts};
use octavo_ops::{Backend, PoolKind};
use proptest::prelude::*;

use crate::common::{open, vectors, with_suite};
use crate::config;
use crate::programs::{SIXTEEN_BITS, fitting};

/// Returns the model with sizes that the kernels support. A classifier may still have any number of scores.
fn fitting_texts(model: TinyTexts) -> TinyTexts {
    TinyTexts { layers: fitting(model.layers), ..model }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn texts_are_near_the_naive_ones(
        model in text_models().prop_map(fitting_texts),
        texts in proptest::collection::vec(1usize..40, 1..4),
    ) {
        with_suite(&config(), 3e-4, 2e-5, |suite| suite.texts_are_near(&model, Rounding::F32, 0.0, &texts))?;
    }

    #[test]
    fn bits_of_texts_do_not_depend_on_the_batch_if_that_is_asked_for(
        model in text_models().prop_map(fitting_texts),
        texts in proptest::collection::vec(1usize..40, 1..4),
    ) {
        let config = CudaConfig { batch_invariant: true, ..config() };
        with_suite(&config, 3e-4, 2e-5, |suite| suite.texts_have_the_same_bits(&model, &texts))?;
    }
}

/// Returns settings for steps of the longest texts of these tests.
fn long() -> CudaConfig {
    CudaConfig { max_num_batched_tokens: 512, ..config() }
}

/// Tests windows on the tensor cores, and an odd number of scores in 16 bits.
#[test]
fn sixteen_bits_are_as_near_as_their_rounding_allows() {
    let classifier = TinyTexts { pool: Some(PoolKind::First), classes: Some(3), ..windowed_texts() };
    let everything = TinyTexts { window: None, norms_sums: true, gated: false, types: 2, ..windowed_texts() };
    for (device, dtype, worst, mean) in SIXTEEN_BITS.into_iter().chain([(H200, Dtype::F32, 3e-4, 2e-5)]) {
        let config = CudaConfig { device, dtype: Some(dtype), ..long() };
        for model in [&windowed_texts(), &classifier, &everything] {
            let near = |suite: &octavo_ops::testing::suite::Suite<'_>| {
                suite.texts_are_near(model, Rounding::F32, 0.0, &[300, 1, 130])
            };
            with_suite(&config, worst, mean, near).unwrap_or_else(|error| panic!("{device}, {dtype:?}: {error}"));
        }
    }
}

#[test]
fn bits_of_sixteen_do_not_depend_on_the_batch_if_that_is_asked_for() {
    for (device, dtype) in [(H200, Dtype::Bf16), (V100, Dtype::F16)] {
        let config = CudaConfig { device, dtype: Some(dtype), batch_invariant: true, ..long() };
        let same = |suite: &octavo_ops::testing::suite::Suite<'_>| {
            suite.texts_have_the_same_bits(&windowed_texts(), &[300, 1, 130, 64])
        };
        with_suite(&config, 1.0, 1.0, same).unwrap();
    }
}

#[test]
fn malformed_texts_are_errors() {
    with_suite(&config(), 0.0, 0.0, |suite| suite.malformed_texts_are_errors());
}

#[test]
fn a_step_beyond_the_memory_is_an_error_and_no_step_allocates() {
    let model = TinyTexts { types: 2, ..windowed_texts() };
    let (program, weights) = model.build().unwrap();
    let mut backend = open(CudaConfig { max_num_batched_tokens: 40, max_num_seqs: 3, graphs: true, ..config() });
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    backend.allocate_kv(16, 0).unwrap();
    let mut refused = |texts: &[(u64, usize)]| backend.forward(&model.batch(texts, true)).unwrap_err().to_string();
    let prefix = "the cuda backend failed: a step has";
    assert_eq!(refused(&[(1, 41)]), format!("{prefix} 41 tokens, but memory was taken for 40"));
    assert_eq!(refused(&[(1, 1); 4]), format!("{prefix} 4 sequences, but memory was taken for 3"));
    let mut sampled = model.batch(&[(1, 5)], false);
    sampled.sampled_rows = vec![4];
    let error = backend.forward(&sampled).unwrap_err().to_string();
    assert_eq!(error, format!("{prefix} 1 sampled rows, but memory was taken for 0"));

    // Every token of the largest step may have a vector, and the division into texts that takes most blocks has them.
    let control = Control::new();
    control.reset();
    let mut vectors = Vec::new();
    for texts in [&[(1, 40)][..], &[(1, 1), (2, 1), (3, 38)], &[(1, 17), (2, 17), (3, 6)]] {
        backend.forward(&model.batch(texts, true)).unwrap();
        backend.embeddings(&mut vectors).unwrap();
        assert_eq!(vectors.len(), 40 * 64);
    }
    assert_eq!((control.allocations(), backend.graph_steps()), (0, (0, 3)));
}

#[test]
fn vectors_of_checkpoints_are_those_of_candle() {
    vectors::agree((2e-5, 5e-6), || open(config()));
}

/// The rounding of bf16 is 2¹⁶ times that of f32.
#[test]
fn vectors_of_checkpoints_in_bf16_are_as_near_as_its_rounding_allows() {
    vectors::agree((0.1, 0.04), || open(CudaConfig { dtype: Some(Dtype::Bf16), ..config() }));
}
