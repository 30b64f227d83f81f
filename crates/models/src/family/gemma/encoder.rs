//! The encoder of images of Gemma 3: SigLIP over a square of patches with learned positions. The means of squares of
//! patches are normed and projected to rows of the decoder.

use octavo_ops::{MergeKind, Op, Program, Rows};

use crate::checkpoint::{Checkpoint, Derived, Format};
use crate::config::VisionConfig;
use crate::program::ModelError;
use crate::program::encoder::Encoder;
use crate::program::names::{EncoderNames, MMPROJ};

/// Names in safetensors files.
static NAMES: EncoderNames = EncoderNames {
    patches: "model.vision_tower.vision_model.embeddings.patch_embedding",
    positions: "model.vision_tower.vision_model.embeddings.position_embedding",
    attention_norm: "model.vision_tower.vision_model.encoder.layers.{}.layer_norm1",
    qkv: &[
        "model.vision_tower.vision_model.encoder.layers.{}.self_attn.q_proj",
        "model.vision_tower.vision_model.encoder.layers.{}.self_attn.k_proj",
        "model.vision_tower.vision_model.encoder.layers.{}.self_attn.v_proj",
    ],
    output: "model.vision_tower.vision_model.encoder.layers.{}.self_attn.out_proj",
    mlp_norm: "model.vision_tower.vision_model.encoder.layers.{}.layer_norm2",
    up: "model.vision_tower.vision_model.encoder.layers.{}.mlp.fc1",
    down: "model.vision_tower.vision_model.encoder.layers.{}.mlp.fc2",
};

/// Names in mmproj files.
static GGUF: EncoderNames = EncoderNames { qkv: &["v.blk.{}.attn_q", "v.blk.{}.attn_k", "v.blk.{}.attn_v"], ..MMPROJ };

/// Names in older mmproj files, in which the two products of the MLP have each other's.
static OLD_GGUF: EncoderNames = EncoderNames { up: MMPROJ.down, down: MMPROJ.up, ..GGUF };

/// The projection, whose tensors in files are `[columns, rows]`: the name that stands for it the other way round, and
/// those of the tensors.
const PROJECTION: &str = "projection";
const PROJECTION_SOURCES: [&str; 2] =
    ["model.multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"];

pub(super) fn program(checkpoint: &Checkpoint, config: &VisionConfig) -> Result<Program, ModelError> {
    let format = checkpoint.format();
    let (names, final_norm, projection_norm) = match format {
        Format::HuggingFace => {
            (&NAMES, "model.vision_tower.vision_model.post_layernorm", "model.multi_modal_projector.mm_soft_emb_norm")
        }
        Format::Gguf if has_old_names(checkpoint, config) => (&OLD_GGUF, "v.post_ln", "mm.soft_emb_norm"),
        Format::Gguf => (&GGUF, "v.post_ln", "mm.soft_emb_norm"),
    };
    let mut e = Encoder::new(checkpoint, config, names, None);
    let x = e.patches()?;
    for layer in 0..config.layers {
        e.attention(layer, x)?;
        e.mlp(layer, x)?;
    }
    let normed = e.normed();
    e.norm("final_norm", final_norm, x, normed)?;
    let mean = e.builder.buffer("mean", Rows::Merged, config.hidden_size);
    let rows = e.builder.buffer("rows", Rows::Merged, config.out_hidden_size);
    e.merge(MergeKind::Mean, normed, mean);
    // The converter to GGUF has added 1 to the factors.
    e.rms_norm("projection_norm", projection_norm, format == Format::HuggingFace, mean)?;
    e.product("projection", PROJECTION, mean, rows)?;
    e.builder.push(Op::StoreRows { input: rows, column: 0 });
    e.finish()
}

/// Returns whether the products of the MLP have each other's name, as their shapes show.
fn has_old_names(checkpoint: &Checkpoint, config: &VisionConfig) -> bool {
    let expected = [config.intermediate_size, config.hidden_size];
    let found = checkpoint.describe(&format!("{}.weight", MMPROJ.up.replace("{}", "0")), &expected);
    found.is_ok_and(|(_, shape)| shape != expected)
}

/// Returns how a tensor that the files do not have is made from others.
pub(super) fn derived(checkpoint: &Checkpoint, name: &str) -> Option<Derived<'static>> {
    let is_projection = name.strip_suffix(".weight") == Some(PROJECTION);
    let source = PROJECTION_SOURCES.into_iter().filter(|_| is_projection).find(|name| checkpoint.has_tensor(name))?;
    Some(Derived::Transposed(source.to_owned()))
}
