//! Log-probabilities of a prompt: the rows that steps have to score, and what they returned.

use std::ops::Range;

use crate::{Logprobs, TokenOutput};

/// Rows of a prompt that are scored: all but that of its last token, if scores were requested. Row p gives the
/// log-probabilities of prompt token p + 1.
pub(crate) struct PromptScores {
    /// Number of rows; 0 if no scores were requested.
    rows: usize,
    /// Number of rows that steps so far have scored or will score. It survives preemption, as those steps do.
    planned: usize,
    /// Log-probabilities received so far.
    logprobs: Vec<Logprobs>,
}

impl PromptScores {
    pub(crate) fn new(rows: usize) -> Self {
        Self { rows, planned: 0, logprobs: Vec::new() }
    }

    /// Returns whether scores were requested.
    pub(crate) fn requested(&self) -> bool {
        self.rows > 0
    }

    /// Returns the positions that a step which computes the tokens up to `end` has to score.
    pub(crate) fn until(&self, end: usize) -> Range<usize> {
        self.planned..end.min(self.rows).max(self.planned)
    }

    /// Returns the number of tokens from `first` on that a step may compute without scoring more than `rows` rows.
    pub(crate) fn within(&self, first: usize, rows: usize) -> usize {
        if self.rows - self.planned <= rows { usize::MAX } else { (self.planned + rows).saturating_sub(first) }
    }

    /// Returns the number of tokens that may come from the prefix cache: those that are still to be scored must be
    /// computed.
    pub(crate) fn may_be_cached(&self) -> usize {
        if self.planned < self.rows { self.planned } else { usize::MAX }
    }

    /// Records that a step computes the tokens up to `end`.
    pub(crate) fn plan(&mut self, end: usize) {
        self.planned = self.until(end).end;
    }

    /// Reserves the memory of all log-probabilities.
    pub(crate) fn reserve(&mut self) {
        self.logprobs.reserve_exact(self.rows);
    }

    /// Appends the scores of the next rows.
    pub(crate) fn receive(&mut self, scores: impl Iterator<Item = TokenOutput>) {
        self.logprobs.extend(scores.filter_map(|score| {
            debug_assert!(score.logprobs.is_some(), "a prompt token was scored for nothing");
            score.logprobs
        }));
    }

    /// Returns the log-probabilities of the whole prompt.
    pub(crate) fn take(&mut self) -> Vec<Logprobs> {
        std::mem::take(&mut self.logprobs)
    }
}
