//! Tests of the backend on a real GPU, the first one, for properties that the stand-in cannot show. Without a GPU every
//! test prints that it is skipped. `tests/gpu/run.sh` runs it.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod common;

use octavo_backend_cuda::testing::pack_folder;
use octavo_backend_cuda::{CacheType, CudaConfig, Dtype, Memory, named_folders, probe};
use octavo_kernels::manifest::mmvq_cutoff;
use octavo_ops::StorageType;
use octavo_ops::testing::suite::real_sizes;
use octavo_ops::testing::{Reference, Rounding, large_images, windowed_texts};

use crate::common::images::{encoded, token_by_token, with_images};
use crate::common::overlap::{ahead, one_by_one};
use crate::common::quantised::{
    Shared, experts_agree, format_agrees, fp8_inputs_agree, mixture_agrees, mixture_is_refused, ordered_columns_agree,
    rounded_rows_keep_their_bits,
};
use crate::common::{BLOCKS, checkpoints, generate, loaded, open, vectors, wide, with_suite};

/// Returns settings for small models in an element type, or `None` if there is no GPU for it.
fn config(dtype: Dtype) -> Option<CudaConfig> {
    let libraries = named_folders();
    match probe(&libraries).usable(0) {
        Ok(device) if device.chip.has(dtype) => Some(CudaConfig {
            device: 0,
            dtype: Some(dtype),
            kv_cache: CacheType::Activation,
            libraries,
            kernel_pack: pack_folder(),
            kernel_cache: std::env::temp_dir().join("octavo-gpu-tests"),
            tuning: None,
            max_num_batched_tokens: 512,
            max_num_seqs: 64,
            max_rows: 512,
            max_model_len: 1024,
            max_patches: 1024,
            adapters: None,
            memory: Memory::KvCache(64 << 20),
            graphs: false,
            early_launches: true,
            batch_invariant: false,
        }),
        Ok(device) => {
            eprintln!("skipped: {} has no {dtype:?}", device.name);
            None
        }
        Err(reason) => {
            eprintln!("skipped: no GPU: {reason}");
            None
        }
    }
}

#[test]
fn the_contract_is_kept() {
    let Some(config) = config(Dtype::F32) else { return };
    with_suite(&config, 3e-4, 2e-5, |suite| suite.contract());
}

#[test]
fn logits_are_near_the_naive_ones() {
    // The numbers are the limits of the worst and of the mean error for each element type.
    for (dtype, worst, mean) in [(Dtype::F32, 3e-4, 2e-5), (Dtype::F16, 8e-3, 1.5e-3), (Dtype::Bf16, 0.06, 0.01)] {
        let Some(config) = config(dtype) else { continue };
        for tokens in [1, 12, 40, 100] {
            with_suite(&config, worst, mean, |suite| suite.near_reference(&wide(), tokens)).unwrap();
        }
        with_suite(&config, worst, mean, |suite| suite.near_reference(&real_sizes(2048), 12)).unwrap();
    }
}

#[test]
fn images_are_near_the_naive_ones() {
    for (dtype, worst, mean) in [(Dtype::F32, 3e-4, 2e-5), (Dtype::F16, 8e-3, 1.5e-3), (Dtype::Bf16, 0.06, 0.01)] {
        let Some(config) = config(dtype) else { continue };
        for images in [&[75, 2][..], &[1], &[25, 25, 50]] {
            let near = |suite: &octavo_ops::testing::suite::Suite<'_>| {
                suite.images_are_near(&large_images(), Rounding::F32, 0.0, images)
            };
            with_suite(&config, worst, mean, near).unwrap();
        }
    }
}

#[test]
fn an_image_has_the_same_bits_beside_others_and_in_steps_of_one_token() {
    let model = large_images();
    for dtype in Dtype::ALL {
        let Some(config) = config(dtype) else { continue };
        let mut backend = with_images(config.clone(), &model);
        let alone = encoded(&mut backend, &model, &[2, 75, 9], false);
        assert!(alone == encoded(&mut backend, &model, &[2, 75, 9], true), "{dtype:?}");
        let expected = token_by_token(&mut backend, &model.decoder, true);
        let mut recorded = with_images(CudaConfig { graphs: true, ..config }, &model);
        encoded(&mut recorded, &model, &[2, 75, 9], true);
        assert!(token_by_token(&mut recorded, &model.decoder, true) == expected, "{dtype:?}");
    }
}

#[test]
fn bits_do_not_depend_on_the_batch_if_that_is_asked_for() {
    for dtype in Dtype::ALL {
        let Some(config) = config(dtype) else { continue };
        let config = CudaConfig { batch_invariant: true, ..config };
        with_suite(&config, 1.0, 1.0, |suite| suite.same_bits(&wide(), 11)).unwrap();
    }
}

#[test]
fn quantised_weights_mean_what_candle_reads() {
    let Some(config) = config(Dtype::F32) else { return };
    for storage in StorageType::ALL.into_iter().filter(|storage| storage.block_elements() > 1) {
        format_agrees(&config, storage);
    }
    use StorageType::{F8E4M3, Q3K, Q4K, Q5K, Q6K};
    for config in Dtype::ALL.into_iter().filter_map(self::config) {
        mixture_agrees(&config, &[Q4K, Q4K, Q6K], false);
        mixture_agrees(&config, &[Q3K, Q5K], false);
        experts_agree(&config, F8E4M3);
        ordered_columns_agree(&config, StorageType::Q4_0);
        assert!(mixture_is_refused(&config, &[Q4K, Q6K]));
    }
}

#[test]
fn rounded_rows_have_the_same_bits_in_every_step() {
    for (dtype, config) in [Dtype::F16, Dtype::Bf16].into_iter().filter_map(|dtype| Some((dtype, config(dtype)?))) {
        let chip = probe(&config.libraries).usable(0).expect("a GPU").chip;
        // The numbers of inputs are multiples of 256.
        rounded_rows_keep_their_bits(&config, mmvq_cutoff(chip, dtype, 256));
    }
}

#[test]
fn inputs_are_rounded_to_fp8_where_it_is_multiplied() {
    let Some(config) = config(Dtype::Bf16) else { return };
    let by_warps = probe(&config.libraries).usable(0).is_ok_and(|device| device.chip.has_fp8_mma());
    for shared in [Shared::Groups, Shared::Rows, Shared::Blocks] {
        // Whether cuBLASLt does depends on its release and on the chip.
        let rounds = fp8_inputs_agree(&config, shared, 70);
        assert!(rounds || !by_warps, "{shared:?}");
    }
}

#[test]
fn greedy_tokens_of_checkpoints_are_those_of_candle() {
    let Some(config) = config(Dtype::F32) else { return };
    checkpoints::agree(|graphs| open(CudaConfig { max_num_seqs: 2, graphs, ..config.clone() }));
}

#[test]
fn a_cache_in_e4m3_is_as_near_as_its_rounding_allows() {
    for dtype in Dtype::ALL {
        let Some(config) = config(dtype) else { continue };
        let config = CudaConfig { kv_cache: CacheType::E4m3, ..config };
        for tokens in [1, 40, 300] {
            let reference = Reference::new(&wide(), tokens, Rounding::FP8);
            with_suite(&config, 0.06, 0.01, |suite| suite.near_meaning(&reference, 4.0)).unwrap();
        }
        with_suite(&config, 0.0, 0.0, |suite| suite.what_is_no_number_reaches_no_row_before_it(&wide()));
    }
}

#[test]
fn what_adapters_add_is_near_the_naive_sums() {
    for (dtype, worst, mean) in [(Dtype::F32, 3e-4, 2e-5), (Dtype::F16, 0.016, 3e-3), (Dtype::Bf16, 0.12, 0.02)] {
        let Some(config) = config(dtype) else { continue };
        for tokens in [1, 40, 100] {
            let near =
                |suite: &octavo_ops::testing::suite::Suite<'_>| suite.near_adapted(&wide(), tokens, Rounding::F32, 0.0);
            with_suite(&config, worst, mean, near).unwrap();
        }
        for graphs in [false, true] {
            let config = CudaConfig { batch_invariant: true, graphs, ..config.clone() };
            with_suite(&config, 1.0, 1.0, |suite| suite.same_bits_adapted(&wide(), 11)).unwrap();
        }
    }
}

#[test]
fn texts_are_near_the_naive_ones() {
    for (dtype, worst, mean) in [(Dtype::F32, 3e-4, 2e-5), (Dtype::F16, 8e-3, 1.5e-3), (Dtype::Bf16, 0.06, 0.01)] {
        let Some(config) = config(dtype) else { continue };
        let near = |suite: &octavo_ops::testing::suite::Suite<'_>| {
            suite.texts_are_near(&windowed_texts(), Rounding::F32, 0.0, &[300, 1, 130])
        };
        with_suite(&config, worst, mean, near).unwrap();
    }
}

#[test]
fn vectors_of_checkpoints_are_those_of_candle() {
    for (dtype, limits) in [(Dtype::F32, (2e-5, 5e-6)), (Dtype::Bf16, (0.1, 0.04))] {
        let Some(config) = config(dtype) else { continue };
        vectors::agree(limits, || open(config.clone()));
    }
}

#[test]
fn recorded_decode_steps_have_the_bits_of_launched_ones_and_of_themselves() {
    for dtype in Dtype::ALL {
        let Some(eager) = config(dtype) else { continue };
        let recorded = CudaConfig { graphs: true, ..eager.clone() };
        let run = |config: &CudaConfig| {
            let mut backend = loaded(config.clone(), &wide(), BLOCKS);
            let bits = generate(&mut backend, || {});
            (bits, backend.graph_steps().0 > 0)
        };
        let (expected, _) = run(&eager);
        for time in ["once", "once more"] {
            assert_eq!(run(&recorded), (expected.clone(), true), "{dtype:?}, {time}");
        }
    }
}

#[test]
fn tokens_are_the_same_whether_anybody_waits_for_a_step_or_not() {
    for dtype in Dtype::ALL {
        let Some(config) = config(dtype) else { continue };
        for graphs in [true, false] {
            let mut backend = loaded(CudaConfig { graphs, ..config.clone() }, &wide(), BLOCKS);
            let expected = one_by_one(&mut backend, &[]);
            assert_eq!(ahead(&mut backend, &[]), expected, "{dtype:?}, graphs: {graphs}");
        }
    }
}
