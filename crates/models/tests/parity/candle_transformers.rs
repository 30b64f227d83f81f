//! Compares every program with the matching model of candle-transformers, on the same checkpoint.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{llama, mistral, qwen2, qwen3};
use octavo_models::{LayerConfig, ModelConfig, RopeScaling};

use crate::support::{Golden, Session, checkpoint, relative_difference, testdata};

/// Tolerance. Both sides run candle in f32; the models of candle-transformers compute rotary angles in f32 and fuse
/// less.
const TOLERANCE: f32 = 5e-5;

/// Returns the checkpoint's tensors in f32. A tied head is also stored under its own name, for models that ask for it.
fn variables(name: &str, config: &ModelConfig) -> VarBuilder<'static> {
    let device = Device::Cpu;
    let loaded = candle_core::safetensors::load(testdata(name).join("model.safetensors"), &device).unwrap();
    let mut tensors: HashMap<String, Tensor> =
        loaded.into_iter().map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).unwrap())).collect();
    if config.tie_word_embeddings {
        let table = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), table);
    }
    VarBuilder::from_tensors(tensors, DType::F32, &device)
}

/// Compares the logits of every position. `reference` prefills a whole prompt and returns the logits of the last
/// position, because these models return no others.
fn check(name: &str, build: impl FnOnce(&ModelConfig, VarBuilder<'static>) -> Box<dyn FnMut(&Tensor) -> Tensor>) {
    let ids = Golden::read(name).ids;
    let checkpoint = checkpoint(name);
    let mut reference = build(checkpoint.config(), variables(name, checkpoint.config()));
    let expected: Vec<f32> = (1..=ids.len())
        .flat_map(|len| {
            let prompt = Tensor::new(&ids[..len], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            reference(&prompt).flatten_all().unwrap().to_vec1::<f32>().unwrap()
        })
        .collect();
    let found = Session::new(&checkpoint, ids.len()).forward(&ids);
    let difference = relative_difference(&found, &expected);
    println!("{name} against candle-transformers: largest difference {difference:.1e} of the largest logit");
    assert!(difference <= TOLERANCE, "{name}: {difference}");
}

fn check_llama(name: &str) {
    check(name, |config, variables| {
        let LayerConfig { attention, mlp, .. } = &config.layers[0];
        let heads = attention.heads;
        let scaling = match attention.rope.as_ref().unwrap().scaling {
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                Some(llama::Llama3RopeConfig {
                    factor: factor as f32,
                    low_freq_factor: low_freq_factor as f32,
                    high_freq_factor: high_freq_factor as f32,
                    original_max_position_embeddings: original_context as usize,
                    rope_type: llama::Llama3RopeType::Llama3,
                })
            }
            _ => None,
        };
        let config = llama::Config {
            hidden_size: config.hidden_size,
            intermediate_size: mlp.intermediate_size,
            vocab_size: config.vocab_size,
            num_hidden_layers: config.layers.len(),
            num_attention_heads: heads.q,
            num_key_value_heads: heads.kv,
            use_flash_attn: false,
            rms_norm_eps: config.norm.eps.into(),
            rope_theta: attention.rope.as_ref().unwrap().theta as f32,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: scaling,
            max_position_embeddings: config.max_position_embeddings,
            tie_word_embeddings: config.tie_word_embeddings,
        };
        let model = llama::Llama::load(variables, &config).unwrap();
        Box::new(move |prompt| {
            let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
            model.forward(prompt, 0, &mut cache).unwrap()
        })
    });
}

#[test]
fn llama() {
    check_llama("llama");
}

#[test]
fn llama3_rope_scaling() {
    check_llama("llama3-rope");
}

#[test]
fn mistral() {
    check("mistral", |config, variables| {
        let LayerConfig { attention, mlp, .. } = &config.layers[0];
        let heads = attention.heads;
        let config = mistral::Config {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: mlp.intermediate_size,
            num_hidden_layers: config.layers.len(),
            num_attention_heads: heads.q,
            head_dim: Some(heads.dim),
            num_key_value_heads: heads.kv,
            hidden_act: Activation::Silu,
            max_position_embeddings: config.max_position_embeddings,
            rms_norm_eps: config.norm.eps.into(),
            rope_theta: attention.rope.as_ref().unwrap().theta,
            // Its mask lets a query see `sliding_window` keys before its own; PyTorch's window includes its own.
            sliding_window: config.sliding_window().map(|window| window - 1),
            use_flash_attn: false,
        };
        let mut model = mistral::Model::new(&config, variables).unwrap();
        Box::new(move |prompt| {
            model.clear_kv_cache();
            model.forward(prompt, 0).unwrap()
        })
    });
}

#[test]
fn qwen2() {
    check("qwen2", |config, variables| {
        let LayerConfig { attention, mlp, .. } = &config.layers[0];
        let heads = attention.heads;
        let config = qwen2::Config {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: mlp.intermediate_size,
            num_hidden_layers: config.layers.len(),
            num_attention_heads: heads.q,
            num_key_value_heads: heads.kv,
            max_position_embeddings: config.max_position_embeddings,
            // The window applies whatever `use_sliding_window` says, so it is wide enough to have no effect.
            sliding_window: config.max_position_embeddings,
            max_window_layers: config.layers.len(),
            tie_word_embeddings: config.tie_word_embeddings,
            rope_theta: attention.rope.as_ref().unwrap().theta,
            rms_norm_eps: config.norm.eps.into(),
            use_sliding_window: false,
            hidden_act: Activation::Silu,
        };
        let mut model = qwen2::ModelForCausalLM::new(&config, variables).unwrap();
        Box::new(move |prompt| {
            model.clear_kv_cache();
            model.forward(prompt, 0).unwrap()
        })
    });
}

#[test]
fn qwen3() {
    check("qwen3", |config, variables| {
        let LayerConfig { attention, mlp, .. } = &config.layers[0];
        let heads = attention.heads;
        let config = qwen3::Config {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: mlp.intermediate_size,
            num_hidden_layers: config.layers.len(),
            num_attention_heads: heads.q,
            head_dim: heads.dim,
            attention_bias: attention.qkv_bias,
            num_key_value_heads: heads.kv,
            max_position_embeddings: config.max_position_embeddings,
            sliding_window: None,
            max_window_layers: config.layers.len(),
            tie_word_embeddings: config.tie_word_embeddings,
            rope_theta: attention.rope.as_ref().unwrap().theta,
            rms_norm_eps: config.norm.eps.into(),
            use_sliding_window: false,
            hidden_act: Activation::Silu,
        };
        let mut model = qwen3::ModelForCausalLM::new(&config, variables).unwrap();
        Box::new(move |prompt| {
            model.clear_kv_cache();
            model.forward(prompt, 0).unwrap()
        })
    });
}
