//! Adapters that are damaged, hostile or made for another model, merged and served.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::path::{Path, PathBuf};

use octavo_models::progress::Silent;
use octavo_models::{AdapterTargets, Checkpoint, MergeOptions, build_program, merge};
use octavo_ops::{AdapterSource, StorageType, WeightSource};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

const BASE: &str = "llama";
/// A module of the base, with 64 inputs and 64 outputs.
const MODULE: &str = "base_model.model.model.layers.0.self_attn.q_proj";

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata").join(name)
}

/// An adapter to write: its settings beside the usual ones, and its tensors.
struct Case {
    settings: Value,
    tensors: Vec<(String, Vec<usize>, f32)>,
}

impl Case {
    /// An adapter of rank 2 for one module of the base.
    fn sound() -> Self {
        Self { settings: json!({}), tensors: tensors(MODULE, [2, 64], [64, 2]) }
    }

    fn write(&self, folder: &Path) {
        let mut config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
        config.as_object_mut().unwrap().extend(self.settings.as_object().unwrap().clone());
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
        let bytes = |shape: &[usize], value: f32| value.to_le_bytes().repeat(shape.iter().product());
        let data: Vec<_> = self.tensors.iter().map(|(_, shape, value)| bytes(shape, *value)).collect();
        let views = self.tensors.iter().zip(&data);
        let views =
            views.map(|((name, shape, _), data)| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
        let file = safetensors::serialize(views, None).unwrap();
        std::fs::write(folder.join("adapter_model.safetensors"), file).unwrap();
    }

    /// Merges the adapter, and returns the error if there is one. No output may be left after an error.
    fn merge(&self, base: &str) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let (adapter, output) = (folder.path().join("adapter"), folder.path().join("merged"));
        self.write(&adapter);
        let merged = merge(MergeOptions { base: &testdata(base), adapter: &adapter, output: &output }, &Silent);
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, if merged.is_ok() { 2 } else { 1 });
        merged.map(|_| ()).map_err(|error| error.to_string())
    }
}

/// Returns the targets of adapters in a checkpoint.
fn targets(base: &str) -> AdapterTargets {
    let checkpoint = Checkpoint::open(&testdata(base)).unwrap();
    AdapterTargets::new(&checkpoint, &build_program(&checkpoint).unwrap().with_adapters())
}

fn tensors(module: &str, a: [usize; 2], b: [usize; 2]) -> Vec<(String, Vec<usize>, f32)> {
    vec![(format!("{module}.lora_A.weight"), a.into(), 0.5), (format!("{module}.lora_B.weight"), b.into(), 0.25)]
}

#[test]
fn a_sound_adapter_is_merged() {
    assert_eq!(Case::sound().merge(BASE), Ok(()));
}

#[test]
fn experts_in_blocks_are_unpacked_if_an_adapter_changes_them() {
    let module = "base_model.model.model.layers.1.mlp.experts";
    let case = Case { tensors: tensors(module, [10, 64], [64, 10]), ..Case::sound() };
    assert_eq!(case.merge("gpt-oss"), Ok(()));
    let folder = tempfile::tempdir().unwrap();
    let merged = |case: &Case, name: &str| {
        let [adapter, output] = ["adapter", "merged"].map(|kind| folder.path().join(format!("{name}-{kind}")));
        case.write(&adapter);
        let base = testdata("gpt-oss-mxfp4");
        let merged = merge(MergeOptions { base: &base, adapter: &adapter, output: &output }, &Silent).unwrap();
        (merged, Checkpoint::open(&output).unwrap())
    };
    let (all, checkpoint) = merged(&case, "experts");
    // Gate with up, and down, of two layers of five experts: 17 bytes became 64.
    let elements = 2 * 5 * (64 * 128 + 64 * 64);
    assert_eq!((all.unpacked, all.unpacked_bytes), (4, [elements / 32 * 17, elements * 2]));
    assert_eq!(checkpoint.quantisation(), None);
    let base = Checkpoint::open(&testdata("gpt-oss-mxfp4")).unwrap();
    // The first layer keeps its values.
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let [before, after] = [&base, &checkpoint].map(|checkpoint| checkpoint.tensor(name).unwrap());
    assert_eq!((&before.shape[..], before.storage), (&[5, 64, 128][..], StorageType::BF16));
    assert_eq!((after.shape, after.storage, after.bytes), (before.shape, before.storage, before.bytes));
    // An adapter of attention leaves the blocks as they are.
    let attention = Case { tensors: tensors(MODULE, [2, 64], [128, 2]), ..Case::sound() };
    let (none, checkpoint) = merged(&attention, "attention");
    assert_eq!((none.unpacked, none.unpacked_bytes), (0, [0; 2]));
    assert_eq!(checkpoint.quantisation(), base.quantisation());
}

#[test]
fn an_adapter_that_does_not_fit_is_refused() {
    let module = "base_model.model.model.layers.0.self_attn";
    for (tensors, part) in [
        (vec![], "it has no tensors of LoRA"),
        (
            tensors(MODULE, [2, 32], [64, 2]),
            "'model.layers.0.self_attn.q_proj.weight' is 64 x 32, but the weight has the shape",
        ),
        (tensors(MODULE, [3, 64], [64, 3]), "the ranks 3 and 3; its configuration says 2"),
        (tensors(MODULE, [2, 64], [64, 4]), "the ranks 2 and 4"),
        (
            tensors(&format!("{module}.x_proj"), [2, 64], [64, 2]),
            "the model has no weight 'model.layers.0.self_attn.x_proj.weight'",
        ),
        (tensors("model.layers.0.self_attn.q_proj", [2, 64], [64, 2]), "does not begin with base_model.model."),
        (tensors(MODULE, [2, 64], [64, 2])[..1].to_vec(), "has one of the tensors A and B only"),
        (vec![(format!("{module}.q_proj.lora_magnitude_vector"), vec![64], 1.0)], "is none of LoRA"),
        (
            vec![
                (format!("{MODULE}.lora_A.weight"), vec![2, 64], f32::NAN),
                tensors(MODULE, [2, 64], [64, 2]).remove(1),
            ],
            "not finite",
        ),
        (
            vec![(format!("{MODULE}.lora_A.weight"), vec![128], 1.0), tensors(MODULE, [2, 64], [64, 2]).remove(1)],
            "not that of a matrix",
        ),
    ] {
        let error = Case { tensors, ..Case::sound() }.merge(BASE).unwrap_err();
        assert!(error.contains(part), "{part}: {error}");
    }
    let large = Case { settings: json!({"r": 257}), tensors: tensors(MODULE, [257, 64], [64, 257]) };
    let error = large.merge(BASE).unwrap_err();
    assert!(error.contains("the largest is 256"), "{error}");
    let dora = Case { settings: json!({"use_dora": true}), ..Case::sound() };
    assert!(dora.merge(BASE).unwrap_err().contains("'use_dora'"));
}

#[test]
fn a_model_without_such_weights_is_refused() {
    let error = Case::sound().merge("llama-gguf/model.gguf").unwrap_err();
    assert!(error.contains("is a GGUF file"), "{error}");
    let error = Case::sound().merge("bert-sentence").unwrap_err();
    assert!(error.contains("sentence-transformers"), "{error}");
}

#[test]
fn an_existing_folder_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (adapter, output) = (folder.path().join("adapter"), folder.path().join("merged"));
    Case::sound().write(&adapter);
    std::fs::create_dir(&output).unwrap();
    std::fs::write(output.join("mine"), "").unwrap();
    let options = MergeOptions { base: &testdata(BASE), adapter: &adapter, output: &output };
    let error = merge(options, &Silent).unwrap_err().to_string();
    assert!(error.contains("the folder exists and is not empty"), "{error}");
    std::fs::remove_file(output.join("mine")).unwrap();
    merge(options, &Silent).unwrap();
    assert!(output.join("tokenizer.json").exists() && output.join("config.json").exists());
}

#[test]
fn damaged_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("merged");
    let merged = |adapter: &Path| {
        let options = MergeOptions { base: &testdata(BASE), adapter, output: &output };
        merge(options, &Silent).unwrap_err().to_string()
    };
    assert!(merged(folder.path()).contains("there is no adapter_config.json"));
    let adapter = folder.path().join("adapter");
    Case::sound().write(&adapter);
    std::fs::write(adapter.join("adapter_model.safetensors"), "text").unwrap();
    assert!(merged(&adapter).contains("the safetensors header is invalid"));
    std::fs::write(adapter.join("adapter_config.json"), "[]").unwrap();
    assert!(merged(&adapter).contains("it is not a JSON object"));
}

#[test]
fn an_adapter_that_cannot_be_served_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let module = |name: &str| format!("base_model.model.model.layers.0.{name}");
    let load = |base: &str, case: Case, rank: usize| {
        case.write(folder.path());
        targets(base).load(folder.path(), rank).map(|adapter| adapter.rank()).map_err(|error| error.to_string())
    };
    assert_eq!(load(BASE, Case::sound(), 2), Ok(2));
    assert_eq!(load("llama-gguf/model.gguf", Case::sound(), 16), Ok(2));
    let of = |name: &str, a, b| Case { tensors: tensors(&module(name), a, b), ..Case::sound() };
    for (base, case, rank, part) in [
        (
            BASE,
            Case::sound(),
            1,
            "its rank 2 at 'model.layers.0.self_attn.q_proj' is above the largest that is served, 1",
        ),
        (
            BASE,
            of("self_attn.x_proj", [2, 64], [64, 2]),
            16,
            "the model has no weight 'model.layers.0.self_attn.x_proj'",
        ),
        (BASE, of("self_attn.q_norm", [2, 64], [64, 2]), 16, "that adapters can change"),
        (
            BASE,
            of("self_attn.q_proj", [2, 64], [32, 2]),
            16,
            "is 32 x 64, but the model's weight has 64 outputs and 64 inputs",
        ),
        (
            "qwen3-moe",
            of("mlp.experts.1.up_proj", [2, 64], [48, 2]),
            16,
            "its delta of 'model.layers.0.mlp.experts.1.up_proj' is 48 x 64, but the model's weight has 32 outputs",
        ),
        (
            "qwen3-moe",
            of("mlp.experts.6.up_proj", [2, 64], [32, 2]),
            16,
            "the model has no weight 'model.layers.0.mlp.experts.6.up_proj' that adapters can change",
        ),
        ("qwen3-moe", of("mlp.gate", [2, 64], [4, 2]), 16, "its delta of 'model.layers.0.mlp.gate' is 4 x 64"),
        (
            "qwen3-moe",
            of("mlp.experts", [12, 64], [65, 12]),
            16,
            "'model.layers.0.mlp.experts' is 65 x 64, but the experts have 64 x 64 and 64 x 32",
        ),
        (
            "qwen3-moe",
            of("mlp.experts", [14, 64], [64, 14]),
            16,
            "have 14 rows for 6 experts; its configuration says the rank 2",
        ),
        (BASE, of("mlp.experts", [12, 64], [64, 12]), 16, "the model has no experts 'model.layers.0.mlp.experts'"),
    ] {
        let error = load(base, case, rank).unwrap_err();
        assert!(error.contains(part), "{part}: {error}");
    }
    let error = targets(BASE).load(&folder.path().join("none"), 16).unwrap_err().to_string();
    assert!(error.contains("has no adapter: there is no adapter_config.json"), "{error}");
}

/// GGUF files have tensors of all experts, which are divided differently from the parameters of transformers.
#[test]
fn parameters_of_all_experts_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let module = "base_model.model.model.layers.1.mlp.experts";
    for (base, experts, hidden, inner) in [
        ("qwen3-moe-gguf/model.gguf", 6, 64, 32),
        ("mixtral-gguf/model.gguf", 5, 64, 64),
        ("gpt-oss-gguf/model.gguf", 5, 64, 64),
        ("gpt-oss-mxfp4", 5, 64, 64),
        ("granitemoe-gguf/model.gguf", 5, 64, 64),
        ("granitemoe", 5, 64, 64),
        ("deepseek-v2", 8, 64, 24),
    ] {
        let ranks = 2 * experts;
        let mut all = tensors(&format!("{module}.base_layer"), [ranks, hidden], [2 * inner, ranks]);
        all.extend(tensors(module, [ranks, inner], [hidden, ranks]));
        Case { tensors: all, settings: json!({"target_parameters": ["mlp.experts.down_proj"]}) }.write(folder.path());
        let adapter = targets(base).load(folder.path(), 2).map_err(|error| error.to_string());
        let numbers = if base == "granitemoe" { 2 * inner + hidden } else { 2 * (inner + hidden) } + hidden + inner;
        assert_eq!(adapter.map(|adapter| adapter.bytes()), Ok(4 * (ranks * numbers) as u64), "{base}");
    }
}

/// Some families fuse projections, and a mixture of experts has plain products beside the experts.
#[test]
fn every_family_lists_its_modules() {
    let folder = tempfile::tempdir().unwrap();
    for (base, name, tensor) in [
        ("phi3", "self_attn.qkv_proj", "model.layers.0.self_attn.qkv_proj.weight"),
        ("phi3-gguf/model.gguf", "self_attn.qkv_proj", "blk.0.attn_qkv.weight"),
        ("phi3-gguf/model.gguf", "mlp.gate_up_proj", "blk.0.ffn_up.weight"),
        ("gemma3", "mlp.gate_proj", "model.layers.0.mlp.gate_proj.weight"),
        ("gemma3-gguf/model.gguf", "mlp.up_proj", "blk.0.ffn_up.weight"),
        ("qwen3-moe", "self_attn.v_proj", "model.layers.0.self_attn.v_proj.weight"),
        ("qwen3-moe", "mlp.gate", "model.layers.0.mlp.gate.weight"),
        ("mixtral", "block_sparse_moe.experts.4.w2", "model.layers.0.block_sparse_moe.experts.4.w2.weight"),
        ("mixtral", "mlp.experts.0.up_proj", "model.layers.0.block_sparse_moe.experts.0.w3.weight"),
        ("deepseek-v3", "mlp.experts.7.down_proj", "model.layers.1.mlp.experts.7.down_proj.weight"),
        ("gpt-oss", "mlp.router", "model.layers.0.mlp.router.weight"),
        ("granitemoe", "block_sparse_moe.router.layer", "model.layers.0.block_sparse_moe.router.layer.weight"),
        ("qwen2-moe", "mlp.shared_expert.gate_proj", "model.layers.1.mlp.shared_expert.gate_proj.weight"),
        ("deepseek-v3", "self_attn.q_a_proj", "model.layers.0.self_attn.q_a_proj.weight"),
    ] {
        let shape = Checkpoint::open(&testdata(base)).unwrap().tensor(tensor).unwrap().shape;
        let layer = if tensor.contains("layers.1.") { 1 } else { 0 };
        let module = format!("base_model.model.model.layers.{layer}.{name}");
        let case = Case { tensors: tensors(&module, [2, shape[1]], [shape[0], 2]), ..Case::sound() };
        case.write(folder.path());
        let rank = targets(base).load(folder.path(), 16).map(|adapter| adapter.rank());
        assert_eq!(rank.map_err(|error| error.to_string()), Ok(2), "{base}, {name}");
    }
}
