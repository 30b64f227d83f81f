//! Size of the KV cache, and the errors of sizes that a runner cannot start with.

use std::ops::RangeInclusive;

use octavo_engine::{KvCacheSpec, KvGroupSpec, KvKind};
use octavo_ops::{Backend, BackendError, Program};

use crate::AdapterLimits;

/// Memory that the logits of the prompt rows may always have that a step scores, in bytes. They may have as much as those of
/// the rows that draw, too, which are one for each sequence.
const SCORED_BYTES: usize = 64 << 20;

/// Limits of the number of these rows. Beyond the upper one, the head is as fast for each row as for more.
const SCORED_ROWS: RangeInclusive<usize> = 64..=512;

/// Returns the maximum number of rows of a step that reach the head, whose logits have `vocab_size` numbers.
pub fn max_rows(max_num_seqs: usize, vocab_size: usize) -> usize {
    let scored = (SCORED_BYTES / (vocab_size.max(1) * size_of::<f32>())).max(max_num_seqs);
    max_num_seqs.saturating_add(scored.clamp(*SCORED_ROWS.start(), *SCORED_ROWS.end()))
}

/// Limit on the size of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// Maximum number of bytes. The media cache is taken from them.
    Bytes(u64),
    /// Number of blocks, including the null block 0, which the KV groups share.
    Blocks(usize),
}

impl KvBudget {
    /// Returns the number of blocks, if a block has `block_bytes` bytes and the media cache `media_bytes`.
    pub fn blocks(self, block_bytes: u64, media_bytes: u64) -> usize {
        match self {
            Self::Blocks(blocks) => blocks,
            Self::Bytes(bytes) => {
                usize::try_from(bytes.saturating_sub(media_bytes) / block_bytes.max(1)).unwrap_or(usize::MAX)
            }
        }
    }
}

/// Sizes of a runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerConfig {
    /// Number of tokens in a KV block; one of [`Backend::block_sizes`].
    pub block_size: usize,
    /// Maximum number of sequences that run at a time, which is the number of seats.
    pub max_num_seqs: usize,
    /// Maximum number of tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Maximum number of prompt and generated tokens of one sequence.
    pub max_model_len: usize,
    /// Size of the KV cache.
    pub kv: KvBudget,
    /// Whether a step is submitted before the tokens of the one before are known. `None` uses the backend's default
    /// ([`Backend::max_in_flight`]).
    pub async_scheduling: Option<bool>,
    /// Room for adapters; `None` without them. The program must have sites for them.
    pub adapters: Option<AdapterLimits>,
}

/// Memory use, for the start-up log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Size of the weights as the backend stores them, in bytes, with those of the encoder.
    pub weight_bytes: u64,
    /// Size of the KV cache in bytes, including the null blocks.
    pub kv_bytes: u64,
    /// Size of the media cache in bytes; 0 without an encoder.
    pub media_bytes: u64,
    /// Element type of the KV cache (`float32`).
    pub kv_dtype: &'static str,
    /// Division of the KV cache into blocks. There are none if the model has no KV.
    pub kv: KvCacheSpec,
    /// Maximum number of tokens of a sequence.
    pub max_model_len: usize,
    /// Maximum number of tokens in a step.
    pub max_num_batched_tokens: usize,
}

/// Returns the division of a cache of `blocks` blocks into those of a program.
pub fn kv_cache_spec(backend: &dyn Backend, program: &Program, block_size: usize, blocks: usize) -> KvCacheSpec {
    let groups = program.kv_groups.iter().map(|group| KvGroupSpec {
        layers: group.layers.len(),
        kind: group.window.map_or(KvKind::Full, KvKind::Window),
    });
    let block_bytes = backend.kv_page_bytes(&program.kv_groups, block_size);
    KvCacheSpec { block_size, block_bytes, blocks, groups: groups.collect() }
}

impl MemoryPlan {
    /// Returns the number of tokens that fit the KV cache, in requests of `max_model_len` tokens.
    pub fn kv_tokens(&self) -> usize {
        let KvCacheSpec { block_size, blocks, .. } = self.kv;
        let tokens = self.max_model_len.next_multiple_of(block_size.max(1));
        let blocks_each = self.kv.blocks_for(tokens, self.max_num_batched_tokens);
        (blocks.saturating_sub(1) * tokens).checked_div(blocks_each).unwrap_or(0)
    }

    /// Returns the number of requests of `max_model_len` tokens that fit at a time; infinite if the model has no KV.
    pub fn max_concurrency(&self) -> f64 {
        match self.kv.blocks_for(self.max_model_len, self.max_num_batched_tokens) {
            0 => f64::INFINITY,
            blocks_each => self.kv.blocks.saturating_sub(1) as f64 / blocks_each as f64,
        }
    }

    /// Computes the size of the KV cache of a loaded backend, beside a media cache of `media_rows` rows.
    pub(crate) fn new(
        backend: &dyn Backend,
        program: &Program,
        config: &RunnerConfig,
        media_rows: usize,
    ) -> Result<MemoryPlan, RunnerError> {
        let RunnerConfig { block_size, max_model_len, max_num_batched_tokens, .. } = *config;
        if !backend.block_sizes().contains(&block_size) {
            let supported = backend.block_sizes().to_vec();
            return Err(RunnerError::BlockSize { backend: backend.name(), block_size, supported });
        }
        let block_bytes = backend.kv_page_bytes(&program.kv_groups, block_size);
        let media_bytes = backend.media_row_bytes().saturating_mul(media_rows as u64);
        let blocks = match config.kv {
            _ if program.kv_groups.is_empty() => 0,
            budget => budget.blocks(block_bytes, media_bytes),
        };
        // Block and slot numbers have 32 bits on the device.
        let blocks = blocks.min(u32::MAX as usize / block_size.max(1));
        let kv = kv_cache_spec(backend, program, block_size, blocks);
        let bytes = |blocks: usize| block_bytes.saturating_mul(blocks as u64);
        let fits = kv.longest_sequence(max_num_batched_tokens);
        if fits < max_model_len {
            let needed = kv.blocks_for(max_model_len, max_num_batched_tokens).saturating_add(1);
            return Err(RunnerError::KvCacheTooSmall {
                max_model_len,
                needed: bytes(needed),
                available: bytes(blocks),
                fits,
            });
        }
        Ok(MemoryPlan {
            weight_bytes: backend.weight_bytes(),
            kv_bytes: bytes(blocks),
            media_bytes,
            kv_dtype: backend.kv_dtype(),
            kv,
            max_model_len,
            max_num_batched_tokens,
        })
    }
}

/// Reason why a runner did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// The backend does not support the block size.
    #[error("the {backend} backend has no KV blocks of {block_size} tokens: choose --block-size from {supported:?}")]
    BlockSize {
        /// Name of the backend.
        backend: &'static str,
        /// Requested block size.
        block_size: usize,
        /// Supported block sizes.
        supported: Vec<usize>,
    },
    /// The KV cache is too small for one request of full length.
    #[error(
        "one request of --max-model-len {max_model_len} needs a KV cache of {needed} bytes, but it has {available}: \
         lower --max-model-len to {fits} or give the cache more memory"
    )]
    KvCacheTooSmall {
        /// Maximum number of tokens of a sequence.
        max_model_len: usize,
        /// Size of one sequence of that length, in bytes.
        needed: u64,
        /// Number of bytes that the budget allows.
        available: u64,
        /// Number of tokens of the longest sequence that would fit.
        fits: usize,
    },
    /// A limit is 0.
    #[error("{0} must be at least 1")]
    ZeroLimit(&'static str),
    /// The backend could not allocate the KV cache.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The operating system did not create the thread.
    #[error("could not start the device thread: {0}")]
    Thread(#[from] std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logits_of_scored_rows_have_a_limit_of_memory() {
        assert_eq!(max_rows(10, 49_152), 10 + 341);
        assert_eq!(max_rows(10, 151_936), 10 + 110);
        assert_eq!(max_rows(256, 151_936), 256 + 256);
        assert_eq!(max_rows(1024, 151_936), 1024 + 512);
        assert_eq!([1 << 20, 1000, 0].map(|vocab| max_rows(10, vocab)), [74, 522, 522]);
    }
}
