//! ModernBERT: an encoder with rotary positions, a window on two layers of three, gated MLPs and norms before the blocks,
//! without biases.

use octavo_ops::{GluKind, HeadShape, NormKind, RopeStyle};

use super::Family;
use crate::config::vectors::{self, VectorReader};
use crate::config::{
    AttentionConfig, ConfigError, Fields, HeadLayer, HeadNorm, InputConfig, LayerConfig, MlpConfig, ModelConfig,
    NormConfig, NormPlaces, PooledRow, RopeConfig, RopeScaling, hf,
};
use crate::program::names::{Names, Role};

pub(super) static FAMILY: Family = Family {
    model_types: &["modernbert"],
    class: hf::MASKED,
    hf: from_hf,
    gguf: None,
    names: Names {
        others: &[
            (Role::Embedding, ("model.embeddings.tok_embeddings", "token_embd")),
            (Role::EmbeddingNorm, ("model.embeddings.norm", "token_embd_norm")),
            (Role::AttentionNorm, ("model.layers.{}.attn_norm", "blk.{}.attn_norm")),
            (Role::Qkv, ("model.layers.{}.attn.Wqkv", "blk.{}.attn_qkv")),
            (Role::Output, ("model.layers.{}.attn.Wo", "blk.{}.attn_output")),
            (Role::MlpNorm, ("model.layers.{}.mlp_norm", "blk.{}.ffn_norm")),
            (Role::GateUp, ("model.layers.{}.mlp.Wi", "blk.{}.ffn_up")),
            (Role::Down, ("model.layers.{}.mlp.Wo", "blk.{}.ffn_down")),
            (Role::FinalNorm, ("model.final_norm", "output_norm")),
        ],
        fused: true,
        ..Names::DEFAULT
    },
    images: None,
    layout: None,
    vectors: Some(VectorReader { pooling: PooledRow::First, classifier }),
};

const GLOBAL_THETA: f64 = 160_000.0;
const LOCAL_THETA: f64 = 10_000.0;
/// One layer of so many has no window.
const PATTERN: usize = 3;
/// Number of tokens that a query with a window sees, half of them on each side.
const WINDOW: usize = 128;

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let hidden_size = fields.required("hidden_size")?;
    let q = fields.required("num_attention_heads")?;
    let heads = HeadShape::new(q, q, hf::head_dim(hidden_size, q)?);
    let mlp = MlpConfig {
        intermediate_size: fields.required("intermediate_size")?,
        activation: fields.str("hidden_activation")?.map_or(Ok(GluKind::Gelu), hf::activation)?,
        gated: true,
        bias: hf::flag(fields, "mlp_bias")?,
    };
    let bias = hf::flag(fields, "attention_bias")?;
    let attention = AttentionConfig { qkv_bias: bias, output_bias: bias, ..AttentionConfig::whole(heads) };
    let norm = NormConfig {
        kind: NormKind::Layer,
        eps: fields.f64("norm_eps")?.unwrap_or(1e-5) as f32,
        unit_offset: false,
        bias: hf::flag(fields, "norm_bias")?,
    };
    let layer = LayerConfig::with_norms(attention, mlp, NormPlaces::Before);
    let mut config = hf::encoder(&FAMILY, fields, layer, norm)?;
    config.input = InputConfig { norm: true, ..InputConfig::default() };
    // The norm of the embeddings takes the place of the first one.
    config.layers[0].attention_norms = NormPlaces::None;
    set_windows(fields, &mut config)?;
    Ok(config)
}

/// Sets the windows and the rotary embeddings, which differ between layers with and without one.
fn set_windows(fields: &Fields<'_>, config: &mut ModelConfig) -> Result<(), ConfigError> {
    let window = fields.usize("local_attention")?.unwrap_or(WINDOW) / 2;
    let pattern = fields.usize("global_attn_every_n_layers")?.unwrap_or(PATTERN).max(1);
    hf::windows(fields, config, Some(window), |layer| !layer.is_multiple_of(pattern))?;
    let parameters = fields.object("rope_parameters")?;
    let theta = |kind: &str, old: &str, default: f64| match parameters.map(|p| p.object(kind)).transpose()?.flatten() {
        Some(parameters) => Ok::<_, ConfigError>(parameters.f64("rope_theta")?.unwrap_or(default)),
        None => Ok(fields.f64(old)?.unwrap_or(default)),
    };
    let global = theta("full_attention", "global_rope_theta", GLOBAL_THETA)?;
    // Old configurations have null in place of the global one.
    let local = theta("sliding_attention", "local_rope_theta", LOCAL_THETA)?;
    for attention in config.layers.iter_mut().map(|layer| &mut layer.attention) {
        attention.rope = Some(RopeConfig {
            style: RopeStyle::NeoX,
            theta: if attention.window.is_some() { local } else { global },
            rotary_dim: attention.heads.dim,
            scaling: RopeScaling::None,
            sections: None,
        });
    }
    Ok(())
}

fn classifier(config: &ModelConfig, fields: &Fields<'_>, labels: usize) -> Result<Vec<HeadLayer>, ConfigError> {
    let activation = fields.str("classifier_activation")?.map_or(Ok(GluKind::Gelu), hf::activation)?;
    let dense = HeadLayer {
        bias: hf::flag(fields, "classifier_bias")?,
        activation: Some(activation),
        norm: Some(HeadNorm { tensor: "head.norm".into(), bias: config.norm.bias }),
        ..vectors::layer("head.dense", config.hidden_size)
    };
    Ok(vec![dense, vectors::layer("classifier", labels)])
}
