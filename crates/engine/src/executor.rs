//! The engine's view of whatever computes tokens.

use crate::plan::{StepId, StepMasks, StepOutput, StepPlan, TokenOutput};

/// One KV group: layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroupSpec {
    /// Layers in the group.
    pub layers: usize,
    /// Bytes of one block over all of them.
    pub block_bytes: u64,
    /// Blocks allocated, the null block 0 included.
    pub blocks: usize,
    /// Tokens that later queries can still see, if bounded.
    pub window: Option<usize>,
}

/// How the executor's KV cache is cut into blocks. No groups: the model has no KV.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvCacheSpec {
    /// Tokens a block.
    pub block_size: usize,
    /// One block table a sequence for each of these.
    pub groups: Vec<KvGroupSpec>,
}

/// A step could not be run; its requests end with an error and the engine goes on.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ExecutorError {
    /// A sentence for the log.
    pub message: String,
    /// The executor can run no further step: the engine stops and `/health` turns 503.
    pub fatal: bool,
}

/// Runs steps in order. Calls come from the engine thread alone: `submit(n)`, `sample(n)`, and `wait()` for the oldest
/// step, with up to [`Executor::max_in_flight`] steps between their `submit` and their `wait`. `sample(n)` comes before
/// `submit(n + 1)`.
///
/// An error ends its step: after a failed `submit` or `sample` the step is not waited for, and after a failed `wait` it
/// is the oldest step that is over. The engine then waits for what else is in flight before it submits again.
pub trait Executor: Send {
    /// Blocks and groups, fixed for the executor's life.
    fn kv_cache_spec(&self) -> &KvCacheSpec;

    /// V, the size of masks.
    fn vocab_size(&self) -> usize;

    /// Steps that may be in flight: 1 or 2.
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Starts the step's forward pass and returns at once. Keys and values of steps are written in the order of
    /// submission, so a block that is free once step n is planned may be planned for n + 1.
    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError>;

    /// Starts the sampling of a submitted step.
    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError>;

    /// Blocks until the oldest step has its tokens.
    fn wait(&mut self) -> Result<StepOutput, ExecutorError>;

    /// Takes back the emptied memory of [`StepOutput::rows`], for a later step.
    fn recycle(&mut self, rows: Vec<TokenOutput>) {
        drop(rows);
    }

    /// Gives back the memory of masks that are no longer needed, for the next [`Executor::sample`] with constrained
    /// rows. The content does not matter.
    fn spare_masks(&mut self) -> StepMasks {
        StepMasks::default()
    }
}
