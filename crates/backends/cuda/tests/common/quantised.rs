//! Compares quantised weights with candle's dequantisation.

use std::borrow::Cow;

use octavo_backend_candle::CandleBackend;
use octavo_backend_cuda::CudaConfig;
use octavo_ops::testing::suite::Suite;
use octavo_ops::testing::{MemoryWeights, PagedBatches, TestRng, TinyExperts, TinyModel, random_blocks};
use octavo_ops::{Backend, HeadShape, Program, StorageType, TensorData};

use super::{open, with_suite};

/// Maximum of the worst and of the mean error, relative to the largest number: activations are rounded to 8 bits for
/// few rows.
const WORST: f64 = 0.08;
const MEAN: f64 = 0.015;

/// Returns a model with rows of whole super-blocks, whose values start at unaligned offsets.
fn model(storage: StorageType) -> TinyModel {
    TinyModel {
        vocab_size: 90,
        hidden: 256,
        inner: 256,
        heads: HeadShape::new(4, 1, 64),
        layers: vec![0],
        storage,
        ..TinyModel::default()
    }
}

/// Compares every row of a model with this storage type: with activations of 8 bits, with tiles if the device has them,
/// and with dequantised values.
pub(crate) fn format_agrees(config: &CudaConfig, storage: StorageType) {
    agrees(config, &model(storage));
}

/// Compares every row of a model whose products have their inputs in another order.
pub(crate) fn ordered_columns_agree(config: &CudaConfig, storage: StorageType) {
    agrees(config, &TinyModel { ordered: true, ..model(storage) });
}

fn agrees(config: &CudaConfig, model: &TinyModel) {
    let candle = || -> Box<dyn Backend> { Box::new(CandleBackend::new()) };
    let candle = Suite { backend: &candle, worst: 0.0, mean: 0.0, logprobs: 0.0 };
    with_suite(config, WORST, MEAN, |suite| {
        for tokens in [3, 20, 70] {
            suite.near_other(&candle, model, tokens).unwrap_or_else(|e| panic!("{}: {e}", model.storage));
        }
    });
}

/// Returns the model with experts, all of which every token chooses, because rounding may change a choice.
fn model_with_experts(storage: StorageType) -> TinyModel {
    let experts = TinyExperts { chosen: 5, ..TinyExperts::default() };
    TinyModel { experts: Some(experts), ..model(storage) }
}

/// Compares a model of experts with this storage type, with tiles of four, 32 and 128 pairs. As many experts as choices, so an
/// expert has a pair of each token.
pub(crate) fn experts_agree(config: &CudaConfig, storage: StorageType) {
    let model = model_with_experts(storage).build().expect("the model is well formed");
    for tokens in [3, 20, 70] {
        let expected = logits(&mut CandleBackend::new(), &model, tokens);
        let mut backend = open(config.clone());
        let found = logits(&mut backend, &model, tokens);
        let (worst, mean) = differences(&found, &expected);
        assert!(worst < WORST && mean < MEAN, "{storage}, {tokens} tokens: off by {worst}, {mean} in the mean");
    }
}

/// Returns a model whose weights of several parts have parts of different types, as in files of mixed precision.
fn mixed(model: &TinyModel, storages: &[StorageType]) -> (Program, MemoryWeights) {
    let (mut program, mut weights) = model.build().expect("the model is well formed");
    let (mut rng, mut next) = (TestRng(31), storages.iter().cycle());
    for weight in program.weights.iter_mut().filter(|weight| weight.parts.len() > 1) {
        let scale = 1.5 / (weight.cols as f32).sqrt();
        for part in &mut weight.parts {
            let storage = *next.next().expect("a cycle has no end");
            let bytes = Cow::Owned(random_blocks(storage, part.rows * weight.cols, scale, &mut rng));
            let tensor = TensorData { storage, shape: vec![part.rows, weight.cols], bytes };
            weights.tensors.insert(part.tensor.clone(), tensor);
            part.storage = storage;
        }
    }
    (program, weights)
}

/// Returns the logits of every row of one sequence.
fn logits(backend: &mut dyn Backend, (program, weights): &(Program, MemoryWeights), tokens: usize) -> Vec<f32> {
    backend.load(program, weights, &mut |_| {}).expect("the model is loaded");
    backend.allocate_kv(16, 16).expect("there is memory");
    let mut batches = PagedBatches::new(16, program.kv_groups.len(), 16, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(tokens, program.vocab_size));
    let batch = batches.step(&[(sequence, tokens)]);
    backend.forward(&batch).expect("the step runs");
    backend.logits().expect("there are logits")
}

/// Returns the largest and the mean difference, relative to the largest number.
fn differences(found: &[f32], expected: &[f32]) -> (f64, f64) {
    let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    assert!(found.len() == expected.len() && found.iter().all(|x| x.is_finite()));
    let errors = found.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs() / largest));
    (errors.clone().fold(0.0, f64::max), errors.sum::<f64>() / found.len() as f64)
}

/// Elements of an FP8 weight that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shared {
    /// 32 adjacent ones.
    Groups,
    /// Those of a row.
    Rows,
    /// 128 x 128.
    Blocks,
}

/// Gives elements of FP8 weights scales that they share, and that differ much.
fn share_scales((program, weights): &mut (Program, MemoryWeights), shared: Shared) {
    let storage = StorageType::F8E4M3;
    for weight in &program.weights {
        let groups = weight.cols / storage.block_elements();
        for part in weight.parts.iter().filter(|part| part.storage == storage && shared != Shared::Groups) {
            let tensor = weights.tensors.get_mut(&part.tensor).expect("the model has its tensors");
            for (at, block) in tensor.bytes.to_mut().chunks_exact_mut(storage.block_bytes()).enumerate() {
                let (row, col) = (at / groups, at % groups * storage.block_elements());
                let factor = match shared {
                    Shared::Rows => [1.0, 0.25, 2.0, 0.5, 4.0][row % 5],
                    Shared::Blocks | Shared::Groups => [1.0, 4.0, 0.25, 2.0][row / 128 % 2 * 2 + col / 128 % 2],
                };
                let scale = factor * 0.5 / (weight.cols as f32).sqrt() / 448.0;
                block[..4].copy_from_slice(&scale.to_le_bytes());
            }
        }
    }
}

/// Compares a model of FP8 weights whose inputs may be rounded with exact inputs. Returns whether those of many rows are
/// rounded. More than 64 rows are many.
pub(crate) fn fp8_inputs_agree(config: &CudaConfig, shared: Shared, many: usize) -> bool {
    let mut model = model(StorageType::F8E4M3).build().expect("the model is well formed");
    share_scales(&mut model, shared);
    let mut rounds = false;
    for tokens in [20, many] {
        let expected = logits(&mut CandleBackend::new(), &model, tokens);
        let [exact, found] = [false, true].map(|fp8_inputs| {
            model.0.fp8_inputs = fp8_inputs;
            let mut backend = open(config.clone());
            let logits = logits(&mut backend, &model, tokens);
            rounds = backend.rounds_to_fp8();
            assert!(fp8_inputs || !rounds, "the checkpoint is not made for it");
            logits
        });
        let (worst, mean) = differences(&found, &expected);
        assert!(worst < WORST && mean < MEAN, "{shared:?}, {tokens} tokens: off by {worst}, {mean} in the mean");
        assert_eq!(found != exact, rounds && tokens == many, "{shared:?}, {tokens} tokens: rounding changes numbers");
    }
    rounds
}

/// Compares models whose weights of several parts have parts with `storages`, in turn: fused weights, or those of experts.
pub(crate) fn mixture_agrees(config: &CudaConfig, storages: &[StorageType], of_experts: bool) {
    let model = if of_experts { model_with_experts(StorageType::F32) } else { model(StorageType::F32) };
    let model = mixed(&model, storages);
    for tokens in [2, 20, 70] {
        let expected = logits(&mut CandleBackend::new(), &model, tokens);
        let found = logits(&mut open(config.clone()), &model, tokens);
        let (worst, _) = differences(&found, &expected);
        assert!(worst < WORST, "{storages:?}, {tokens} tokens: off by {worst}");
    }
}

/// Returns the logits of the last token of a sequence, which decodes beside others with so many tokens in the step.
fn decoded(config: &CudaConfig, (program, weights): &(Program, MemoryWeights), others: &[usize]) -> Vec<f32> {
    let mut backend = open(config.clone());
    backend.load(program, weights, &mut |_| {}).expect("the model is loaded");
    backend.allocate_kv(16, 64).expect("there is memory");
    let mut batches = PagedBatches::new(16, program.kv_groups.len(), 64, &mut TestRng(3));
    let mut add = |tokens: usize, seed| batches.add(TestRng(seed).tokens(tokens, program.vocab_size));
    let sequence = add(6, 4);
    let others: Vec<_> = others.iter().map(|count| (add(count + 1, 5), *count)).collect();
    backend.forward(&batches.step(&[(sequence, 5)])).expect("the step runs");
    for (other, _) in &others {
        backend.forward(&batches.step(&[(*other, 1)])).expect("the step runs");
    }
    let step: Vec<_> = std::iter::once((sequence, 1)).chain(others).collect();
    backend.forward(&batches.step(&step)).expect("the step runs");
    backend.logits().expect("there are logits")[..program.vocab_size].to_vec()
}

/// Checks that a row has the same bits wherever it is rounded: by its product, by the op before it, and by an activation that its
/// product applies. `most` is the maximum number of rows whose input is rounded on the chip.
pub(crate) fn rounded_rows_keep_their_bits(config: &CudaConfig, most: u32) {
    let model = mixed(&model(StorageType::Q4K), &[StorageType::Q4K, StorageType::Q4K, StorageType::Q6K]);
    let alone = decoded(config, &model, &[]);
    let few = |others: &&[usize]| others.iter().sum::<usize>() < most as usize;
    for others in [&[1][..], &[2], &[1, 2], &[1, 1, 3]].into_iter().filter(few) {
        assert!(decoded(config, &model, others) == alone, "beside {others:?} tokens");
    }
}

/// Returns whether experts with `storages`, in turn, are refused.
pub(crate) fn mixture_is_refused(config: &CudaConfig, storages: &[StorageType]) -> bool {
    let (program, weights) = mixed(&model_with_experts(StorageType::F32), storages);
    let loaded = open(config.clone()).load(&program, &weights, &mut |_| {});
    loaded.is_err_and(|error| error.to_string().contains("experts that are stored in different ways"))
}
