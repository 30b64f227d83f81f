//! The encoder of Qwen3-VL: layers over patches with learned and rotary positions, whose last output, and those of some
//! layers (deepstack), are merged to rows of the decoder. The decoder is Qwen3.

use octavo_ops::{BufferId, GluKind, MergeKind, Op, Program, Rope, RopeStyle, Rows};

use crate::checkpoint::{Checkpoint, Format};
use crate::config::VisionConfig;
use crate::program::ModelError;
use crate::program::encoder::Encoder;
use crate::program::names::{EncoderNames, MMPROJ};

/// Names in safetensors files.
static NAMES: EncoderNames = EncoderNames {
    patches: "model.visual.patch_embed.proj",
    positions: "model.visual.pos_embed",
    attention_norm: "model.visual.blocks.{}.norm1",
    qkv: &["model.visual.blocks.{}.attn.qkv"],
    output: "model.visual.blocks.{}.attn.proj",
    mlp_norm: "model.visual.blocks.{}.norm2",
    up: "model.visual.blocks.{}.mlp.linear_fc1",
    down: "model.visual.blocks.{}.mlp.linear_fc2",
};

pub(super) fn program(checkpoint: &Checkpoint, config: &VisionConfig) -> Result<Program, ModelError> {
    let format = checkpoint.format();
    let names: &EncoderNames = match format {
        Format::HuggingFace => &NAMES,
        Format::Gguf => &MMPROJ,
    };
    let mut e = Encoder::new(checkpoint, config, names, config.theta.map(|theta| rope(config, theta)));
    let x = e.patches()?;
    let merger = Merger::new(&mut e, config);
    for layer in 0..config.layers {
        e.attention(layer, x)?;
        e.mlp(layer, x)?;
        if let Some(part) = config.deepstack_layers.iter().position(|&deep| deep == layer) {
            // The norm is over merged rows.
            e.merge(MergeKind::Concatenated, x, merger.merged);
            let (label, names) = (format!("deepstack.{part}"), MergerNames::deepstack(format, part, layer));
            e.norm(&format!("{label}.norm"), &names.norm, merger.merged, merger.merged)?;
            merger.project(&mut e, &label, &names, part + 1)?;
        }
    }
    // The norm is over patches.
    let (normed, names) = (e.normed(), MergerNames::last(format));
    e.norm("merger.norm", &names.norm, x, normed)?;
    e.merge(MergeKind::Concatenated, normed, merger.merged);
    merger.project(&mut e, "merger", &names, 0)?;
    e.finish()
}

/// Names of a merger's tensors.
struct MergerNames {
    norm: String,
    up: String,
    down: String,
}

impl MergerNames {
    fn new([norm, up, down]: [&str; 3], prefix: &str) -> Self {
        let name = |stem: &str| format!("{prefix}.{stem}");
        Self { norm: name(norm), up: name(up), down: name(down) }
    }

    /// Returns the names of the merger after the last layer.
    fn last(format: Format) -> Self {
        match format {
            Format::HuggingFace => Self::new(["norm", "linear_fc1", "linear_fc2"], "model.visual.merger"),
            Format::Gguf => Self { norm: "v.post_ln".into(), up: "mm.0".into(), down: "mm.2".into() },
        }
    }

    /// Returns the names of a deepstack merger: safetensors files number the mergers, mmproj files the layers.
    fn deepstack(format: Format, part: usize, layer: usize) -> Self {
        match format {
            Format::HuggingFace => {
                Self::new(["norm", "linear_fc1", "linear_fc2"], &format!("model.visual.deepstack_merger_list.{part}"))
            }
            Format::Gguf => Self::new(["norm", "fc1", "fc2"], &format!("v.deepstack.{layer}")),
        }
    }
}

/// Returns the two-dimensional rotary embedding: the first half of the pairs turns by the row of a patch, the second by
/// its column, with the same frequencies.
fn rope(config: &VisionConfig, theta: f64) -> Rope {
    let each = config.head_shape().dim / 4;
    let frequencies = (0..each).map(|i| theta.powf(-(i as f64) / each as f64));
    let inv_freq = frequencies.clone().chain(frequencies).collect();
    let streams = [vec![0; each], vec![1; each]].concat();
    Rope { style: RopeStyle::NeoX, inv_freq, magnitude: 1.0, streams }
}

/// Buffers of the mergers.
struct Merger {
    merged: BufferId,
    hidden: BufferId,
    out: BufferId,
    out_cols: usize,
}

impl Merger {
    fn new(e: &mut Encoder<'_>, config: &VisionConfig) -> Self {
        let (cols, out_cols) = (config.merged_patches() * config.hidden_size, config.out_hidden_size);
        let mut buffer = |name, cols| e.builder.buffer(name, Rows::Merged, cols);
        Self {
            merged: buffer("merged", cols),
            hidden: buffer("merger_hidden", cols),
            out: buffer("rows", out_cols),
            out_cols,
        }
    }

    /// Emits `down(gelu(up(merged)))` and stores the rows as a part of the media cache.
    fn project(&self, e: &mut Encoder<'_>, label: &str, names: &MergerNames, part: usize) -> Result<(), ModelError> {
        e.linear(&format!("{label}.up"), &names.up, self.merged, None, self.hidden)?;
        e.act(GluKind::Gelu, self.hidden);
        e.linear(&format!("{label}.down"), &names.down, self.hidden, None, self.out)?;
        e.builder.push(Op::StoreRows { input: self.out, column: part * self.out_cols });
        Ok(())
    }
}
