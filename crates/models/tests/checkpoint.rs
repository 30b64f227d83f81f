//! Tests of a checkpoint's data other than tensors, in both formats, and of refused checkpoints.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

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

/// Settings that an operator gives.
fn given(settings: Value) -> serde_json::Map<String, Value> {
    settings.as_object().unwrap().clone()
}

#[test]
fn the_settings_of_an_image_processor_are_read_and_changed() {
    let copy = Copy::of_model("qwen3-vl");
    let limits = |settings: Value| match copy.open().unwrap().image_processor(&given(settings)).unwrap().unwrap().size {
        ImageSize::Area { min, max } => (min, max),
        other => panic!("{other:?}"),
    };
    assert_eq!(limits(json!({})), (1024, 4096));
    assert_eq!(limits(json!({"max_pixels": 2048})), (1024, 2048));
    assert_eq!(limits(json!({"images_kwargs": {"min_pixels": 64}})), (64, 4096));
    copy.set("preprocessor_config.json", "max_pixels", json!(3000));
    assert_eq!(limits(json!({})), (1024, 3000), "the older name wins");
    assert_eq!(limits(json!({"size": {"shortest_edge": 100, "longest_edge": 200}})), (100, 200));
    // Newer directories have one file for all kinds of input.
    std::fs::remove_file(copy.path("preprocessor_config.json")).unwrap();
    assert_eq!(limits(json!({})), (65_536, 16_777_216), "the published ones");
    let processors = r#"{"image_processor": {"size": {"shortest_edge": 7, "longest_edge": 8000}}}"#;
    std::fs::write(copy.path("processor_config.json"), processors).unwrap();
    assert_eq!(limits(json!({})), (7, 8000));
    let text = Copy::of_model("qwen3").open().unwrap();
    assert!(text.image_processor(&given(json!({}))).unwrap().is_none());
}

#[test]
fn settings_of_an_image_processor_that_change_pixels_unknown_to_us_are_errors() {
    for (key, value) in [
        ("do_sharpen", json!(true)),
        ("do_resize", json!(false)),
        ("resample", json!(0)),
        ("patch_size", json!(14)),
        ("image_mean", json!([0.5])),
        ("image_processor_type", json!("SiglipImageProcessor")),
        ("data_format", json!("channels_last")),
        ("do_image_splitting", json!(true)),
    ] {
        let copy = Copy::of_model("qwen3-vl");
        let by_flag = copy.open().unwrap().image_processor(&given(json!({key: value}))).unwrap_err();
        assert!(matches!(by_flag, CheckpointError::GivenSetting(_)), "{by_flag}");
        assert!(by_flag.to_string().contains(key), "{by_flag}");
        copy.set("preprocessor_config.json", key, value);
        let error = copy.open().unwrap().image_processor(&given(json!({}))).unwrap_err().to_string();
        assert!(error.contains("preprocessor_config.json") && error.contains(key), "{error}");
        let other = copy.open().unwrap().image_processor(&given(json!({"max_pixels": 2048}))).unwrap_err().to_string();
        assert_eq!(other, error, "the flag did not cause the error of the file");
    }
}

#[test]
fn the_settings_of_tiles_are_read_and_changed() {
    let copy = Copy::of_model("idefics3");
    let read = |settings: Value| copy.open().unwrap().image_processor(&given(settings));
    let size = |settings: Value| read(settings).unwrap().unwrap().size;
    assert_eq!(size(json!({})), ImageSize::Tiles { longest: 60, side: 26 });
    assert_eq!(size(json!({"size": {"longest_edge": 90}})), ImageSize::Tiles { longest: 90, side: 26 });
    assert_eq!(size(json!({"do_image_splitting": false})), ImageSize::Square { longest: 60, side: 26 });
    assert_eq!(size(json!({"max_image_size": {"longest_edge": 24}})), ImageSize::Tiles { longest: 60, side: 24 });
    for (key, value, words) in [
        ("max_image_size", json!({"longest_edge": 28}), "'max_image_size' of the image processor is 28"),
        ("max_image_size", json!({"height": 24, "width": 24}), "'max_image_size' of the image processor without"),
        ("max_image_size", json!(24), "'max_image_size' is not an object"),
        ("size", json!({"height": 24, "width": 24}), "'size' of the image processor without 'longest_edge'"),
        ("do_image_splitting", json!("no"), "'do_image_splitting' is not a boolean"),
        ("min_pixels", json!(4), "'min_pixels': 4"),
    ] {
        let error = read(json!({key: value})).unwrap_err();
        assert!(matches!(error, CheckpointError::GivenSetting(_)), "{error}");
        names(&error.to_string(), &[words]);
    }
    let config = read(json!({"resample": 2})).unwrap().unwrap();
    assert_eq!((config.resample, config.text.is_some()), (Resample::Bilinear, true));
    std::fs::remove_file(copy.path("preprocessor_config.json")).unwrap();
    names(&read(json!({})).unwrap_err().to_string(), &["'max_image_size' of the image processor is 364"]);
}

#[test]
fn smolvlm_is_idefics3_by_another_name() {
    let copy = Copy::of_model("idefics3");
    copy.set("config.json", "model_type", json!("smolvlm"));
    assert_eq!(copy.open().unwrap().config().family.name(), "idefics3");
}

#[test]
fn gemma_3_with_images_is_read_under_both_names_of_its_tensors() {
    let copy = Copy::of_model("gemma3-images");
    let program = build_program(&copy.open().unwrap()).unwrap();
    // The two prefixes have the same length, so the header keeps its own.
    let mut file = std::fs::read(copy.path("model.safetensors")).unwrap();
    let (old, new) = (b"\"language_model.model.", b"\"model.language_model.");
    let places: Vec<usize> = (0..file.len() - old.len()).filter(|&at| file[at..].starts_with(old)).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|&at| file[at..at + new.len()].copy_from_slice(new));
    copy.write("model.safetensors", &file);
    let checkpoint = copy.open().unwrap();
    assert_eq!(build_program(&checkpoint).unwrap(), program);
    assert!(checkpoint.tensor("model.language_model.norm.weight").is_ok());
    let encoder = build_programs(&checkpoint).unwrap().encoder.unwrap();
    // Since transformers 5, an encoder has shorter names, which leaves room for spaces in the header.
    let (old, new) = (b"\"vision_tower.vision_model.", b"             \"vision_tower.");
    let places: Vec<usize> = (0..file.len() - old.len()).filter(|&at| file[at..].starts_with(old)).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|&at| file[at..at + new.len()].copy_from_slice(new));
    copy.write("model.safetensors", &file);
    assert_eq!(build_programs(&copy.open().unwrap()).unwrap().encoder, Some(encoder));
}

#[test]
fn the_image_processor_of_gemma_3_is_read() {
    let copy = Copy::of_model("gemma3-images");
    let read = |settings: Value| copy.open().unwrap().image_processor(&given(settings));
    let config = read(json!({})).unwrap().unwrap();
    assert_eq!((config.size, config.resample), (ImageSize::Fixed { side: 32 }, Resample::Bilinear));
    let text = config.text.unwrap();
    assert_eq!(text.placeholder, Some("<start_of_image>"));
    assert_eq!((text.write)("I", 0, 0), "\n\n<start_of_image>I<end_of_image>\n\n");
    for (key, value, words) in [
        ("do_pan_and_scan", json!(true), "'do_pan_and_scan': true of the image processor"),
        ("size", json!({"height": 64, "width": 32}), "is 32 x 64, but the encoder takes 32 x 32"),
        ("size", json!({"longest_edge": 32}), "without 'height' and 'width'"),
    ] {
        names(&read(json!({key: value})).unwrap_err().to_string(), &[words]);
    }
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
fn damaged_modules_of_quantised_weights_are_named() {
    const Q: &str = "model.layers.0.self_attn.q_proj";
    let error = |name: &str, suffix: &str, shape: Option<&[usize]>| {
        let copy = Copy::of_model(&format!("quantised/{name}"));
        with_tensors(&copy, |tensors| {
            let key = format!("{Q}.{suffix}");
            let (dtype, _, data) = tensors.remove(&key).unwrap();
            if let Some(shape) = shape {
                let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
                tensors.insert(key, (dtype, shape.to_vec(), data[..bytes].to_vec()));
            }
        });
        match build_program(&copy.open().unwrap()) {
            Err(error) => error.to_string(),
            Ok(program) => {
                let checkpoint = copy.open().unwrap();
                let parts = program.weights.iter().flat_map(|weight| &weight.parts);
                let error = parts.into_iter().find_map(|part| checkpoint.tensor(&part.tensor).err());
                error.expect("the module is damaged").to_string()
            }
        }
    };
    for (name, suffix, shape, words) in [
        ("gptq", "scales", None, "q_proj.scales"),
        ("gptq", "scales", Some(&[1, 64][..]), "its 1 groups are not those of the inputs"),
        ("gptq", "g_idx", Some(&[60][..]), "are not those of the inputs"),
        ("gptq", "qweight", Some(&[512][..]), "is not that of a matrix"),
        ("gptq-zeros", "qzeros", Some(&[1, 8][..]), "do not fit"),
        ("awq", "qzeros", None, "q_proj.qzeros"),
        ("fp8-block", "weight_scale_inv", Some(&[1, 2][..]), "does not fit a weight of 64 x 64"),
        ("pack-quantized", "weight_scale", Some(&[32, 2][..]), "do not fit"),
        ("pack-quantized", "weight_shape", None, "weight_shape"),
        ("int-quantized", "weight_scale", Some(&[32, 1][..]), "do not fit"),
        ("nf4", "weight.absmax", Some(&[32][..]), "does not fit the codes"),
        ("nf4", "weight.quant_map", None, "quant_map"),
        ("int8", "SCB", Some(&[32][..]), "its 32 elements do not fit a weight of 64 x 64"),
        ("fp8", "weight_scale", None, "q_proj.weight_scale"),
        ("nvfp4", "weight_scale", Some(&[64, 2][..]), "does not fit a weight of 64 x 64"),
        ("nvfp4", "weight_global_scale", None, "q_proj.weight_global_scale"),
        ("modelopt-nvfp4", "weight_scale_2", None, "q_proj.weight_scale_2"),
        ("mxfp4", "weight_packed", Some(&[512][..]), "is not that of a matrix"),
    ] {
        let error = error(name, suffix, shape);
        assert!(error.contains(words), "{name}, {suffix}: {error}");
    }
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

/// The products of the MLP had each other's name in older mmproj files.
#[test]
fn an_older_mmproj_file_of_gemma_3_is_read() {
    let copy = Copy::of_model("gemma3-images-gguf");
    let open = || Checkpoint::open(&copy.path("model.gguf")).unwrap();
    let encoder = || build_programs(&open()).unwrap().encoder.unwrap();
    let shapes =
        |program: &Program| program.weights.iter().map(|w| (w.name.clone(), w.rows, w.cols)).collect::<Vec<_>>();
    let before = encoder();
    let file = std::fs::read(copy.path("mmproj-BF16.gguf")).unwrap();
    // A name has its length before it. The swap keeps the length of the header.
    let name = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut swapped = file;
    for (layer, kind) in (0..3).flat_map(|layer| ["weight", "bias"].map(|kind| (layer, kind))) {
        let [up, down, aside] =
            ["ffn_up", "ffn_down", "ffn_aside"].map(|part| name(&format!("v.blk.{layer}.{part}.{kind}")));
        for (from, to) in [(&up, &aside), (&down, &up), (&aside, &down)] {
            let at = (0..swapped.len()).find(|&at| swapped[at..].starts_with(from)).unwrap();
            swapped.splice(at..at + from.len(), to.iter().copied());
        }
    }
    copy.write("mmproj-BF16.gguf", &swapped);
    assert_eq!(shapes(&encoder()), shapes(&before));
    let up =
        |program: &Program| program.weights.iter().find(|w| w.name == "layers.0.up").unwrap().parts[0].tensor.clone();
    assert_eq!((up(&before).as_str(), up(&encoder()).as_str()), ("v.blk.0.ffn_up.weight", "v.blk.0.ffn_down.weight"));
}

/// Most GGUF files of a family may have no encoder, and the file beside one may be another model's.
#[test]
fn a_gguf_file_of_gemma_3_needs_no_encoder() {
    let copy = Copy::of_model("gemma3-images-gguf");
    let vision = || Checkpoint::open(&copy.path("model.gguf")).unwrap().config().vision.clone();
    assert!(vision().is_some());
    std::fs::copy(testdata("qwen3-vl-gguf").join("mmproj-BF16.gguf"), copy.path("mmproj-BF16.gguf")).unwrap();
    assert_eq!(vision(), None);
    std::fs::remove_file(copy.path("mmproj-BF16.gguf")).unwrap();
    assert_eq!(vision(), None);
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
fn damaged_safetensors_are_refused() {
    let copy = Copy::of_model("qwen2");
    let file = "model.safetensors";
    let valid = std::fs::read(copy.path(file)).unwrap();
    for len in [0, 7, 8, 100, valid.len() / 2, valid.len() - 1] {
        copy.write(file, &valid[..len]);
        names(&copy.error(), &[file, "safetensors header is invalid"]);
    }
    copy.write(file, [&u64::MAX.to_le_bytes()[..], &valid[8..]].concat());
    names(&copy.error(), &[file]);
    let header = |json: &str| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[0; 64]].concat();
    for json in [
        "not JSON",
        r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,64]}}"#,
        r#"{"a":{"dtype":"F32","shape":[16],"data_offsets":[0,18446744073709551615]}}"#,
        r#"{"a":{"dtype":"F32","shape":[16],"data_offsets":[64,0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},"b":{"dtype":"F32","shape":[12],"data_offsets":[16,64]}}"#,
        r#"{"a":{"dtype":"F32","shape":[17],"data_offsets":[0,64]}}"#,
    ] {
        copy.write(file, header(json));
        names(&copy.error(), &[file]);
    }
    // Types that no program uses may occur; they are refused when the tensor is read.
    copy.write(file, header(r#"{"a":{"dtype":"I64","shape":[8],"data_offsets":[0,64]}}"#));
    names(&copy.open().unwrap().tensor("a").unwrap_err().to_string(), &["'a'", "I64"]);
}

#[test]
fn tensors_that_do_not_fit_the_configuration_are_named() {
    let copy = Copy::of_model("qwen2");
    copy.set("config.json", "num_hidden_layers", json!(3));
    names(&copy.program_error(), &["model.layers.2.input_layernorm.weight"]);
    let copy = Copy::of_model("qwen2");
    copy.set("config.json", "vocab_size", json!(321));
    names(&copy.program_error(), &["model.embed_tokens.weight", "[320, 64]", "[321, 64]"]);
    let copy = Copy::of_model("qwen2");
    copy.set("config.json", "tie_word_embeddings", json!(false));
    names(&copy.program_error(), &["lm_head.weight"]);
    let copy = Copy::of_model("qwen2");
    copy.set("config.json", "num_key_value_heads", json!(4));
    names(&copy.program_error(), &["k_proj.weight"]);
}

#[test]
fn hostile_configurations_are_refused() {
    let cases = [
        ("num_attention_heads", json!(0), "0 attention heads"),
        ("num_attention_heads", json!(5), "5 attention heads"),
        ("num_key_value_heads", json!(0), "key-value heads is 0"),
        ("num_key_value_heads", json!(3), "3 key-value heads"),
        ("hidden_size", json!(1u64 << 40), "hidden size is 1099511627776"),
        ("hidden_size", json!("wide"), "'hidden_size' is not a non-negative integer"),
        ("hidden_size", json!(-64), "'hidden_size'"),
        ("hidden_size", Value::Null, "'hidden_size' is missing"),
        ("num_hidden_layers", json!(1u64 << 50), "number of layers is"),
        ("num_hidden_layers", json!(0), "number of layers is 0"),
        ("vocab_size", json!(u64::MAX), "vocabulary size is"),
        ("intermediate_size", json!(0), "intermediate size is 0"),
        ("max_position_embeddings", json!(0), "context length is 0"),
        ("head_dim", json!(7), "cannot be rotated in pairs"),
        ("rope_theta", json!(0), "base is 0"),
        ("rms_norm_eps", json!(-1), "epsilon is -1"),
        ("rope_scaling", json!({"rope_type": "dynamic", "factor": 2}), "rotary scaling 'dynamic' (supported"),
        ("rope_scaling", json!({"type": "linear"}), "'factor' is missing"),
        ("rope_scaling", json!({"type": "linear", "factor": 0}), "factor is 0"),
        ("hidden_act", json!("relu"), "activation 'relu'"),
        (
            "model_type",
            json!("mamba"),
            "'mamba' is not supported (supported: llama, mistral, qwen2, qwen3, qwen3_vl, idefics3, smolvlm, gemma2, \
             gemma3_text, gemma3, phi3, granite, smollm3, olmo2, mixtral, qwen2_moe, qwen3_moe, granitemoe, gpt_oss, deepseek_v2, \
             deepseek_v3, bert, roberta, xlm-roberta, modernbert)",
        ),
        ("model_type", Value::Null, "'model_type' is missing"),
        ("architectures", json!(["Qwen2ForTokenClassification"]), "Qwen2ForTokenClassification"),
        ("quantization_config", json!({"quant_method": "quark"}), "'quark'"),
    ];
    for (key, value, words) in cases {
        let copy = Copy::of_model("qwen2");
        copy.set("config.json", key, value);
        names(&copy.error(), &["config.json", words]);
    }
}

#[test]
fn what_is_no_checkpoint_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let open = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    names(&open(&folder.path().join("absent.gguf")), &["absent.gguf"]);
    names(&open(folder.path()), &["no config.json"]);
    names(&open(Path::new("/dev/zero")), &["not a regular file"]);
    let copy = Copy::of_model("qwen2");
    std::fs::remove_file(copy.path("model.safetensors")).unwrap();
    names(&copy.error(), &["neither model.safetensors"]);
    copy.write("config.json", "[1, 2");
    names(&copy.error(), &["config.json", "not a JSON object"]);
    let copy = Copy::of_model("qwen2");
    let error = copy.open().unwrap().tokenizer().unwrap_err().to_string();
    names(&error, &["tokenizer.json"]);
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
fn the_programs_of_qwen3_vl_8b_have_its_parameters() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shapes/qwen3-vl-8b");
    let checkpoint = Checkpoint::open_without_weights(&path).unwrap();
    let Programs { decoder, encoder } = build_programs(&checkpoint).unwrap();
    let encoder = encoder.unwrap();
    // The model's card states 8.77 billion parameters.
    assert_eq!((decoder.parameters(), encoder.parameters()), (8_190_735_360, 576_388_336));
    // A row of the media cache holds the last layer's output and three of deepstack.
    assert_eq!((decoder.media_columns(), encoder.media_columns()), (4 * 4096, 4 * 4096));
    assert_eq!((decoder.position_streams(), encoder.position_streams()), (3, 2));
    assert_eq!(build_program(&checkpoint).unwrap().media_columns(), 0, "without images");
}

#[test]
fn the_programs_of_smolvlm_have_its_parameters() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shapes/smolvlm-256m");
    let checkpoint = Checkpoint::open_without_weights(&path).unwrap();
    let Programs { decoder, encoder } = build_programs(&checkpoint).unwrap();
    let encoder = encoder.unwrap();
    assert_eq!((decoder.parameters(), encoder.parameters()), (162_974_016, 93_510_912));
    let entry = octavo_models::catalog::find("smolvlm-256m-instruct").unwrap();
    assert_eq!(entry.parameters, decoder.parameters() + encoder.parameters());
    assert_eq!(entry.weight_bytes, decoder.weight_bytes() + encoder.weight_bytes());
    let processor = checkpoint.image_processor(&given(json!({}))).unwrap().unwrap();
    assert_eq!(processor.size, ImageSize::Tiles { longest: 2048, side: 512 });
    assert_eq!((processor.resample, processor.mean, processor.std), (Resample::Lanczos, [0.5; 3], [0.5; 3]));
}

#[test]
fn the_programs_of_gemma_3_4b_have_its_parameters() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shapes/gemma-3-4b");
    let checkpoint = Checkpoint::open_without_weights(&path).unwrap();
    let Programs { decoder, encoder } = build_programs(&checkpoint).unwrap();
    let encoder = encoder.unwrap();
    let entry = octavo_models::catalog::find("gemma-3-4b-it").unwrap();
    assert_eq!(entry.parameters, decoder.parameters() + encoder.parameters());
    assert_eq!(entry.weight_bytes, decoder.weight_bytes() + encoder.weight_bytes());
    assert!(decoder.has_spans() && !build_program(&checkpoint).unwrap().has_spans());
    let vision = checkpoint.config().vision.as_ref().unwrap();
    assert_eq!(vision.image_tokens(ImageGrid { rows: 64, cols: 64 }), Some(256));
    let processor = checkpoint.image_processor(&given(json!({}))).unwrap().unwrap();
    assert_eq!((processor.size, processor.resample), (ImageSize::Fixed { side: 896 }, Resample::Bilinear));
}

#[test]
fn tiles_may_end_within_a_patch() {
    // The numbers of SmolVLM 2.2B: 27 whole patches of 14 pixels in a tile of 384.
    let copy = Copy::of_model("idefics3");
    let mut config: Value = serde_json::from_slice(&std::fs::read(copy.path("config.json")).unwrap()).unwrap();
    (config["vision_config"]["image_size"], config["vision_config"]["patch_size"]) = (json!(384), json!(14));
    copy.write("config.json", config.to_string());
    let checkpoint = copy.open().unwrap();
    let vision = checkpoint.config().vision.as_ref().unwrap();
    assert_eq!(vision.table_side, 27);
    assert_eq!(vision.image_tokens(octavo_models::ImageGrid { rows: 27, cols: 27 }), Some(81));
    let tiles = given(json!({"max_image_size": {"longest_edge": 384}, "size": {"longest_edge": 1536}}));
    let processor = checkpoint.image_processor(&tiles).unwrap().unwrap();
    assert_eq!(processor.size, ImageSize::Tiles { longest: 1536, side: 384 });
}

#[test]
fn a_config_of_an_encoder_that_does_not_fit_is_refused() {
    let refused = |key: &str, value: Value| {
        let copy = Copy::of_model("qwen3-vl");
        let mut config: Value = serde_json::from_slice(&std::fs::read(copy.path("config.json")).unwrap()).unwrap();
        config["vision_config"][key] = value;
        copy.write("config.json", config.to_string());
        copy.error()
    };
    names(&refused("out_hidden_size", json!(32)), &["'out_hidden_size' is 32", "64 columns"]);
    names(&refused("deepstack_visual_indexes", json!([2, 0])), &["'deepstack_visual_indexes' is [2, 0]"]);
    names(&refused("deepstack_visual_indexes", json!([1, 4])), &["'deepstack_visual_indexes' is [1, 4]", "4 layers"]);
    names(&refused("num_position_embeddings", json!(35)), &["'num_position_embeddings' is 35"]);
    names(&refused("num_heads", json!(5)), &["48 columns", "heads of 5"]);
    names(&refused("num_heads", json!(0)), &["the encoder's number of heads is 0"]);
    names(&refused("depth", Value::Null), &["'depth' is missing"]);
    let copy = Copy::of_model("qwen3-vl");
    copy.set("config.json", "vision_config", Value::Null);
    names(&copy.error(), &["'vision_config' is missing"]);
    let copy = Copy::of_model("qwen3-vl");
    copy.set("config.json", "image_token_id", json!(320));
    names(&copy.error(), &["the token 320 is beyond the vocabulary"]);
}

/// A copy of the GGUF file with an mmproj file beside it.
struct Pair(Copy);

impl Pair {
    const MMPROJ: &str = "mmproj-BF16.gguf";

    fn new() -> Self {
        Self(Copy::of_model("qwen3-vl-gguf"))
    }

    fn open(&self) -> Result<Checkpoint, String> {
        Checkpoint::open(&self.0.path("model.gguf")).map_err(|e| e.to_string())
    }

    /// Replaces the bytes behind the first occurrence of `key`, a few bytes behind it.
    fn change(&self, file: &str, key: &str, skip: usize, value: &[u8]) {
        let mut bytes = std::fs::read(self.0.path(file)).unwrap();
        let at = bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + skip;
        bytes[at..at + value.len()].copy_from_slice(value);
        self.0.write(file, bytes);
    }

    /// Returns the error after a change.
    fn refused(file: &str, key: &str, skip: usize, value: &[u8]) -> String {
        let pair = Self::new();
        pair.change(file, key, skip, value);
        pair.open().expect_err("this must not open")
    }
}

#[test]
fn an_mmproj_file_is_the_encoder_of_the_gguf_file_beside_it() {
    let checkpoint = Pair::new().open().unwrap();
    let folder = Checkpoint::open(&testdata("qwen3-vl")).unwrap();
    assert_eq!(checkpoint.config().vision, folder.config().vision);
    assert_eq!(checkpoint.config().layers, folder.config().layers);
    let [gguf, hf] = [&checkpoint, &folder].map(|checkpoint| build_programs(checkpoint).unwrap());
    assert_eq!(gguf.decoder.parameters(), hf.decoder.parameters());
    assert_eq!(gguf.encoder.unwrap().parameters(), hf.encoder.unwrap().parameters());
    assert_eq!(checkpoint.format(), Format::Gguf);
}

#[test]
fn a_gguf_file_without_its_mmproj_file_takes_text_only() {
    let pair = Pair::new();
    std::fs::remove_file(pair.0.path(Pair::MMPROJ)).unwrap();
    let checkpoint = pair.open().unwrap();
    assert_eq!(checkpoint.config().vision, None);
    assert!(build_programs(&checkpoint).unwrap().encoder.is_none());
}

#[test]
fn an_mmproj_file_of_another_model_is_refused_by_name() {
    let mmproj = Pair::MMPROJ;
    let another = "the encoder of another model";
    // Behind a key are the type of its value, in four bytes, and the value; behind the type of a string, its length.
    let error = Pair::refused(mmproj, "clip.vision.projection_dim", 4, &32u32.to_le_bytes());
    names(&error, &[mmproj, another, "32 columns", "the model has 64"]);
    let error = Pair::refused(mmproj, "clip.projector_type", 12, b"qwen2vl_merger");
    names(&error, &[mmproj, another, "'qwen2vl_merger'", "'qwen3vl_merger' is needed"]);
    let error = Pair::refused("model.gguf", "qwen3vl.n_deepstack_layers", 4, &3u32.to_le_bytes());
    names(&error, &[mmproj, another, "2 deepstack layers", "takes 3"]);
    let error = Pair::refused(mmproj, "general.architecture", 12, b"clap");
    names(&error, &[mmproj, "no image encoder", "'clap'"]);
    let error = Pair::refused(mmproj, "clip.use_gelu", 4, &[0]);
    names(&error, &[mmproj, "quick_gelu"]);
    let error = Pair::refused(mmproj, "clip.vision.attention.head_count", 4, &5u32.to_le_bytes());
    names(&error, &[mmproj, "heads of 5"]);
    let error = Pair::refused("model.gguf", "<|image_pa", 0, b"t|>");
    names(&error, &["model.gguf", "no token '<|image_pad|>'"]);
    let error = Pair::refused(mmproj, "GG", 0, b"ML");
    names(&error, &[mmproj, "not a GGUF file"]);
    let pair = Pair::new();
    let error = Checkpoint::open(&pair.0.path(mmproj)).unwrap_err().to_string();
    names(&error, &[mmproj, "without its model", "beside it"]);
}

#[test]
fn the_mmproj_file_that_fits_is_taken() {
    let pair = Pair::new();
    let bytes = std::fs::read(pair.0.path(Pair::MMPROJ)).unwrap();
    // The first by name is of another model, and the second of another training of the same model.
    for name in ["mmproj-A.gguf", "mmproj-B.gguf"] {
        pair.0.write(name, &bytes);
    }
    pair.change("mmproj-A.gguf", "clip.vision.projection_dim", 4, &32u32.to_le_bytes());
    pair.change("mmproj-B.gguf", "general.name", 12, b"Other");
    pair.change("mmproj-B.gguf", "clip.vision.attention.head_count", 4, &3u32.to_le_bytes());
    assert_eq!(pair.open().unwrap().config().vision.as_ref().unwrap().heads, 4);
    std::fs::remove_file(pair.0.path(Pair::MMPROJ)).unwrap();
    assert_eq!(pair.open().unwrap().config().vision.as_ref().unwrap().heads, 3, "better than none");
}

#[test]
fn frames_of_a_patch_that_differ_in_shape_are_refused() {
    let pair = Pair::new();
    // Behind a name are the number of dimensions, in four bytes, and the dimensions, the innermost first.
    pair.change(Pair::MMPROJ, "v.patch_embd.weight.1", 4, &2u64.to_le_bytes());
    let error = build_programs(&pair.open().unwrap()).unwrap_err().to_string();
    names(&error, &["v.patch_embd.weight.1", "not that of the first frame"]);
}

#[test]
fn a_config_of_idefics3_that_does_not_fit_is_refused() {
    let refused = |object: Option<&str>, key: &str, value: Value| {
        let copy = Copy::of_model("idefics3");
        let mut config: Value = serde_json::from_slice(&std::fs::read(copy.path("config.json")).unwrap()).unwrap();
        match object {
            Some(object) => config[object][key] = value,
            None => config[key] = value,
        }
        copy.write("config.json", config.to_string());
        copy.error()
    };
    let vision = Some("vision_config");
    names(&refused(vision, "image_size", json!(3)), &["'image_size' is 3", "patch size of 4"]);
    names(&refused(vision, "patch_size", json!(0)), &["a patch size of 0"]);
    names(&refused(vision, "num_attention_heads", json!(5)), &["48 columns", "heads of 5"]);
    names(&refused(vision, "layer_norm_eps", json!(-1.0)), &["epsilon is -1"]);
    names(&refused(None, "scale_factor", json!(4)), &["'scale_factor' is 4", "6 patches"]);
    names(&refused(None, "scale_factor", json!(0)), &["'scale_factor' is 0"]);
    names(&refused(None, "image_token_id", json!(320)), &["the token 320 is beyond the vocabulary"]);
    names(&refused(None, "text_config", Value::Null), &["'text_config' is missing"]);
    names(&refused(Some("text_config"), "model_type", json!("mistral")), &["the decoder 'mistral'"]);
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
