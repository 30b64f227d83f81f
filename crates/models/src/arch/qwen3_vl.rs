//! The encoder of Qwen3-VL: layers over patches with learned and rotary positions, whose last output, and those of some
//! layers (deepstack), are merged to rows of the decoder. The decoder is Qwen3.

use octavo_ops::{BufferId, EmbedTaps, GluKind, Op, Program, Rope, RopeStyle, Rows};

use super::ModelError;
use super::vision::Encoder;
use crate::checkpoint::Checkpoint;
use crate::config::VisionConfig;

/// Value added under the root of every norm of the encoder; no configuration contains it.
const EPS: f32 = 1e-6;

pub(super) fn encoder(checkpoint: &Checkpoint, config: &VisionConfig) -> Result<Program, ModelError> {
    let mut e = Encoder::new(checkpoint, config, EPS, rope(config));
    let x = e.patches("model.visual.patch_embed.proj")?;
    let positions = config.table_side * config.table_side;
    let table = e.matrix("positions", "model.visual.pos_embed", positions, config.hidden_size)?;
    e.builder.push(Op::EmbedTaps(EmbedTaps { table, out: x }));
    let merger = Merger::new(&mut e, config);
    for layer in 0..config.layers {
        let tensor = format!("model.visual.blocks.{layer}");
        e.attention(layer, &tensor, x)?;
        e.mlp(layer, &tensor, x)?;
        if let Some(part) = config.deepstack_layers.iter().position(|&deep| deep == layer) {
            // The norm is over merged rows.
            e.builder.push(Op::MergeRows { input: x, out: merger.merged });
            let (label, tensor) = (format!("deepstack.{part}"), format!("model.visual.deepstack_merger_list.{part}"));
            e.norm(&format!("{label}.norm"), &format!("{tensor}.norm"), merger.merged, merger.merged)?;
            merger.project(&mut e, &label, &tensor, part + 1)?;
        }
    }
    // The norm is over patches.
    let normed = e.normed();
    e.norm("merger.norm", "model.visual.merger.norm", x, normed)?;
    e.builder.push(Op::MergeRows { input: normed, out: merger.merged });
    merger.project(&mut e, "merger", "model.visual.merger", 0)?;
    e.finish()
}

/// Returns the two-dimensional rotary embedding: the first half of the pairs turns by the row of a patch, the second by
/// its column, with the same frequencies.
fn rope(config: &VisionConfig) -> Rope {
    let each = config.head_shape().dim / 4;
    let frequencies = (0..each).map(|i| config.theta.powf(-(i as f64) / each as f64));
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

    /// Emits `fc2(gelu(fc1(merged)))` and stores the rows as a part of the media cache.
    fn project(&self, e: &mut Encoder<'_>, label: &str, tensor: &str, part: usize) -> Result<(), ModelError> {
        e.linear(&format!("{label}.up"), &format!("{tensor}.linear_fc1"), self.merged, None, self.hidden)?;
        e.act(GluKind::Gelu, self.hidden);
        e.linear(&format!("{label}.down"), &format!("{tensor}.linear_fc2"), self.hidden, None, self.out)?;
        e.builder.push(Op::StoreRows { input: self.out, column: part * self.out_cols });
        Ok(())
    }
}
