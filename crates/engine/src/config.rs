//! Limits of the engine, and the errors of an engine that cannot start with them.

use std::time::Duration;

use crate::{KvCacheSpec, Speculation};

/// Order in which requests are admitted and preempted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower [`Request::priority`](crate::Request::priority) first, then earlier arrival.
    Priority,
    /// The client that has received the least service first, then first come, first served. See
    /// [`Request::client`](crate::Request::client).
    Fair,
}

impl SchedulingPolicy {
    /// Returns the value of `--scheduling-policy` that selects this policy.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Priority => "priority",
            Self::Fair => "fair",
        }
    }
}

/// Limits of the engine. They do not change while it runs.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Maximum number of prompt and generated tokens of one sequence.
    pub max_model_len: usize,
    /// Maximum number of sequences that run at a time.
    pub max_num_seqs: usize,
    /// Token budget of a step.
    pub max_num_batched_tokens: usize,
    /// Number of tokens of images that a step may encode. An image is encoded in one step, so one with more tokens is
    /// refused.
    pub max_num_encoder_tokens: usize,
    /// Time that a step should take at most, by the executor's cost model and the measured speed; `None` means no
    /// limit. A step computes at least one share, and takes five times the time of the work that every step has if that
    /// is more. Images that it encodes take their time on top. Has no effect without a cost model.
    pub max_step: Option<Duration>,
    /// Order of admission and of preemption.
    pub policy: SchedulingPolicy,
    /// Reuses full blocks of earlier requests instead of computing them again.
    pub enable_prefix_caching: bool,
    /// Seed of the block hashes, `PYTHONHASHSEED` in vLLM. Engines with the same seed give a prefix the same hashes.
    pub prefix_seed: Option<String>,
    /// Prefills a prompt in several steps when it does not fit the budget. Without it, `max_num_batched_tokens` must be
    /// at least `max_model_len`, and only prompts with requested log-probabilities are split, into chunks of
    /// the rows that a step may score.
    pub enable_chunked_prefill: bool,
    /// Maximum number of tokens of one prompt in a step that has other requests; 0 means no limit. Needs chunked
    /// prefill.
    pub long_prefill_token_threshold: usize,
    /// Share of the KV blocks, 0 to 1, that an admission leaves free while others run, so that those find blocks for their
    /// output and are not preempted.
    pub watermark: f64,
    /// Drafts tokens from earlier occurrences of the latest ones and verifies them in one step, where that pays; `None`
    /// turns it off. With it, one step is in flight at a time.
    pub speculation: Option<Speculation>,
    /// Maximum number of requests that wait for their first admission.
    pub max_queued_requests: usize,
    /// Maximum number of prompt tokens that wait for their first admission. A single longer prompt is accepted if no
    /// other waits.
    pub max_queued_tokens: usize,
    /// Time without progress on work after which the engine counts as stuck and liveness probes fail. It is extended for
    /// steps that are expected to take long, by the executor's cost model and the measured speed.
    pub stuck_after: Duration,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_model_len: 2048,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_num_encoder_tokens: 16_384,
            max_step: None,
            policy: SchedulingPolicy::Fcfs,
            enable_prefix_caching: true,
            prefix_seed: None,
            enable_chunked_prefill: true,
            long_prefill_token_threshold: 0,
            watermark: 0.01,
            speculation: None,
            max_queued_requests: 8192,
            max_queued_tokens: 16 << 20,
            stuck_after: Duration::from_secs(120),
        }
    }
}

/// Reason why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A limit is 0.
    #[error("{0} must be at least 1")]
    ZeroLimit(&'static str),
    /// Chunked prefill is off, and the longest prompt does not fit one step.
    #[error(
        "without chunked prefill max_num_batched_tokens ({budget}) must be at least max_model_len ({max_model_len}): \
         raise the one or lower the other"
    )]
    BudgetTooSmall {
        /// Value of `max_num_batched_tokens`.
        budget: usize,
        /// Value of `max_model_len`.
        max_model_len: usize,
    },
    /// The KV cache is too small for one sequence of full length, which could never finish.
    #[error(
        "the KV cache holds {fits} tokens, too few for one sequence of max_model_len ({max_model_len}): lower \
         max_model_len to {fits} or give the cache more memory"
    )]
    KvCacheTooSmall {
        /// Value of `max_model_len`.
        max_model_len: usize,
        /// Number of tokens that fit.
        fits: usize,
    },
    /// The n-grams of speculation have no length.
    #[error("n-grams of {lookup_min} to {lookup_max} tokens cannot be looked up: the first must not exceed the second")]
    Lookup {
        /// Length of the shortest n-gram.
        lookup_min: usize,
        /// Length of the longest n-gram.
        lookup_max: usize,
    },
    /// A step of the executor has no room for a row of each sequence and a scored one.
    #[error(
        "max_num_seqs ({max_num_seqs}) is too large for the executor, which computes at most {rows} rows in a step: lower \
         it to less than that"
    )]
    TooFewRows {
        /// Maximum number of rows of a step.
        rows: usize,
        /// Value of `max_num_seqs`.
        max_num_seqs: usize,
    },
    /// The block size of the executor's KV cache is 0.
    #[error("the executor's KV cache has groups but a block size of 0")]
    NoBlockSize,
    /// The operating system did not create the thread.
    #[error("could not start the engine thread: {0}")]
    Thread(#[from] std::io::Error),
}

impl EngineConfig {
    /// Returns the maximum number of tokens of an image: those that a step encodes. If the decoder computes an image in one
    /// step (`seen_whole`), there must be room for it beside a token of each other sequence.
    pub fn max_image_tokens(&self, seen_whole: bool) -> usize {
        let beside = self.max_num_batched_tokens.saturating_sub(self.max_num_seqs.saturating_sub(1));
        if seen_whole { self.max_num_encoder_tokens.min(beside) } else { self.max_num_encoder_tokens }
    }

    /// Checks that the limits are consistent and fit the executor's KV cache and the `rows` of its steps.
    pub(crate) fn check(&self, kv: &KvCacheSpec, rows: usize) -> Result<(), EngineError> {
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
        if let Some(Speculation { tokens, lookup_min, lookup_max }) = self.speculation {
            if tokens == 0 || lookup_min == 0 {
                return Err(EngineError::ZeroLimit("a number of speculation"));
            }
            if lookup_min > lookup_max {
                return Err(EngineError::Lookup { lookup_min, lookup_max });
            }
        }
        if !self.enable_chunked_prefill && self.max_num_batched_tokens < self.max_model_len {
            return Err(EngineError::BudgetTooSmall {
                budget: self.max_num_batched_tokens,
                max_model_len: self.max_model_len,
            });
        }
        if rows <= self.max_num_seqs {
            return Err(EngineError::TooFewRows { rows, max_num_seqs: self.max_num_seqs });
        }
        if !kv.groups.is_empty() && kv.block_size == 0 {
            return Err(EngineError::NoBlockSize);
        }
        let fits = kv.longest_sequence(self.max_num_batched_tokens);
        if fits < self.max_model_len {
            return Err(EngineError::KvCacheTooSmall { max_model_len: self.max_model_len, fits });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvGroupSpec, KvKind};

    /// Rows of a step, more than sequences.
    const ROWS: usize = 1000;

    fn spec(blocks: usize) -> KvCacheSpec {
        let groups = vec![KvGroupSpec { layers: 1, kind: KvKind::Full }];
        KvCacheSpec { block_size: 16, block_bytes: 1, blocks, groups }
    }

    #[test]
    fn a_sequence_of_full_length_must_fit() {
        let config = EngineConfig { max_model_len: 160, ..EngineConfig::default() };
        assert!(config.check(&spec(11), ROWS).is_ok());
        let error = config.check(&spec(10), ROWS).expect_err("one block is null");
        assert!(error.to_string().contains("lower max_model_len to 144"), "{error}");
        assert!(config.check(&KvCacheSpec::default(), ROWS).is_ok(), "a model without KV needs no blocks");
    }

    #[test]
    fn limits_are_checked() {
        let whole = EngineConfig {
            enable_chunked_prefill: false,
            max_model_len: 4096,
            max_num_batched_tokens: 2048,
            ..EngineConfig::default()
        };
        assert!(matches!(whole.check(&spec(1000), ROWS), Err(EngineError::BudgetTooSmall { .. })));
        let none = EngineConfig { max_num_seqs: 0, ..EngineConfig::default() };
        assert!(matches!(none.check(&spec(1000), ROWS), Err(EngineError::ZeroLimit("max_num_seqs"))));
        let speculates = |tokens, lookup_min| EngineConfig {
            speculation: Some(Speculation { tokens, lookup_min, lookup_max: 3 }),
            ..EngineConfig::default()
        };
        assert!(speculates(1, 3).check(&spec(1000), ROWS).is_ok());
        assert!(matches!(speculates(1, 4).check(&spec(1000), ROWS), Err(EngineError::Lookup { .. })));
        assert!(matches!(speculates(1, 0).check(&spec(1000), ROWS), Err(EngineError::ZeroLimit(_))));
        assert!(matches!(speculates(0, 3).check(&spec(1000), ROWS), Err(EngineError::ZeroLimit(_))));
        let no_size = KvCacheSpec { block_size: 0, ..spec(1000) };
        assert!(matches!(EngineConfig::default().check(&no_size, ROWS), Err(EngineError::NoBlockSize)));
    }
}
