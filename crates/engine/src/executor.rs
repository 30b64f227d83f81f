//! The engine's interface to the component that computes tokens.

use crate::plan::{StepId, StepMasks, StepOutput, StepPlan, TokenOutput};
use crate::{ImageSpec, StepCost};

/// What the tokens of a sequence see in a KV group. Layers that keep a state in place of keys and values would be a further
/// kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvKind {
    /// All tokens before.
    Full,
    /// The latest tokens. There are this many with the token itself.
    Window(usize),
}

/// A KV group: layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroupSpec {
    /// Number of layers in the group.
    pub layers: usize,
    /// What the tokens see.
    pub kind: KvKind,
}

/// Division of the executor's KV cache into blocks, which the KV groups share. A model without KV has no groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvCacheSpec {
    /// Number of tokens in a block.
    pub block_size: usize,
    /// Size of a block in bytes: that of the group with the largest.
    pub block_bytes: u64,
    /// Number of blocks allocated, including the null block 0.
    pub blocks: usize,
    /// KV groups. A sequence has one block table for each.
    pub groups: Vec<KvGroupSpec>,
}

impl KvKind {
    /// Returns the first position that the tokens from `position` on see.
    pub fn first_seen(self, position: usize) -> usize {
        match self {
            Self::Full => 0,
            Self::Window(window) => (position + 1).saturating_sub(window),
        }
    }

    /// Returns the maximum number of blocks that a sequence holds if a step computes at most `step` of its tokens;
    /// `usize::MAX` if it holds all.
    pub(crate) fn most_blocks(self, step: usize, block_size: usize) -> usize {
        match self {
            Self::Full => usize::MAX,
            Self::Window(window) => window.saturating_add(step).saturating_sub(2).div_ceil(block_size.max(1)) + 1,
        }
    }
}

impl KvCacheSpec {
    /// Returns the maximum number of blocks that a sequence of `tokens` tokens holds, in all groups, if a step computes at
    /// most `step` of them.
    pub fn blocks_for(&self, tokens: usize, step: usize) -> usize {
        let all = tokens.div_ceil(self.block_size.max(1));
        let of_group = |group: &KvGroupSpec| group.kind.most_blocks(step, self.block_size).min(all);
        self.groups.iter().map(of_group).fold(0, usize::saturating_add)
    }

    /// Returns the maximum number of tokens of a sequence that fits the cache alone; `usize::MAX` without groups.
    pub fn longest_sequence(&self, step: usize) -> usize {
        let usable = self.blocks.saturating_sub(1);
        if self.blocks_for(usize::MAX, step) <= usable {
            return usize::MAX;
        }
        // A group with windows needs a constant number of blocks once the sequence is long.
        let (mut fits, mut beyond) = (0, usable + 1);
        while fits + 1 < beyond {
            let middle = fits.midpoint(beyond);
            let tokens = middle * self.block_size;
            if self.blocks_for(tokens, step) <= usable { fits = middle } else { beyond = middle }
        }
        fits * self.block_size
    }
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

    /// Returns masks that are no longer needed, as memory for the next [`Executor::sample`] with constrained rows.
    /// Its content does not matter.
    fn spare_masks(&mut self) -> StepMasks {
        StepMasks::default()
    }
}
