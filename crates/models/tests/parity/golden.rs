//! Compares every tiny checkpoint with the logits that PyTorch computed for it: whole prefill, chunked prefill, decode.

use octavo_backend_candle::CandleBackend;
use octavo_backend_cpu::{CpuBackend, CpuConfig, Isa};
use octavo_models::Checkpoint;
use octavo_ops::Backend;

use crate::support::{Defect, Golden, Session, checkpoint, instruction_sets, mean_difference, relative_difference};

/// Limits on the difference from PyTorch's logits.
#[derive(Clone, Copy)]
pub(crate) struct Tolerance {
    /// Limit on a difference, relative to the largest logit.
    largest: f32,
    /// Limit on the root mean square of the differences, relative to that of the logits. Defects change it most.
    mean: f64,
}

/// Both sides compute in f32 with sums in another order, and PyTorch computes rotary angles in f32.
pub(crate) const CANDLE: Tolerance = Tolerance { largest: 2e-5, mean: 5e-6 };
/// The CPU backend stores keys and values in bf16. The largest mean of all checkpoints is 0.0092.
const CPU: Tolerance = Tolerance { largest: 0.03, mean: 0.012 };
/// Weights that were merged in another order may be rounded to the other of two numbers in 16 bits.
pub(crate) const MERGED: Tolerance = Tolerance { largest: 2e-3, mean: 5e-4 };
/// Some processors also multiply bf16 weights with activations in bf16. The largest mean of all checkpoints is 0.017.
const CPU_BF16: Tolerance = Tolerance { largest: 0.03, mean: 0.02 };
/// A defect changes the mean at least by this many times the limit.
const DEFECT: f64 = 4.0;
/// Margin between the two most likely tokens, in tolerances, above which both sides must agree on the first.
const CLEAR_MARGIN: f32 = 2.0;

/// Prefills in chunks of the given sizes (repeated as needed) and returns every position's logits in order.
fn run(session: &mut Session, ids: &[u32], chunks: &[usize]) -> Vec<f32> {
    session.restart();
    let (mut rest, mut logits) = (ids, Vec::new());
    for &size in chunks.iter().cycle() {
        let (chunk, after) = rest.split_at(size.min(rest.len()));
        logits.extend(session.forward(chunk));
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    logits
}

pub(crate) fn check(name: &str) {
    check_checkpoint(name, &checkpoint(name), CANDLE);
}

/// Compares a checkpoint with the golden numbers of a folder. `candle` is the tolerance of the candle backend.
pub(crate) fn check_checkpoint(name: &str, checkpoint: &Checkpoint, candle: Tolerance) {
    let golden = Golden::read(name);
    let vocab = checkpoint.config().vocab_size;
    let session = Session::new(checkpoint, golden.ids.len());
    check_session(session, &format!("{name} on candle"), &golden, vocab, candle);
    for isa in instruction_sets() {
        let session = Session::on_cpu(isa, checkpoint, golden.ids.len());
        check_session(session, &format!("{name} on {isa}"), &golden, vocab, tolerance(isa));
    }
}

pub(crate) fn check_session(mut session: Session, name: &str, golden: &Golden, vocab: usize, tolerance: Tolerance) {
    let whole = golden.ids.len();
    let modes: [(&str, &[usize]); 4] =
        [("whole", &[whole]), ("chunks of 7", &[7]), ("chunks of 16, 1, 23", &[16, 1, 23]), ("decode", &[1])];
    for (mode, chunks) in modes {
        let found = run(&mut session, &golden.ids, chunks);
        let difference = relative_difference(&found, &golden.logits);
        let mean = mean_difference(&found, &golden.logits);
        println!("{name}, {mode}: largest difference {difference:.1e} of the largest logit, {mean:.1e} in the mean");
        assert!(difference <= tolerance.largest, "{name}, {mode}: {difference}");
        assert!(mean <= tolerance.mean, "{name}, {mode}: {mean} in the mean");
        assert_same_top(&found, &golden.logits, vocab, CLEAR_MARGIN * tolerance.largest);
    }
}

fn assert_same_top(found: &[f32], expected: &[f32], vocab: usize, margin: f32) {
    let scale = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    for (position, (a, b)) in found.chunks(vocab).zip(expected.chunks(vocab)).enumerate() {
        let (top, second) = top_two(b);
        if b[top] - b[second] > margin * scale {
            assert_eq!(top_two(a).0, top, "position {position}");
        }
    }
}

fn top_two(row: &[f32]) -> (usize, usize) {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    (order[0], order[1])
}

/// Returns the tolerance of an instruction set.
pub(crate) fn tolerance(isa: Isa) -> Tolerance {
    if multiplies_bf16(isa) { CPU_BF16 } else { CPU }
}

fn multiplies_bf16(isa: Isa) -> bool {
    isa.name().ends_with("bf16") || isa.name() == "amx"
}

/// Checks that the comparison detects a defect on every backend.
fn sees(name: &str, defect: Defect) {
    let (golden, checkpoint) = (Golden::read(name), checkpoint(name));
    let whole = golden.ids.len();
    let mut backends: Vec<(String, Box<dyn Backend>)> = vec![("candle".into(), Box::new(CandleBackend::new()))];
    for isa in instruction_sets() {
        let config = CpuConfig { isa: Some(isa), ..CpuConfig::default() };
        backends.push((isa.to_string(), Box::new(CpuBackend::new(config).unwrap())));
    }
    for (backend, implementation) in backends {
        let mut session = Session::on(implementation, &checkpoint, whole, Some(defect));
        let found = run(&mut session, &golden.ids, &[whole / 2, whole]);
        let mean = mean_difference(&found, &golden.logits);
        println!("{name} on {backend}, {defect:?}: {mean:.1e} in the mean");
        assert!(mean > DEFECT * CPU_BF16.mean, "{name} on {backend}, {defect:?}: {mean}");
    }
}

#[test]
fn a_window_that_is_too_wide_is_seen() {
    for name in ["mistral", "qwen2-window", "gemma2", "gemma3", "gpt-oss"] {
        sees(name, Defect::Window);
    }
}

#[test]
fn a_position_that_is_shifted_is_seen() {
    for name in ["llama", "llama-gguf", "mistral", "qwen3", "gemma3", "phi3", "deepseek-v2"] {
        sees(name, Defect::Position);
    }
}

macro_rules! golden_tests {
    ($($test:ident: $name:literal;)*) => {$(
        #[test]
        fn $test() {
            check($name);
        }
    )*};
}

golden_tests! {
    llama: "llama";
    llama3_rope_scaling: "llama3-rope";
    linear_rope_scaling_and_biases: "llama-linear";
    yarn_rope_scaling: "llama-yarn";
    mistral_with_a_sliding_window: "mistral";
    qwen2: "qwen2";
    qwen2_with_a_window_in_some_layers: "qwen2-window";
    qwen3: "qwen3";
    qwen3_in_two_shards: "qwen3-sharded";
    llama_gguf_with_permuted_rows: "llama-gguf";
    qwen2_gguf: "qwen2-gguf";
    gemma2: "gemma2";
    gemma3_with_a_window_in_some_layers: "gemma3";
    phi3_with_long_rope: "phi3";
    phi4: "phi4";
    granite: "granite";
    olmo2: "olmo2";
    smollm3: "smollm3";
    gemma2_gguf: "gemma2-gguf";
    gemma3_gguf: "gemma3-gguf";
    phi3_gguf: "phi3-gguf";
    granite_gguf: "granite-gguf";
    olmo2_gguf: "olmo2-gguf";
    smollm3_gguf: "smollm3-gguf";
    mixtral: "mixtral";
    qwen2_moe_with_a_dense_layer: "qwen2-moe";
    qwen3_moe_with_a_dense_layer: "qwen3-moe";
    granite_moe: "granitemoe";
    gpt_oss: "gpt-oss";
    gpt_oss_in_mxfp4: "gpt-oss-mxfp4";
    mixtral_gguf: "mixtral-gguf";
    qwen2_moe_gguf: "qwen2-moe-gguf";
    qwen3_moe_gguf: "qwen3-moe-gguf";
    granite_moe_gguf: "granitemoe-gguf";
    gpt_oss_gguf: "gpt-oss-gguf";
    deepseek_v2_with_a_dense_layer: "deepseek-v2";
    deepseek_v3_with_yarn: "deepseek-v3";
    deepseek_v2_gguf: "deepseek-v2-gguf";
    deepseek_v3_gguf: "deepseek-v3-gguf";
}
