//! Encoders of the BERT kind: BERT, RoBERTa and XLM-RoBERTa. Learned positions and token types, a layer norm of each sum,
//! biases everywhere, and an MLP without a gate.

use octavo_ops::{GluKind, HeadShape, NormKind};

use super::Family;
use crate::config::vectors::{self, VectorReader};
use crate::config::{
    AttentionConfig, ConfigError, Fields, HeadLayer, InputConfig, LayerConfig, LearnedPositions, MlpConfig,
    ModelConfig, NormConfig, NormPlaces, PooledRow, hf,
};
use crate::program::names::{Names, Role};

pub(super) static BERT: Family = Family {
    model_types: &["bert"],
    class: hf::MASKED,
    hf: |fields| encoder(&BERT, fields, 0),
    gguf: None,
    names: Names { prefix: "bert.", ..NAMES },
    images: None,
    layout: None,
    vectors: Some(VectorReader { pooling: PooledRow::First, classifier: bert_classifier }),
};

pub(super) static ROBERTA: Family = Family {
    model_types: &["roberta", "xlm-roberta"],
    class: hf::MASKED,
    hf: |fields| encoder(&ROBERTA, fields, fields.usize("pad_token_id")?.unwrap_or(1).saturating_add(1)),
    gguf: None,
    names: Names { prefix: "roberta.", ..NAMES },
    images: None,
    layout: None,
    vectors: Some(VectorReader { pooling: PooledRow::First, classifier: roberta_classifier }),
};

const NAMES: Names = Names {
    others: &[
        (Role::Embedding, ("model.embeddings.word_embeddings", "token_embd")),
        (Role::Positions, ("model.embeddings.position_embeddings", "position_embd")),
        (Role::TokenTypes, ("model.embeddings.token_type_embeddings", "token_types")),
        (Role::EmbeddingNorm, ("model.embeddings.LayerNorm", "token_embd_norm")),
        (Role::Q, ("model.encoder.layer.{}.attention.self.query", "blk.{}.attn_q")),
        (Role::K, ("model.encoder.layer.{}.attention.self.key", "blk.{}.attn_k")),
        (Role::V, ("model.encoder.layer.{}.attention.self.value", "blk.{}.attn_v")),
        (Role::Output, ("model.encoder.layer.{}.attention.output.dense", "blk.{}.attn_output")),
        (Role::AttentionPostNorm, ("model.encoder.layer.{}.attention.output.LayerNorm", "blk.{}.attn_output_norm")),
        (Role::Up, ("model.encoder.layer.{}.intermediate.dense", "blk.{}.ffn_up")),
        (Role::Down, ("model.encoder.layer.{}.output.dense", "blk.{}.ffn_down")),
        (Role::MlpPostNorm, ("model.encoder.layer.{}.output.LayerNorm", "blk.{}.layer_output_norm")),
    ],
    ..Names::DEFAULT
};

fn encoder(family: &'static Family, fields: &Fields<'_>, offset: usize) -> Result<ModelConfig, ConfigError> {
    if let Some(kind) = fields.str("position_embedding_type")?.filter(|kind| *kind != "absolute") {
        return Err(ConfigError::Unsupported(format!("positions of the type '{}'", kind.escape_debug())));
    }
    if hf::flag(fields, "is_decoder")? || hf::flag(fields, "add_cross_attention")? {
        return Err(ConfigError::Unsupported("an encoder that is used as a decoder".into()));
    }
    let hidden_size = fields.required("hidden_size")?;
    let q = fields.required("num_attention_heads")?;
    let heads = HeadShape::new(q, q, hf::head_dim(hidden_size, q)?);
    let rows = fields.required("max_position_embeddings")?;
    let mlp = MlpConfig {
        intermediate_size: fields.required("intermediate_size")?,
        activation: fields.str("hidden_act")?.map_or(Ok(GluKind::Gelu), hf::activation)?,
        gated: false,
        bias: true,
    };
    let attention = AttentionConfig { qkv_bias: true, output_bias: true, ..AttentionConfig::whole(heads) };
    let layer = LayerConfig::with_norms(attention, mlp, NormPlaces::Sum);
    let input = InputConfig {
        positions: Some(LearnedPositions { rows, offset }),
        token_types: fields.usize("type_vocab_size")?.unwrap_or(2),
        norm: true,
    };
    let eps = fields.f64("layer_norm_eps")?.unwrap_or(1e-12) as f32;
    let norm = NormConfig { kind: NormKind::Layer, eps, unit_offset: false, bias: true };
    Ok(ModelConfig {
        input,
        final_norm: false,
        max_position_embeddings: rows.saturating_sub(offset),
        ..hf::encoder(family, fields, layer, norm)?
    })
}

/// The layer that BERT's first row passes through, then the classes.
fn bert_classifier(config: &ModelConfig, _: &Fields<'_>, labels: usize) -> Result<Vec<HeadLayer>, ConfigError> {
    Ok(vec![
        HeadLayer { activation: Some(GluKind::Tanh), ..vectors::layer("bert.pooler.dense", config.hidden_size) },
        vectors::layer("classifier", labels),
    ])
}

fn roberta_classifier(config: &ModelConfig, _: &Fields<'_>, labels: usize) -> Result<Vec<HeadLayer>, ConfigError> {
    Ok(vec![
        HeadLayer { activation: Some(GluKind::Tanh), ..vectors::layer("classifier.dense", config.hidden_size) },
        vectors::layer("classifier.out_proj", labels),
    ])
}
