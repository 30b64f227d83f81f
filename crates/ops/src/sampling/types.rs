//! What the `Sample` op reads and writes.

use crate::BackendError;

/// What one row asks of the sampler. Plain numbers: ranges are checked where the request is parsed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleParams {
    /// 0 means greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches p; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this fraction of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Subtracted once from the logit of every token already generated.
    pub presence_penalty: f32,
    /// Subtracted from a logit for each time its token was generated.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Key of the random draws.
    pub seed: u64,
    /// Number of most likely tokens to report beside the drawn one; `None` reports no log-probabilities.
    pub logprobs: Option<u32>,
}

impl SampleParams {
    /// Whether the most likely token is taken; a temperature that is no number counts as 0.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 || self.temperature.is_nan()
    }

    /// Whether the row's [`TokenCounts`] matter.
    pub fn needs_counts(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

impl Default for SampleParams {
    /// Greedy, nothing filtered, no log-probabilities.
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

/// Tokens a sequence has seen, for the penalties. Owned by the runner, one a slot, updated with each drawn token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Ids of the prompt, ascending, no duplicates.
    pub prompt: Vec<u32>,
    /// `(id, times generated)`, ascending by id.
    pub output: Vec<(u32, u32)>,
}

impl TokenCounts {
    /// Counts of a sequence: its prompt, and what it has generated already (a preempted one that comes back).
    pub fn new(prompt: &[u32], output: &[u32]) -> Self {
        let mut prompt = prompt.to_vec();
        prompt.sort_unstable();
        prompt.dedup();
        let mut counts = Self { prompt, output: Vec::new() };
        output.iter().for_each(|&token| counts.push(token));
        counts
    }

    /// Counts one more generated token.
    pub fn push(&mut self, token: u32) {
        match self.output.binary_search_by_key(&token, |&(id, _)| id) {
            Ok(i) => self.output[i].1 += 1,
            Err(i) => self.output.insert(i, (token, 1)),
        }
    }
}

/// One sampled row.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    /// What to do.
    pub params: &'a SampleParams,
    /// Index of the output token in its sequence, 0 for the first: with the seed, the key of the draw.
    pub output_position: u32,
    /// Seen tokens; `None` where no penalty is on.
    pub counts: Option<&'a TokenCounts>,
    /// Added to the logits.
    pub logit_bias: &'a [(u32, f32)],
    /// Never drawn (end-of-sequence and stop ids below `min_tokens`).
    pub forbidden: &'a [u32],
    /// Bit `id` of word `id / 32` set = allowed; `None` allows all. Holds ⌈V / 32⌉ words.
    pub mask: Option<&'a [u32]>,
    /// The token is given: nothing is drawn, whatever else is set, and only its log-probabilities are reported.
    pub forced: Option<u32>,
    /// If not empty and log-probabilities are reported: the tokens to report beside the row's own, in place of the most
    /// likely ones. Repetitions count once; an id beyond the vocabulary has the log-probability −∞.
    pub logprob_ids: &'a [u32],
}

impl<'a> SampleRow<'a> {
    /// A row of which nothing but the parameters is set, the first of its sequence.
    pub const fn new(params: &'a SampleParams) -> Self {
        Self {
            params,
            output_position: 0,
            counts: None,
            logit_bias: &[],
            forbidden: &[],
            mask: None,
            forced: None,
            logprob_ids: &[],
        }
    }

    /// Whether the row's token is the largest of its logits as they are, the lowest id among equals, and nothing else is
    /// asked of it. Where no logit is above −∞, [`Sampler`](super::Sampler) says what comes out.
    pub fn wants_the_largest(&self) -> bool {
        let free = self.forced.is_none() && self.params.logprobs.is_none();
        free && self.params.is_greedy() && self.takes_logits_as_they_are()
    }

    /// Whether nothing changes the logits before a token is chosen.
    pub(crate) const fn takes_logits_as_they_are(&self) -> bool {
        self.counts.is_none() && self.logit_bias.is_empty() && self.forbidden.is_empty() && self.mask.is_none()
    }
}

/// The rows of a step, in the order of [`StepBatch::sampled_rows`](crate::StepBatch::sampled_rows).
#[derive(Clone, Copy, Debug)]
pub struct SampleBatch<'a> {
    /// R rows.
    pub rows: &'a [SampleRow<'a>],
}

impl SampleBatch<'_> {
    /// That there is a row for each that the last forward pass left.
    ///
    /// # Errors
    /// [`BackendError::Failed`], which tells both numbers.
    pub fn check(&self, backend: &'static str, left: usize) -> Result<(), BackendError> {
        let wanted = self.rows.len();
        if wanted == left {
            return Ok(());
        }
        let reason = format!("{wanted} rows to sample, but the forward pass left {left}");
        Err(BackendError::Failed { backend, reason })
    }
}

/// A drawn token, or the forced one.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: u32,
    /// Present if the row asked for log-probabilities.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log-probabilities of the raw distribution (before bias, penalties and temperature).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the row's token.
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
    /// `(id, log-probability)` of the most likely tokens, or of [`SampleRow::logprob_ids`]; descending, ties by id.
    pub top: Vec<(u32, f32)>,
}
