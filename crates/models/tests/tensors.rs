//! Checkpoints whose tensors differ from what families usually have: those of experts, and names without a prefix.
//! Damage is an error that describes the defect.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use octavo_models::{Checkpoint, build_program};
use octavo_ops::{KvScales, WeightSource};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

const LAYER: &str = "model.layers.0.mlp.experts.";

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata").join(name)
}

/// A tensor of a copy that a test changes.
type Tensors = HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Opens a copy of a checkpoint whose tensors were changed. Returns the error of its program, if there is one.
fn changed(name: &str, change: impl FnOnce(&mut Tensors)) -> Result<Checkpoint, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(testdata(name).join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(testdata(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Tensors =
        file.iter().map(|(name, t)| (name.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect();
    change(&mut tensors);
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).map_err(|error| error.to_string())?;
    build_program(&checkpoint).map(|_| checkpoint).map_err(|error| error.to_string())
}

fn error(name: &str, change: impl FnOnce(&mut Tensors)) -> String {
    changed(name, change).expect_err("the checkpoint is damaged")
}

#[test]
fn an_unchanged_copy_opens() {
    for name in ["mixtral", "granitemoe", "gpt-oss", "gpt-oss-mxfp4", "deepseek-v2"] {
        assert!(changed(name, |_| {}).is_ok(), "{name}");
    }
}

#[test]
fn experts_that_are_missing_are_named() {
    let name = "model.layers.1.block_sparse_moe.experts.3.w2.weight";
    assert_eq!(error("mixtral", |t| drop(t.remove(name))), format!("the checkpoint has no tensor '{name}'"));
    let name = format!("{LAYER}down_proj");
    let message = error("gpt-oss", |t| drop(t.remove(&name)));
    assert_eq!(message, format!("the checkpoint has no tensor '{name}'"));
    let name = format!("{LAYER}gate_up_proj_scales");
    let message = error("gpt-oss-mxfp4", |t| drop(t.remove(&name)));
    assert_eq!(message, format!("the checkpoint has no tensor '{name}'"));
}

#[test]
fn tensors_of_experts_have_the_right_shape() {
    let reshape = |name: &str, shape: Vec<usize>| {
        let name = name.to_owned();
        move |t: &mut Tensors| t.get_mut(&name).unwrap().1 = shape
    };
    let blocks = format!("{LAYER}gate_up_proj_blocks");
    // Four experts of 160 outputs have as many bytes as five of 128.
    let message = error("gpt-oss-mxfp4", reshape(&blocks, vec![4, 160, 2, 16]));
    assert!(message.contains("is not that of a tensor of all experts"), "{message}");
    let message = error("gpt-oss-mxfp4", reshape(&blocks, vec![5, 128, 32]));
    assert!(message.contains("is not that of a tensor of all experts"), "{message}");
    let message = error("gpt-oss", reshape(&format!("{LAYER}gate_up_proj"), vec![5, 128, 64]));
    assert!(message.contains("has the shape"), "{message}");
    let message = error("granitemoe", reshape("model.layers.0.block_sparse_moe.input_linear.weight", vec![5, 64, 128]));
    assert!(message.contains("has the shape [5, 64, 128]"), "{message}");
    let codes = format!("{LAYER}down_proj_blocks");
    let message = error("gpt-oss-mxfp4", |t| {
        let (dtype, _, data) = t.get_mut(&codes).unwrap();
        (*dtype, *data) = (Dtype::I16, data.repeat(2));
    });
    assert!(message.contains("its elements are not bytes"), "{message}");
}

#[test]
fn a_tensor_of_one_expert_is_cut_from_that_of_all() {
    let checkpoint = Checkpoint::open(&testdata("gpt-oss")).unwrap();
    let all = checkpoint.tensor(&format!("{LAYER}gate_up_proj_bias")).unwrap();
    let width = 2 * all.shape[1];
    let of = |expert: usize, first: usize| -> Vec<u8> {
        let row = &all.bytes[expert * width..][..width];
        row.chunks(2).skip(first).step_by(2).flatten().copied().collect()
    };
    for expert in 0..5 {
        let tensor = |name: &str| checkpoint.tensor(&format!("{LAYER}{expert}.{name}.bias")).unwrap();
        assert_eq!(
            (&tensor("gate_proj").bytes[..], &tensor("up_proj").bytes[..]),
            (&of(expert, 0)[..], &of(expert, 1)[..])
        );
    }
    assert!(checkpoint.tensor(&format!("{LAYER}5.gate_proj.bias")).is_err(), "there are five experts");
    assert!(checkpoint.tensor(&format!("{LAYER}0.other.bias")).is_err());
}

#[test]
fn a_matrix_of_one_head_is_cut_from_that_of_all() {
    const NAME: &str = "model.layers.0.self_attn.kv_b_proj.";
    let checkpoint = Checkpoint::open(&testdata("deepseek-v2")).unwrap();
    let all = checkpoint.tensor(&format!("{NAME}weight")).unwrap();
    // Four heads of 24 rows for the keys and 20 for the values, each of 32 elements of two bytes.
    assert_eq!(all.shape, [4 * 44, 32]);
    let element = |row: usize, column: usize| &all.bytes[(row * 32 + column) * 2..][..2];
    for head in 0..4 {
        let keys = checkpoint.tensor(&format!("{NAME}{head}.k.weight")).unwrap();
        let values = checkpoint.tensor(&format!("{NAME}{head}.v.weight")).unwrap();
        assert_eq!((&keys.shape[..], &values.shape[..]), (&[32, 24][..], &[20, 32][..]));
        for column in 0..32 {
            for row in 0..24 {
                assert_eq!(&keys.bytes[(column * 24 + row) * 2..][..2], element(head * 44 + row, column));
            }
            for row in 0..20 {
                assert_eq!(&values.bytes[(row * 32 + column) * 2..][..2], element(head * 44 + 24 + row, column));
            }
        }
    }
    assert!(checkpoint.tensor(&format!("{NAME}4.k.weight")).is_err(), "there are four heads");
    assert!(checkpoint.tensor(&format!("{NAME}0.q.weight")).is_err());
    let name = format!("{NAME}weight");
    let message = error("deepseek-v2", |t| t.get_mut(&name).unwrap().1 = vec![88, 64]);
    assert!(message.contains("is not that of 4 heads with these rows"), "{message}");
    let message = error("deepseek-v2", |t| drop(t.remove(&name)));
    assert_eq!(message, format!("the checkpoint has no tensor '{name}'"));
}

/// GGUF files of DeepSeek from before 2025 have the matrices of keys and values as one, quantised by the rows of both.
#[test]
fn a_gguf_file_whose_heads_are_not_apart_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut bytes = std::fs::read(testdata("deepseek-v2-gguf").join("model.gguf")).unwrap();
    let at = bytes.windows(8).position(|name| name == b"attn_k_b").unwrap();
    bytes[at..at + 8].copy_from_slice(b"attn_kvb");
    std::fs::write(&path, bytes).unwrap();
    let message = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(message.contains("convert it with a newer llama.cpp"), "{message}");
}

#[test]
fn names_may_lack_the_prefix_of_the_model() {
    // Qwen3-Embedding is stored as the decoder alone.
    let bare = changed("qwen3", |tensors| {
        *tensors =
            tensors.drain().map(|(name, tensor)| (name.trim_start_matches("model.").to_owned(), tensor)).collect();
    });
    let bare = bare.unwrap();
    let whole = Checkpoint::open(&testdata("qwen3")).unwrap();
    assert_eq!(build_program(&bare).unwrap(), build_program(&whole).unwrap());
    let name = "model.layers.1.mlp.up_proj.weight";
    assert_eq!(bare.tensor(name).unwrap().bytes, whole.tensor(name).unwrap().bytes);
    assert!(bare.tensor("model.layers.2.mlp.up_proj.weight").is_err());
}

/// Opens a copy of a model with tensors of f32 numbers in the attention of its first layer.
fn with_scales(tensors: &[(&str, &[f32])]) -> Result<Checkpoint, String> {
    changed("qwen3", |all| {
        for (name, numbers) in tensors {
            let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            let shape = if numbers.len() == 1 { vec![] } else { vec![numbers.len()] };
            all.insert(format!("model.layers.0.self_attn.{name}"), (Dtype::F32, shape, bytes));
        }
    })
}

#[test]
fn scales_of_keys_and_values_are_found_under_every_name() {
    let scales = |tensors: &[(&str, &[f32])]| {
        let group = build_program(&with_scales(tensors).unwrap()).unwrap().kv_groups.remove(0);
        assert!((1..group.layers.len()).all(|layer| group.scales(layer) == KvScales::ONE));
        group.scales.first().map(|scales| (scales.key, scales.value))
    };
    for (key, value) in [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ] {
        assert_eq!(scales(&[(key, &[0.25]), (value, &[3.0])]), Some((0.25, 3.0)), "{key}");
        assert_eq!(scales(&[(key, &[0.25])]), Some((0.25, 0.25)), "{key} is that of both");
        assert_eq!(scales(&[(value, &[3.0])]), Some((3.0, 3.0)), "{value} is that of both");
    }
    assert_eq!(scales(&[("kv_scale", &[0.5])]), Some((0.5, 0.5)));
    assert_eq!(scales(&[]), None);
    assert_eq!(scales(&[("k_scale", &[0.5, 0.25]), ("v_scale", &[0.5, 0.25])]), None, "scales by head");
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let message = with_scales(&[("k_scale", &[wrong])]).unwrap_err();
        assert!(message.contains("self_attn.k_scale") && message.contains("positive number"), "{message}");
    }
}
