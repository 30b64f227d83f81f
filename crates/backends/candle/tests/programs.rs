//! Tests of whole programs: they are close to the exact f64 result of every op, and have the same bits however the
//! sequences are divided into steps.

use octavo_backend_candle::CandleBackend;
use octavo_ops::testing::suite::{Suite, models, real_sizes};
use octavo_ops::testing::{
    Rounding, TinyModel, image_models, large_images, models_with_experts, models_with_latents, real_latents,
    text_models, windowed_texts,
};
use proptest::prelude::*;

// A norm over few columns may amplify a rounding error a hundredfold, but not many of them: 3.9e-4 was found after norms over 12.
const SUITE: Suite<'_> = Suite { backend: &|| Box::new(CandleBackend::new()), worst: 6e-4, mean: 2e-5, logprobs: 0.0 };

// With adapters, more sums are rounded before such a norm: 3.8e-4 and 2.2e-5 were found.
const ADAPTED: Suite<'_> = Suite { worst: 1e-3, mean: 6e-5, ..SUITE };

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn logits_are_near_the_naive_ones(
        // The result of a norm over very few columns is nearly their signs, which a rounding error may flip.
        model in models().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..50,
    ) {
        SUITE.near_reference(&model, tokens)?;
    }

    #[test]
    fn bits_do_not_depend_on_the_batch(model in models(), seed in any::<u64>()) {
        SUITE.same_bits(&model, seed)?;
    }

    #[test]
    fn rows_with_adapters_are_near_the_naive_ones(
        model in models().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..50,
    ) {
        ADAPTED.near_adapted(&model, tokens, Rounding::F32, 0.0)?;
    }

    #[test]
    fn bits_do_not_depend_on_adapters_of_others(model in models(), seed in any::<u64>()) {
        SUITE.same_bits_adapted(&model, seed)?;
    }

    #[test]
    fn experts_are_near_the_naive_ones(
        model in models_with_experts().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..30,
    ) {
        SUITE.near_reference(&model, tokens)?;
    }

    #[test]
    fn bits_of_experts_do_not_depend_on_the_batch(model in models_with_experts(), seed in any::<u64>()) {
        SUITE.same_bits(&model, seed)?;
    }

    #[test]
    fn experts_with_adapters_are_near_the_naive_ones(
        model in models_with_experts().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..30,
    ) {
        ADAPTED.near_adapted(&model, tokens, Rounding::F32, 0.0)?;
    }

    #[test]
    fn bits_of_experts_do_not_depend_on_adapters_of_others(model in models_with_experts(), seed in any::<u64>()) {
        SUITE.same_bits_adapted(&model, seed)?;
    }

    #[test]
    fn latents_are_near_the_naive_ones(
        model in models_with_latents().prop_filter("too few columns", |model| model.hidden >= 8),
        tokens in 1usize..50,
    ) {
        SUITE.near_reference(&model, tokens)?;
    }

    #[test]
    fn bits_of_latents_do_not_depend_on_the_batch(model in models_with_latents(), seed in any::<u64>()) {
        SUITE.same_bits(&model, seed)?;
    }

    #[test]
    fn images_are_near_the_naive_ones(
        model in image_models(),
        images in proptest::collection::vec(1usize..12, 1..4),
    ) {
        SUITE.images_are_near(&model, Rounding::F32, 0.0, &images)?;
    }

    #[test]
    fn bits_of_images_do_not_depend_on_the_batch(
        model in image_models(),
        images in proptest::collection::vec(1usize..12, 1..4),
    ) {
        SUITE.images_have_the_same_bits(&model, &images)?;
    }

    #[test]
    fn texts_are_near_the_naive_ones(
        model in text_models(),
        texts in proptest::collection::vec(1usize..40, 1..4),
    ) {
        SUITE.texts_are_near(&model, Rounding::F32, 0.0, &texts)?;
    }

    #[test]
    fn bits_of_texts_do_not_depend_on_the_batch(
        model in text_models(),
        texts in proptest::collection::vec(1usize..40, 1..4),
    ) {
        SUITE.texts_have_the_same_bits(&model, &texts)?;
    }
}

#[test]
fn windows_of_texts_are_as_wide_as_they_say() {
    SUITE.texts_are_near(&windowed_texts(), Rounding::F32, 0.0, &[300, 130, 2]).unwrap();
}

#[test]
fn unfit_adapters_are_errors_and_adapters_end_with_their_program() {
    SUITE.unfit_adapters_are_errors();
    SUITE.adapters_end_with_their_program();
}

#[test]
fn malformed_texts_are_errors() {
    SUITE.malformed_texts_are_errors();
}

#[test]
fn large_images_are_near_the_naive_ones() {
    SUITE.images_are_near(&large_images(), Rounding::F32, 0.0, &[75, 2]).unwrap();
}

#[test]
fn malformed_images_are_errors() {
    SUITE.malformed_images_are_errors();
}

#[test]
fn bits_do_not_depend_on_the_batch_at_real_sizes() {
    SUITE.same_bits(&real_sizes(2048), 5).unwrap();
}

#[test]
fn logits_at_real_sizes_are_near_the_naive_ones() {
    SUITE.near_reference(&real_sizes(300), 12).unwrap();
}

#[test]
fn latents_of_real_sizes_are_near_the_naive_ones() {
    SUITE.near_reference(&real_latents(16), 20).unwrap();
}

#[test]
fn the_contract_is_kept() {
    SUITE.contract();
}

#[test]
fn what_is_no_number_reaches_no_row_before_it() {
    SUITE.what_is_no_number_reaches_no_row_before_it(&TinyModel::default());
}
