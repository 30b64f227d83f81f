//! Compares every tiny checkpoint with the logits that PyTorch computed for it: whole prefill, chunked prefill, decode.

use octavo_models::Checkpoint;

use crate::support::{Golden, Session, checkpoint, instruction_sets, relative_difference, testdata};

/// Maximum difference from PyTorch's logits, relative to the largest logit. Both sides compute in f32 with sums in
/// another order, and PyTorch computes rotary angles in f32.
const TOLERANCE: f32 = 2e-5;
/// Maximum difference of the CPU backend, which stores keys and values in bf16, and multiplies bf16 weights with
/// activations in bf16 where the processor has tiles for it.
const CPU_TOLERANCE: f32 = 0.03;
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

fn check(name: &str) {
    let golden = Golden::read(name);
    let checkpoint = checkpoint(name);
    let vocab = checkpoint.config().vocab_size;
    let candle = Session::new(&checkpoint, golden.ids.len());
    check_session(candle, &format!("{name} on candle"), &golden, vocab, TOLERANCE);
    for isa in instruction_sets() {
        let session = Session::on_cpu(isa, &checkpoint, golden.ids.len());
        check_session(session, &format!("{name} on {isa}"), &golden, vocab, CPU_TOLERANCE);
    }
}

fn check_session(mut session: Session, name: &str, golden: &Golden, vocab: usize, tolerance: f32) {
    let whole = golden.ids.len();
    let modes: [(&str, &[usize]); 4] =
        [("whole", &[whole]), ("chunks of 7", &[7]), ("chunks of 16, 1, 23", &[16, 1, 23]), ("decode", &[1])];
    for (mode, chunks) in modes {
        let found = run(&mut session, &golden.ids, chunks);
        let difference = relative_difference(&found, &golden.logits);
        println!("{name}, {mode}: largest difference {difference:.1e} of the largest logit");
        assert!(difference <= tolerance, "{name}, {mode}: {difference}");
        assert_same_top(&found, &golden.logits, vocab, CLEAR_MARGIN * tolerance);
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

/// Checks that the comparison detects a window that is one token too wide.
#[test]
fn a_wrong_window_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(testdata("mistral")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let path = folder.path().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.replace("\"sliding_window\": 16", "\"sliding_window\": 17")).unwrap();
    let golden = Golden::read("mistral");
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.config().sliding_window(), Some(17));
    let found = Session::new(&checkpoint, golden.ids.len()).forward(&golden.ids);
    assert!(relative_difference(&found, &golden.logits) > 1e-2);
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
