//! Encoders of texts: the memory of the keys and values of a step, and the reduction of rows.

use octavo_kernels::manifest;
use octavo_kernels::params::{KV_BLOCK, PoolRowsParams};
use octavo_ops::{BackendError, Op, PoolKind, PoolRows, Program, StepBatch};

use crate::build::KernelId;
use crate::forward::{Cache, Machine, Step, some};
use crate::launcher::Launcher;
use crate::loaded::Loaded;
use crate::lower::{Lowering, Stage, block_elements};

/// Steps of an encoder of texts over the memory of their keys and values.
pub(crate) struct Texts {
    step: StepBatch,
    cache: Cache,
}

impl Texts {
    /// Creates the steps of a loaded encoder.
    pub(crate) fn new(loaded: &Loaded) -> Self {
        let Loaded { arena, layout, limits, program, .. } = loaded;
        let cache = Cache {
            address: arena.at(layout.step_kv),
            block_elements: block_elements(&program.step_kv()),
            blocks: limits.step_blocks(),
        };
        Self { step: StepBatch::with_capacity(limits.tokens, limits.sequences, 0, 1), cache }
    }

    /// Gives each text of a step blocks of its own. The step must be within the limits.
    pub(crate) fn divide(&mut self, batch: &StepBatch) {
        let blocks = batch.in_own_blocks(KV_BLOCK, &mut self.step);
        debug_assert!(blocks <= self.cache.blocks);
    }

    /// Returns the step that was divided last.
    pub(crate) fn step(&self) -> &StepBatch {
        &self.step
    }

    /// Returns the memory of the keys and values.
    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }
}

/// Returns whether a program reads patches or writes the media cache, so that its steps are those of images.
pub(crate) fn encodes_images(program: &Program) -> bool {
    let is_of_images =
        |op: &Op| matches!(op, Op::Patches { .. } | Op::EmbedTaps(_) | Op::MergeRows(_) | Op::StoreRows { .. });
    program.ops.iter().any(is_of_images)
}

impl Lowering<'_> {
    pub(crate) fn pool_rows(&mut self, op: &PoolRows) -> Stage {
        let pool = match op.kind {
            PoolKind::First => manifest::Pool::First,
            PoolKind::Mean => manifest::Pool::Mean,
        };
        let kernel = self.instances.id(manifest::pool_rows(self.setting.dtype, pool));
        let (out, input, cols) = (self.buffer(op.out), self.buffer(op.input), self.cols(op.out));
        Stage::Pool { kernel, params: PoolRowsParams { out, input, cols, ..PoolRowsParams::default() } }
    }
}

impl<L: Launcher> Machine<L> {
    /// Reduces rows, unless none are returned.
    pub(crate) fn pool_rows(
        &self,
        kernel: KernelId,
        params: &PoolRowsParams,
        step: &Step<'_>,
    ) -> Result<(), BackendError> {
        let (row_index, lens) = (step.at(step.shape.pooled_rows()), step.at(step.shape.pooled_lens()));
        let params = PoolRowsParams { row_index, lens, count: step.shape.pooled as u32, ..*params };
        let threads = self.launcher.threads(kernel);
        some(params.count, || self.launch(kernel, params.grid(threads), &params))
    }
}
