//! Lowering and launches of the ops of images.

use octavo_kernels::manifest::{self, MediaMove};
use octavo_kernels::params::{
    ActParams, AttentionParams, EmbedTapsParams, MeanRowsParams, MediaRowsParams, PatchesParams,
};
use octavo_ops::{
    Act, BackendError, BufferId, EmbedTaps, InjectMode, InjectRows, MergeKind, MergeRows, Rows, SegmentAttention,
};

use crate::build::KernelId;
use crate::forward::{Machine, Step, some};
use crate::launcher::Launcher;
use crate::lower::{Attention, Lowering, Stage, activation};
use crate::unsupported;

/// An op of images with its kernel and all parameters that are constant.
#[derive(Clone, Debug)]
pub(crate) enum ImageStage {
    Patches {
        kernel: KernelId,
        params: PatchesParams,
    },
    EmbedTaps {
        kernel: KernelId,
        params: EmbedTapsParams,
    },
    Act {
        kernel: KernelId,
        params: ActParams,
        rows: Rows,
    },
    /// Rows that become one are consecutive, so they are copied as they are.
    Concatenate {
        out: u64,
        input: u64,
        row_bytes: u64,
    },
    Mean {
        kernel: KernelId,
        params: MeanRowsParams,
    },
    Store {
        kernel: KernelId,
        params: MediaRowsParams,
    },
    Inject {
        kernel: KernelId,
        params: MediaRowsParams,
    },
}

impl Lowering<'_> {
    pub(crate) fn patches(&mut self, out: BufferId) -> Stage {
        let kernel = self.instances.id(manifest::patches(self.setting.dtype));
        let params = PatchesParams { out: self.buffer(out), cols: self.cols(out), ..PatchesParams::default() };
        Stage::Image(ImageStage::Patches { kernel, params })
    }

    pub(crate) fn embed_taps(&mut self, op: &EmbedTaps) -> Result<Stage, BackendError> {
        let [table] = self.matrix(op.table) else {
            return Err(unsupported("a table of positions of parts that are stored in different ways"));
        };
        if table.quant.is_some() {
            return Err(unsupported("a quantised table of positions"));
        }
        let table = self.arena.at(table.region);
        let kernel = self.instances.id(manifest::embed_taps(self.setting.dtype));
        let (out, cols) = (self.buffer(op.out), self.cols(op.out));
        let params = EmbedTapsParams { out, table, cols, ..EmbedTapsParams::default() };
        Ok(Stage::Image(ImageStage::EmbedTaps { kernel, params }))
    }

    pub(crate) fn act(&mut self, op: &Act) -> Stage {
        let kernel = self.instances.id(manifest::act(self.setting.dtype, activation(op.kind)));
        let (out, input) = (self.buffer(op.out), self.buffer(op.input));
        let params = ActParams { out, input, rows: 0, cols: self.cols(op.out) };
        Stage::Image(ImageStage::Act { kernel, params, rows: self.rows(op.out) })
    }

    pub(crate) fn merge(&mut self, op: &MergeRows) -> Stage {
        let (out, input, cols) = (self.buffer(op.out), self.buffer(op.input), self.cols(op.out));
        Stage::Image(match op.kind {
            MergeKind::Concatenated => {
                let row_bytes = u64::from(cols) * self.setting.dtype.bytes() as u64;
                ImageStage::Concatenate { out, input, row_bytes }
            }
            MergeKind::Mean => {
                let kernel = self.instances.id(manifest::mean_rows(self.setting.dtype));
                let merge = self.program.merge() as u32;
                ImageStage::Mean { kernel, params: MeanRowsParams { out, input, rows: 0, cols, merge, reserved: 0 } }
            }
        })
    }

    pub(crate) fn store(&mut self, input: BufferId, column: usize) -> Stage {
        let (kernel, params) = self.media_rows(input, column, MediaMove::Store);
        Stage::Image(ImageStage::Store { kernel, params })
    }

    pub(crate) fn inject(&mut self, op: &InjectRows) -> Stage {
        let how = match op.mode {
            InjectMode::Replace => MediaMove::Replace,
            InjectMode::Add => MediaMove::Add,
        };
        let (kernel, params) = self.media_rows(op.out, op.column, how);
        Stage::Image(ImageStage::Inject { kernel, params })
    }

    fn media_rows(&mut self, rows: BufferId, column: usize, how: MediaMove) -> (KernelId, MediaRowsParams) {
        let kernel = self.instances.id(manifest::media_rows(self.setting.dtype, how));
        let (rows, cols) = (self.buffer(rows), self.cols(rows));
        (kernel, MediaRowsParams { rows, cols, column: column as u32, ..MediaRowsParams::default() })
    }

    /// Lowers attention over segments. A tile has queries of one segment, whose sums are the same in any batch.
    pub(crate) fn segment_attention(&mut self, op: &SegmentAttention) -> Stage {
        let (window, lookahead) = on_both_sides(op.window);
        let params = self.attention_params(op.q, op.out, op.heads);
        let params = AttentionParams { window, lookahead, scale: op.scale, ..params };
        let attention = match self.prefill(self.setting.dtype.into(), op.heads) {
            Some(prefill) => Attention::Tiled { prefill, params },
            None => {
                let kernel = self.instances.id(manifest::paged_attention(self.setting.dtype, op.heads.dim));
                Attention::Plain { kernel, params }
            }
        };
        Stage::Attention { attention, cache: self.step_layer(&op.heads) }
    }
}

/// Returns the window and the lookahead of queries that see `window` tokens on each side, or all.
fn on_both_sides(window: Option<usize>) -> (u32, u32) {
    let side = window.and_then(|window| u32::try_from(window).ok());
    let whole = side.and_then(|side| side.checked_mul(2)?.checked_add(1));
    side.zip(whole).map_or((0, u32::MAX), |(side, whole)| (whole, side))
}

impl<L: Launcher> Machine<L> {
    /// Launches an op of images, unless it has no rows.
    pub(crate) fn image(&self, stage: &ImageStage, step: &Step<'_>) -> Result<(), BackendError> {
        let shape = &step.shape;
        let tokens = shape.tokens as u32;
        match stage {
            ImageStage::Patches { kernel, params } => {
                let params = PatchesParams {
                    bytes: step.patches,
                    channels: step.at(shape.channels()),
                    rows: tokens,
                    channel_cols: params.cols / (shape.channels as u32).max(1),
                    ..*params
                };
                some(tokens, || self.launch(*kernel, params.grid(), &params))
            }
            ImageStage::EmbedTaps { kernel, params } => {
                let (tap_rows, tap_weights) = (step.at(shape.tap_rows()), step.at(shape.tap_weights()));
                let params = EmbedTapsParams { tap_rows, tap_weights, rows: tokens, ..*params };
                some(tokens, || self.launch(*kernel, params.grid(), &params))
            }
            ImageStage::Act { kernel, params, rows } => {
                let params = ActParams { rows: step.rows(*rows), ..*params };
                let threads = self.launcher.threads(*kernel);
                some(params.rows, || self.launch(*kernel, params.grid(threads), &params))
            }
            ImageStage::Concatenate { out, input, row_bytes } => {
                self.launcher.copy(*out, *input, shape.merged as u64 * row_bytes)
            }
            ImageStage::Mean { kernel, params } => {
                let params = MeanRowsParams { rows: shape.merged as u32, ..*params };
                some(params.rows, || self.launch(*kernel, params.grid(), &params))
            }
            ImageStage::Store { kernel, params } => self.media_rows(*kernel, params, 0, step),
            ImageStage::Inject { kernel, params } => {
                self.media_rows(*kernel, params, step.at(shape.injected_rows()), step)
            }
        }
    }

    fn media_rows(
        &self,
        kernel: KernelId,
        params: &MediaRowsParams,
        row_index: u64,
        step: &Step<'_>,
    ) -> Result<(), BackendError> {
        let params = MediaRowsParams {
            media: step.media.address,
            media_cols: step.media.columns,
            media_index: step.at(step.shape.media_rows()),
            row_index,
            count: step.shape.media as u32,
            ..*params
        };
        some(params.count, || self.launch(kernel, params.grid(), &params))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_without_an_end_see_all() {
        let found = [None, Some(0), Some(64), Some(u32::MAX as usize / 2), Some(1 << 31), Some(usize::MAX)];
        let all = (0, u32::MAX);
        assert_eq!(found.map(on_both_sides), [all, (1, 0), (129, 64), (u32::MAX, u32::MAX / 2), all, all]);
    }
}
