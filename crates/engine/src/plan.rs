//! The plan of a step, which the engine gives an executor, and the result it gets back. Both are flat, and the engine
//! reuses the same few plans.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::{Adapter, ImageInput, PromptImage, SamplingParams};

/// Number of a step. Steps are numbered from 1 in the order of submission.
pub type StepId = u64;

/// Index of a running sequence in the executor's persistent buffers, from a fixed pool of `max_num_seqs`.
pub type Seat = u32;

/// A token of the step's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputToken {
    /// A token that the engine knows.
    Id(u32),
    /// The token that row `row` of the preceding step draws. The engine has not seen it yet.
    Drawn {
        /// Index among the preceding step's rows that give a token.
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

/// Index of a slot of the executor that holds an adapter.
pub type AdapterSlot = u32;

/// A new content of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterChange {
    /// Slot, whose former adapter no later step uses.
    pub slot: AdapterSlot,
    /// Adapter that it holds from now on.
    pub adapter: Adapter,
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
    /// Whether [`Executor::sample`](crate::Executor::sample) brings a mask for each row that draws a token.
    pub constrained: bool,
    /// Images of the prompt, in order. They determine the positions of all tokens.
    pub images: Arc<[PromptImage]>,
    /// Position of the first token of the second text of a pair.
    pub second_text: Option<u32>,
    /// Slot of its adapter.
    pub adapter: Option<AdapterSlot>,
}

impl Joined {
    /// Creates the data of a new sequence of text without a mask.
    pub fn new(seat: Seat, prompt: impl Into<Arc<[u32]>>, params: impl Into<Arc<SamplingParams>>) -> Self {
        Self {
            seat,
            params: params.into(),
            prompt: prompt.into(),
            output: Vec::new(),
            constrained: false,
            images: Arc::default(),
            second_text: None,
            adapter: None,
        }
    }
}

/// What a step returns for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// The log-probabilities of the prompt token after the row, with the number of alternatives from `prompt_logprobs`.
    Score,
    /// A token drawn after the row, which is the last known one.
    Draw,
    /// A token drawn after the row, which is a draft. It counts if the tokens drawn before it in this step equal the
    /// drafts.
    Verify,
    /// A vector. A model that reduces rows to one reduces those of the sequence in this step up to this one, from the
    /// first or from the pooled row before.
    Pool,
}

impl RowKind {
    /// Returns whether the row reaches the head and gives a token.
    pub const fn gives_token(self) -> bool {
        !matches!(self, Self::Pool)
    }

    /// Returns whether a token is drawn.
    pub const fn draws(self) -> bool {
        matches!(self, Self::Draw | Self::Verify)
    }
}

/// A token of a step that gives an output.
///
/// The token that is drawn after position p is the output token number p + 1 − prompt length, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedRow {
    /// Index of its sequence in [`StepPlan::sequences`].
    pub sequence: u32,
    /// Position of the token in its sequence.
    pub position: u32,
    /// What the step returns for it.
    pub kind: RowKind,
}

/// A change of a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableChange {
    /// Seat of the sequence.
    pub seat: Seat,
    /// KV group.
    pub group: u32,
    /// Number of leading blocks that stay.
    pub start: u32,
    /// Range in [`StepPlan::blocks`] of the blocks that follow, in place of those that did.
    pub blocks: Range<usize>,
}

/// Blocks that no token of their sequence sees from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedBlocks {
    /// Seat of the sequence.
    pub seat: Seat,
    /// KV group.
    pub group: u32,
    /// Range in the block table, whose entries become the null block.
    pub blocks: Range<u32>,
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
    /// Range of its tokens of images in [`StepPlan::injected`], in order.
    pub injected: Range<usize>,
}

/// The plan of one step. It names only what is new: an executor keeps the sequences in their seats and their block tables
/// from step to step.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Number of the step.
    pub step: StepId,
    /// Input tokens of all sequences, `[T]`.
    pub tokens: Vec<InputToken>,
    /// Sequences in scheduling order. Each has at least one token.
    pub sequences: Vec<PlannedSequence>,
    /// Rows that give an output, sequence by sequence, by position: first those that score, then those that draw, then
    /// those that are pooled.
    pub rows: Vec<PlannedRow>,
    /// Seats that sequences have left since the plan before. They are applied first.
    pub left: Vec<Seat>,
    /// Changes of the executor's slots of adapters, which follow.
    pub adapters: Vec<AdapterChange>,
    /// Sequences that take a seat in this step. Their block tables are empty.
    pub joined: Vec<Joined>,
    /// Changes of block tables, which follow. With them, the tables have a block for every token that a token of the step
    /// sees, and the null block for the others.
    pub tables: Vec<TableChange>,
    /// Other changes of block tables.
    pub passed: Vec<PassedBlocks>,
    /// Block ids of all changes.
    pub blocks: Vec<u32>,
    /// Images that are encoded first.
    pub encode: Vec<PlannedImage>,
    /// Tokens of images of all sequences, whose rows of the media cache this step or an earlier one has encoded.
    pub injected: Vec<InjectedTokens>,
}

impl StepPlan {
    /// Returns the number of rows that reach the head and give a token.
    pub fn token_rows(&self) -> usize {
        self.rows.iter().filter(|row| row.kind.gives_token()).count()
    }

    /// Returns the number of rows that give a vector.
    pub fn pooled_rows(&self) -> usize {
        self.rows.len() - self.token_rows()
    }

    /// Returns the sequence of a row; `None` if the plan is malformed.
    pub fn sequence(&self, row: &PlannedRow) -> Option<&PlannedSequence> {
        self.sequences.get(row.sequence as usize)
    }

    /// Returns the input token of a row; `None` if the plan is malformed.
    pub fn token(&self, row: &PlannedRow) -> Option<InputToken> {
        let sequence = self.sequence(row)?;
        let offset = row.position.checked_sub(sequence.first_position)?;
        self.tokens.get(sequence.tokens.clone())?.get(offset as usize).copied()
    }

    /// Clears the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
        self.rows.clear();
        self.left.clear();
        self.adapters.clear();
        self.joined.clear();
        self.tables.clear();
        self.passed.clear();
        self.blocks.clear();
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
    /// Tokens of the plan's rows that give a token, in order.
    pub tokens: Vec<TokenOutput>,
    /// Vectors of the plan's pooled rows one after the other, all of the same length.
    pub vectors: Vec<f32>,
    /// Time that the device worked on the step; zero if it is not known.
    pub busy: Duration,
    /// The plan, returned for reuse of its memory.
    pub plan: StepPlan,
}

/// Bit masks for the rows of a step that draw a token for a constrained sequence, in order.
#[derive(Debug, Default)]
pub struct StepMasks {
    /// Masks of ⌈V / 32⌉ words.
    pub rows: Vec<Vec<u32>>,
}
