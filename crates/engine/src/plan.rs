//! What the engine asks of an executor in one step, and what it gets back. Flat and reusable: the engine fills the same
//! few plans over and over.

use std::ops::Range;
use std::sync::Arc;

use crate::SamplingParams;

/// Steps are numbered from 1 in the order of submission.
pub type StepId = u64;

/// Index of a running sequence in the executor's persistent buffers; handed out from a fixed pool of `max_num_seqs`.
pub type Slot = u32;

/// A token of the step's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputToken {
    /// Known to the engine.
    Id(u32),
    /// What row `row` of the step before this one draws; the engine has not seen it yet.
    Drawn {
        /// Index among that step's rows.
        row: u32,
    },
}

/// What an executor needs to know once about a sequence that takes a slot.
#[derive(Clone, Debug)]
pub struct Joined {
    /// The slot it takes.
    pub slot: Slot,
    /// How its tokens are drawn.
    pub params: Arc<SamplingParams>,
    /// Prompt token ids.
    pub prompt: Arc<[u32]>,
    /// Tokens generated before (a preempted sequence that comes back); empty for a new one.
    pub output: Vec<u32>,
}

/// One sequence's part of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedSequence {
    /// Its slot.
    pub slot: Slot,
    /// Its tokens in [`StepPlan::tokens`].
    pub tokens: Range<usize>,
    /// Position of the first of them.
    pub first_position: u32,
    /// Per KV group, its block table in [`StepPlan::blocks`]: enough blocks for every token up to and including this
    /// step's.
    pub tables: Range<usize>,
    /// Positions of this step's tokens that are scored: the one at p gives the log-probabilities of prompt token p + 1,
    /// with as many alternatives as `prompt_logprobs` says. Mostly empty.
    pub scores: Range<u32>,
    /// The last of its tokens is the last one known: the step draws a token for it.
    pub samples: bool,
    /// The last of its tokens is the last one of the prompt, whose hidden state is returned.
    pub pools: bool,
    /// Index of the token drawn, counted from the first generated one.
    pub output_position: u32,
    /// A mask will come with [`Executor::sample`](crate::Executor::sample).
    pub constrained: bool,
}

/// One step.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Number of the step.
    pub step: StepId,
    /// `[T]`, sequence after sequence.
    pub tokens: Vec<InputToken>,
    /// Sequences in scheduling order. The step's rows are numbered from 0 in this order: those that a sequence scores, by
    /// position, then the one that it draws, if it does. Embeddings are numbered by themselves.
    pub sequences: Vec<PlannedSequence>,
    /// Block tables as ranges of [`StepPlan::blocks`]; `sequences[i].tables` indexes here, one range a KV group.
    pub tables: Vec<Range<usize>>,
    /// Block ids.
    pub blocks: Vec<u32>,
    /// Sequences that take a slot in this step; applied before [`StepPlan::sequences`] is read.
    pub joined: Vec<Joined>,
}

impl PlannedSequence {
    /// Rows that reach the head.
    pub fn rows(&self) -> usize {
        self.scores.len() + usize::from(self.samples)
    }
}

impl StepPlan {
    /// Rows that a step scores, at most, whatever it computes: executors size their buffers for these and one drawn row
    /// a sequence.
    pub const MAX_SCORED_ROWS: usize = 64;

    /// Number of rows that reach the head: scored ones and those that draw a token.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(PlannedSequence::rows).sum()
    }

    /// Number of sequences whose hidden state is returned.
    pub fn pooled_rows(&self) -> usize {
        self.sequences.iter().filter(|s| s.pools).count()
    }

    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
        self.tables.clear();
        self.blocks.clear();
        self.joined.clear();
    }
}

/// A token drawn for a sequence, with log-probabilities if it asked for them; or a scored prompt token with its
/// log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    /// The id.
    pub id: u32,
    /// Raw log-probabilities.
    pub logprobs: Option<Logprobs>,
}

/// Log-probabilities of a position, before bias, penalties and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token itself.
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
    /// `(id, log-probability)` of the most likely tokens, or of those in
    /// [`SamplingParams::logprob_token_ids`]; descending, ties by id.
    pub top: Vec<(u32, f32)>,
}

/// The result of a step.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// One token for each row of the plan, in order.
    pub rows: Vec<TokenOutput>,
    /// `[H]` for each sequence that pools, in order.
    pub embeddings: Vec<Vec<f32>>,
    /// The plan, for the next use of its memory.
    pub plan: StepPlan,
}

/// Bit masks for the constrained rows of a step, in the order of the plan's constrained sequences that sample.
#[derive(Debug, Default)]
pub struct StepMasks {
    /// Words of a mask: ⌈V / 32⌉.
    pub words: usize,
    /// `[constrained rows, words]`.
    pub bits: Vec<u32>,
}
