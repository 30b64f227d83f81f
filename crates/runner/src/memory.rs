//! How the KV cache is sized, and why a runner cannot start with some sizes.

use octavo_ops::{Backend, BackendError, Program};

/// What the KV cache may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// At most this many bytes over all KV groups.
    Bytes(u64),
    /// This many blocks in each KV group, the null block 0 included.
    Blocks(usize),
}

/// Sizes that the runner is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerConfig {
    /// Tokens a KV block; one of [`Backend::block_sizes`].
    pub block_size: usize,
    /// Sequences that run at a time: the number of slots.
    pub max_num_seqs: usize,
    /// Tokens of a step, at most.
    pub max_num_batched_tokens: usize,
    /// Prompt and generated tokens of a sequence together.
    pub max_model_len: usize,
    /// Size of the KV cache.
    pub kv: KvBudget,
    /// Whether a step is submitted before the tokens of the one before are known; `None` leaves it to the backend
    /// ([`Backend::max_in_flight`]).
    pub async_scheduling: Option<bool>,
}

/// Where the memory goes; for the start-up log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Bytes of the weights as the backend holds them.
    pub weight_bytes: u64,
    /// Bytes of the KV cache, the null blocks included.
    pub kv_bytes: u64,
    /// Element type of the KV cache (`float32`).
    pub kv_dtype: &'static str,
    /// Tokens a block.
    pub block_size: usize,
    /// Blocks of each KV group, the null block 0 included; 0 where the model has no KV.
    pub blocks: usize,
    /// Bytes of one block of each KV group, over its layers.
    pub block_bytes: Vec<u64>,
    /// Tokens of a sequence, at most.
    pub max_model_len: usize,
}

impl MemoryPlan {
    /// Tokens that the KV cache holds.
    pub fn kv_tokens(&self) -> usize {
        self.blocks.saturating_sub(1) * self.block_size
    }

    /// Requests of `max_model_len` tokens that fit at a time; infinite where the model has no KV.
    pub fn max_concurrency(&self) -> f64 {
        let blocks_each = self.max_model_len.div_ceil(self.block_size.max(1));
        match self.block_bytes.is_empty() {
            true => f64::INFINITY,
            false => self.blocks.saturating_sub(1) as f64 / blocks_each.max(1) as f64,
        }
    }

    /// Sizes the KV cache of a loaded backend.
    pub(crate) fn new(
        backend: &dyn Backend,
        program: &Program,
        config: &RunnerConfig,
    ) -> Result<MemoryPlan, RunnerError> {
        let RunnerConfig { block_size, max_model_len, .. } = *config;
        if !backend.block_sizes().contains(&block_size) {
            let supported = backend.block_sizes().to_vec();
            return Err(RunnerError::BlockSize { backend: backend.name(), block_size, supported });
        }
        let block_bytes: Vec<u64> =
            program.kv_groups.iter().map(|group| backend.kv_block_bytes(group, block_size)).collect();
        let row_of_blocks = block_bytes.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let blocks = match config.kv {
            _ if block_bytes.is_empty() => 0,
            KvBudget::Blocks(blocks) => blocks,
            KvBudget::Bytes(bytes) => usize::try_from(bytes / row_of_blocks.max(1)).unwrap_or(usize::MAX),
        };
        // Block and slot numbers are 32 bits wide on the device.
        let blocks = blocks.min(u32::MAX as usize / block_size.max(1));
        let needed = max_model_len.div_ceil(block_size.max(1)).saturating_add(1);
        let bytes = |blocks: usize| row_of_blocks.saturating_mul(blocks as u64);
        if !block_bytes.is_empty() && blocks < needed {
            return Err(RunnerError::KvCacheTooSmall {
                max_model_len,
                needed: bytes(needed),
                available: bytes(blocks),
                fits: blocks.saturating_sub(1) * block_size,
            });
        }
        Ok(MemoryPlan {
            weight_bytes: backend.weight_bytes(),
            kv_bytes: bytes(blocks),
            kv_dtype: backend.kv_dtype(),
            block_size,
            blocks,
            block_bytes,
            max_model_len,
        })
    }
}

/// Why a runner did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// The backend has other block sizes.
    #[error("the {backend} backend has no KV blocks of {block_size} tokens: choose --block-size from {supported:?}")]
    BlockSize {
        /// Its name.
        backend: &'static str,
        /// What was asked for.
        block_size: usize,
        /// What there is.
        supported: Vec<usize>,
    },
    /// Not even one request of full length fits.
    #[error(
        "one request of --max-model-len {max_model_len} needs a KV cache of {needed} bytes, but it has {available}: \
         lower --max-model-len to {fits} or give the cache more memory"
    )]
    KvCacheTooSmall {
        /// Tokens of a sequence, at most.
        max_model_len: usize,
        /// Bytes for one sequence of that length.
        needed: u64,
        /// Bytes that the budget gives.
        available: u64,
        /// Tokens of the longest sequence that would fit.
        fits: usize,
    },
    /// A limit is 0.
    #[error("{0} must be at least 1")]
    ZeroLimit(&'static str),
    /// The backend could not allocate the KV cache.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The operating system gave no thread.
    #[error("could not start the device thread: {0}")]
    Thread(#[from] std::io::Error),
}
