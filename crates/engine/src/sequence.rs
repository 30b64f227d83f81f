//! A request inside the engine, and the table of all requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use octavo_telemetry::FinishedRequest;

use crate::draft::Drafter;
use crate::image::SequenceImages;
use crate::inbox::RequestId;
use crate::kv::{KvLayout, SequenceKv, TokenHistory};
use crate::scores::PromptScores;
use crate::stop::RepetitionDetector;
use crate::stream::{EventSender, FirstEvent};
use crate::timeline::Timeline;
use crate::{
    Adapter, AdapterSlot, ClientId, Constraint, FinishReason, Pooling, Request, SamplingParams, Seat, StepId, Task,
};

/// Location of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residence {
    /// In the waiting queue, without blocks.
    Waiting,
    /// In the running list.
    Running(Seat),
}

/// Result that a step takes from a sequence's last known token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LastOutput {
    /// Samples a token.
    Token,
    /// Returns the vector of the prompt, or that of the last of its tokens, and ends the request.
    Vectors(Pooling),
    /// Returns nothing more: the prompt is scored, which ends the request.
    Scores,
}

/// Rows of a share that give an output, by kind. Those that score come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShareRows {
    /// Whether the share has the last known token, so that an answer follows.
    pub(crate) completes: bool,
    /// Number of rows that score the prompt.
    pub(crate) scores: usize,
    /// Number of rows that draw a token, which are those of the last tokens: that of the last known one and one of each
    /// draft.
    pub(crate) draws: usize,
    /// Number of rows that give a vector, which are those of the last tokens.
    pub(crate) vectors: usize,
}

impl ShareRows {
    /// Returns the number of rows that reach the head.
    pub(crate) fn tokens(&self) -> usize {
        self.scores + self.draws
    }

    /// Returns the number of drafts that are verified.
    pub(crate) fn drafts(&self) -> usize {
        self.draws.saturating_sub(1)
    }
}

/// A request inside the engine.
///
/// Its tokens are the known ones (prompt and generated) and at most two `pending` ones, sampled by steps in flight,
/// whose ids the engine has not seen. An answer that is no token counts as a pending one too. `retired ≤ submitted ≤
/// known + pending`, beyond which a step in flight may verify drafts: `retired` counts the tokens whose keys and values are in memory, `submitted` those of all steps
/// submitted so far.
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    /// Request id given by the caller.
    pub(crate) name: String,
    pub(crate) history: TokenHistory,
    pub(crate) params: Arc<SamplingParams>,
    pub(crate) priority: i64,
    pub(crate) client: ClientId,
    /// Latest step that computed tokens of the sequence, or for a new sequence the one before the latest.
    pub(crate) served: StepId,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    /// Whether the latest mask of the constraint allowed no token.
    pub(crate) unsatisfiable: bool,
    /// Whether the constraint does not allow the token that was drawn last.
    pub(crate) rejected: bool,
    pub(crate) repetition: Option<RepetitionDetector>,
    pub(crate) last_output: LastOutput,
    pub(crate) scores: PromptScores,
    /// Vectors received so far.
    vectors: Vec<f32>,
    /// Position of the first token of the second text of a pair.
    pub(crate) second_text: Option<u32>,
    pub(crate) adapter: Option<Adapter>,
    /// Slot of its adapter, while it runs.
    pub(crate) adapter_slot: Option<AdapterSlot>,
    parent_n: Option<u32>,
    pub(crate) residence: Residence,
    /// Whether the executor knows that the sequence has its seat.
    pub(crate) joined: bool,
    /// Whether a step has passed the sequence over while it waited, so that later ones may have overtaken it.
    pub(crate) deferred: bool,
    /// Number of steps that have passed it over for want of a budget of the step.
    pub(crate) passes: u32,
    /// Number of preemptions. A planned row carries the count, so that rows from before a preemption are recognised.
    pub(crate) preemptions: u32,
    /// Maximum number of prompt and output tokens together.
    limit: usize,
    pub(crate) pending: usize,
    /// Drafts of the next tokens, if the sequence may have any.
    pub(crate) drafter: Option<Box<Drafter>>,
    /// Row of the latest step that draws the last pending token, among those that give one.
    pub(crate) drawn_row: u32,
    pub(crate) submitted: usize,
    pub(crate) retired: usize,
    pub(crate) kv: SequenceKv,
    pub(crate) images: SequenceImages,
    /// Number of prompt tokens found in the prefix cache at the first admission.
    pub(crate) cached_tokens: u32,
    pub(crate) timeline: Timeline,
    pub(crate) sender: EventSender,
}

impl Sequence {
    /// Creates a waiting sequence. `request` must have been checked: its prompt is not empty and shorter than
    /// `max_model_len`.
    pub(crate) fn new(
        id: RequestId,
        request: Request,
        prepared: SequenceKv,
        sender: EventSender,
        limit: usize,
    ) -> Self {
        let Request { id: name, prompt, images, task, params, priority, client, arrival, constraint, adapter, .. } =
            request;
        let (parent_n, second_text) = (request.parent_n, request.second_text);
        let last_output = match task {
            Task::Generate if limit > prompt.len() => LastOutput::Token,
            Task::Generate => LastOutput::Scores,
            Task::Embed(pooling) => LastOutput::Vectors(pooling),
        };
        let scores = params.prompt_logprobs.is_some() && task == Task::Generate;
        Self {
            id,
            name,
            scores: PromptScores::new(if scores { prompt.len() - 1 } else { 0 }),
            history: TokenHistory::new(prompt),
            repetition: params.repetition_detection.and_then(RepetitionDetector::new),
            last_output,
            vectors: Vec::new(),
            second_text,
            adapter,
            adapter_slot: None,
            params,
            priority,
            client,
            served: 0,
            constraint,
            unsatisfiable: false,
            rejected: false,
            parent_n,
            residence: Residence::Waiting,
            joined: false,
            deferred: false,
            passes: 0,
            preemptions: 0,
            limit,
            pending: 0,
            drafter: None,
            drawn_row: 0,
            submitted: 0,
            retired: 0,
            kv: prepared,
            images: SequenceImages::new(images),
            cached_tokens: 0,
            timeline: Timeline::new(arrival, Instant::now()),
            sender,
        }
    }

    pub(crate) fn prompt_len(&self) -> usize {
        self.history.prompt.len()
    }

    /// Returns the number of known and pending tokens.
    pub(crate) fn total(&self) -> usize {
        self.history.len() + self.pending
    }

    /// Returns the number of tokens that the next step should compute, with drafts: 0 if the pending token is the last that
    /// fits.
    pub(crate) fn wanted(&self) -> usize {
        match self.pending {
            0 => self.total() + self.drafts().len() - self.submitted,
            _ if self.total() >= self.limit => 0,
            _ => self.total() - self.submitted,
        }
    }

    /// Returns the drafts that the step being planned or in flight verifies.
    pub(crate) fn drafts(&self) -> &[u32] {
        self.drafter.as_ref().map_or(&[], |drafter| drafter.drafts())
    }

    /// Returns whether tokens may be drafted. The mask of a draw is not known before the tokens before it are.
    pub(crate) fn may_draft(&self) -> bool {
        self.last_output == LastOutput::Token && self.constraint.is_none()
    }

    /// Returns the number of drafts that fit if all of them are accepted, with the token after them.
    pub(crate) fn draft_room(&self) -> usize {
        self.limit.saturating_sub(self.total() + 1)
    }

    /// Maximum number of prompt and output tokens together.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the number of tokens that may come from the prefix cache. Tokens whose vectors are returned must be
    /// computed.
    pub(crate) fn may_be_cached(&self) -> usize {
        match self.last_output {
            LastOutput::Vectors(Pooling::Tokens) => 0,
            _ => self.scores.may_be_cached(),
        }
    }

    /// Returns the rows that give an output in a step which computes the tokens `first..end`.
    pub(crate) fn rows_of(&self, first: usize, end: usize) -> ShareRows {
        let completes = end >= self.total();
        ShareRows {
            completes,
            scores: self.scores.until(end).len(),
            draws: if completes && self.last_output == LastOutput::Token { 1 + end - self.total() } else { 0 },
            vectors: match self.last_output {
                LastOutput::Vectors(Pooling::Tokens) => end - first,
                LastOutput::Vectors(Pooling::Prompt) => usize::from(completes),
                _ => 0,
            },
        }
    }

    /// Keeps the vectors that a step returned, of which the first is that of the token at `first` if each token has one.
    /// Those of tokens that were computed again after a preemption replace the earlier ones.
    pub(crate) fn keep_vectors(&mut self, first: usize, vectors: &[f32], width: usize) {
        let at = if self.last_output == LastOutput::Vectors(Pooling::Tokens) { first * width } else { 0 };
        if at <= self.vectors.len() {
            self.vectors.truncate(at);
            self.vectors.extend_from_slice(vectors);
        }
    }

    /// Returns the vectors, if they are the answer.
    pub(crate) fn take_vectors(&mut self) -> Option<Vec<f32>> {
        matches!(self.last_output, LastOutput::Vectors(_)).then(|| std::mem::take(&mut self.vectors))
    }

    /// Returns whether the output repeats itself with its newest token. Must be called once per token.
    pub(crate) fn repeats(&mut self) -> bool {
        let Self { history, repetition, params, .. } = self;
        let repeats = repetition.as_mut().is_some_and(|detector| detector.push(&history.output));
        repeats && history.output.len() >= params.min_tokens as usize
    }

    /// Returns whether no further token fits.
    pub(crate) fn full(&self) -> bool {
        self.history.len() >= self.limit
    }

    /// Returns the data of the first event, if the latest token is the first or the answer is no token.
    pub(crate) fn first_event(&mut self) -> Option<FirstEvent> {
        let first = self.history.output.len() <= 1;
        first.then(|| FirstEvent { cached_tokens: self.cached_tokens, prompt_logprobs: self.scores.take() })
    }

    /// Assigns a seat, with `cached` tokens already in its blocks.
    pub(crate) fn admit(&mut self, seat: Seat, cached: usize, layout: &KvLayout) {
        debug_assert_eq!((self.residence, self.pending, self.submitted), (Residence::Waiting, 0, 0));
        if !self.timeline.was_scheduled() {
            self.cached_tokens = cached as u32;
            self.history.output.reserve(self.limit - self.history.len());
            self.scores.reserve();
            self.kv.reserve(layout, self.limit);
        }
        self.residence = Residence::Running(seat);
        self.joined = false;
        self.submitted = cached;
        self.retired = cached;
    }

    /// Counts the tokens up to `position` as submitted, because the sequence has got blocks that hold them.
    pub(crate) fn skip_to(&mut self, position: usize) {
        if self.preemptions == 0 && position > self.submitted {
            self.cached_tokens += (position - self.submitted) as u32;
        }
        self.submitted = position;
    }

    /// Takes the seat away; the caller takes the blocks. A pending token stays pending, because its step computes it
    /// all the same.
    pub(crate) fn preempt(&mut self) {
        self.residence = Residence::Waiting;
        self.preemptions += 1;
        self.submitted = 0;
        self.retired = 0;
    }

    /// Returns the figures that the metrics record at the end of the request.
    pub(crate) fn finished(&self, reason: &FinishReason, now: Instant) -> FinishedRequest {
        let stages = self.timeline.stages(now);
        FinishedRequest {
            reason: reason.name(),
            e2e: stages.e2e,
            queue: stages.queue,
            prefill: stages.prefill,
            decode: stages.decode,
            prompt_tokens: self.prompt_len() as u64,
            generated_tokens: self.history.output.len() as u64,
            cached_tokens: u64::from(self.cached_tokens),
            max_tokens: (self.limit - self.prompt_len()) as u64,
            n: self.parent_n,
            preemptions: u64::from(self.preemptions),
        }
    }
}

/// Identifies a sequence while it is in the table. The key of a removed sequence is never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SequenceKey {
    index: u32,
    generation: u32,
}

/// All sequences of the engine, waiting and running.
#[derive(Default)]
pub(crate) struct SequenceTable {
    entries: Vec<Entry>,
    vacant: Vec<u32>,
    keys: HashMap<RequestId, SequenceKey>,
}

struct Entry {
    generation: u32,
    sequence: Option<Box<Sequence>>,
}

impl SequenceTable {
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn insert(&mut self, sequence: Sequence) -> SequenceKey {
        let id = sequence.id;
        let sequence = Some(Box::new(sequence));
        let key = if let Some(index) = self.vacant.pop() {
            let entry = &mut self.entries[index as usize];
            entry.sequence = sequence;
            SequenceKey { index, generation: entry.generation }
        } else {
            self.entries.push(Entry { generation: 0, sequence });
            SequenceKey { index: (self.entries.len() - 1) as u32, generation: 0 }
        };
        self.keys.insert(id, key);
        key
    }

    pub(crate) fn key(&self, id: RequestId) -> Option<SequenceKey> {
        self.keys.get(&id).copied()
    }

    pub(crate) fn get(&self, key: SequenceKey) -> Option<&Sequence> {
        let entry = &self.entries[key.index as usize];
        entry.sequence.as_deref().filter(|_| entry.generation == key.generation)
    }

    pub(crate) fn get_mut(&mut self, key: SequenceKey) -> Option<&mut Sequence> {
        let entry = &mut self.entries[key.index as usize];
        entry.sequence.as_deref_mut().filter(|_| entry.generation == key.generation)
    }

    pub(crate) fn remove(&mut self, key: SequenceKey) -> Option<Box<Sequence>> {
        self.get(key)?;
        let entry = &mut self.entries[key.index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        self.vacant.push(key.index);
        let sequence = entry.sequence.take();
        if let Some(sequence) = &sequence {
            self.keys.remove(&sequence.id);
        }
        sequence
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceKey, &Sequence)> + Clone {
        self.entries.iter().enumerate().filter_map(|(index, entry)| {
            let key = SequenceKey { index: index as u32, generation: entry.generation };
            entry.sequence.as_deref().map(|sequence| (key, sequence))
        })
    }
}
