//! Compares every tiny checkpoint with the logits that PyTorch computed for it: whole prefill, chunked prefill, decode.

use octavo_models::{Checkpoint, build_program};

use crate::limits::{CANDLE, DEFECT, Difference, largest_mean, on_cpu};
use crate::support::{Defect, Device, Golden, Session, checkpoint, golden_tests, instruction_sets};

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
pub(crate) fn check_checkpoint(name: &str, checkpoint: &Checkpoint, candle: Difference) {
    let golden = Golden::read(name);
    let vocab = checkpoint.config().vocab_size;
    let session = Session::new(checkpoint, golden.ids.len());
    check_session(session, &format!("{name} on candle"), &golden, vocab, candle);
    for isa in instruction_sets() {
        let session = Session::on_cpu(isa, checkpoint, golden.ids.len());
        check_session(session, &format!("{name} on {isa}"), &golden, vocab, on_cpu(name, isa));
    }
}

pub(crate) fn check_session(mut session: Session, name: &str, golden: &Golden, vocab: usize, limit: Difference) {
    let whole = golden.ids.len();
    let modes: [(&str, &[usize]); 4] =
        [("whole", &[whole]), ("chunks of 7", &[7]), ("chunks of 16, 1, 23", &[16, 1, 23]), ("decode", &[1])];
    for (mode, chunks) in modes {
        let found = run(&mut session, &golden.ids, chunks);
        Difference::between(&found, &golden.logits).assert_within(limit, &format!("{name}, {mode}"));
        assert_same_top(&found, &golden.logits, vocab, CLEAR_MARGIN * limit.largest);
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

/// Checks that the comparison detects each defect on every backend.
fn sees_defects(name: &str) {
    let (golden, checkpoint) = (Golden::read(name), checkpoint(name));
    let (whole, least) = (golden.ids.len(), DEFECT * largest_mean(name));
    let program = build_program(&checkpoint).unwrap();
    let defects: Vec<Defect> = Defect::ALL.into_iter().filter(|defect| defect.applies(&program, whole)).collect();
    assert!(!defects.is_empty());
    for defect in defects {
        for Device { name: device, backend, .. } in Device::all() {
            let mut session = Session::on(backend, &checkpoint, whole, Some(defect));
            let found = run(&mut session, &golden.ids, &[whole / 2, whole]);
            let Difference { mean, .. } = Difference::between(&found, &golden.logits);
            println!("{name} on {device}, {defect:?}: {mean:.1e} in the mean, {:.1} limits", DEFECT * mean / least);
            assert!(mean >= least, "{name} on {device}, {defect:?}: {mean} is below {least}");
        }
    }
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
    mixtral_in_fp8_by_rows: "mixtral-fp8";
    qwen3_moe_in_fp8_by_blocks: "qwen3-moe-fp8";
    deepseek_v3_in_fp8_by_blocks: "deepseek-v3-fp8";
    deepseek_v2_gguf: "deepseek-v2-gguf";
    deepseek_v3_gguf: "deepseek-v3-gguf";
}
