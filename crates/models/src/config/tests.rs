use octavo_ops::{ExpertGroups, GroupScore, HeadShape, RopeStyle, RouteScores};
use serde_json::{Value, json};

use super::*;

fn rope(scaling: RopeScaling) -> RopeConfig {
    RopeConfig { style: RopeStyle::NeoX, theta: 10_000.0, rotary_dim: 128, scaling, sections: None }
}

fn read(config: Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_hf(&Fields::new(config.as_object().unwrap()), None, crate::family::Runner::Auto)
}

/// Returns a configuration with the required keys only, and those of `more`.
fn minimal(model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512,
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn what_a_config_leaves_out_has_the_published_defaults() {
    let config = read(minimal("llama", json!({}))).unwrap();
    let AttentionConfig { heads, rope, qkv_bias, .. } = &config.layers[0].attention;
    let rope = rope.as_ref().unwrap();
    assert_eq!((heads.kv, heads.dim, config.norm.eps), (4, 16, 1e-6));
    assert_eq!((rope.theta, rope.rotary_dim, &rope.scaling), (1e4, 16, &RopeScaling::None));
    assert_eq!((config.tie_word_embeddings, *qkv_bias, config.sliding_window()), (false, false, None));
    assert_eq!(read(minimal("qwen3", json!({}))).unwrap().head_shape().dim, 128);
    assert!(read(minimal("qwen2", json!({}))).unwrap().layers[0].attention.qkv_bias);
}

#[test]
fn windows_follow_each_family_s_rule() {
    let windows = |kind, more| read(minimal(kind, more)).unwrap().windows().collect::<Vec<_>>();
    assert_eq!(windows("mistral", json!({"sliding_window": 8})), [Some(8); 4]);
    assert_eq!(windows("mistral", json!({"sliding_window": null})), [None; 4]);
    assert_eq!(windows("mistral", json!({})), [Some(4096); 4]);
    assert_eq!(windows("llama", json!({"sliding_window": 8})), [None; 4]);
    assert_eq!(windows("qwen2", json!({"sliding_window": 8})), [None; 4]);
    let qwen = json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3});
    assert_eq!(windows("qwen2", qwen), [None, None, None, Some(8)]);
    let types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"];
    let listed = json!({"sliding_window": 8, "use_sliding_window": true, "layer_types": types});
    assert_eq!(windows("qwen3", listed), [Some(8), None, None, Some(8)]);
    let short = json!({"sliding_window": 8, "use_sliding_window": true, "layer_types": ["full_attention"]});
    assert!(read(minimal("qwen3", short)).unwrap_err().to_string().contains("layer_types"));
}

#[test]
fn gemma_s_defaults_are_those_of_its_classes() {
    let config = read(minimal("gemma2", json!({}))).unwrap();
    let attention = &config.layers[0].attention;
    assert_eq!((attention.heads.dim, attention.scale, attention.softcap), (256, 1.0 / 16.0, Some(50.0)));
    assert_eq!((config.embedding_scale, config.logits_softcap, config.tie_word_embeddings), (8.0, Some(30.0), true));
    assert_eq!(config.windows().collect::<Vec<_>>(), [Some(4096), None, Some(4096), None]);
    assert_eq!((config.layers[0].mlp.activation, config.norm.unit_offset), (GluKind::GeluTanh, true));
    let uncapped = json!({"attn_logit_softcapping": null, "final_logit_softcapping": null});
    assert_eq!(read(minimal("gemma2", uncapped)).unwrap().logits_softcap, None);
    let both = json!({"use_bidirectional_attention": true});
    assert!(read(minimal("gemma2", both)).unwrap_err().to_string().contains("both directions"));
}

#[test]
fn gemma_3_has_two_rotary_embeddings() {
    let older = json!({"sliding_window": 8, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    let newer = json!({"sliding_window": 8, "layer_types":
        ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
    let [older, newer] = [older, newer].map(|config| read(minimal("gemma3_text", config)).unwrap());
    assert_eq!(older.layers, newer.layers);
    let ropes = [0, 1].map(|layer| newer.layers[layer].attention.rope.as_ref().unwrap());
    assert_eq!(ropes.map(|rope| rope.theta), [1e4, 1e6]);
    assert_eq!((&ropes[0].scaling, &ropes[1].scaling), (&RopeScaling::None, &RopeScaling::Linear { factor: 8.0 }));
    let six = read(minimal("gemma3_text", json!({"num_hidden_layers": 6, "sliding_window": 8}))).unwrap();
    assert_eq!(six.windows().filter(Option::is_none).count(), 1, "one layer in six has full attention");
}

#[test]
fn every_fourth_layer_of_smollm3_has_no_rotary_embedding() {
    let rotary = |config: &ModelConfig| config.layers.iter().map(|l| l.attention.rope.is_some()).collect::<Vec<_>>();
    let config = read(minimal("smollm3", json!({}))).unwrap();
    assert_eq!(rotary(&config), [true, true, true, false]);
    assert_eq!((config.layers[0].attention.rope.as_ref().unwrap().theta, config.tie_word_embeddings), (2e6, true));
    // A longer list is read as far as there are layers.
    let listed = json!({"no_rope_layers": [0, 1, 1, 1, 0], "no_rope_layer_interval": 2});
    assert_eq!(rotary(&read(minimal("smollm3", listed)).unwrap()), [false, true, true, true]);
    let windows = json!({"no_rope_layer_interval": 2, "use_sliding_window": true, "sliding_window": 8});
    let config = read(minimal("smollm3", windows)).unwrap();
    assert_eq!(rotary(&config), [true, false, true, false]);
    assert_eq!(config.windows().collect::<Vec<_>>(), [None, Some(8), None, Some(8)]);
    for (wrong, word) in [
        (json!({"no_rope_layers": [1]}), "1 entries for 4 layers"),
        (json!({"no_rope_layer_interval": 0}), "'no_rope_layer_interval' is 0"),
    ] {
        assert!(read(minimal("smollm3", wrong)).unwrap_err().to_string().contains(word));
    }
    assert_eq!(rotary(&read(minimal("llama", json!({}))).unwrap()), [true; 4]);
}

/// The published configurations of Gemma 3 with images state only what differs from the 4B model's class.
#[test]
fn gemma_3_with_images_omits_the_defaults_of_its_text() {
    let text = json!({"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}});
    let mut whole = json!({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144, "mm_tokens_per_image": 256,
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": false},
        "text_config": text, "torch_dtype": "bfloat16"});
    let config = read(whole.clone()).unwrap();
    let heads = config.head_shape();
    assert_eq!((heads.q, heads.kv, heads.dim, config.vocab_size), (8, 4, 256, 262_208));
    assert_eq!((config.max_position_embeddings, config.tie_word_embeddings), (131_072, true));
    assert_eq!((config.dtype.as_str(), config.layers.len(), config.norm.eps), ("bfloat16", 34, 1e-6));
    assert_eq!(config.windows().filter(Option::is_none).count(), 5);
    let rope = config.layers[5].attention.rope.as_ref().unwrap();
    assert_eq!((rope.theta, &rope.scaling), (1e6, &RopeScaling::Linear { factor: 8.0 }));
    assert_eq!((config.rope().unwrap().theta, config.layers[0].attention.scale), (1e4, 1.0 / 16.0));
    let vision = config.vision.unwrap();
    assert_eq!((vision.table_side, vision.merge_size, vision.patch_elements()), (64, 4, 588));
    assert_eq!((vision.hidden_size, vision.heads, vision.layers, vision.out_hidden_size), (1152, 16, 27, 2560));
    let ImageTokens { image, start, end, .. } = vision.tokens;
    assert_eq!((image, start, end, vision.seen_whole), (262_144, Some(255_999), Some(256_000), true));
    for (place, value, words) in [
        ("/mm_tokens_per_image", json!(250), "'mm_tokens_per_image' is 250, which are no squares"),
        ("/mm_tokens_per_image", json!(9), "which are no squares of the 64 patches of a side"),
        ("/vision_config/patch_size", json!(0), "a patch size of 0 does not fit it"),
        ("/vision_config/num_attention_heads", json!(7), "the image encoder: 1152 columns are not whole heads of 7"),
        (
            "/text_config/sliding_window",
            json!(255),
            "a window of 255 tokens, which is less than the 256 tokens of an image",
        ),
    ] {
        let mut whole = whole.clone();
        *whole.pointer_mut(place).unwrap() = value;
        let error = read(whole).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    // The 27B model.
    for (key, value) in [("num_attention_heads", 32), ("num_key_value_heads", 16), ("head_dim", 128)] {
        whole["text_config"][key] = value.into();
    }
    whole["text_config"]["query_pre_attn_scalar"] = 168.into();
    let attention = &read(whole.clone()).unwrap().layers[0].attention;
    assert_eq!((attention.heads.q, attention.heads.dim), (32, 128));
    assert_eq!(attention.scale, (168f64.sqrt().recip()) as f32);
    whole["text_config"] = json!(null);
    assert!(read(whole).unwrap_err().to_string().contains("text_config"));
}

#[test]
fn the_served_context_decides_on_the_factors_of_phi_3() {
    let rope = json!({"type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8]});
    let mut config =
        read(minimal("phi3", json!({"rope_scaling": rope, "original_max_position_embeddings": 64}))).unwrap();
    let first = |config: &ModelConfig| config.rope().unwrap().frequencies(None);
    assert_eq!(first(&config).inv_freq[0], 0.5, "512 positions are more than 64");
    assert!((first(&config).magnitude - 1.5f64.sqrt()).abs() < 1e-12, "1 + ln(512 / 64) / ln(64) = 1.5");
    config.serve(64);
    assert_eq!(first(&config).inv_freq[0], 1.0);
    let short = json!({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]});
    assert!(read(minimal("phi3", json!({"rope_scaling": short}))).unwrap_err().to_string().contains("8 numbers"));
}

#[test]
fn factors_that_are_not_above_0_are_refused() {
    for key in ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"] {
        for factor in [-1.0, 0.0] {
            let error = read(minimal("granite", json!({key: factor}))).unwrap_err().to_string();
            assert!(error.contains("must be above 0"), "{key}: {error}");
        }
    }
    let error = read(minimal("gemma2", json!({"query_pre_attn_scalar": 0}))).unwrap_err().to_string();
    assert!(error.contains("the attention's scale is inf"), "{error}");
}

#[test]
fn mrope_pairs_take_turns_or_follow_each_other() {
    let streams = |sizes, interleaved| {
        let rope = RopeConfig { sections: Some(RopeSections { sizes, interleaved }), ..rope(RopeScaling::None) };
        rope.check(128).map(|()| rope.frequencies(None).streams)
    };
    let found = streams([24, 20, 20], true).unwrap();
    assert_eq!(found[..7], [0, 1, 2, 0, 1, 2, 0]);
    assert_eq!(found[57..], [0, 1, 2, 0, 0, 0, 0]);
    let found = streams([16, 24, 24], false).unwrap();
    assert_eq!((found[15], found[16], found[39], found[40], found[63]), (0, 1, 1, 2, 2));
    let error = streams([24, 20, 21], true).unwrap_err().to_string();
    assert_eq!(error, "'mrope_section' [24, 20, 21] does not divide the 64 pairs of a head");
    assert!(streams([0, 32, 32], true).is_err(), "the pairs of heights and widths cannot take turns");
}

#[test]
fn unscaled_frequencies_are_the_geometric_series() {
    let rope = rope(RopeScaling::None).frequencies(None);
    assert_eq!((rope.inv_freq.len(), rope.inv_freq[0], rope.magnitude), (64, 1.0, 1.0));
    assert!((rope.inv_freq[32] - 0.01).abs() < 1e-15);
}

#[test]
fn llama3_keeps_high_frequencies_and_stretches_low_ones() {
    let scaling =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
    let plain = rope(RopeScaling::None).frequencies(None).inv_freq;
    let scaled = rope(scaling).frequencies(None).inv_freq;
    assert_eq!(plain[0], scaled[0]);
    assert!((scaled[63] - plain[63] / 8.0).abs() < 1e-18);
    assert!(scaled.iter().zip(&plain).all(|(s, p)| (p / 8.0..=*p).contains(s)));
    assert!(scaled.is_sorted_by(|a, b| a > b));
}

#[test]
fn yarn_has_the_papers_magnitude_and_ramp() {
    let config = json!({
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        "head_dim": 128,
    });
    let config = read(minimal("llama", config)).unwrap();
    let scaled = config.rope().unwrap().frequencies(None);
    let plain = rope(RopeScaling::None).frequencies(None).inv_freq;
    assert!((scaled.magnitude - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    assert_eq!(scaled.inv_freq[0], plain[0]);
    assert!((scaled.inv_freq[63] - plain[63] / 4.0).abs() < 1e-18);
}

#[test]
fn factors_of_the_file_divide_pair_by_pair() {
    let factors: Vec<f32> = (1..=64).map(|i| i as f32).collect();
    let plain = rope(RopeScaling::None).frequencies(None).inv_freq;
    let divided = rope(RopeScaling::None).frequencies(Some(&factors)).inv_freq;
    for i in 0..64 {
        assert_eq!(divided[i], plain[i] / f64::from(factors[i]));
    }
}

#[test]
fn a_scaling_whose_frequencies_would_not_be_numbers_is_refused() {
    for scaling in [
        RopeScaling::Linear { factor: f64::NAN },
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_context: 1.0 },
        RopeScaling::Yarn {
            factor: 1.0,
            beta_fast: 0.0,
            beta_slow: 1.0,
            original_context: 1.0,
            attention_factor: 1.0,
            truncate: true,
        },
    ] {
        assert!(rope(scaling.clone()).check(128).is_err(), "{scaling:?}");
    }
}

#[test]
fn experts_are_in_the_layers_that_each_family_s_rule_names() {
    let qwen = |kind: &str, more: Value| {
        let mut all = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(minimal(kind, all))
    };
    let with_experts = |config: &ModelConfig| config.layers.iter().map(|l| l.experts.is_some()).collect::<Vec<_>>();
    let config = qwen("qwen3_moe", json!({"mlp_only_layers": [0], "decoder_sparse_step": 2})).unwrap();
    assert_eq!(with_experts(&config), [false, true, false, true]);
    assert_eq!((config.layers[0].mlp.intermediate_size, config.layers[1].mlp.intermediate_size), (128, 32));
    assert!(!config.experts().unwrap().normalise, "the default of its class");
    let config = qwen("qwen2_moe", json!({"mlp_only_layers": [3]})).unwrap();
    assert_eq!(with_experts(&config), [true, true, true, false]);
    let shared = config.experts().unwrap().shared;
    assert_eq!(shared, Some(SharedExpertConfig { intermediate_size: 48, gated: true }));
    let error = qwen("qwen3_moe", json!({"num_experts_per_tok": 9})).unwrap_err().to_string();
    assert!(error.contains("the number of experts of a token"), "{error}");
    let error = qwen("qwen3_moe", json!({"num_experts": 1 << 20})).unwrap_err().to_string();
    assert!(error.contains("the number of experts"), "{error}");
    let error = read(minimal("mixtral", json!({}))).unwrap_err().to_string();
    assert!(error.contains("num_local_experts"), "{error}");
}

#[test]
fn deepseek_s_defaults_are_those_of_its_classes() {
    let config = read(minimal("deepseek_v2", json!({"num_experts_per_tok": 6}))).unwrap();
    let attention = &config.layers[0].attention;
    assert_eq!((attention.heads, attention.scale), (HeadShape::latent(4, 512, 64), (1.0 / 192f32.sqrt())));
    let latent = attention.latent.unwrap();
    assert_eq!((latent.query_rank, latent.value, latent.norm_eps), (Some(1536), 128, 1e-6));
    let rope = attention.rope.as_ref().unwrap();
    assert_eq!((rope.style, rope.rotary_dim), (RopeStyle::GptJ, 64));
    let experts = config.layers[0].experts.as_ref().unwrap();
    assert_eq!((experts.count, experts.chosen, experts.groups, experts.normalise), (64, 6, None, false));
    assert_eq!(experts.shared, Some(SharedExpertConfig { intermediate_size: 2 * 1407, gated: false }));

    let config = read(minimal("deepseek_v3", json!({"rope_interleave": false, "q_lora_rank": null}))).unwrap();
    assert_eq!(
        config.layers.iter().map(|layer| layer.experts.is_some()).collect::<Vec<_>>(),
        [false, false, false, true]
    );
    let experts = config.experts().unwrap();
    assert_eq!((experts.count, experts.chosen, experts.scale), (256, 8, 2.5));
    assert!(experts.scores == RouteScores::Sigmoid && experts.correction && experts.normalise);
    assert_eq!(experts.groups, Some(ExpertGroups { count: 8, kept: 4, score: GroupScore::BestTwo }));
    assert_eq!(config.layers[0].attention.rope.as_ref().unwrap().style, RopeStyle::NeoX);
    assert_eq!(config.layers[0].attention.latent.unwrap().query_rank, None);
}

#[test]
fn yarn_multiplies_deepseek_s_scores_by_the_square_of_its_magnitude() {
    let scaling = json!({"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096});
    let config = json!({"num_experts_per_tok": 6, "max_position_embeddings": 163_840, "rope_scaling": scaling});
    let config = read(minimal("deepseek_v2", config)).unwrap();
    let attention = &config.layers[0].attention;
    let magnitude = 0.1 * 0.707 * 40f64.ln() + 1.0;
    assert!((f64::from(attention.scale) - magnitude * magnitude / 192f64.sqrt()).abs() < 1e-7);
    assert!((attention.rope.as_ref().unwrap().frequencies(None).magnitude - 1.0).abs() < 1e-12);
}

#[test]
fn variants_of_deepseek_that_are_not_served_are_named() {
    let error = |more: Value| {
        let mut all = json!({"num_experts_per_tok": 2});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(minimal("deepseek_v2", all)).unwrap_err().to_string()
    };
    assert_eq!(error(json!({"attention_bias": true})), "latent attention with biases is not supported");
    assert!(error(json!({"mlp_bias": true})).contains("biases"));
    assert_eq!(error(json!({"scoring_func": "sparsemax"})), "'scoring_func' sparsemax is not supported");
    assert_eq!(error(json!({"topk_method": "random"})), "'topk_method' random is not supported");
    assert_eq!(error(json!({"topk_method": "group_limited_greedy"})), "'n_group' is missing");
    assert!(error(json!({"head_dim": 32})).contains("32 elements, but 64 of a head are rotated"));
    assert!(error(json!({"kv_lora_rank": 0})).contains("the rank of the keys and values"));
    assert!(error(json!({"quantization_config": {"quant_method": "quark"}})).contains("'quark'"));
    let missing = read(minimal("deepseek_v2", json!({}))).unwrap_err().to_string();
    assert_eq!(missing, "'num_experts_per_tok' is missing");
}

#[test]
fn gpt_oss_has_sinks_windows_and_biases() {
    let experts = json!({"num_local_experts": 4, "num_experts_per_tok": 2});
    let config = read(minimal("gpt_oss", experts.clone())).unwrap();
    assert_eq!(config.windows().collect::<Vec<_>>(), [Some(128), None, Some(128), None]);
    let LayerConfig { attention, mlp, experts: Some(found), .. } = &config.layers[0] else {
        panic!("it has experts");
    };
    assert!(attention.sinks && attention.qkv_bias && attention.output_bias && mlp.bias && found.router_bias);
    assert_eq!((attention.heads.dim, config.norm.eps), (64, 1e-5));
    assert_eq!(mlp.activation, GluKind::ClampedSwiglu { alpha: 1.702, limit: 7.0 });
    let quantised = |method: &str| {
        let mut config = minimal("gpt_oss", experts.clone());
        config["quantization_config"] = json!({"quant_method": method});
        read(config)
    };
    assert!(quantised("mxfp4").is_ok());
    assert!(quantised("quark").unwrap_err().to_string().contains("'quark'"));
}

#[test]
fn settings_of_quantised_weights_that_are_not_supported_are_named() {
    let quantised = |config: Value| read(minimal("llama", json!({"quantization_config": config})));
    for config in [
        json!({"quant_method": "gptq", "bits": 4, "sym": true, "dynamic": {}}),
        json!({"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}, "-:.*gate$": {}}}),
        json!({"quant_method": "awq", "w_bit": 4, "version": "GEMM"}),
        json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
        json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"block_structure": "128x128"}}}}),
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
        json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
    ] {
        assert!(quantised(config.clone()).is_ok(), "{config}");
    }
    for (config, words) in [
        (json!({"quant_method": "hqq"}), "'hqq' of this checkpoint (supported: gptq, awq, fp8"),
        (json!({"quant_method": "gptq"}), "'bits' is missing"),
        (json!({"quant_method": "gptq", "bits": 3}), "GPTQ with 'bits': 3"),
        (json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "'checkpoint_format': marlin"),
        (
            json!({"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}, "+:.*down": {"bits": 8}}}),
            "settings for some",
        ),
        (json!({"quant_method": "awq", "version": "gemv"}), "AWQ with 'version': gemv"),
        (json!({"quant_method": "awq", "bits": 8}), "AWQ with 'bits': 8"),
        (json!({"quant_method": "modelopt", "quant_algo": "MXFP8"}), "ModelOpt with 'quant_algo': MXFP8"),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "FP8 with 'fmt': e5m2"),
        (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), "no size of a block"),
        (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "'format': marlin-24"),
        (json!({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}), "'transform_config'"),
        (
            json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse"}}),
            "'sparsity_config': sparse",
        ),
    ] {
        let error = quantised(config.clone()).unwrap_err().to_string();
        assert!(error.contains(words), "{config}: {error}");
    }
}
