//! Checkpoints of models that take images: settings of the processors, encoders in files of their own, refused ones.

use crate::*;

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
