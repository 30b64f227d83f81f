//! Compares the vectors of the tiny checkpoints that return vectors with those of the candle backend.

use octavo_backend_candle::CandleBackend;
use octavo_backend_cuda::CudaBackend;
use octavo_models::{Checkpoint, build_program};
use octavo_ops::testing::{TestRng, in_each_group};
use octavo_ops::{Backend, Program, StepBatch};

use super::checkpoints::folder;

const CHECKPOINTS: [&str; 7] = [
    "bert-classifier",
    "bert-sentence",
    "xlm-roberta",
    "modernbert",
    "modernbert-classifier",
    "qwen3-embedding",
    "qwen3-classifier",
];

/// Lengths of the texts of a step: a single token, and more than windows and blocks.
const TEXTS: [usize; 3] = [37, 1, 58];

/// Returns a step of random texts, of which a vector is returned, or with `tokens` a vector of each token, and the number
/// of blocks of each KV group.
fn texts(program: &Program, tokens: bool) -> (StepBatch, usize) {
    let mut rng = TestRng(21);
    let mut batch = StepBatch { query_start: vec![0], ..StepBatch::default() };
    for (slot, length) in TEXTS.into_iter().enumerate() {
        batch.token_ids.extend(rng.tokens(length, program.vocab_size));
        batch.positions.extend(0..length as u32);
        if program.token_types() > 0 {
            let second = rng.below(length);
            batch.token_types.extend((0..length).map(|place| u32::from(program.token_types() > 1 && place > second)));
        }
        let end = batch.token_ids.len() as u32;
        batch.query_start.push(end);
        batch.seq_lens.push(length as u32);
        batch.seats.push(slot as u32);
        let pooled = if tokens { end - length as u32..end } else { end - 1..end };
        if program.reduces_rows() {
            batch.pooled_lens.extend(pooled.clone().map(|_| if tokens { 1 } else { length as u32 }));
        }
        batch.pooled_rows.extend(pooled);
    }
    let mut paged = StepBatch::default();
    let blocks = batch.in_own_blocks(16, &mut paged);
    let groups = program.kv_groups.len();
    (batch.slot_mapping, batch.block_tables) = (paged.slot_mapping, paged.block_tables);
    in_each_group(&mut batch, groups, blocks, 16);
    (batch, blocks * groups)
}

fn run(backend: &mut dyn Backend, program: &Program, checkpoint: &Checkpoint) -> [Vec<f32>; 2] {
    backend.load(program, checkpoint, &mut |_| {}).expect("the checkpoint is loaded");
    [false, true].map(|tokens| {
        let (batch, blocks) = texts(program, tokens);
        backend.allocate_kv(16, blocks).expect("there is memory");
        backend.forward(&batch).expect("the step runs");
        let mut vectors = Vec::new();
        backend.embeddings(&mut vectors).expect("there are vectors");
        vectors
    })
}

/// Returns the largest and the root-mean-square difference, relative to the largest and the root-mean-square number.
fn differences(found: &[f32], expected: &[f32]) -> (f64, f64) {
    let pairs = || found.iter().zip(expected).map(|(&found, &expected)| (f64::from(found), f64::from(expected)));
    // `max` would drop a NaN.
    let largest = |x: f64, y: f64| if y.is_nan() || y > x { y } else { x };
    let worst =
        pairs().map(|(x, y)| (x - y).abs()).fold(0.0, largest) / pairs().map(|(_, y)| y.abs()).fold(0.0, largest);
    let squares: f64 = pairs().map(|(x, y)| (x - y).powi(2)).sum();
    (worst, (squares / pairs().map(|(_, y)| y.powi(2)).sum::<f64>()).sqrt())
}

/// Compares the vectors of texts and of tokens of every checkpoint, with limits of the [`differences`].
pub(crate) fn agree((worst, mean): (f64, f64), open: impl Fn() -> CudaBackend) {
    for name in CHECKPOINTS {
        let checkpoint = Checkpoint::open(&folder().join(name)).expect("the checkpoint is readable");
        let program = build_program(&checkpoint).expect("the architecture is known");
        let expected = run(&mut CandleBackend::new(), &program, &checkpoint);
        let found = run(&mut open(), &program, &checkpoint);
        for (what, (found, expected)) in ["texts", "tokens"].into_iter().zip(found.iter().zip(&expected)) {
            assert_eq!(found.len(), expected.len(), "{name}, {what}");
            let differences = differences(found, expected);
            println!("{name}, {what}: differences of {:.1e} at most, {:.1e} on average", differences.0, differences.1);
            assert!(differences.0 <= worst && differences.1 <= mean, "{name}, {what}: {differences:?}");
        }
    }
}
