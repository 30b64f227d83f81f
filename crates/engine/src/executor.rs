//! The engine's interface to the component that computes tokens.

use crate::plan::{StepId, StepMasks, StepOutput, StepPlan, TokenOutput};
use crate::{ImageSpec, StepCost};

/// A KV group: layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroupSpec {
    /// Number of layers in the group.
    pub layers: usize,
    /// Size of one block over all layers of the group, in bytes.
    pub block_bytes: u64,
    /// Number of blocks allocated, including the null block 0.
    pub blocks: usize,
    /// Number of tokens that later queries can still see; `None` if unlimited.
    pub window: Option<usize>,
}

/// Division of the executor's KV cache into blocks. A model without KV has no groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvCacheSpec {
    /// Number of tokens in a block.
    pub block_size: usize,
    /// KV groups. A sequence has one block table for each.
    pub groups: Vec<KvGroupSpec>,
}

/// A step that could not be run. Its requests end with an error and the engine continues.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ExecutorError {
    /// Message for the log.
    pub message: String,
    /// Whether the executor cannot run further steps. The engine then stops and `/health` returns 503.
    pub fatal: bool,
}

/// Runs steps in order. All calls come from the engine thread: `submit(n)`, `sample(n)`, and `wait()` for the oldest
/// step, with up to [`Executor::max_in_flight`] steps between their `submit` and their `wait`. `sample(n)` comes before
/// `submit(n + 1)`.
///
/// An error ends its step: after a failed `submit` or `sample` the engine does not wait for the step, and a failed
/// `wait` ends the oldest step. The engine then waits for all other steps in flight before it submits again.
pub trait Executor: Send {
    /// Returns the blocks and groups of the KV cache, which do not change.
    fn kv_cache_spec(&self) -> &KvCacheSpec;

    /// Returns the images that the executor takes, which do not change; `None` if it takes no images.
    fn image_spec(&self) -> Option<ImageSpec> {
        None
    }

    /// Returns the number of slots for adapters, which does not change.
    fn adapter_slots(&self) -> usize {
        0
    }

    /// Returns the vocabulary size V, which determines the size of masks.
    fn vocab_size(&self) -> usize;

    /// Returns the maximum number of rows of a step that reach the head: those that score prompts, and those that draw
    /// tokens. It is more than `max_num_seqs`; what exceeds that is the budget of scores.
    fn max_rows(&self) -> usize;

    /// Returns the maximum number of steps in flight: 1 or 2.
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Returns the cost model of steps, if there is one. The engine measures the speed.
    fn step_cost(&self) -> Option<Box<dyn StepCost>> {
        None
    }

    /// Starts the step's forward pass and returns at once. Steps write keys and values in the order of submission, so a
    /// block that is free once step n is planned may be used by n + 1.
    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError>;

    /// Starts the sampling of a submitted step.
    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError>;

    /// Blocks until the oldest step has its tokens.
    fn wait(&mut self) -> Result<StepOutput, ExecutorError>;

    /// Takes back the emptied buffer of [`StepOutput::tokens`] for reuse in a later step.
    fn recycle(&mut self, tokens: Vec<TokenOutput>) {
        drop(tokens);
    }

    /// Returns the buffer of masks that are no longer needed, for the next [`Executor::sample`] with constrained rows.
    /// Its content does not matter.
    fn spare_masks(&mut self) -> StepMasks {
        StepMasks::default()
    }
}
