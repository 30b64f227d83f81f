//! A request inside the engine, and the table that holds them all.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use octavo_telemetry::FinishedRequest;

use crate::inbox::RequestId;
use crate::kv::{KvLayout, SequenceKv, TokenHistory};
use crate::stream::EventSender;
use crate::timeline::Timeline;
use crate::{Constraint, FinishReason, Request, SamplingParams, Slot};

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residence {
    /// In the waiting queue, without blocks.
    Waiting,
    /// In the running list.
    Running(Slot),
}

/// A request inside the engine.
///
/// Its tokens are known (prompt and generated), then at most two `pending`: drawn by steps in flight, whose ids the
/// engine has not seen. `retired ≤ submitted ≤ known + pending` count the tokens whose keys and values are in memory,
/// and those that steps so far put or will put there.
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    /// The caller's name for it.
    pub(crate) name: String,
    pub(crate) history: TokenHistory,
    pub(crate) params: Arc<SamplingParams>,
    pub(crate) priority: i64,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    parent_n: Option<u32>,
    pub(crate) residence: Residence,
    /// Times it was preempted. A planned row carries the count, so that a row from before is known as such.
    pub(crate) preemptions: u32,
    /// Tokens that prompt and output may reach together.
    limit: usize,
    pub(crate) pending: usize,
    /// Row of the latest step that draws the last pending token.
    pub(crate) drawn_row: u32,
    pub(crate) submitted: usize,
    pub(crate) retired: usize,
    pub(crate) kv: SequenceKv,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub(crate) cached_tokens: u32,
    pub(crate) timeline: Timeline,
    pub(crate) sender: EventSender,
}

impl Sequence {
    /// A sequence that waits. `request` has been checked: its prompt is not empty and shorter than `max_model_len`.
    pub(crate) fn new(
        id: RequestId,
        request: Request,
        prepared: SequenceKv,
        sender: EventSender,
        limit: usize,
    ) -> Self {
        let Request { id: name, prompt, params, priority, arrival, cache_salt: _, constraint, parent_n } = request;
        Self {
            id,
            name,
            history: TokenHistory::new(prompt),
            params,
            priority,
            constraint,
            parent_n,
            residence: Residence::Waiting,
            preemptions: 0,
            limit,
            pending: 0,
            drawn_row: 0,
            submitted: 0,
            retired: 0,
            kv: prepared,
            cached_tokens: 0,
            timeline: Timeline::new(arrival, Instant::now()),
            sender,
        }
    }

    pub(crate) fn prompt_len(&self) -> usize {
        self.history.prompt.len()
    }

    /// Tokens that exist, seen or not.
    pub(crate) fn total(&self) -> usize {
        self.history.len() + self.pending
    }

    /// Tokens that the next step should compute: none when the pending token is the last that fits.
    pub(crate) fn wanted(&self) -> usize {
        let total = self.total();
        if total >= self.limit { 0 } else { total - self.submitted }
    }

    /// No further token fits.
    pub(crate) fn full(&self) -> bool {
        self.history.len() >= self.limit
    }

    /// The cached prompt tokens, if the latest token is the first.
    pub(crate) fn cached_in_first_event(&self) -> Option<u32> {
        (self.history.output.len() == 1).then_some(self.cached_tokens)
    }

    /// Takes a slot, with `cached` tokens in its blocks already.
    pub(crate) fn admit(&mut self, slot: Slot, cached: usize, layout: &KvLayout) {
        debug_assert_eq!((self.residence, self.pending, self.submitted), (Residence::Waiting, 0, 0));
        if !self.timeline.was_scheduled() {
            self.cached_tokens = cached as u32;
            self.history.output.reserve(self.limit - self.history.len());
            self.kv.reserve(layout, self.limit);
        }
        self.residence = Residence::Running(slot);
        self.submitted = cached;
        self.retired = cached;
    }

    /// Loses its slot and, elsewhere, its blocks. A pending token stays pending: its step computes it all the same.
    pub(crate) fn preempt(&mut self) {
        self.residence = Residence::Waiting;
        self.preemptions += 1;
        self.submitted = 0;
        self.retired = 0;
    }

    /// What the metrics want to know of its end.
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

/// Names a sequence for as long as it is in the table, and nothing afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
