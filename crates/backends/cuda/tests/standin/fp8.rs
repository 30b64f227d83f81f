//! Tests of a KV cache in e4m3.

use octavo_backend_cuda::testing::devices::{H200, L40S, T4, V100};
use octavo_backend_cuda::{CacheType, CudaConfig, Dtype};
use octavo_ops::testing::suite::models;
use octavo_ops::testing::{Reference, Rounding, TinyModel, models_with_latents, real_latents};
use octavo_ops::{Backend, HeadShape, KvGroup, KvScales};
use proptest::prelude::*;

use crate::common::{BLOCKS, generate, loaded, open, wide, with_suite};
use crate::config;
use crate::programs::{fitting, fitting_latents};

/// Settings with keys and values in 8 bits.
fn fp8() -> CudaConfig {
    CudaConfig { kv_cache: CacheType::E4m3, ..config() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn logits_are_as_near_as_the_rounding_of_keys_and_values_allows(
        model in models().prop_map(fitting),
        tokens in 1usize..50,
    ) {
        let reference = Reference::new(&model, tokens, Rounding::FP8);
        with_suite(&fp8(), 3e-4, 2e-5, |suite| suite.near_meaning(&reference, 4.0))?;
    }

    #[test]
    fn latents_are_as_near_as_their_rounding_allows(
        model in models_with_latents().prop_map(fitting_latents),
        tokens in 1usize..40,
    ) {
        let reference = Reference::new(&model, tokens, Rounding::FP8);
        with_suite(&fp8(), 3e-4, 2e-5, |suite| suite.near_meaning(&reference, 4.0))?;
    }

    #[test]
    fn bits_do_not_depend_on_the_batch_if_that_is_asked_for(model in models().prop_map(fitting), seed in any::<u64>()) {
        let config = CudaConfig { batch_invariant: true, ..fp8() };
        with_suite(&config, 3e-4, 2e-5, |suite| suite.same_bits(&model, seed))?;
    }
}

#[test]
fn every_chip_attends_to_keys_and_values_in_8_bits() {
    for (device, dtype) in [(H200, Dtype::Bf16), (L40S, Dtype::F16), (V100, Dtype::F16), (T4, Dtype::F16)] {
        let config = CudaConfig { device, dtype: Some(dtype), ..fp8() };
        let scaled = TinyModel { kv_scales: KvScales { key: 0.37, value: 2.9 }, ..wide() };
        let latent = TinyModel { kv_scales: KvScales { key: 0.37, value: 0.37 }, ..real_latents(3) };
        for (model, tokens) in [(wide(), 40), (scaled, 40), (latent, 20)] {
            let reference = Reference::new(&model, tokens, Rounding::FP8);
            with_suite(&config, 0.06, 0.01, |suite| suite.near_meaning(&reference, 4.0)).unwrap();
        }
    }
}

#[test]
fn a_recorded_step_has_the_bits_of_one_that_is_launched() {
    for (device, dtype) in [(H200, Dtype::Bf16), (V100, Dtype::F16)] {
        let eager = CudaConfig { device, dtype: Some(dtype), ..fp8() };
        let recorded = CudaConfig { graphs: true, ..eager.clone() };
        let [mut eager, mut recorded] = [eager, recorded].map(|config| loaded(config, &wide(), BLOCKS));
        assert_eq!(generate(&mut recorded, || {}), generate(&mut eager, || {}), "{dtype:?}");
    }
}

#[test]
fn the_contract_is_kept() {
    with_suite(&fp8(), 3e-4, 2e-5, |suite| suite.contract());
    for model in [wide(), real_latents(2)] {
        with_suite(&fp8(), 0.0, 0.0, |suite| suite.what_is_no_number_reaches_no_row_before_it(&model));
    }
}

#[test]
fn a_key_takes_a_byte_for_each_element() {
    let group = KvGroup { layers: vec![HeadShape::new(8, 2, 64); 3], scales: Vec::new(), window: None };
    let backend = |kv_cache| open(CudaConfig { dtype: Some(Dtype::Bf16), kv_cache, ..config() });
    let (plain, narrow) = (backend(CacheType::Activation), backend(CacheType::E4m3));
    let elements = 16 * 2 * 3 * 2 * 64;
    assert_eq!((plain.kv_block_bytes(&group, 16), narrow.kv_block_bytes(&group, 16)), (2 * elements, elements));
    assert_eq!((plain.kv_dtype(), narrow.kv_dtype()), ("bfloat16", "fp8_e4m3"));
    assert_eq!(narrow.device_profile().elements.kv, 1);
}
