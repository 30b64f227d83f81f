//! The processor backend reads weights of every storage type as candle does.

use octavo_backend_candle::CandleBackend;
use octavo_backend_cpu::{ActivationBits, CpuBackend, CpuConfig, Isa};
use octavo_ops::testing::suite::Suite;
use octavo_ops::testing::{TinyModel, experts_of_blocks, latents_of_blocks};
use octavo_ops::{Backend, StorageType};

/// Returns a suite whose results are compared with those of another.
fn suite(backend: &dyn Fn() -> Box<dyn Backend>) -> Suite<'_> {
    Suite { backend, worst: 0.0, mean: 0.0, logprobs: 0.0 }
}

/// Runs a test for each available instruction set.
fn each(activations: ActivationBits, test: impl Fn(&Suite<'_>)) {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let config = CpuConfig { threads: Some(2), isa: Some(isa), activations, ..CpuConfig::default() };
        let backend = || -> Box<dyn Backend> { Box::new(CpuBackend::new(config).expect("the threads start")) };
        test(&suite(&backend));
    }
}

#[test]
fn every_format_means_what_candle_reads() {
    let candle = || -> Box<dyn Backend> { Box::new(CandleBackend::new()) };
    let candle = suite(&candle);
    for storage in StorageType::ALL {
        // One format is converted to another; activations are rounded to bf16 if weights are bf16.
        let is_kept = storage != StorageType::Q2K;
        let (worst, mean) = if is_kept { (0.015, 0.003) } else { (0.15, 0.03) };
        each(ActivationBits::Twelve, |suite| {
            Suite { worst, mean, ..*suite }.near_other(&candle, &TinyModel::of_blocks(storage), 20).unwrap()
        });
        let (worst, mean) = (worst.max(0.06), mean.max(0.012));
        each(ActivationBits::Eight, |suite| {
            Suite { worst, mean, ..*suite }.near_other(&candle, &TinyModel::of_blocks(storage), 20).unwrap()
        });
    }
}

#[test]
fn every_format_of_latents_means_what_candle_reads() {
    let candle = || -> Box<dyn Backend> { Box::new(CandleBackend::new()) };
    let candle = suite(&candle);
    for storage in StorageType::ALL.into_iter().filter(|storage| *storage != StorageType::Q2K) {
        let model = latents_of_blocks(storage);
        each(ActivationBits::Twelve, |suite| {
            Suite { worst: 0.02, mean: 0.004, ..*suite }.near_other(&candle, &model, 20).unwrap()
        });
    }
}

#[test]
fn every_format_of_experts_means_what_candle_reads() {
    let candle = || -> Box<dyn Backend> { Box::new(CandleBackend::new()) };
    let candle = suite(&candle);
    for storage in StorageType::ALL.into_iter().filter(|storage| *storage != StorageType::Q2K) {
        // Every expert is chosen, since the rounding of activations may change a choice.
        let model = experts_of_blocks(storage, 5);
        each(ActivationBits::Twelve, |suite| {
            Suite { worst: 0.015, mean: 0.003, ..*suite }.near_other(&candle, &model, 20).unwrap()
        });
    }
}
