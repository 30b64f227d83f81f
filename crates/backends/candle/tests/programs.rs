//! Whole programs: near the naive f64 meaning of every op, and the same bits however the sequences are cut into steps.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

use octavo_backend_candle::CandleBackend;
use octavo_ops::testing::{
    MemoryWeights, PagedBatches, QkNormWidth, TestRng, TinyModel, reference_embeddings, reference_logits,
};
use octavo_ops::{Backend, GluKind, HeadShape, NormKind, Program, Rope, RopeStyle, StepBatch};
use proptest::prelude::*;

const BLOCK: usize = 16;
const BLOCKS: usize = 64;

fn backend(program: &Program, weights: &MemoryWeights) -> CandleBackend {
    let mut backend = CandleBackend::new();
    backend.load(program, weights, &mut |_| {}).unwrap();
    backend.allocate_kv(BLOCK, &vec![BLOCKS; program.kv_groups.len()]).unwrap();
    backend
}

/// The logits of a step's rows, then the hidden state of each, as bits.
fn run(backend: &mut CandleBackend, program: &Program, batch: &StepBatch) -> Vec<Vec<u32>> {
    backend.forward(batch).unwrap();
    let logits = backend.logits().unwrap();
    let mut hidden = vec![0.5];
    backend.embeddings(&mut hidden).unwrap();
    let width = hidden.len() / batch.pooled_rows.len().max(1);
    let rows = logits.chunks(program.vocab_size).zip(hidden.chunks(width.max(1)));
    rows.map(|(logits, hidden)| logits.iter().chain(hidden).map(|x| x.to_bits()).collect()).collect()
}

/// The logits and hidden states of every token of a sequence that is alone and prefilled in one step.
fn alone(program: &Program, weights: &MemoryWeights, tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut batches = PagedBatches::new(BLOCK, program.kv_groups.len(), BLOCKS, &mut TestRng(1));
    let sequence = batches.add(tokens.to_vec());
    let batch = batches.step(&[(sequence, tokens.len())]);
    run(&mut backend(program, weights), program, &batch)
}

fn near_reference(model: &TinyModel, tokens: usize) -> Result<(), TestCaseError> {
    let (program, weights) = model.build().unwrap();
    let tokens = TestRng(model.seed ^ 1).tokens(tokens, model.vocab_size);
    let found = alone(&program, &weights, &tokens);
    prop_assert_eq!(found.len(), tokens.len());
    prop_assert!(found.iter().all(|row| row.len() == model.vocab_size + model.hidden));
    let (logits, hidden): (Vec<_>, Vec<_>) = found.iter().map(|row| row.split_at(model.vocab_size)).unzip();
    near(&logits, &reference_logits(&program, &weights, &tokens).unwrap())?;
    near(&hidden, &reference_embeddings(&program, &weights, &tokens).unwrap())
}

fn near(found: &[&[u32]], expected: &[Vec<f64>]) -> Result<(), TestCaseError> {
    let largest = expected.iter().flatten().fold(1.0f64, |m, x| m.max(x.abs()));
    let differences: Vec<f64> = (found.iter().copied().flatten().zip(expected.iter().flatten()))
        .map(|(found, expected)| (f64::from(f32::from_bits(*found)) - expected).abs() / largest)
        .collect();
    let worst = differences.iter().fold(0.0, |m: f64, x| m.max(*x));
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    // A norm over few columns may enlarge a rounding error a hundredfold, but not many of them.
    prop_assert!(worst < 3e-4 && mean < 2e-5, "the rows are off by {worst}, {mean} in the mean");
    Ok(())
}

fn ropes() -> impl Strategy<Value = Option<(RopeStyle, usize, f64)>> {
    let style = prop_oneof![Just(RopeStyle::NeoX), Just(RopeStyle::GptJ)];
    proptest::option::weighted(0.85, (style, 1usize..=4, prop_oneof![Just(1.0), 0.5f64..1.5]))
}

fn models() -> impl Strategy<Value = TinyModel> {
    let sizes = (1usize..40, 1usize..50, 1usize..60, 1usize..4, 1usize..4, 4usize..20);
    let windows = proptest::collection::vec(proptest::option::of(1usize..40), 1..3);
    let glu = prop_oneof![Just(GluKind::Silu), Just(GluKind::Gelu), Just(GluKind::GeluTanh)];
    let norm = prop_oneof![3 => Just(NormKind::Rms), 1 => Just(NormKind::Layer)];
    let qk_norm = prop_oneof![Just(None), Just(Some(QkNormWidth::Head)), Just(Some(QkNormWidth::Row))];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let caps = (proptest::option::of(1.0f32..30.0), proptest::option::of(1.0f32..30.0));
    let scales = (prop_oneof![Just(1.0f32), 0.3f32..4.0], prop_oneof![Just(1.0f32), 0.3f32..4.0]);
    (sizes, windows, ropes(), glu, norm, qk_norm, flags, caps, scales, any::<u64>()).prop_map(
        |(sizes, windows, rope, glu, norm, qk_norm, flags, caps, scales, seed)| {
            let (hidden, inner, vocab_size, kv, group, dim) = sizes;
            let layers = (0..windows.len() + 1).map(|layer| layer % windows.len()).collect();
            let rope = rope.map(|(style, pairs, magnitude)| Rope {
                style,
                inv_freq: (0..pairs.min(dim / 2)).map(|i| 0.3f64.powi(i as i32)).collect(),
                magnitude,
            });
            TinyModel {
                vocab_size,
                hidden,
                inner,
                heads: HeadShape { q: kv * group, kv, dim },
                layers,
                windows,
                rope,
                qk_norm,
                norm,
                unit_offset: flags.0,
                biases: flags.1,
                tied: flags.2,
                glu,
                attention_softcap: caps.0,
                logits_softcap: caps.1,
                scales,
                seed,
            }
        },
    )
}

/// Cuts the sequences into steps at random and compares every row's bits with those of the sequence alone.
fn same_bits(model: &TinyModel, seed: u64) -> Result<(), TestCaseError> {
    let (program, weights) = model.build().unwrap();
    let mut rng = TestRng(seed);
    let mut batches = PagedBatches::new(BLOCK, program.kv_groups.len(), BLOCKS, &mut rng);
    let mut backend = backend(&program, &weights);
    let mut expected = Vec::new();
    for _ in 0..3 {
        let length = 1 + rng.below(40);
        let tokens = rng.tokens(length, model.vocab_size);
        expected.push(alone(&program, &weights, &tokens));
        batches.add(tokens);
    }
    // Shares the blocks of the first once those are computed.
    let mut sharing = None;
    while (0..expected.len()).any(|s| batches.left(s) > 0) || sharing.is_none() {
        if batches.left(0) == 0 && sharing.is_none() {
            let tokens = first_then(&batches, &mut rng, model.vocab_size);
            expected.push(alone(&program, &weights, &tokens));
            sharing = Some(batches.add_sharing(0, tokens));
        }
        let mut parts = Vec::new();
        for sequence in 0..expected.len() {
            let left = batches.left(sequence);
            if left > 0 && rng.below(4) > 0 {
                let decode = rng.below(2) == 0;
                parts.push((sequence, if decode { 1 } else { 1 + rng.below(left) }));
            }
        }
        let starts: Vec<_> = parts.iter().map(|&(sequence, _)| batches.computed(sequence)).collect();
        let batch = batches.step(&parts);
        let rows = run(&mut backend, &program, &batch);
        let mut rows = rows.iter();
        for (&(sequence, count), start) in parts.iter().zip(starts) {
            for position in start..start + count {
                let expected = &expected[sequence][position];
                prop_assert_eq!(rows.next(), Some(expected), "sequence {}, position {}", sequence, position);
            }
        }
    }
    Ok(())
}

/// The tokens of the first sequence and some more.
fn first_then(batches: &PagedBatches, rng: &mut TestRng, vocab_size: usize) -> Vec<u32> {
    let more = 1 + rng.below(20);
    let mut tokens = batches.tokens(0).to_vec();
    tokens.extend(rng.tokens(more, vocab_size));
    tokens
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn logits_are_near_the_naive_ones(model in models(), tokens in 1usize..50) {
        near_reference(&model, tokens)?;
    }

    #[test]
    fn bits_do_not_depend_on_the_batch(model in models(), seed in any::<u64>()) {
        same_bits(&model, seed)?;
    }
}

/// Sizes of a real small model, at which the matrix product takes its blocked and its parallel paths.
#[test]
fn bits_do_not_depend_on_the_batch_at_real_sizes() {
    let model = TinyModel {
        vocab_size: 2048,
        hidden: 576,
        inner: 1536,
        heads: HeadShape { q: 9, kv: 3, dim: 64 },
        layers: vec![0],
        ..TinyModel::default()
    };
    same_bits(&model, 5).unwrap();
}

#[test]
fn logits_at_real_sizes_are_near_the_naive_ones() {
    let model = TinyModel {
        vocab_size: 300,
        hidden: 576,
        inner: 1536,
        heads: HeadShape { q: 9, kv: 3, dim: 64 },
        layers: vec![0],
        ..TinyModel::default()
    };
    near_reference(&model, 12).unwrap();
}
