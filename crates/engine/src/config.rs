//! Limits of the engine, and why an engine cannot start with some.

use crate::KvCacheSpec;

/// Which waiting request is next, and which running one gives way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower [`Request::priority`](crate::Request::priority) first, then earlier arrival.
    Priority,
}

impl SchedulingPolicy {
    /// The spelling of `--scheduling-policy`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Priority => "priority",
        }
    }
}

/// Limits of the engine; fixed for its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Prompt and generated tokens of a sequence together.
    pub max_model_len: usize,
    /// Sequences that run at a time.
    pub max_num_seqs: usize,
    /// The token budget of a step.
    pub max_num_batched_tokens: usize,
    /// Order of admission and of preemption.
    pub policy: SchedulingPolicy,
    /// Find full blocks of earlier requests instead of computing them.
    pub enable_prefix_caching: bool,
    /// What the hashes of blocks begin with, `PYTHONHASHSEED` in vLLM; engines with the same one name a prefix alike.
    pub prefix_seed: Option<String>,
    /// Prefill a prompt in several steps when it does not fit the budget. Without it, `max_num_batched_tokens` must be
    /// at least `max_model_len`, and only a prompt whose log-probabilities are asked for is cut, to
    /// [`StepPlan::MAX_SCORED_ROWS`](crate::StepPlan::MAX_SCORED_ROWS) rows a step.
    pub enable_chunked_prefill: bool,
    /// Most tokens of one prompt in a step while there are other requests; 0 is no bound. Needs chunked prefill.
    pub long_prefill_token_threshold: usize,
    /// Requests that wait for their first admission, at most.
    pub max_queued_requests: usize,
    /// Prompt tokens that wait for their first admission, at most; a single longer prompt is taken if none waits.
    pub max_queued_tokens: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_model_len: 2048,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            policy: SchedulingPolicy::Fcfs,
            enable_prefix_caching: true,
            prefix_seed: None,
            enable_chunked_prefill: true,
            long_prefill_token_threshold: 0,
            max_queued_requests: 8192,
            max_queued_tokens: 16 << 20,
        }
    }
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A limit is 0.
    #[error("{0} must be at least 1")]
    ZeroLimit(&'static str),
    /// Without chunked prefill a prompt must fit one step.
    #[error(
        "without chunked prefill max_num_batched_tokens ({budget}) must be at least max_model_len ({max_model_len}): \
         raise the one or lower the other"
    )]
    BudgetTooSmall {
        /// `max_num_batched_tokens`.
        budget: usize,
        /// `max_model_len`.
        max_model_len: usize,
    },
    /// One sequence of full length must fit the KV cache, or it could never end.
    #[error(
        "the KV cache holds {fits} tokens, too few for one sequence of max_model_len ({max_model_len}): lower \
         max_model_len to {fits} or give the cache more memory"
    )]
    KvCacheTooSmall {
        /// `max_model_len`.
        max_model_len: usize,
        /// Tokens that fit.
        fits: usize,
    },
    /// The executor's KV cache has blocks of no tokens.
    #[error("the executor's KV cache has groups but a block size of 0")]
    NoBlockSize,
    /// The operating system gave no thread.
    #[error("could not start the engine thread: {0}")]
    Thread(#[from] std::io::Error),
}

impl EngineConfig {
    /// Checks the limits by themselves and against the executor's KV cache.
    pub(crate) fn check(&self, kv: &KvCacheSpec) -> Result<(), EngineError> {
        for (limit, name) in [
            (self.max_model_len, "max_model_len"),
            (self.max_num_seqs, "max_num_seqs"),
            (self.max_num_batched_tokens, "max_num_batched_tokens"),
            (self.max_queued_requests, "max_queued_requests"),
            (self.max_queued_tokens, "max_queued_tokens"),
        ] {
            if limit == 0 {
                return Err(EngineError::ZeroLimit(name));
            }
        }
        if !self.enable_chunked_prefill && self.max_num_batched_tokens < self.max_model_len {
            return Err(EngineError::BudgetTooSmall {
                budget: self.max_num_batched_tokens,
                max_model_len: self.max_model_len,
            });
        }
        if !kv.groups.is_empty() && kv.block_size == 0 {
            return Err(EngineError::NoBlockSize);
        }
        for group in &kv.groups {
            let fits = group.blocks.saturating_sub(1) * kv.block_size;
            if fits < self.max_model_len {
                return Err(EngineError::KvCacheTooSmall { max_model_len: self.max_model_len, fits });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvGroupSpec;

    fn spec(blocks: usize) -> KvCacheSpec {
        KvCacheSpec { block_size: 16, groups: vec![KvGroupSpec { layers: 1, block_bytes: 1, blocks, window: None }] }
    }

    #[test]
    fn a_sequence_of_full_length_must_fit() {
        let config = EngineConfig { max_model_len: 160, ..EngineConfig::default() };
        assert!(config.check(&spec(11)).is_ok());
        let error = config.check(&spec(10)).expect_err("one block is null");
        assert!(error.to_string().contains("lower max_model_len to 144"), "{error}");
        assert!(config.check(&KvCacheSpec::default()).is_ok(), "a model without KV needs no blocks");
    }

    #[test]
    fn limits_are_checked() {
        let whole = EngineConfig {
            enable_chunked_prefill: false,
            max_model_len: 4096,
            max_num_batched_tokens: 2048,
            ..EngineConfig::default()
        };
        assert!(matches!(whole.check(&spec(1000)), Err(EngineError::BudgetTooSmall { .. })));
        let none = EngineConfig { max_num_seqs: 0, ..EngineConfig::default() };
        assert!(matches!(none.check(&spec(1000)), Err(EngineError::ZeroLimit("max_num_seqs"))));
        let no_size = KvCacheSpec { block_size: 0, ..spec(1000) };
        assert!(matches!(EngineConfig::default().check(&no_size), Err(EngineError::NoBlockSize)));
    }
}
