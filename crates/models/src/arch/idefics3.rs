//! The encoder of Idefics3 and SmolVLM: SigLIP over a square of patches with learned positions. Squares of patches are
//! merged to rows of the decoder, which is Llama.

use octavo_ops::{Op, Program, Rows};

use super::ModelError;
use super::names::IDEFICS3;
use super::vision::Encoder;
use crate::checkpoint::Checkpoint;
use crate::config::VisionConfig;

pub(super) fn encoder(checkpoint: &Checkpoint, config: &VisionConfig) -> Result<Program, ModelError> {
    let mut e = Encoder::new(checkpoint, config, &IDEFICS3, None);
    let x = e.patches()?;
    for layer in 0..config.layers {
        e.attention(layer, x)?;
        e.mlp(layer, x)?;
    }
    let normed = e.normed();
    e.norm("final_norm", "model.vision_model.post_layernorm", x, normed)?;
    let merged = e.builder.buffer("merged", Rows::Merged, config.merged_patches() * config.hidden_size);
    let rows = e.builder.buffer("rows", Rows::Merged, config.out_hidden_size);
    e.builder.push(Op::MergeRows { input: normed, out: merged });
    e.product("projection", "model.connector.modality_projection.proj", merged, rows)?;
    e.builder.push(Op::StoreRows { input: rows, column: 0 });
    e.finish()
}
