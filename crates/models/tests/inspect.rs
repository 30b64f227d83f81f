//! Compares the output of `octavo inspect` with `snapshots/`. `UPDATE_SNAPSHOTS=1` updates them.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::path::{Path, PathBuf};

use octavo_models::{Checkpoint, InspectOptions, build_programs, inspect, inspect_encoder};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn check(name: &str, file: &str, options: &InspectOptions) {
    let checkpoint = Checkpoint::open(&root().join("../../models/testdata").join(file)).unwrap();
    let programs = build_programs(&checkpoint).unwrap();
    let config = checkpoint.config();
    let mut found = inspect(config, &programs.decoder, options);
    if let (Some(vision), Some(encoder)) = (&config.vision, &programs.encoder) {
        found += &format!("\n{}", inspect_encoder(vision, encoder, options));
    }
    let path = root().join("tests/snapshots").join(format!("{name}.txt"));
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    assert_eq!(found, expected, "the text has changed; if that is right, run again with UPDATE_SNAPSHOTS=1");
}

#[test]
fn a_gguf_file_of_mixed_types_folds_its_layers() {
    check("llama-gguf", "llama-gguf/model.gguf", &InspectOptions::default());
}

#[test]
fn a_directory_whose_layers_differ_shows_each() {
    check("qwen2-window", "qwen2-window", &InspectOptions { context: 100, prompt: 64, ..InspectOptions::default() });
}

#[test]
fn q_and_k_norms_are_weights_of_their_op() {
    check("qwen3", "qwen3", &InspectOptions { context: 1, prompt: 1, ..InspectOptions::default() });
}

#[test]
fn an_encoder_has_a_program_of_its_own() {
    check(
        "qwen3-vl",
        "qwen3-vl",
        &InspectOptions { context: 1, prompt: 20, image_side: 32, ..InspectOptions::default() },
    );
}

#[test]
fn an_encoder_in_an_mmproj_file_is_printed_too() {
    check(
        "qwen3-vl-gguf",
        "qwen3-vl-gguf/model.gguf",
        &InspectOptions { context: 1, prompt: 20, image_side: 32, ..InspectOptions::default() },
    );
}

#[test]
fn an_encoder_without_rotary_positions_merges_squares() {
    check(
        "idefics3",
        "idefics3",
        &InspectOptions { context: 1, prompt: 20, image_side: 24, ..InspectOptions::default() },
    );
}

#[test]
fn experts_are_counted_as_far_as_a_step_uses_them() {
    let options = InspectOptions { context: 100, prompt: 64, ..InspectOptions::default() };
    check("qwen2-moe", "qwen2-moe", &options);
    check("gpt-oss", "gpt-oss", &options);
}

#[test]
fn latent_attention_caches_one_row_for_all_heads() {
    let options = InspectOptions { context: 100, prompt: 64, ..InspectOptions::default() };
    check("deepseek-v3", "deepseek-v3", &options);
}

#[test]
fn the_shape_of_deepseek_v2_lite_has_its_published_size() {
    let checkpoint = Checkpoint::open_shape(&root().join("../../models/shapes/deepseek-v2-lite")).unwrap();
    let program = build_programs(&checkpoint).unwrap().decoder;
    assert_eq!(program.parameters(), 15_706_484_224);
    assert_eq!(program.kv_groups[0].elements_per_token(), 27 * (512 + 64));
}
