//! Tests of adapters.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, L40S, V100};
use octavo_backend_cuda::{CudaBackend, CudaConfig, Dtype};
use octavo_ops::testing::suite::models;
use octavo_ops::testing::{PagedBatches, Rounding, TestAdapter, TestRng, TinyExperts, TinyModel, models_with_experts};
use octavo_ops::{AdapterSource, Backend, LoraMatrices, SiteId, SiteKind};
use proptest::prelude::*;

use crate::common::{BLOCKS, open, wide, with_suite};
use crate::config;
use crate::programs::{SIXTEEN_BITS, fitting};

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn what_adapters_add_is_near_the_naive_sums(model in models().prop_map(fitting), tokens in 1usize..50) {
        with_suite(&config(), 3e-4, 2e-5, |suite| suite.near_adapted(&model, tokens, Rounding::F32, 0.0))?;
    }

    #[test]
    fn bits_do_not_depend_on_adapters_of_others_if_that_is_asked_for(
        model in models().prop_map(fitting),
        seed in any::<u64>(),
    ) {
        let config = CudaConfig { batch_invariant: true, ..config() };
        with_suite(&config, 3e-4, 2e-5, |suite| suite.same_bits_adapted(&model, seed))?;
    }

    #[test]
    fn what_adapters_add_to_experts_is_near_the_naive_sums(
        model in models_with_experts().prop_map(fitting),
        tokens in 1usize..30,
    ) {
        with_suite(&config(), 3e-4, 2e-5, |suite| suite.near_adapted(&model, tokens, Rounding::F32, 0.0))?;
    }

    #[test]
    fn bits_of_experts_do_not_depend_on_adapters_of_others_if_that_is_asked_for(
        model in models_with_experts().prop_map(fitting),
        seed in any::<u64>(),
    ) {
        let config = CudaConfig { batch_invariant: true, ..config() };
        with_suite(&config, 3e-4, 2e-5, |suite| suite.same_bits_adapted(&model, seed))?;
    }
}

/// The model of these tests with experts.
fn wide_experts() -> TinyModel {
    TinyModel { experts: Some(TinyExperts::default()), ..wide() }
}

#[test]
fn sixteen_bits_are_as_near_as_their_rounding_allows() {
    for (device, dtype, worst, mean) in SIXTEEN_BITS {
        let config = CudaConfig { device, dtype: Some(dtype), ..config() };
        for tokens in [1, 40] {
            let near =
                |suite: &octavo_ops::testing::suite::Suite<'_>| suite.near_adapted(&wide(), tokens, Rounding::F32, 0.0);
            // Adapters are rounded too.
            with_suite(&config, 2.0 * worst, 2.0 * mean, near).unwrap();
        }
    }
}

#[test]
fn bits_of_sixteen_do_not_depend_on_adapters_of_others_if_that_is_asked_for() {
    for (device, dtype) in [(H200, Dtype::Bf16), (L40S, Dtype::F16), (V100, Dtype::F16)] {
        for graphs in [false, true] {
            let config = CudaConfig { device, dtype: Some(dtype), batch_invariant: true, graphs, ..config() };
            with_suite(&config, 1.0, 1.0, |suite| suite.same_bits_adapted(&wide(), 11)).unwrap();
        }
    }
}

#[test]
fn unfit_adapters_are_errors() {
    with_suite(&config(), 3e-4, 2e-5, |suite| suite.unfit_adapters_are_errors());
    with_suite(&config(), 3e-4, 2e-5, |suite| suite.adapters_end_with_their_program());
    let mut backend = adapted(config(), &wide());
    let error = backend.allocate_adapters(1, 257).unwrap_err().to_string();
    assert!(error.ends_with("adapters may have a rank of 256 at most, not 257"), "{error}");
    let (program, weights) = wide().build().unwrap();
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    let error = backend.allocate_adapters(1, 8).unwrap_err().to_string();
    assert!(error.ends_with("the program has no sites for adapters"), "{error}");
}

/// An adapter with numbers that f16 does not have.
struct Large(TestAdapter, Vec<f32>);

impl AdapterSource for Large {
    fn matrices(&self, site: SiteId, part: usize) -> Option<LoraMatrices<'_>> {
        let found = self.0.matrices(site, part)?;
        Some(LoraMatrices { b: &self.1[..found.b.len()], ..found })
    }

    fn rank(&self) -> usize {
        self.0.rank()
    }
}

#[test]
fn an_adapter_beyond_the_range_of_f16_is_refused_and_leaves_an_empty_slot() {
    let config = CudaConfig { device: V100, dtype: Some(Dtype::F16), ..config() };
    let mut backend = adapted(config, &wide());
    let (program, _) = wide().build().unwrap();
    let source = TestAdapter::random(&program.with_adapters(), 8, &mut TestRng(3));
    let expected = decode(&mut backend, &[0, 0, 0]);
    backend.set_adapter(0, &source).unwrap();
    assert_ne!(decode(&mut backend, &[1, 1, 1]), expected);
    let error = backend.set_adapter(0, &Large(source, vec![1e6; 1 << 14])).unwrap_err().to_string();
    assert!(error.ends_with("the adapter has values beyond the range of float16: use --dtype float32"), "{error}");
    assert_eq!(decode(&mut backend, &[1, 1, 1]), expected);
}

/// Returns a backend with a model with sites, two slots and two adapters.
fn adapted(config: CudaConfig, model: &TinyModel) -> CudaBackend {
    let (program, weights) = model.build().expect("the model is well formed");
    let program = program.with_adapters();
    let mut backend = open(config);
    backend.load(&program, &weights, &mut |_| {}).expect("the model is loaded");
    backend.allocate_adapters(2, 12).expect("there is memory");
    backend.allocate_kv(16, BLOCKS).expect("there is memory");
    for slot in 0..2 {
        let adapter = TestAdapter::random(&program, 12, &mut TestRng(slot as u64));
        backend.set_adapter(slot, &adapter).expect("it fits");
    }
    backend
}

/// Prefills sequences with these adapters and decodes a token of each. Returns the bits of the logits of the last step.
fn decode(backend: &mut CudaBackend, adapters: &[u32]) -> Vec<u32> {
    let mut batches = PagedBatches::new(16, 2, BLOCKS, &mut TestRng(5));
    let mut rng = TestRng(6);
    for _ in adapters {
        batches.add(rng.tokens(20, 101));
    }
    for count in [19, 1] {
        let parts: Vec<_> = (0..adapters.len()).map(|sequence| (sequence, count)).collect();
        let mut batch = batches.step(&parts);
        batch.pooled_rows.clear();
        batch.sampled_rows = batch.query_start[1..].iter().map(|end| end - 1).collect();
        batch.adapters = adapters.to_vec();
        backend.forward(&batch).expect("the step runs");
    }
    backend.logits().expect("there are logits").into_iter().map(f32::to_bits).collect()
}

#[test]
fn a_recorded_step_with_adapters_has_the_bits_of_one_that_is_launched() {
    for (device, dtype, model) in [
        (H200, Dtype::Bf16, wide()),
        (V100, Dtype::F16, wide()),
        (H200, Dtype::F32, wide()),
        (H200, Dtype::Bf16, wide_experts()),
        (V100, Dtype::F16, wide_experts()),
    ] {
        let eager = CudaConfig { device, dtype: Some(dtype), ..config() };
        let recorded = CudaConfig { graphs: true, ..eager.clone() };
        let [mut eager, mut recorded] = [eager, recorded].map(|config| adapted(config, &model));
        let mut results = Vec::new();
        for adapters in [&[0, 0, 0][..], &[1, 2, 0], &[2, 2, 2, 1, 0], &[0, 1]] {
            let expected = decode(&mut eager, adapters);
            assert!(decode(&mut recorded, adapters) == expected, "{dtype:?} {adapters:?}");
            results.push(expected);
        }
        assert_eq!(recorded.graph_steps(), (4, 4), "the prefills are launched, the decodes are replayed");
        assert_ne!(results[0], results[1][..results[0].len()]);
        // A slot is replaced.
        let (program, _) = model.build().unwrap();
        let other = TestAdapter::random(&program.with_adapters(), 5, &mut TestRng(77));
        for backend in [&mut eager, &mut recorded] {
            backend.set_adapter(1, &other).expect("it fits");
        }
        let [first, second] = [&mut eager, &mut recorded].map(|backend| decode(backend, &[1, 2, 0]));
        assert!(first == second && first != results[1], "{dtype:?}");
    }
}

#[test]
fn a_step_without_adapters_launches_nothing_for_them_and_allocates_nothing() {
    let control = Control::new();
    let launches = |backend: &mut CudaBackend, adapters: &[u32]| {
        control.reset();
        decode(backend, adapters);
        assert_eq!(control.allocations(), 0);
        control.calls("cuLaunchKernelEx")
    };
    let config = CudaConfig { dtype: Some(Dtype::Bf16), ..config() };
    let plain = launches(&mut crate::common::loaded(config.clone(), &wide(), BLOCKS), &[0, 0]);
    let mut backend = adapted(config, &wide());
    assert_eq!(launches(&mut backend, &[0, 0]), plain);
    // From now on, the device has the block tables.
    let plain = launches(&mut backend, &[0, 0]);
    // A table of embeddings has one launch, every other site two, in both steps.
    let (program, _) = wide().build().unwrap();
    let sites = program.with_adapters().sites;
    let each = sites.iter().map(|site| if site.kind == SiteKind::Embedding { 1 } else { 2 }).sum::<u64>();
    // With adapters, products leave norms and activations to others: in the decode step the first norm, two activations and the
    // last norm, which is that of few rows in the prefill too.
    let expected = plain + 2 * each + 5;
    assert_eq!(launches(&mut backend, &[2, 0]), expected);
    assert_eq!(launches(&mut backend, &[2, 1]), expected, "whatever their number");
}

#[test]
fn experts_add_launches_for_sites_and_one_for_the_pairs_of_a_layer() {
    let control = Control::new();
    let launches = |backend: &mut CudaBackend, adapters: &[u32]| {
        control.reset();
        decode(backend, adapters);
        assert_eq!(control.allocations(), 0);
        control.calls("cuLaunchKernelEx")
    };
    let mut backend = adapted(CudaConfig { dtype: Some(Dtype::Bf16), ..config() }, &wide_experts());
    launches(&mut backend, &[0, 0]);
    let plain = launches(&mut backend, &[0, 0]);
    let (program, _) = wide_experts().build().unwrap();
    let kinds: Vec<_> = program.with_adapters().sites.iter().map(|site| site.kind).collect();
    let each = kinds.iter().map(|kind| match kind {
        SiteKind::Embedding => 1,
        SiteKind::Linear | SiteKind::Head | SiteKind::Experts(_) => 2,
        // The pairs are divided after the choice.
        SiteKind::Router => 3,
    });
    let each: u64 = each.sum();
    assert!(kinds.contains(&SiteKind::Router) && kinds.contains(&SiteKind::Experts(5)));
    // As above, without activations.
    let expected = plain + 2 * each + 3;
    assert_eq!(launches(&mut backend, &[2, 0]), expected);
    assert_eq!(launches(&mut backend, &[2, 1]), expected, "whatever their number");
}
