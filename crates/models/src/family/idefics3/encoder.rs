//! The encoder of Idefics3 and SmolVLM: SigLIP over a square of patches with learned positions. Squares of patches are
//! merged to rows of the decoder, which is Llama.

use octavo_ops::{MergeKind, Op, Program, Rows};

use crate::checkpoint::Checkpoint;
use crate::config::VisionConfig;
use crate::program::ModelError;
use crate::program::encoder::Encoder;
use crate::program::names::EncoderNames;

/// Names in safetensors files: SigLIP.
static NAMES: EncoderNames = EncoderNames {
    patches: "model.vision_model.embeddings.patch_embedding",
    positions: "model.vision_model.embeddings.position_embedding",
    attention_norm: "model.vision_model.encoder.layers.{}.layer_norm1",
    qkv: &[
        "model.vision_model.encoder.layers.{}.self_attn.q_proj",
        "model.vision_model.encoder.layers.{}.self_attn.k_proj",
        "model.vision_model.encoder.layers.{}.self_attn.v_proj",
    ],
    output: "model.vision_model.encoder.layers.{}.self_attn.out_proj",
    mlp_norm: "model.vision_model.encoder.layers.{}.layer_norm2",
    up: "model.vision_model.encoder.layers.{}.mlp.fc1",
    down: "model.vision_model.encoder.layers.{}.mlp.fc2",
};

pub(super) fn program(checkpoint: &Checkpoint, config: &VisionConfig) -> Result<Program, ModelError> {
    let mut e = Encoder::new(checkpoint, config, &NAMES, None);
    let x = e.patches()?;
    for layer in 0..config.layers {
        e.attention(layer, x)?;
        e.mlp(layer, x)?;
    }
    let normed = e.normed();
    e.norm("final_norm", "model.vision_model.post_layernorm", x, normed)?;
    let merged = e.builder.buffer("merged", Rows::Merged, config.merged_patches() * config.hidden_size);
    let rows = e.builder.buffer("rows", Rows::Merged, config.out_hidden_size);
    e.merge(MergeKind::Concatenated, normed, merged);
    e.product("projection", "model.connector.modality_projection.proj", merged, rows)?;
    e.builder.push(Op::StoreRows { input: rows, column: 0 });
    e.finish()
}
