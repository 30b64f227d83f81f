//! Tests of whole programs on every instruction set of the machine: they are close to the exact f64 result of every op,
//! and have the same bits however the sequences are divided into steps.

use octavo_backend_cpu::{ActivationBits, CpuBackend, CpuConfig, Isa, KvDtype, WeightDtype};
use octavo_ops::testing::suite::{Suite, models, real_sizes};
use octavo_ops::testing::{
    MemoryWeights, PagedBatches, Reference, Rounding, Scales, TestRng, TinyLatent, TinyModel, experts_of_blocks,
    image_models, large_images, latents_of_blocks, models_with_experts, models_with_latents, real_latents, text_models,
    windowed_texts,
};
use octavo_ops::{Backend, HeadShape, KvGroup, KvScales, Program, StorageType};
use proptest::prelude::*;

/// Configuration with keys and values in 8 bits.
const INT8: CpuConfig = CpuConfig {
    threads: None,
    isa: None,
    weights: WeightDtype::AsStored,
    kv: KvDtype::Int8,
    activations: ActivationBits::Twelve,
    copies_bytes: 0,
};

/// Configuration with keys and values in e4m3.
const FP8: CpuConfig = CpuConfig { kv: KvDtype::Fp8, ..INT8 };

/// Configuration with keys and values in bf16.
const BF16: CpuConfig = CpuConfig { kv: KvDtype::Bf16, ..INT8 };

/// Configuration with activations in 8 bits.
const COARSE: CpuConfig = CpuConfig { activations: ActivationBits::Eight, ..BF16 };

/// Returns a configuration with each type of keys and values.
fn caches() -> impl Strategy<Value = CpuConfig> {
    proptest::sample::select(vec![BF16, INT8, FP8])
}

/// Returns a configuration with each precision of activations.
fn precisions() -> impl Strategy<Value = CpuConfig> {
    proptest::sample::select(vec![BF16, COARSE])
}

/// Runs a test for each available instruction set and prints the others.
fn each(test: impl Fn(&Suite<'_>)) {
    each_with(BF16, test);
}

/// Does the same with a configuration.
fn each_with(config: CpuConfig, test: impl Fn(&Suite<'_>)) {
    for isa in Isa::ALL {
        if !isa.is_available() {
            eprintln!("SKIPPED: this machine has no {isa}");
            continue;
        }
        let backend = || -> Box<dyn Backend> {
            Box::new(
                CpuBackend::new(CpuConfig { threads: Some(2), isa: Some(isa), ..config }).expect("the threads start"),
            )
        };
        test(&Suite { backend: &backend, worst: 3e-4, mean: 2e-5, logprobs: 0.0 });
    }
}

/// Returns the rounding of keys and values.
fn rounding(config: CpuConfig) -> Rounding {
    match config.kv {
        KvDtype::Bf16 => Rounding::BF16,
        KvDtype::Int8 => Rounding::INT8,
        KvDtype::Fp8 => Rounding::FP8,
    }
}

/// Does the same for a case of a property and returns the first failure.
fn each_case(config: CpuConfig, test: impl Fn(&Suite<'_>) -> Result<(), TestCaseError>) -> Result<(), TestCaseError> {
    let outcome = std::cell::RefCell::new(Ok(()));
    each_with(config, |suite| {
        let mut outcome = outcome.borrow_mut();
        if outcome.is_ok() {
            *outcome = test(suite);
        }
    });
    outcome.into_inner()
}

/// Returns the configuration of the properties. `PROPTEST_CASES` changes their number of cases, for slow machines.
fn properties() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 48 };
    ProptestConfig { cases, ..default }
}

proptest! {
    #![proptest_config(properties())]

    #[test]
    fn logits_are_near_the_naive_ones(
        // The result of a norm over very few columns is nearly their signs, which rounding to bf16 may flip.
        model in models().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..50,
        config in caches(),
    ) {
        let reference = Reference::new(&model, tokens, rounding(config));
        // The ratio exceeds 1 in one case of some hundreds, where a norm is nearly singular.
        each_case(config, |suite| suite.near_meaning(&reference, 4.0))?;
    }

    #[test]
    fn bits_do_not_depend_on_the_batch(
        model in models(),
        seed in any::<u64>(),
        config in prop_oneof![3 => caches(), 1 => Just(COARSE)],
    ) {
        each_case(config, |suite| suite.same_bits(&model, seed))?;
    }

    #[test]
    fn rows_with_adapters_are_near_the_naive_ones(
        model in models().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..50,
    ) {
        each_case(BF16, |suite| suite.near_adapted(&model, tokens, Rounding::BF16, 4.0))?;
    }

    #[test]
    fn bits_do_not_depend_on_adapters_of_others(model in models(), seed in any::<u64>(), config in precisions()) {
        each_case(config, |suite| suite.same_bits_adapted(&model, seed))?;
    }

    #[test]
    fn experts_are_near_the_naive_ones(
        model in models_with_experts().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..20,
    ) {
        let reference = Reference::new(&model, tokens, Rounding::BF16);
        each_case(BF16, |suite| suite.near_meaning(&reference, 4.0))?;
    }

    #[test]
    fn bits_of_experts_do_not_depend_on_the_batch(
        model in models_with_experts(),
        seed in any::<u64>(),
        config in precisions(),
    ) {
        each_case(config, |suite| suite.same_bits(&model, seed))?;
    }

    #[test]
    fn experts_with_adapters_are_near_the_naive_ones(
        model in models_with_experts().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..20,
    ) {
        each_case(BF16, |suite| suite.near_adapted(&model, tokens, Rounding::BF16, 4.0))?;
    }

    #[test]
    fn bits_of_experts_do_not_depend_on_adapters_of_others(
        model in models_with_experts(),
        seed in any::<u64>(),
        config in precisions(),
    ) {
        each_case(config, |suite| suite.same_bits_adapted(&model, seed))?;
    }

    #[test]
    fn latents_are_near_the_naive_ones(
        model in models_with_latents().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..50,
        config in caches(),
    ) {
        let reference = Reference::new(&model, tokens, rounding(config));
        each_case(config, |suite| suite.near_meaning(&reference, 4.0))?;
    }

    #[test]
    fn bits_of_latents_do_not_depend_on_the_batch(
        model in models_with_latents(),
        seed in any::<u64>(),
        config in caches(),
    ) {
        each_case(config, |suite| suite.same_bits(&model, seed))?;
    }

    #[test]
    fn images_are_near_the_naive_ones(
        model in image_models(),
        images in proptest::collection::vec(1usize..12, 1..4),
    ) {
        each_case(BF16, |suite| suite.images_are_near(&model, Rounding::BF16, 4.0, &images))?;
    }

    #[test]
    fn bits_of_images_do_not_depend_on_the_batch(
        model in image_models(),
        images in proptest::collection::vec(1usize..12, 1..4),
    ) {
        each_case(BF16, |suite| suite.images_have_the_same_bits(&model, &images))?;
    }

    #[test]
    fn texts_are_near_the_naive_ones(
        model in text_models(),
        texts in proptest::collection::vec(1usize..40, 1..4),
    ) {
        each_case(BF16, |suite| suite.texts_are_near(&model, Rounding::BF16, 4.0, &texts))?;
    }

    #[test]
    fn bits_of_texts_do_not_depend_on_the_batch(
        model in text_models(),
        texts in proptest::collection::vec(1usize..40, 1..4),
    ) {
        each_case(BF16, |suite| suite.texts_have_the_same_bits(&model, &texts))?;
    }
}

#[test]
fn windows_of_texts_are_as_wide_as_they_say() {
    each(|suite| {
        suite.texts_are_near(&windowed_texts(), Rounding::BF16, 4.0, &[300, 130, 2]).unwrap();
        suite.texts_have_the_same_bits(&windowed_texts(), &[2, 300, 64, 65]).unwrap();
    });
}

#[test]
fn malformed_texts_are_errors() {
    each(|suite| suite.malformed_texts_are_errors());
}

#[test]
fn large_images_are_near_the_naive_ones_and_do_not_depend_on_the_batch() {
    each(|suite| {
        suite.images_are_near(&large_images(), Rounding::BF16, 4.0, &[75, 2]).unwrap();
        suite.images_have_the_same_bits(&large_images(), &[2, 75, 9]).unwrap();
    });
}

#[test]
fn malformed_images_are_errors() {
    each(|suite| suite.malformed_images_are_errors());
}

#[test]
fn bits_do_not_depend_on_the_batch_at_real_sizes() {
    each(|suite| suite.same_bits(&real_sizes(2048), 5).unwrap());
}

#[test]
fn logits_at_real_sizes_are_near_the_naive_ones() {
    for config in [BF16, INT8, FP8] {
        let reference = Reference::new(&real_sizes(300), 12, rounding(config));
        each_with(config, |suite| suite.near_meaning(&reference, 1.0).unwrap());
    }
}

/// Returns latent attention with more heads than a kernel processes at once.
fn many_latents() -> TinyModel {
    let latent = TinyLatent { rank: 40, rotated: 8, content: 12, value: 12, query_rank: None };
    latent.model(20, TinyModel { layers: vec![0], ..TinyModel::default() })
}

/// Runs the sizes of DeepSeek-V2, and more keys than a tile has, with more heads than a kernel processes at once.
#[test]
fn latents_of_real_sizes_are_near_the_naive_ones() {
    for (model, tokens) in [(real_latents(20), 20), (many_latents(), 140)] {
        for config in [BF16, INT8, FP8] {
            let reference = Reference::new(&model, tokens, rounding(config));
            each_with(config, |suite| suite.near_meaning(&reference, 4.0).unwrap());
        }
    }
}

#[test]
fn bits_of_latents_do_not_depend_on_the_batch_in_any_format() {
    for storage in StorageType::ALL.into_iter().filter(|storage| *storage != StorageType::Q2K) {
        each(|suite| suite.same_bits(&latents_of_blocks(storage), 7).unwrap());
    }
}

/// Steps of one row divide the heads among the threads, and larger ones do not.
#[test]
fn bits_of_many_latents_do_not_depend_on_the_batch() {
    for config in [BF16, INT8, FP8] {
        each_with(config, |suite| suite.same_bits(&many_latents(), 6).unwrap());
    }
}

#[test]
fn a_latent_takes_the_memory_of_one_row() {
    for (kv, bytes) in [(KvDtype::Bf16, 16 * 576 * 2), (KvDtype::Int8, 16 * (576 + 2 * 4)), (KvDtype::Fp8, 16 * 576)] {
        let backend = CpuBackend::new(CpuConfig { threads: Some(1), kv, ..BF16 }).unwrap();
        let layers = vec![HeadShape::latent(16, 512, 64)];
        assert_eq!(backend.kv_block_bytes(&KvGroup { layers, scales: vec![], window: None }, 16), bytes, "{kv}");
    }
}

#[test]
fn a_key_of_8_bits_takes_about_half_the_memory() {
    let bytes = |kv| {
        let backend = CpuBackend::new(CpuConfig { threads: Some(1), kv, ..BF16 }).unwrap();
        let layers = vec![HeadShape::new(9, 3, 64); 2];
        backend.kv_block_bytes(&KvGroup { layers, scales: vec![], window: None }, 16)
    };
    let elements = 2 * 3 * 64 * 16 * 2;
    // The size is a multiple of 8 KiB, so blocks are a thirty-second of the power of two below it further apart.
    assert_eq!(bytes(KvDtype::Bf16), 2 * elements + (16 << 10) / 32);
    // Each key and value of each head has an f32 scale.
    assert_eq!(bytes(KvDtype::Int8), elements + elements / 64 * 4);
    assert_eq!(bytes(KvDtype::Fp8), elements + (8 << 10) / 32);
}

/// Returns the logits of a sequence of 40 tokens.
fn logits(program: &Program, weights: &MemoryWeights, isa: Isa) -> Vec<u32> {
    let mut backend =
        CpuBackend::new(CpuConfig { threads: Some(1), isa: Some(isa), ..FP8 }).expect("the threads start");
    backend.load(program, weights, &mut |_| {}).expect("the weights are loaded");
    backend.allocate_kv(16, 8).expect("there is memory");
    let mut batches = PagedBatches::new(16, 1, 8, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(40, program.vocab_size));
    backend.forward(&batches.step(&[(sequence, 40)])).expect("the step runs");
    backend.logits().expect("there are logits").iter().map(|x| x.to_bits()).collect()
}

/// Multiplies a tensor of f32 numbers.
fn multiply(weights: &mut MemoryWeights, name: &str, factor: f32) {
    let tensor = &weights.tensors[name];
    let numbers: Vec<f32> = tensor.bytes.as_chunks().0.iter().map(|x| factor * f32::from_le_bytes(*x)).collect();
    weights.insert(name, tensor.shape.clone(), &numbers);
}

/// Powers of two change no fraction. So a cache with scales has the bits of a model whose keys and values are as much smaller,
/// whose scores are as much larger, and whose outputs are.
#[test]
fn scales_of_keys_and_values_keep_the_bits() {
    let model = TinyModel { heads: HeadShape::new(4, 2, 32), hidden: 64, ..TinyModel::default() };
    let (key, value) = (1.0 / 64.0, 8.0);
    let (scaled, weights) = TinyModel { kv_scales: KvScales { key, value }, ..model.clone() }.build().unwrap();
    let scales = Scales { attention: model.scales.attention * key, ..model.scales };
    let (plain, mut moved) = TinyModel { scales, ..model.clone() }.build().unwrap();
    for layer in 0..2 {
        multiply(&mut moved, &format!("{layer}.qkv.1"), 1.0 / key);
        multiply(&mut moved, &format!("{layer}.qkv.2"), 1.0 / value);
        multiply(&mut moved, &format!("{layer}.out.0"), value);
    }
    let (unscaled, _) = model.build().unwrap();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let found = logits(&scaled, &weights, isa);
        assert_eq!(found, logits(&plain, &moved, isa), "{isa}");
        assert_ne!(found, logits(&unscaled, &weights, isa), "{isa}: the scales have an effect");
    }
}

#[test]
fn scales_of_any_size_keep_the_meaning() {
    let kv_scales = KvScales { key: 0.37, value: 0.37 };
    let plain = TinyModel { kv_scales, ..TinyModel::default() };
    let latent = TinyModel { kv_scales, ..many_latents() };
    for model in [plain, latent] {
        let reference = Reference::new(&model, 40, Rounding::FP8);
        each_with(FP8, |suite| suite.near_meaning(&reference, 4.0).unwrap());
        each_with(FP8, |suite| suite.same_bits(&model, 9).unwrap());
    }
}

#[test]
fn bits_do_not_depend_on_the_batch_in_any_format() {
    for storage in StorageType::ALL {
        for tied in [true, false] {
            each(|suite| suite.same_bits(&TinyModel { tied, ..TinyModel::of_blocks(storage) }, 7).unwrap());
            each_with(COARSE, |suite| {
                suite.same_bits(&TinyModel { tied, ..TinyModel::of_blocks(storage) }, 8).unwrap()
            });
        }
    }
}

#[test]
fn bits_of_experts_do_not_depend_on_the_batch_in_any_format() {
    for storage in StorageType::ALL {
        each(|suite| suite.same_bits(&experts_of_blocks(storage, 2), 7).unwrap());
    }
}

#[test]
fn unfit_adapters_are_errors_and_adapters_end_with_their_program() {
    each(|suite| suite.unfit_adapters_are_errors());
    each(|suite| suite.adapters_end_with_their_program());
}

#[test]
fn bits_of_adapters_do_not_depend_on_the_batch_at_real_sizes() {
    for storage in [StorageType::F32, StorageType::BF16, StorageType::Q4_1] {
        each(|suite| suite.same_bits_adapted(&TinyModel::of_blocks(storage), 9).unwrap());
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let one = || -> Box<dyn Backend> {
        Box::new(CpuBackend::new(CpuConfig { threads: Some(1), ..BF16 }).expect("the threads start"))
    };
    let five = || -> Box<dyn Backend> {
        Box::new(CpuBackend::new(CpuConfig { threads: Some(5), ..BF16 }).expect("the threads start"))
    };
    // Only 0 is below the smallest number, so the bits must be equal.
    let [one, five] = [&one as &dyn Fn() -> Box<dyn Backend>, &five].map(|backend| Suite {
        backend,
        worst: f64::MIN_POSITIVE,
        mean: f64::MIN_POSITIVE,
        logprobs: 0.0,
    });
    // One token is less than the threads, so heads are divided among them.
    for tokens in [1, 40] {
        one.near_other(&five, &many_latents(), tokens).unwrap();
    }
    for storage in [StorageType::F32, StorageType::BF16, StorageType::Q4_1] {
        one.near_other(&five, &TinyModel::of_blocks(storage), 40).unwrap();
        one.near_other(&five, &experts_of_blocks(storage, 2), 40).unwrap();
    }
}

#[test]
fn the_contract_is_kept() {
    each(|suite| suite.contract());
    each_with(INT8, |suite| suite.contract());
    each_with(FP8, |suite| suite.contract());
}

#[test]
fn what_is_no_number_reaches_no_row_before_it() {
    for config in [BF16, INT8, FP8] {
        for model in [TinyModel::of_blocks(StorageType::F32), latents_of_blocks(StorageType::F32)] {
            each_with(config, |suite| suite.what_is_no_number_reaches_no_row_before_it(&model));
        }
    }
}
