//! Tests of a checkpoint's data other than tensors, in both formats.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod images;
mod refused;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use octavo_models::{
    Checkpoint, CheckpointError, Format, ImageGrid, ImageSize, KvScheme, Programs, Resample, TokenizerData,
    build_program, build_programs,
};
use octavo_ops::dummy::DummyWeights;
use octavo_ops::{Program, StorageType, WeightError, WeightSource};
use serde_json::{Value, json};

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata").join(name)
}

/// A copy of a directory of the test data that a test may corrupt.
struct Copy(tempfile::TempDir);

impl Copy {
    fn of_model(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(testdata(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        Self(folder)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn write(&self, file: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.path(file), text).unwrap();
    }

    /// Changes one key of a JSON file; `null` counts as missing.
    fn set(&self, file: &str, key: &str, value: Value) {
        let mut object: Value = serde_json::from_slice(&std::fs::read(self.path(file)).unwrap()).unwrap();
        object[key] = value;
        self.write(file, object.to_string());
    }

    fn open(&self) -> Result<Checkpoint, String> {
        Checkpoint::open(self.0.path()).map_err(|e| e.to_string())
    }

    fn error(&self) -> String {
        self.open().expect_err("this must not open")
    }

    fn program_error(&self) -> String {
        build_program(&self.open().unwrap()).expect_err("this must not make a program").to_string()
    }
}

/// Checks that `error` contains every one of `words`.
fn names(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "no '{word}' in: {error}");
    }
}

#[test]
fn a_gguf_file_brings_its_vocabulary_template_and_end_of_generation_ids() {
    let checkpoint = Checkpoint::open(&testdata("llama-gguf/model.gguf")).unwrap();
    assert_eq!(checkpoint.format(), Format::Gguf);
    assert_eq!(checkpoint.config().vocab_size, 320);
    assert!(checkpoint.config().tie_word_embeddings);
    assert!(checkpoint.chat_template().unwrap().contains("<|im_start|>"));
    // The header declares 0 as end of sequence, but <|im_end|> (2) ends a chat turn too.
    assert_eq!(checkpoint.generation_config().eos_token_ids, [0, 2]);
    let TokenizerData::Gguf(tokenizer) = checkpoint.tokenizer().unwrap() else { panic!("of the wrong kind") };
    assert_eq!((tokenizer.model.as_str(), tokenizer.pre.as_deref()), ("gpt2", Some("gpt-2")));
    assert_eq!((tokenizer.tokens.len(), tokenizer.token_types.len()), (320, 320));
    assert_eq!(tokenizer.tokens[2], "<|im_end|>");
    assert_eq!((tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos), (Some(0), Some(0), Some(false)));
    assert!(tokenizer.merges.iter().all(|merge| merge.contains(' ')));
}

#[test]
fn gguf_tensors_are_views_with_the_outermost_dimension_first() {
    let checkpoint = Checkpoint::open(&testdata("llama-gguf/model.gguf")).unwrap();
    let k = checkpoint.tensor("blk.0.attn_k.weight").unwrap();
    assert_eq!((k.storage, k.shape.as_slice()), (StorageType::Q8_0, &[32, 64][..]));
    assert_eq!(k.bytes.len(), StorageType::Q8_0.bytes_for(32 * 64).unwrap());
    assert!(matches!(k.bytes, std::borrow::Cow::Borrowed(_)));
    assert_eq!(checkpoint.tensor("nothing").unwrap_err(), WeightError::Missing("nothing".into()));
    let summary = checkpoint.storage_summary();
    assert!(summary.is_sorted_by(|a, b| a.bytes >= b.bytes));
    assert_eq!(summary.iter().map(|t| t.tensors).sum::<usize>(), 21);
}

#[test]
fn a_directory_brings_tokenizer_special_tokens_and_defaults() {
    let checkpoint = Checkpoint::open(&testdata("qwen3")).unwrap();
    assert_eq!(checkpoint.format(), Format::HuggingFace);
    assert_eq!(checkpoint.config().dtype, "bfloat16");
    let generation = checkpoint.generation_config();
    assert_eq!((generation.temperature, generation.top_p, generation.top_k), (Some(0.6), Some(0.95), Some(20)));
    assert_eq!(generation.eos_token_ids, [2, 0]);
    let tokenizer = checkpoint.tokenizer().unwrap();
    let TokenizerData::Json { tokenizer_json, bos, eos, unk, pad, add_bos, add_eos } = tokenizer else {
        panic!("of the wrong kind")
    };
    assert!(tokenizer_json.starts_with(b"{"));
    assert_eq!((bos, add_bos, add_eos), (None, Some(false), None));
    let text = |token: Option<String>| token.unwrap();
    assert_eq!((text(eos), text(unk), text(pad)), ("<|im_end|>".into(), "<|endoftext|>".into(), "<|im_end|>".into()));
}

#[test]
fn chat_template_jinja_wins_over_tokenizer_config() {
    let copy = Copy::of_model("qwen3");
    assert!(copy.open().unwrap().chat_template().unwrap().contains("<|im_start|>"));
    std::fs::remove_file(copy.path("chat_template.jinja")).unwrap();
    assert_eq!(copy.open().unwrap().chat_template(), Some("shadowed by chat_template.jinja"));
    std::fs::write(copy.path("chat_template.json"), r#"{"chat_template": "in an object"}"#).unwrap();
    assert_eq!(copy.open().unwrap().chat_template(), Some("in an object"));
    std::fs::remove_file(copy.path("chat_template.json")).unwrap();
    copy.set("tokenizer_config.json", "chat_template", Value::Null);
    assert_eq!(copy.open().unwrap().chat_template(), None);
}

/// Writes a checkpoint with some tensors changed.
fn with_tensors(copy: &Copy, change: impl Fn(&mut BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>)) {
    let file = std::fs::read(copy.path("model.safetensors")).unwrap();
    let read = safetensors::SafeTensors::deserialize(&file).unwrap();
    let owned = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    let mut tensors = read.tensors().into_iter().map(owned).collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    copy.write("model.safetensors", safetensors::serialize(views, None).unwrap());
}

#[test]
fn a_gguf_file_in_pieces_is_that_file() {
    let whole = Checkpoint::open(&testdata("llama-gguf").join("model.gguf")).unwrap();
    let program = build_program(&whole).unwrap();
    let copy = Copy::of_model("llama-gguf-split");
    let piece = |number: usize| copy.path(&format!("model-{number:05}-of-00003.gguf"));
    for number in 1..=3 {
        let split = Checkpoint::open(&piece(number)).unwrap();
        assert_eq!(build_program(&split).unwrap(), program);
        assert_eq!(split.config(), whole.config());
        for part in program.weights.iter().flat_map(|weight| &weight.parts) {
            let [found, expected] = [&split, &whole].map(|checkpoint| checkpoint.tensor(&part.tensor).unwrap());
            assert_eq!((found.shape, found.bytes), (expected.shape, expected.bytes), "{}", part.tensor);
        }
    }
    let error = || Checkpoint::open(&piece(1)).unwrap_err().to_string();
    let second = std::fs::read(piece(2)).unwrap();
    std::fs::copy(piece(3), piece(2)).unwrap();
    names(&error(), &["model-00002-of-00003.gguf", "it is not piece 2 of 3 of", "model-00001-of-00003.gguf"]);
    std::fs::remove_file(piece(2)).unwrap();
    names(&error(), &["model-00002-of-00003.gguf", "No such file"]);
    copy.write("model-00002-of-00003.gguf", second);
    std::fs::rename(piece(1), copy.path("model.gguf")).unwrap();
    let error = Checkpoint::open(&copy.path("model.gguf")).unwrap_err().to_string();
    names(&error, &["it is one of 3 pieces, and its name must end with '-00001-of-00003.gguf'"]);
}

#[test]
fn of_several_named_chat_templates_the_default_is_taken() {
    let checkpoint = Checkpoint::open(&testdata("llama")).unwrap();
    assert!(checkpoint.chat_template().unwrap().contains("<|im_start|>"));
    let copy = Copy::of_model("llama");
    copy.set("tokenizer_config.json", "chat_template", json!([{"name": "rag", "template": "only"}]));
    assert_eq!(copy.open().unwrap().chat_template(), Some("only"));
    copy.set("tokenizer_config.json", "chat_template", json!(17));
    names(&copy.error(), &["tokenizer_config.json", "chat_template"]);
}

#[test]
fn end_of_sequence_ids_come_from_tokenizer_config_and_generation_config() {
    let copy = Copy::of_model("llama");
    copy.set("config.json", "eos_token_id", json!([7, 2]));
    copy.set("generation_config.json", "eos_token_id", json!(9));
    assert_eq!(copy.open().unwrap().generation_config().eos_token_ids, [2, 7, 9]);
    copy.set("generation_config.json", "eos_token_id", json!("two"));
    names(&copy.error(), &["generation_config.json", "eos_token_id"]);
}

/// The tokenizer of the test ends its texts with 2.
#[test]
fn end_of_sequence_ids_of_every_family_are_read() {
    for (config, generation, expected) in [
        (json!(null), json!(null), &[2][..]),
        (json!(2), json!(2), &[2]),
        // Llama 3, Gemma 3, Phi-3 and GPT-OSS.
        (json!([128_001, 128_008, 128_009]), json!(null), &[2, 128_001, 128_008, 128_009]),
        (json!([1, 106]), json!([1, 106]), &[2, 1, 106]),
        (json!(32_000), json!([32_007, 32_001, 32_000]), &[2, 32_000, 32_007, 32_001]),
        (json!(200_002), json!([200_002, 199_999, 200_012]), &[2, 200_002, 199_999, 200_012]),
    ] {
        let copy = Copy::of_model("llama");
        copy.set("config.json", "eos_token_id", config);
        copy.set("generation_config.json", "eos_token_id", generation);
        assert_eq!(copy.open().unwrap().generation_config().eos_token_ids, expected);
    }
    // A list that is not made of ids is refused.
    for wrong in [json!([1, -1]), json!([1, null]), json!([1.5])] {
        let copy = Copy::of_model("llama");
        copy.set("generation_config.json", "eos_token_id", wrong);
        names(&copy.error(), &["generation_config.json", "eos_token_id"]);
    }
}

#[test]
fn defaults_that_no_request_may_ask_for_are_dropped() {
    let copy = Copy::of_model("llama");
    copy.set("generation_config.json", "temperature", json!(-1));
    copy.set("generation_config.json", "top_p", json!(7));
    copy.set("generation_config.json", "top_k", json!(-1));
    let generation = copy.open().unwrap().generation_config().clone();
    assert_eq!((generation.temperature, generation.top_p, generation.top_k), (None, None, Some(0)));
}

#[test]
fn both_forms_of_rotary_parameters_read_the_same() {
    let new = Copy::of_model("llama3-rope");
    let old = Copy::of_model("llama3-rope");
    let mut parameters: Value = serde_json::from_slice(&std::fs::read(old.path("config.json")).unwrap()).unwrap();
    let mut parameters = parameters["rope_scaling"].take();
    parameters["rope_theta"] = json!(10000.0);
    new.set("config.json", "rope_parameters", parameters);
    new.set("config.json", "rope_scaling", Value::Null);
    new.set("config.json", "rope_theta", Value::Null);
    assert_eq!(new.open().unwrap().config(), old.open().unwrap().config());
}

#[test]
fn shards_are_found_by_their_index_and_only_beside_it() {
    let copy = Copy::of_model("qwen3-sharded");
    assert!(build_program(&copy.open().unwrap()).is_ok());
    let index = "model.safetensors.index.json";
    for name in ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b", "", ".", "..", "c:x", "x\0y"] {
        copy.set(index, "weight_map", json!({ "lm_head.weight": name }));
        names(&copy.error(), &[index, "not a plain file name"]);
    }
    copy.set(index, "weight_map", json!({ "lm_head.weight": "absent.safetensors" }));
    names(&copy.error(), &["absent.safetensors"]);
    copy.set(index, "weight_map", json!({}));
    names(&copy.error(), &["0 files"]);
    copy.set(index, "weight_map", json!({ "invented": "model-00001-of-00002.safetensors" }));
    names(&copy.error(), &["'invented'"]);
    std::fs::copy(copy.path("model-00001-of-00002.safetensors"), copy.path("again.safetensors")).unwrap();
    copy.set(index, "weight_map", json!({ "a": "again.safetensors", "b": "model-00001-of-00002.safetensors" }));
    names(&copy.error(), &["another shard"]);
}

#[test]
fn a_configuration_alone_is_a_model_of_made_up_weights() {
    let (folder, whole) = (tempfile::tempdir().unwrap(), testdata("qwen3"));
    std::fs::copy(whole.join("config.json"), folder.path().join("config.json")).unwrap();
    let dummy = Checkpoint::open_without_weights(folder.path()).unwrap();
    assert!(dummy.is_dummy() && !dummy.has_tokenizer());
    let program = build_program(&dummy).unwrap();
    assert_eq!(program, build_program(&Checkpoint::open(&whole).unwrap()).unwrap(), "as with the weights");
    let weights = DummyWeights::new(&program);
    for weight in &program.weights {
        for part in &weight.parts {
            let data = weights.tensor(&part.tensor).unwrap();
            part.read(weight.cols, &weights).unwrap();
            assert_eq!(weights.tensor(&part.tensor).unwrap().bytes, data.bytes, "the same every time");
        }
    }
    assert!(weights.tensor("another").is_err());
    assert!(Checkpoint::open_shape(folder.path()).unwrap().is_dummy());
    assert!(!Checkpoint::open_shape(&whole).unwrap().is_dummy(), "weights that are there are looked at");
    // Dummy weights are never used without a request for them.
    let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("neither model.safetensors nor"), "{error}");
    let error = Checkpoint::open_without_weights(&testdata("llama-gguf/model.gguf")).unwrap_err().to_string();
    assert!(error.contains("a directory with a config.json only"), "{error}");
}

#[test]
fn the_shape_for_benchmarks_is_qwen3_8bs() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shapes/qwen3-8b");
    let checkpoint = Checkpoint::open_without_weights(&path).unwrap();
    let program = build_program(&checkpoint).unwrap();
    // The model's card states 8.2 billion parameters, 6.95 without the embedding and the head.
    assert_eq!(program.parameters(), 8_190_735_360);
    assert_eq!(program.weight_bytes(), 2 * program.parameters());
    assert_eq!(checkpoint.config().dtype, "bfloat16");
}

#[test]
fn the_type_of_the_kv_cache_is_that_of_the_scheme() {
    let scheme = |key: &str, value: Value| {
        let copy = Copy::of_model("quantised/fp8");
        let text = std::fs::read(copy.path("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        config["quantization_config"][key] = value;
        copy.write("config.json", config.to_string());
        copy.open().map(|checkpoint| checkpoint.kv_scheme().cloned())
    };
    let tensor = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true});
    assert_eq!(scheme("kv_cache_scheme", tensor), Ok(Some(KvScheme::Fp8)));
    assert_eq!(scheme("kv_cache_quant_algo", json!("FP8")), Ok(Some(KvScheme::Fp8)));
    assert_eq!(scheme("kv_cache_scheme", Value::Null), Ok(None));
    let heads = json!({"num_bits": 8, "type": "float", "strategy": "attn_head"});
    assert_eq!(scheme("kv_cache_scheme", heads), Ok(Some(KvScheme::Other("8 bits, float, attn_head".into()))));
    assert_eq!(scheme("kv_cache_quant_algo", json!("NVFP4")), Ok(Some(KvScheme::Other("NVFP4".into()))));
    assert!(scheme("kv_cache_scheme", json!(8)).is_err());
}

#[test]
fn inputs_may_be_rounded_as_the_makers_of_the_checkpoint_do() {
    let allowed = |model: &str, change: fn(&mut Value)| {
        let copy = Copy::of_model(model);
        let mut config: Value = serde_json::from_slice(&std::fs::read(copy.path("config.json")).unwrap()).unwrap();
        change(&mut config["quantization_config"]);
        copy.write("config.json", config.to_string());
        build_program(&copy.open().unwrap()).unwrap().fp8_inputs
    };
    assert!(allowed("quantised/fp8", |_| ()) && allowed("quantised/fp8-block", |_| ()));
    assert!(!allowed("quantised/float-quantized", |_| ()), "only its weights are rounded");
    assert!(allowed("quantised/float-quantized", |config| {
        config["config_groups"]["group_0"]["input_activations"] = json!({"num_bits": 8, "type": "float"});
    }));
    assert!(!allowed("quantised/int-quantized", |config| {
        config["config_groups"]["group_0"]["input_activations"] = json!({"num_bits": 8, "type": "int"});
    }));
    assert!(!allowed("quantised/gptq", |_| ()) && !allowed("llama", |_| ()));
}

#[test]
fn a_file_beside_the_configuration_says_how_weights_are_quantised() {
    const WEIGHT: &str = "model.layers.0.self_attn.q_proj.weight";
    let moved = |model: &str, file: &str, change: fn(Value) -> Value| {
        let copy = Copy::of_model(model);
        let expected = copy.open().unwrap();
        let config: Value = serde_json::from_slice(&std::fs::read(copy.path("config.json")).unwrap()).unwrap();
        let mut settings = config["quantization_config"].clone();
        settings.as_object_mut().unwrap().remove("quant_method");
        copy.set("config.json", "quantization_config", Value::Null);
        copy.write(file, change(settings).to_string());
        let found = copy.open().unwrap();
        assert!(expected.quantisation().is_some());
        assert_eq!(found.quantisation(), expected.quantisation(), "{model}");
        let [found, expected] = [&found, &expected].map(|checkpoint| checkpoint.tensor(WEIGHT).unwrap());
        assert_eq!((found.storage, &found.bytes), (expected.storage, &expected.bytes), "{model}");
        copy
    };
    moved("quantised/gptq", "quantize_config.json", |settings| settings);
    moved("quantised/awq", "quant_config.json", |mut settings| {
        let object = settings.as_object_mut().unwrap();
        for (new, old) in [("bits", "w_bit"), ("group_size", "q_group_size")] {
            let value = object.remove(new).unwrap();
            object.insert(old.into(), value);
        }
        settings
    });
    let copy = moved(
        "quantised/modelopt-nvfp4",
        "hf_quant_config.json",
        |settings| json!({"producer": {"name": "modelopt", "version": "0.37"}, "quantization": settings}),
    );
    // The file of ModelOpt is the first that is read.
    copy.write("quantize_config.json", json!({"bits": 3}).to_string());
    assert_eq!(copy.open().unwrap().quantisation(), Some("modelopt"));
    copy.write("hf_quant_config.json", "{}");
    names(&copy.error(), &["hf_quant_config.json", "no object 'quantization'"]);
}
