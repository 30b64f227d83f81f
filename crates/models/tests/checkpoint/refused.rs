//! Damaged and hostile checkpoints, and folders that are none.

use crate::*;

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
