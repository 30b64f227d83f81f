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
    /// What sampled row `row` of the step before this one draws; the engine has not seen it yet.
    Drawn {
        /// Index among that step's sampled rows.
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// The last of its tokens is the last one known: the step draws a token for it.
    pub samples: bool,
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
    /// Sequences in scheduling order. Sampled rows are numbered in this order, skipping those that do not sample.
    pub sequences: Vec<PlannedSequence>,
    /// Block tables as ranges of [`StepPlan::blocks`]; `sequences[i].tables` indexes here, one range a KV group.
    pub tables: Vec<Range<usize>>,
    /// Block ids.
    pub blocks: Vec<u32>,
    /// Sequences that take a slot in this step; applied before [`StepPlan::sequences`] is read.
    pub joined: Vec<Joined>,
}

impl StepPlan {
    /// Number of sequences that draw a token.
    pub fn sampled_rows(&self) -> usize {
        self.sequences.iter().filter(|s| s.samples).count()
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

/// A token drawn for a sequence, with log-probabilities if it asked for them.
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
    /// `(id, log-probability)` of the most likely tokens, descending.
    pub top: Vec<(u32, f32)>,
}

/// The result of a step.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// One token for each sampled row of the plan, in order.
    pub rows: Vec<TokenOutput>,
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
