//! The plan of a step, which the engine gives an executor, and the result it gets back. Both are flat, and the engine
//! reuses the same few plans.

use std::ops::Range;
use std::sync::Arc;

use crate::{ImageInput, PromptImage, SamplingParams};

/// Number of a step. Steps are numbered from 1 in the order of submission.
pub type StepId = u64;

/// Index of a running sequence in the executor's persistent buffers, from a fixed pool of `max_num_seqs`.
pub type Seat = u32;

/// A token of the step's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputToken {
    /// A token that the engine knows.
    Id(u32),
    /// The token that row `row` of the preceding step samples. The engine has not seen it yet.
    Drawn {
        /// Index among the preceding step's rows.
        row: u32,
    },
}

/// An image that a step encodes before its forward pass.
#[derive(Clone, Debug)]
pub struct PlannedImage {
    /// The image.
    pub image: Arc<ImageInput>,
    /// Rows of the media cache that its tokens take, in order.
    pub media: Vec<Range<u32>>,
}

/// Consecutive tokens of a step that take rows of the media cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InjectedTokens {
    /// Position of the first token.
    pub position: u32,
    /// Rows of the media cache, one for each token.
    pub media: Range<u32>,
}

/// Data of a sequence that takes a seat. The executor receives it once.
#[derive(Clone, Debug)]
pub struct Joined {
    /// Seat of the sequence.
    pub seat: Seat,
    /// Sampling parameters of the sequence.
    pub params: Arc<SamplingParams>,
    /// Prompt token ids.
    pub prompt: Arc<[u32]>,
    /// Tokens generated before a preemption; empty for a new sequence.
    pub output: Vec<u32>,
    /// Images of the prompt, in order. They determine the positions of all tokens.
    pub images: Arc<[PromptImage]>,
    /// Position of the first token of the second text of a pair.
    pub second_text: Option<u32>,
}

/// Vectors of a sequence that a step returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PooledRows {
    /// None.
    #[default]
    None,
    /// One vector of the prompt, whose last token is the last one of this step. A model that reduces all rows of the
    /// prompt gets the whole prompt in one step.
    Prompt,
    /// A vector for each token of this step.
    Each,
}

/// One sequence's part of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedSequence {
    /// Seat of the sequence.
    pub seat: Seat,
    /// Range of its tokens in [`StepPlan::tokens`].
    pub tokens: Range<usize>,
    /// Position of its first token in this step.
    pub first_position: u32,
    /// Block tables in [`StepPlan::blocks`], one per KV group, with enough blocks for every token up to the last of
    /// this step.
    pub tables: Range<usize>,
    /// Positions of this step's tokens that are scored: position p gives the log-probabilities of prompt token p + 1,
    /// with the number of alternatives from `prompt_logprobs`. Mostly empty.
    pub scores: Range<u32>,
    /// Whether the step samples a token after its last token, because that is the last known one.
    pub samples: bool,
    /// Vectors that the step returns.
    pub pools: PooledRows,
    /// Index of the sampled token, counted from the first generated one.
    pub output_position: u32,
    /// Whether a mask will come with [`Executor::sample`](crate::Executor::sample).
    pub constrained: bool,
    /// Range of its tokens of images in [`StepPlan::injected`], in order.
    pub injected: Range<usize>,
}

/// The plan of one step.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Number of the step.
    pub step: StepId,
    /// Input tokens of all sequences, `[T]`.
    pub tokens: Vec<InputToken>,
    /// Sequences in scheduling order. The step's rows are numbered from 0 in this order: first the rows that a sequence
    /// scores, by position, then the row that it samples, if any. Embeddings have their own numbering.
    pub sequences: Vec<PlannedSequence>,
    /// Block tables as ranges of [`StepPlan::blocks`]. `sequences[i].tables` selects one range per KV group.
    pub tables: Vec<Range<usize>>,
    /// Block ids of all tables.
    pub blocks: Vec<u32>,
    /// Sequences that take a seat in this step. They are applied before [`StepPlan::sequences`] is read.
    pub joined: Vec<Joined>,
    /// Images that are encoded first.
    pub encode: Vec<PlannedImage>,
    /// Tokens of images of all sequences, whose rows of the media cache this step or an earlier one has encoded.
    pub injected: Vec<InjectedTokens>,
}

impl PlannedSequence {
    /// Returns the number of rows that reach the head.
    pub fn rows(&self) -> usize {
        self.scores.len() + usize::from(self.samples)
    }

    /// Returns the number of vectors that are returned.
    pub fn vectors(&self) -> usize {
        match self.pools {
            PooledRows::None => 0,
            PooledRows::Prompt => 1,
            PooledRows::Each => self.tokens.len(),
        }
    }
}

impl StepPlan {
    /// Returns the number of rows that reach the head: scored rows and rows that sample a token.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(PlannedSequence::rows).sum()
    }

    /// Returns the number of vectors that are returned.
    pub fn vectors(&self) -> usize {
        self.sequences.iter().map(PlannedSequence::vectors).sum()
    }

    /// Clears the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
        self.tables.clear();
        self.blocks.clear();
        self.joined.clear();
        self.encode.clear();
        self.injected.clear();
    }
}

/// A token sampled for a sequence, or a scored prompt token, with log-probabilities if they were requested.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    /// Token id.
    pub id: u32,
    /// Raw log-probabilities.
    pub logprobs: Option<Logprobs>,
}

/// Log-probabilities at a position, before bias, penalties and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Log-probability of the token itself.
    pub logprob: f32,
    /// Rank of the token; 1 is the most likely one.
    pub rank: u32,
    /// `(id, log-probability)` of the most likely tokens, or of the tokens in [`SamplingParams::logprob_token_ids`], in
    /// descending order, ties by id.
    pub top: Vec<(u32, f32)>,
}

/// The result of a step.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Tokens of the plan's rows, in order.
    pub rows: Vec<TokenOutput>,
    /// Vectors of the sequences that pool, in order: one vector, or those of the step's tokens one after the other.
    pub embeddings: Vec<Vec<f32>>,
    /// The plan, returned for reuse of its memory.
    pub plan: StepPlan,
}

/// Bit masks for the constrained rows of a step, in the order of the plan's constrained sequences that sample.
#[derive(Debug, Default)]
pub struct StepMasks {
    /// Number of words in a mask: ⌈V / 32⌉.
    pub words: usize,
    /// Bits, `[constrained rows, words]`.
    pub bits: Vec<u32>,
}
