//! Measurements of an engine in this process, without HTTP, as `vllm bench latency` and `vllm bench throughput` do.
//!
//! Prompts are random token ids, tokens are sampled at temperature 1 and end-of-sequence is ignored, so that every answer
//! has the requested length. Nothing is detokenized.

mod latency;
mod sequence;
mod throughput;

pub use latency::{FixedBatch, LatencyConfig, LatencyReport};
use octavo_engine::SubmitError;
pub use throughput::{ThroughputConfig, ThroughputReport, throughput};

/// The limits of the measured model that prompts depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLimits {
    /// Exclusive upper bound of token ids.
    pub vocab_size: u32,
    /// Maximum number of tokens of a prompt and its answer together.
    pub max_model_len: usize,
}

/// The reason why there is no measurement.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// A setting out of range.
    #[error("{0}")]
    Config(&'static str),
    /// Prompt and answer do not fit the context.
    #[error(
        "prompts of {input_len} tokens with answers of {output_len} do not fit a context of {max_model_len} tokens: ask \
         for fewer with --input-len and --output-len, or raise --max-model-len"
    )]
    TooLong {
        /// Tokens of the longest prompt.
        input_len: usize,
        /// Tokens of the longest answer.
        output_len: u32,
        /// The context.
        max_model_len: usize,
    },
    /// The engine refused a request although its queue was empty.
    #[error("the engine refused a request: {0}")]
    Submit(#[from] SubmitError),
    /// A request ended before its answer had the requested length.
    #[error("a request ended early: {0}")]
    Ended(String),
}

/// Checks the lengths of the longest request.
fn check_lengths(limits: ModelLimits, input_len: usize, output_len: u32) -> Result<(), OfflineError> {
    if input_len == 0 || output_len == 0 {
        return Err(OfflineError::Config("prompts and answers need at least one token"));
    }
    if input_len.saturating_add(output_len as usize) > limits.max_model_len {
        return Err(OfflineError::TooLong { input_len, output_len, max_model_len: limits.max_model_len });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
