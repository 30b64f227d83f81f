//! Tests of image encoders and of decoders that take their rows.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H100, H200};
use octavo_backend_cuda::{CudaConfig, Dtype, Memory};
use octavo_ops::testing::{ImageModel, Rounding, TinyEncoder, image_models, large_images};
use octavo_ops::{Backend, BackendError};
use proptest::prelude::*;

use crate::common::images::{encoded, token_by_token, with_images};
use crate::common::{open, with_suite};
use crate::config;
use crate::programs::{SIXTEEN_BITS, fitting};

/// Returns the model with sizes that the kernels support.
fn fitting_images(ImageModel { encoder, decoder }: ImageModel) -> ImageModel {
    let decoder = fitting(decoder);
    let patch = encoder.patch.next_multiple_of(8);
    let encoder = TinyEncoder { layers: fitting(encoder.layers), patch, out: decoder.hidden, ..encoder };
    ImageModel { encoder, decoder }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn images_are_near_the_naive_ones(
        model in image_models().prop_map(fitting_images),
        images in proptest::collection::vec(1usize..12, 1..4),
    ) {
        with_suite(&config(), 3e-4, 2e-5, |suite| suite.images_are_near(&model, Rounding::F32, 0.0, &images))?;
    }

    #[test]
    fn bits_of_images_do_not_depend_on_the_batch(
        model in image_models().prop_map(fitting_images),
        images in proptest::collection::vec(1usize..12, 1..4),
    ) {
        let config = CudaConfig { batch_invariant: true, ..config() };
        with_suite(&config, 3e-4, 2e-5, |suite| suite.images_have_the_same_bits(&model, &images))?;
    }
}

/// Tests heads of 72 elements on the tensor cores, with keys that fill several tiles.
#[test]
fn large_images_are_as_near_as_their_rounding_allows() {
    for (device, dtype, worst, mean) in SIXTEEN_BITS.into_iter().chain([(H200, Dtype::F32, 3e-4, 2e-5)]) {
        let config = CudaConfig { device, dtype: Some(dtype), ..config() };
        let near = |suite: &octavo_ops::testing::suite::Suite<'_>| {
            suite.images_are_near(&large_images(), Rounding::F32, 0.0, &[75, 2])
        };
        with_suite(&config, worst, mean, near).unwrap_or_else(|error| panic!("{device}, {dtype:?}: {error}"));
    }
}

/// The rows of an image are the same in any batch, even if cuBLASLt computes the products.
#[test]
fn an_image_has_the_same_bits_beside_others() {
    let model = large_images();
    let mut backend = with_images(CudaConfig { dtype: Some(Dtype::Bf16), ..config() }, &model);
    let images = [2, 75, 9];
    let alone = encoded(&mut backend, &model, &images, false);
    assert!(alone == encoded(&mut backend, &model, &images, true));
}

/// A recorded step has no rows of images, so a step of one token with such a row must not be replayed.
#[test]
fn a_token_of_an_image_is_not_lost_in_a_recorded_step() {
    let model = large_images();
    let run = |graphs, injected| {
        let mut backend = with_images(CudaConfig { graphs, ..config() }, &model);
        encoded(&mut backend, &model, &[25], true);
        let logits = token_by_token(&mut backend, &model.decoder, injected);
        (logits, backend.graph_steps())
    };
    let (expected, steps) = run(false, true);
    assert_eq!(steps, (0, 20));
    let (found, steps) = run(true, true);
    assert_eq!(steps, (10, 10), "the tokens of text are replayed");
    assert!(found == expected);
    assert!(run(true, false).0 != expected, "the rows of the image matter");
}

#[test]
fn malformed_images_are_errors() {
    with_suite(&config(), 0.0, 0.0, |suite| suite.malformed_images_are_errors());
    let model = large_images();
    let mut backend = with_images(CudaConfig { max_patches: 16, ..config() }, &model);
    backend.encode(&model.encoder.batch(&[(1, 4)], vec![0, 1, 2, 3])).expect("it has 16 patches");
    let error = backend.encode(&model.encoder.batch(&[(1, 4), (2, 5)], (0..9).collect())).unwrap_err().to_string();
    assert_eq!(error, "the cuda backend failed: an image has 20 patches, but memory was taken for 16");
}

#[test]
fn an_encoder_takes_its_memory_from_that_of_the_kv_cache() {
    let model = large_images();
    let (decoder, decoder_weights) = model.decoder.build().unwrap();
    let (encoder, encoder_weights) = model.encoder.build().unwrap();
    let mut backend = open(CudaConfig { device: H100, memory: Memory::Share(0.9), ..config() });
    backend.load(&decoder, &decoder_weights, &mut |_| {}).unwrap();
    let (kv, weights, steps) = (backend.kv_bytes(), backend.weight_bytes(), backend.step_bytes());
    backend.load_encoder(&encoder, &encoder_weights, &mut |_| {}).unwrap();
    let taken = backend.weight_bytes() - weights + backend.step_bytes() - steps;
    assert!(taken > 0 && backend.kv_bytes() <= kv - taken, "{taken} of {kv}");
    assert_eq!(backend.media_row_bytes(), 4 * decoder.media_columns() as u64);

    let control = Control::new();
    control.fail("cuMemAlloc_v2", 0, 2, false);
    let error = backend.allocate_media(100).unwrap_err();
    assert!(matches!(&error, BackendError::OutOfMemory { what, .. } if what == "the media cache"), "{error}");
    backend.allocate_media(100).expect("there is memory now");
    control.reset();
    encoded(&mut backend, &model, &[75, 2], true);
    assert_eq!(control.allocations(), 0, "encoding allocates nothing");
}

#[test]
fn an_encoder_alone_is_refused() {
    let (encoder, weights) = large_images().encoder.build().unwrap();
    let error = open(config()).load(&encoder, &weights, &mut |_| {}).unwrap_err().to_string();
    assert_eq!(error, "the cuda backend does not support encoders of images without a decoder");
}
