//! Compares the greedy tokens of every architecture's tiny checkpoint with those of the candle backend.

use std::path::{Path, PathBuf};

use octavo_backend_candle::CandleBackend;
use octavo_backend_cuda::CudaBackend;
use octavo_models::{Checkpoint, build_program};
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow};
use octavo_ops::testing::{PagedBatches, TestRng};
use octavo_ops::{Backend, Program};

/// Checkpoints, each with the lead of a token, as a share of the largest logit, above which the choice is clear:
/// smaller leads depend on the order of sums or, for quantised weights, on activations of 8 bits. These may also change a
/// choice of experts.
const CHECKPOINTS: [(&str, f32); 50] = [
    ("llama", 1e-4),
    ("llama3-rope", 1e-4),
    ("llama-linear", 1e-4),
    ("llama-yarn", 1e-4),
    ("mistral", 1e-4),
    ("qwen2", 1e-4),
    ("qwen2-window", 1e-4),
    ("qwen3", 1e-4),
    ("qwen3-sharded", 1e-4),
    ("llama-gguf/model.gguf", 0.03),
    ("qwen2-gguf/model.gguf", 0.03),
    ("gemma2", 1e-4),
    ("gemma3", 1e-4),
    ("gemma3-images", 1e-4),
    ("phi3", 1e-4),
    ("phi4", 1e-4),
    ("granite", 1e-4),
    ("olmo2", 1e-4),
    ("smollm3", 1e-4),
    ("gemma2-gguf/model.gguf", 0.03),
    ("gemma3-gguf/model.gguf", 0.03),
    ("phi3-gguf/model.gguf", 0.03),
    ("granite-gguf/model.gguf", 0.03),
    ("olmo2-gguf/model.gguf", 0.03),
    ("smollm3-gguf/model.gguf", 0.03),
    ("mixtral", 1e-4),
    ("qwen2-moe", 1e-4),
    ("qwen3-moe", 1e-4),
    ("granitemoe", 1e-4),
    ("gpt-oss", 1e-4),
    ("gpt-oss-mxfp4", 1e-4),
    ("mixtral-gguf/model.gguf", 0.03),
    ("qwen2-moe-gguf/model.gguf", 0.08),
    ("qwen3-moe-gguf/model.gguf", 0.03),
    ("granitemoe-gguf/model.gguf", 0.03),
    ("gpt-oss-gguf/model.gguf", 0.03),
    ("deepseek-v2", 1e-4),
    ("deepseek-v3", 1e-4),
    ("deepseek-v2-gguf/model.gguf", 0.03),
    ("deepseek-v3-gguf/model.gguf", 0.03),
    ("mixtral-fp8", 1e-4),
    ("qwen3-moe-fp8", 1e-4),
    ("deepseek-v3-fp8", 1e-4),
    ("quantised/awq", 0.03),
    ("quantised/int8", 0.03),
    ("quantised/fp8-block-32", 1e-4),
    ("quantised/nf4-nested", 1e-4),
    ("quantised/mxfp4", 0.03),
    ("quantised/nvfp4", 0.03),
    ("quantised/modelopt-nvfp4", 0.03),
];

/// Returns the tokens that two sequences choose in one batch, with their margins, in the order of steps. They continue
/// with the tokens of `script`, or else with their own.
fn generate(
    backend: &mut dyn Backend,
    program: &Program,
    checkpoint: &Checkpoint,
    script: Option<&[u32]>,
) -> (Vec<u32>, Vec<f32>) {
    backend.load(program, checkpoint, &mut |_| {}).expect("the checkpoint is loaded");
    let groups = program.kv_groups.len();
    backend.allocate_kv(16, 64).expect("there is memory");
    let mut prompts = TestRng(12);
    let mut sequences: Vec<Vec<u32>> = [37, 5].map(|len| prompts.tokens(len, program.vocab_size)).into();
    let params = SampleParams::default();
    let (mut tokens, mut margins, mut computed) = (Vec::new(), Vec::new(), vec![0; sequences.len()]);
    for _ in 0..12 {
        // Blocks are allocated again in each step, in the same way, so that a sequence keeps its blocks.
        let mut batches = PagedBatches::new(16, groups, 64, &mut TestRng(8));
        let parts: Vec<_> = sequences.iter().map(|tokens| batches.add(tokens.clone())).collect();
        let before: Vec<_> =
            parts.iter().zip(&computed).filter(|(_, done)| **done > 0).map(|(&s, &done)| (s, done)).collect();
        if !before.is_empty() {
            batches.step(&before);
        }
        let next: Vec<_> = parts.iter().map(|&s| (s, batches.left(s))).collect();
        let mut batch = batches.step(&next);
        batch.pooled_rows.clear();
        batch.sampled_rows = batch.query_start[1..].iter().map(|end| end - 1).collect();
        backend.forward(&batch).expect("the step runs");
        let logits = backend.logits().expect("there are logits");
        margins.extend(logits.chunks(program.vocab_size).map(margin));
        let rows = vec![SampleRow::new(&params); sequences.len()];
        let mut drawn = Vec::new();
        backend.sample(&SampleBatch { rows: &rows }, &mut drawn).expect("it is sampled");
        for ((sequence, done), token) in sequences.iter_mut().zip(&mut computed).zip(&drawn) {
            *done = sequence.len();
            sequence.push(script.map_or(token.id, |script| script[tokens.len()]));
            tokens.push(token.id);
        }
    }
    (tokens, margins)
}

/// Returns the lead of the most likely token, as a share of the largest logit.
fn margin(row: &[f32]) -> f32 {
    let mut sorted = row.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    (sorted[0] - sorted[1]) / sorted[0].abs()
}

/// Returns the folder of the checkpoints; `OCTAVO_TESTDATA` names it if this program was built on another machine.
pub(crate) fn folder() -> PathBuf {
    let here = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../models/testdata");
    std::env::var_os("OCTAVO_TESTDATA").map_or_else(here, PathBuf::from)
}

/// Compares every checkpoint with and without recorded steps. `open` opens a backend in f32 for two sequences.
pub(crate) fn agree(open: impl Fn(bool) -> CudaBackend) {
    for (name, clear) in CHECKPOINTS {
        let checkpoint = Checkpoint::open(&folder().join(name)).expect("the checkpoint is readable");
        let program = build_program(&checkpoint).expect("the architecture is known");
        let (expected, margins) = generate(&mut CandleBackend::new(), &program, &checkpoint, None);
        let is_clear: Vec<_> = margins.iter().map(|margin| *margin > clear).collect();
        let count = is_clear.iter().filter(|is_clear| **is_clear).count();
        assert!(2 * count > expected.len(), "{name}: {count} of {} choices are clear", expected.len());
        for graphs in [true, false] {
            let mut backend = open(graphs);
            let (found, _) = generate(&mut backend, &program, &checkpoint, Some(&expected));
            for (step, is_clear) in is_clear.iter().enumerate() {
                assert!(found[step] == expected[step] || !is_clear, "{name}, graphs: {graphs}, choice {step}");
            }
            assert_eq!(backend.graph_steps().0 > 0, graphs);
        }
    }
}
