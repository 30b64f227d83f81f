//! Inputs and results of the `Sample` op.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::BackendError;

/// Sampling parameters of a row. The code that parses the request checks the ranges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleParams {
    /// Temperature; 0 means greedy.
    pub temperature: f32,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// Probability that the smallest set of kept tokens must reach; 1 keeps all.
    pub top_p: f32,
    /// Minimum probability as a fraction of the most likely token's; 0 keeps all.
    pub min_p: f32,
    /// Penalty subtracted once from the logit of every token already generated.
    pub presence_penalty: f32,
    /// Penalty subtracted from a logit for each time its token was generated.
    pub frequency_penalty: f32,
    /// Factor that divides positive and multiplies negative logits of tokens in prompt or output; 1 turns it off.
    pub repetition_penalty: f32,
    /// Random seed.
    pub seed: u64,
    /// Number of most likely tokens to report beside the sampled one; `None` reports no log-probabilities.
    pub logprobs: Option<u32>,
}

impl SampleParams {
    /// Returns whether the most likely token is taken. A temperature of NaN counts as 0.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 || self.temperature.is_nan()
    }

    /// Returns whether the row's [`TokenCounts`] are needed.
    pub fn needs_counts(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

impl Default for SampleParams {
    /// Returns greedy sampling without filters and log-probabilities.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            logprobs: None,
        }
    }
}

/// Identity of the counts of a sequence; the default is that of none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountsId(u64);

impl CountsId {
    fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Relaxed) + 1)
    }
}

/// Counts of the tokens of a sequence, for the penalties. The runner owns one per seat and updates it with each sampled
/// token.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts {
    /// Ids of the prompt, ascending, without duplicates.
    pub prompt: Vec<u32>,
    /// `(id, times generated)`, ascending by id.
    pub output: Vec<(u32, u32)>,
    generated: Vec<u32>,
    id: CountsId,
}

impl TokenCounts {
    /// Counts the tokens of a sequence: its prompt, and its output before a preemption.
    pub fn new(prompt: &[u32], output: &[u32]) -> Self {
        let mut prompt = prompt.to_vec();
        prompt.sort_unstable();
        prompt.dedup();
        let mut counts = Self { prompt, output: Vec::new(), generated: Vec::new(), id: CountsId::next() };
        output.iter().for_each(|&token| counts.push(token));
        counts
    }

    /// Returns the identity. With the same one, the prompt is the same, and fewer generated tokens are the first of more.
    pub fn id(&self) -> CountsId {
        self.id
    }

    /// Returns the generated tokens in order.
    pub fn generated(&self) -> &[u32] {
        &self.generated
    }

    /// Returns the counts with a token that may never be generated, such as a draft.
    #[must_use]
    pub fn with(&self, token: u32) -> Self {
        let mut counts = Self { id: CountsId::next(), ..self.clone() };
        counts.push(token);
        counts
    }

    /// Counts one more generated token.
    pub fn push(&mut self, token: u32) {
        self.generated.push(token);
        match self.output.binary_search_by_key(&token, |&(id, _)| id) {
            Ok(i) => self.output[i].1 += 1,
            Err(i) => self.output.insert(i, (token, 1)),
        }
    }
}

impl PartialEq for TokenCounts {
    /// Compares how often tokens were generated, in whatever order.
    fn eq(&self, other: &Self) -> bool {
        (&self.prompt, &self.output) == (&other.prompt, &other.output)
    }
}

impl Eq for TokenCounts {}

/// Sampler input of a row.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    /// Sampling parameters.
    pub params: &'a SampleParams,
    /// Index of the output token in its sequence, from 0. Seed and index together determine the random number.
    pub output_position: u32,
    /// Seat of the sequence: its index in what a backend keeps from step to step.
    pub seat: u32,
    /// Counts of the tokens seen; `None` without penalties.
    pub counts: Option<&'a TokenCounts>,
    /// Row of the step that was sampled before, if its token counts too and the host does not know it yet. Only a backend
    /// with two steps under way ([`Backend::max_in_flight`](crate::Backend::max_in_flight)) is given one.
    pub pending: Option<u32>,
    /// Values added to the logits, as `(id, value)`.
    pub logit_bias: &'a [(u32, f32)],
    /// Ids that are never sampled (end-of-sequence and stop ids below `min_tokens`), each once.
    pub forbidden: &'a [u32],
    /// Mask of ⌈V / 32⌉ words, in which bit `id % 32` of word `id / 32` allows a token; `None` allows all.
    pub mask: Option<&'a [u32]>,
    /// Token to take instead of sampling, whatever else is set. Only its log-probabilities are computed.
    pub forced: Option<u32>,
    /// Tokens to report beside the row's own instead of the most likely ones, if not empty and log-probabilities are
    /// reported. Duplicates count once. An id beyond the vocabulary has the log-probability −∞.
    pub logprob_ids: &'a [u32],
}

impl<'a> SampleRow<'a> {
    /// Creates a row with parameters only, at the first output position.
    pub const fn new(params: &'a SampleParams) -> Self {
        Self {
            params,
            output_position: 0,
            seat: 0,
            counts: None,
            pending: None,
            logit_bias: &[],
            forbidden: &[],
            mask: None,
            forced: None,
            logprob_ids: &[],
        }
    }

    /// Returns whether the row's token is simply the largest of its unchanged logits, the lowest id among equals, with
    /// nothing else to compute. [`Sampler`](super::Sampler) defines the token if that one is forbidden or no logit is above −∞.
    pub fn wants_the_largest(&self) -> bool {
        let free = self.forced.is_none() && self.params.logprobs.is_none();
        free && self.params.is_greedy() && self.takes_logits_as_they_are()
    }

    /// Returns whether the logits of tokens that are not forbidden stay unchanged before one is chosen.
    pub(crate) const fn takes_logits_as_they_are(&self) -> bool {
        self.counts.is_none() && self.logit_bias.is_empty() && self.mask.is_none()
    }
}

/// The rows of a step, in the order of [`StepBatch::sampled_rows`](crate::StepBatch::sampled_rows).
#[derive(Clone, Copy, Debug)]
pub struct SampleBatch<'a> {
    /// Rows, R of them.
    pub rows: &'a [SampleRow<'a>],
}

impl SampleBatch<'_> {
    /// Checks that there is a row for each one of the last forward pass.
    ///
    /// # Errors
    /// Returns [`BackendError::Failed`] with both numbers.
    pub fn check(&self, backend: &'static str, left: usize) -> Result<(), BackendError> {
        let wanted = self.rows.len();
        if wanted == left {
            return Ok(());
        }
        let reason = format!("{wanted} rows to sample, but the forward pass left {left}");
        Err(BackendError::Failed { backend, reason })
    }
}

/// A sampled or forced token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Token id.
    pub id: u32,
    /// Log-probabilities, if the row requested them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log-probabilities of the raw distribution (before bias, penalties and temperature).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log-probability of the row's token.
    pub logprob: f32,
    /// Rank of the token; 1 is the most likely one.
    pub rank: u32,
    /// `(id, log-probability)` of the most likely tokens, or of [`SampleRow::logprob_ids`], in descending order, ties
    /// by id.
    pub top: Vec<(u32, f32)>,
}
