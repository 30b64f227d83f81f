//! Shares of a step, and its budget.

use std::time::Instant;

use crate::sequence::{SequenceKey, ShareRows};
use crate::{StepId, StepWork};

/// One sequence's share of a step: its tokens, and the rows that give an output. The engine keeps it until the step
/// retires.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) key: SequenceKey,
    /// Value of [`Sequence::preemptions`] when the share was planned.
    pub(super) preemptions: u32,
    /// Position of its first token.
    pub(crate) first: usize,
    pub(crate) tokens: usize,
    pub(crate) rows: ShareRows,
    /// Whether its tokens are drawn under masks.
    pub(crate) constrained: bool,
    /// Estimated work; nothing without a cost model.
    pub(super) work: StepWork,
    /// Estimated time in seconds.
    pub(super) seconds: f64,
}

impl Share {
    /// Returns the position after its last token.
    pub(super) fn end(&self) -> usize {
        self.first + self.tokens
    }

    /// Returns the number of masks that it needs.
    pub(crate) fn masks(&self) -> usize {
        if self.constrained { self.rows.draws } else { 0 }
    }
}

/// The shares of a step in flight.
#[derive(Debug, Default)]
pub(crate) struct StepRecord {
    pub(crate) step: StepId,
    /// Shares, in the order of the plan's sequences.
    pub(crate) shares: Vec<Share>,
    /// Whether its sampling has been started.
    pub(crate) sampling: bool,
    /// Number of tokens of the images that it encodes.
    pub(crate) image_tokens: usize,
    /// Estimated work; nothing without a cost model.
    pub(crate) work: StepWork,
    /// Time of its submission.
    pub(crate) begun: Option<Instant>,
}

impl StepRecord {
    /// Returns the number of tokens and the number of vectors in its output.
    pub(crate) fn outputs(&self) -> (usize, usize) {
        let rows = self.shares.iter().map(|share| share.rows);
        rows.fold((0, 0), |(tokens, vectors), rows| (tokens + rows.tokens(), vectors + rows.vectors))
    }

    /// Returns the number of rows that draw under a mask.
    pub(crate) fn masks(&self) -> usize {
        self.shares.iter().map(Share::masks).sum()
    }
}

/// Remaining budget of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    pub(super) tokens: usize,
    /// Number of rows that may still be scored or verify a draft.
    pub(super) scores: usize,
    /// Number of sequences that were passed over for want of rows to score.
    pub(super) without_rows: usize,
    /// Number of drafts that may still be verified.
    pub(super) drafts: usize,
    /// Number of masks that sequences may still have which ran before, and that those may have which the step admits.
    pub(super) masks: usize,
    pub(super) first_masks: usize,
    /// Seconds; infinite if the step is not bounded in time.
    pub(super) seconds: f64,
    /// Time that a token takes if every running sequence draws one, once it has been estimated.
    pub(super) token_seconds: Option<f64>,
    /// Number of blocks that running sequences still need for the tokens that they have, once it has been counted.
    pub(super) reserved: Option<usize>,
}

impl Budget {
    pub(super) fn take(&mut self, share: &Share) {
        self.tokens -= share.tokens;
        self.scores -= share.rows.scores + share.rows.drafts();
        self.drafts -= share.rows.drafts();
        self.seconds -= share.seconds;
    }

    pub(super) fn give_back(&mut self, share: &Share) {
        self.tokens += share.tokens;
        self.scores += share.rows.scores + share.rows.drafts();
        self.drafts += share.rows.drafts();
        self.seconds += share.seconds;
        self.masks = self.masks.saturating_add(share.masks());
    }
}
