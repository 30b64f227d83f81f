use octavo_ops::RopeStyle;
use serde_json::{Value, json};

use super::*;

fn rope(scaling: RopeScaling) -> RopeConfig {
    RopeConfig { style: RopeStyle::NeoX, theta: 10_000.0, rotary_dim: 128, scaling, sections: None }
}

fn read(config: Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_hf(&Fields::new(config.as_object().unwrap()))
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
    let scaled = config.layers[0].attention.rope.frequencies(None);
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
