//! Memory of models whose layers have windows: the KV cache holds about what the tokens to come see.

use octavo_backend_cpu::{CpuBackend, CpuConfig};
use octavo_engine::EngineConfig;
use octavo_engine::internals::ManualScheduler;
use octavo_models::{Checkpoint, build_program};
use octavo_ops::{Backend, Program};
use octavo_runner::kv_cache_spec;

const BLOCK: usize = 16;
const WINDOW: usize = 512;
/// Number of tokens in a step.
const STEP: usize = 2048;
const CONTEXT: usize = 32 << 10;

/// The attention of Gemma 3 1B: five of six layers have a window.
const CONFIG: &str = r#"{
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 512, "sliding_window_pattern": 6, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "rope_local_base_freq": 10000, "max_position_embeddings": 65536, "vocab_size": 320, "dtype": "bfloat16"
}"#;

fn program() -> Program {
    let folder = tempfile::tempdir().expect("there is room");
    std::fs::write(folder.path().join("config.json"), CONFIG).expect("there is room");
    let checkpoint = Checkpoint::open_without_weights(folder.path()).expect("the configuration is whole");
    build_program(&checkpoint).expect("the model is known")
}

/// Returns the bytes of keys and values that the tokens from `position` to `end` see, in bf16.
fn needed(program: &Program, position: usize, end: usize) -> usize {
    let groups = program.kv_groups.iter();
    let tokens = |window: Option<usize>| end - window.map_or(0, |window| (position + 1).saturating_sub(window));
    groups.map(|group| 2 * group.elements_per_token() * tokens(group.window)).sum()
}

#[test]
fn a_long_sequence_takes_the_memory_that_its_windows_need() {
    let program = program();
    let layers =
        |window| program.kv_groups.iter().filter(move |group| group.window == window).map(|group| group.layers.len());
    assert_eq!((layers(None).sum::<usize>(), layers(Some(WINDOW)).sum::<usize>()), (4, 22));
    let backend = CpuBackend::new(CpuConfig::default()).expect("there are threads");
    let spec = kv_cache_spec(&backend, &program, BLOCK, 8 << 10);
    let limits =
        EngineConfig { max_model_len: CONTEXT + 2 * WINDOW, max_num_batched_tokens: STEP, ..EngineConfig::default() };
    let mut scheduler = ManualScheduler::new(limits, &spec);
    scheduler.add((0..CONTEXT as u32).collect(), 100);
    let mut position = 0;
    for step in 0..CONTEXT / STEP + 64 {
        let tokens = scheduler.schedule().tokens.len();
        let end = position + tokens;
        let (used, needed) =
            (scheduler.used_blocks() as f64 * spec.block_bytes as f64, needed(&program, position, end));
        // For a shorter one, the room that a group leaves in its blocks counts for more.
        if end >= CONTEXT / 2 {
            let ratio = used / needed as f64;
            assert!((1.0..1.1).contains(&ratio), "step {step}: {ratio} of the memory for {end} tokens");
        }
        position = end;
        scheduler.retire(1);
    }
    assert!(position > CONTEXT);
    let every_token = 2 * program.kv_groups.iter().map(|group| group.elements_per_token()).sum::<usize>() * CONTEXT;
    let promised = spec.blocks_for(CONTEXT, STEP) as u64 * spec.block_bytes;
    assert!(promised * 4 < every_token as u64, "{promised} bytes for a sequence, {every_token} without windows");
    assert_eq!(backend.kv_dtype(), "bfloat16");
}
