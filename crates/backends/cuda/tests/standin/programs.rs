//! The suite that every backend passes.

use octavo_backend_cuda::testing::devices::{H200, L40S, T4, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::testing::suite::{models, real_sizes};
use octavo_ops::testing::{
    NormPlacement, PagedBatches, Scales, TestRng, TinyExperts, TinyLatent, TinyModel, models_with_experts,
    models_with_latents, real_latents,
};
use octavo_ops::{Backend, GluKind, HeadShape, StepBatch};
use proptest::prelude::*;

use crate::common::{loaded, wide, with_suite};
use crate::config;

/// Returns the model with sizes that the kernels support: products of 8 inputs at a time.
pub(crate) fn fitting(model: TinyModel) -> TinyModel {
    let up = |size: usize| size.next_multiple_of(8);
    let HeadShape { q, kv, dim, .. } = model.heads;
    TinyModel { hidden: up(model.hidden), inner: up(model.inner), heads: HeadShape::new(q, kv, up(dim)), ..model }
}

/// Returns a model with latent attention and sizes that the kernels support.
pub(crate) fn fitting_latents(model: TinyModel) -> TinyModel {
    let up = |size: usize| size.next_multiple_of(8);
    let TinyModel { hidden, inner, heads, .. } = model;
    let latent = model.latent.map(|latent| TinyLatent {
        rank: up(latent.rank),
        rotated: up(latent.rotated),
        content: up(latent.content),
        value: up(latent.value),
        query_rank: latent.query_rank.map(up),
    });
    let model = TinyModel { hidden: up(hidden), inner: up(inner), ..model };
    match latent {
        Some(latent) => latent.model(heads.q, model),
        None => model,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn logits_are_near_the_naive_ones(model in models().prop_map(fitting), tokens in 1usize..50) {
        with_suite(&config(), 3e-4, 2e-5, |suite| suite.near_reference(&model, tokens))?;
    }

    #[test]
    fn experts_are_near_the_naive_ones(model in models_with_experts().prop_map(fitting), tokens in 1usize..30) {
        with_suite(&config(), 3e-4, 2e-5, |suite| suite.near_reference(&model, tokens))?;
    }

    #[test]
    fn latents_are_near_the_naive_ones(
        model in models_with_latents().prop_map(fitting_latents),
        tokens in 1usize..50,
    ) {
        with_suite(&config(), 3e-4, 2e-5, |suite| suite.near_reference(&model, tokens))?;
    }

    #[test]
    fn bits_of_latents_do_not_depend_on_the_batch_if_that_is_asked_for(
        model in models_with_latents().prop_map(fitting_latents),
        seed in any::<u64>(),
    ) {
        let config = CudaConfig { batch_invariant: true, ..config() };
        with_suite(&config, 3e-4, 2e-5, |suite| suite.same_bits(&model, seed))?;
    }

    #[test]
    fn bits_of_experts_do_not_depend_on_the_batch_if_that_is_asked_for(
        model in models_with_experts().prop_map(fitting),
        seed in any::<u64>(),
    ) {
        let config = CudaConfig { batch_invariant: true, ..config() };
        with_suite(&config, 3e-4, 2e-5, |suite| suite.same_bits(&model, seed))?;
    }

    #[test]
    fn bits_do_not_depend_on_the_batch_if_that_is_asked_for(model in models().prop_map(fitting), seed in any::<u64>()) {
        let config = CudaConfig { batch_invariant: true, ..config() };
        with_suite(&config, 3e-4, 2e-5, |suite| suite.same_bits(&model, seed))?;
    }
}

#[test]
fn logits_at_real_sizes_are_near_the_naive_ones() {
    with_suite(&config(), 3e-4, 2e-5, |suite| suite.near_reference(&real_sizes(300), 12)).unwrap();
}

/// Each type of 16 bits on the chips that support it, with the worst and the mean error that its rounding allows.
pub(crate) const SIXTEEN_BITS: [(usize, Dtype, f64, f64); 4] = [
    (H200, Dtype::Bf16, 0.06, 0.01),
    (L40S, Dtype::F16, 8e-3, 1.5e-3),
    (V100, Dtype::F16, 8e-3, 1.5e-3),
    (T4, Dtype::F16, 8e-3, 1.5e-3),
];

/// Tests each type with other kernels for attention and products, and cuBLASLt for more than 16 rows.
#[test]
fn sixteen_bits_are_as_near_as_their_rounding_allows() {
    for (device, dtype, worst, mean) in SIXTEEN_BITS {
        let config = CudaConfig { device, dtype: Some(dtype), ..config() };
        for tokens in [1, 12, 40] {
            with_suite(&config, worst, mean, |suite| suite.near_reference(&wide(), tokens)).unwrap();
        }
        let scales = Scales { attention: 1.5, residual: 0.5, ..Scales::default() };
        let glu = GluKind::ClampedSwiglu { alpha: 1.702, limit: 0.5 };
        let model = TinyModel { placement: NormPlacement::Sandwich, sinks: true, scales, glu, ..wide() };
        with_suite(&config, worst, mean, |suite| suite.near_reference(&model, 40)).unwrap();
        // Every expert is chosen, since the rounding of activations may change a choice.
        let experts = TinyExperts { chosen: 5, shared: true, ..TinyExperts::default() };
        let model = TinyModel { experts: Some(experts), ..wide() };
        // Three tokens are for products of vectors, twelve for small tiles and 70 for large ones.
        for tokens in [3, 12, 70] {
            with_suite(&config, worst, mean, |suite| suite.near_reference(&model, tokens)).unwrap();
        }
        // The sizes of DeepSeek-V2, for which sm_80 and later have kernels.
        with_suite(&config, worst, mean, |suite| suite.near_reference(&real_latents(3), 20)).unwrap();
        // Only the plain kernel supports these heads.
        with_suite(&config, worst, mean, |suite| suite.near_reference(&TinyModel::default(), 20)).unwrap();
    }
}

#[test]
fn bits_of_sixteen_do_not_depend_on_the_batch_if_that_is_asked_for() {
    let config = CudaConfig { dtype: Some(Dtype::Bf16), batch_invariant: true, ..config() };
    with_suite(&config, 1.0, 1.0, |suite| suite.same_bits(&wide(), 11)).unwrap();
    let experts = TinyExperts { chosen: 5, ..TinyExperts::default() };
    with_suite(&config, 1.0, 1.0, |suite| suite.same_bits(&TinyModel { experts: Some(experts), ..wide() }, 12))
        .unwrap();
}

#[test]
fn what_is_no_number_reaches_no_row_before_it() {
    for (device, dtype) in [(H200, Dtype::Bf16), (L40S, Dtype::F16), (V100, Dtype::F16), (V100, Dtype::F32)] {
        let config = CudaConfig { device, dtype: Some(dtype), ..config() };
        for model in [wide(), real_latents(2)] {
            with_suite(&config, 0.0, 0.0, |suite| suite.what_is_no_number_reaches_no_row_before_it(&model));
        }
    }
}

#[test]
fn the_contract_is_kept() {
    with_suite(&config(), 3e-4, 2e-5, |suite| suite.contract());
}

#[test]
fn rows_for_the_head_and_rows_that_are_returned_are_told_apart() {
    // With `batch_invariant`, five rows have the bits of twenty.
    let mut backend = loaded(CudaConfig { batch_invariant: true, ..config() }, &TinyModel::default(), 8);
    let mut batches = PagedBatches::new(16, 1, 8, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(20, 50));
    let mut batch = batches.step(&[(sequence, 20)]);
    let mut run = |batch: &StepBatch| {
        backend.forward(batch).unwrap();
        let mut hidden = Vec::new();
        backend.embeddings(&mut hidden).unwrap();
        (backend.logits().unwrap(), hidden)
    };
    let (logits, hidden) = run(&batch);
    batch.sampled_rows = vec![5, 7, 8, 9, 19];
    batch.pooled_rows = vec![3, 11];
    let (some_logits, some_hidden) = run(&batch);
    let of = |all: &[f32], width: usize, rows: &[u32]| -> Vec<f32> {
        rows.iter().flat_map(|&row| all[row as usize * width..][..width].to_vec()).collect()
    };
    assert_eq!(some_logits, of(&logits, 50, &batch.sampled_rows));
    assert_eq!(some_hidden, of(&hidden, 24, &batch.pooled_rows));
}
