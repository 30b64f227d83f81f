//! The scheduler decides which sequences compute which tokens in the next step.
//!
//! There is no prefill phase and no decode phase: a step distributes a token budget so that computed tokens catch up
//! with known tokens. Running sequences come first, then waiting ones. [`Scheduler::schedule`] depends only on the
//! queues and the blocks: it uses no clock, no thread and no randomness.

mod queue;
#[cfg(test)]
mod tests;
mod write_plan;

use crate::inbox::RequestId;
use crate::kv::{KvCache, KvLayout};
use crate::sequence::{Answer, Residence, Sequence, SequenceKey, SequenceTable};
use crate::{EngineConfig, KvCacheSpec, SchedulingPolicy, Slot, StepId, StepPlan};
use queue::{Rank, WaitingQueue};

/// One sequence's share of a step. The engine keeps it until the step retires.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRow {
    pub(crate) key: SequenceKey,
    /// Value of [`Sequence::preemptions`] when the row was planned.
    preemptions: u32,
    first: usize,
    tokens: usize,
    /// Number of prompt tokens among `tokens`.
    prompt_tokens: usize,
    /// Number of output rows that score the prompt. They come before the sampled row.
    pub(crate) scores: usize,
    /// Result of its last token, if that was the last known one.
    pub(crate) answer: Option<Answer>,
    pub(crate) constrained: bool,
}

impl StepRow {
    /// Returns whether a token is sampled.
    pub(crate) fn samples(&self) -> bool {
        self.answer == Some(Answer::Token)
    }

    /// Returns whether the hidden state is returned.
    pub(crate) fn pools(&self) -> bool {
        self.answer == Some(Answer::Embedding)
    }
}

/// The sequences of a step in flight, with their shares.
#[derive(Debug, Default)]
pub(crate) struct StepRecord {
    pub(crate) step: StepId,
    /// Shares, in the order of the plan's sequences.
    pub(crate) rows: Vec<StepRow>,
    /// Whether its sampling has been started.
    pub(crate) sampling: bool,
}

impl StepRecord {
    /// Returns the number of rows and the number of embeddings of its output.
    pub(crate) fn outputs(&self) -> (usize, usize) {
        let rows = self.rows.iter().map(|row| row.scores + usize::from(row.samples())).sum();
        (rows, self.rows.iter().filter(|row| row.pools()).count())
    }

    /// Returns the number of sequences that sample under a mask.
    pub(crate) fn constrained_rows(&self) -> usize {
        self.rows.iter().filter(|row| row.constrained).count()
    }
}

/// A sequence chosen for the step being planned.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    key: SequenceKey,
    tokens: usize,
    /// Number of prompt rows that are scored.
    scores: usize,
}

/// Remaining budget of a step.
#[derive(Clone, Copy, Debug)]
struct Budget {
    tokens: usize,
    /// Number of rows that may still be scored.
    scores: usize,
}

impl Budget {
    fn take(&mut self, chosen: &Chosen) {
        self.tokens -= chosen.tokens;
        self.scores -= chosen.scores;
    }

    fn give_back(&mut self, chosen: &Chosen) {
        self.tokens += chosen.tokens;
        self.scores += chosen.scores;
    }
}

/// All sequences and blocks of the engine.
pub(crate) struct Scheduler {
    config: EngineConfig,
    kv: KvCache,
    sequences: SequenceTable,
    waiting: WaitingQueue,
    /// Running sequences, in the order of admission.
    running: Vec<SequenceKey>,
    /// Free slots.
    slots: Vec<Slot>,
    /// Sequences chosen for the step being planned.
    chosen: Vec<Chosen>,
    /// Sequences that the last call of [`Scheduler::schedule`] admitted.
    admitted: Vec<SequenceKey>,
    /// Number of preemptions since the last [`Scheduler::take_preempted`].
    preempted: u64,
    /// Buffer of [`Scheduler::check_integrity`], which runs after every step of a debug build.
    counts: Vec<u32>,
}

impl Scheduler {
    pub(crate) fn new(config: EngineConfig, spec: &KvCacheSpec) -> Self {
        let seats = config.max_num_seqs;
        Self {
            kv: KvCache::new(
                spec,
                KvLayout::new(spec, config.enable_prefix_caching).seeded(config.prefix_seed.as_deref()),
            ),
            sequences: SequenceTable::default(),
            waiting: WaitingQueue::new(config.policy),
            running: Vec::with_capacity(seats),
            slots: (0..seats as Slot).rev().collect(),
            chosen: Vec::with_capacity(seats),
            admitted: Vec::with_capacity(seats),
            preempted: 0,
            counts: Vec::new(),
            config,
        }
    }

    pub(crate) fn kv_mut(&mut self) -> &mut KvCache {
        &mut self.kv
    }

    pub(crate) fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// Returns whether no sequence runs or waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.sequences.len() == 0
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of sequences in the waiting queue that have run before.
    pub(crate) fn waiting_preempted(&self) -> usize {
        self.waiting.preempted()
    }

    /// Returns the number of preemptions since the last call.
    pub(crate) fn take_preempted(&mut self) -> u64 {
        std::mem::take(&mut self.preempted)
    }

    /// Returns the sequences that the last call of [`Scheduler::schedule`] admitted.
    pub(crate) fn admitted(&self) -> &[SequenceKey] {
        &self.admitted
    }

    pub(crate) fn key(&self, id: RequestId) -> Option<SequenceKey> {
        self.sequences.key(id)
    }

    pub(crate) fn sequence_mut(&mut self, key: SequenceKey) -> Option<&mut Sequence> {
        self.sequences.get_mut(key)
    }

    pub(crate) fn sequences(&self) -> impl Iterator<Item = (SequenceKey, &Sequence)> + Clone {
        self.sequences.iter()
    }

    /// Adds a new sequence to the waiting queue.
    pub(crate) fn enqueue(&mut self, sequence: Sequence) {
        let key = self.sequences.insert(sequence);
        if let Some(sequence) = self.sequences.get(key) {
            self.waiting.push(key, sequence);
        }
    }

    /// Removes a sequence, running or waiting; its slot and blocks are free at once. Steps in flight may still read and
    /// write the blocks. That is safe because the executor runs steps in the order of submission, so the next owner of
    /// a block writes later.
    pub(crate) fn remove(&mut self, key: SequenceKey) -> Option<Box<Sequence>> {
        let mut sequence = self.sequences.remove(key)?;
        match sequence.residence {
            Residence::Waiting => self.waiting.remove(&sequence),
            Residence::Running(slot) => {
                self.running.retain(|&other| other != key);
                self.slots.push(slot);
                self.kv.release(&mut sequence.kv);
            }
        }
        Some(sequence)
    }

    /// Plans a step. The plan is empty if nothing can be computed now.
    pub(crate) fn schedule(&mut self, step: StepId, plan: &mut StepPlan, record: &mut StepRecord) {
        self.chosen.clear();
        self.admitted.clear();
        let preempted = self.preempted;
        let mut budget = Budget { tokens: self.config.max_num_batched_tokens, scores: StepPlan::MAX_SCORED_ROWS };
        self.schedule_running(&mut budget);
        if self.preempted == preempted {
            self.schedule_waiting(budget);
        }
        self.write_plan(step, plan, record);
    }

    /// Returns the maximum number of tokens that one sequence may compute in a step, apart from the budget.
    fn share(&self) -> usize {
        let alone = self.sequences.len() <= 1;
        match self.config.long_prefill_token_threshold {
            threshold if threshold > 0 && self.config.enable_chunked_prefill && !alone => threshold,
            _ => usize::MAX,
        }
    }

    fn schedule_running(&mut self, budget: &mut Budget) {
        let share = self.share();
        let mut at = 0;
        while let Some(&key) = self.running.get(at)
            && budget.tokens > 0
        {
            let Some(sequence) = self.sequences.get(key) else { break };
            let first = sequence.submitted;
            let tokens =
                sequence.wanted().min(share).min(budget.tokens).min(sequence.within_rows(first, budget.scores));
            let chosen = Chosen { key, tokens, scores: sequence.scores_until(first + tokens).len() };
            if tokens == 0 {
                at += 1;
            } else if self.make_room(key, first + tokens, &mut at, budget) {
                self.chosen.push(chosen);
                budget.take(&chosen);
                at += 1;
            }
        }
    }

    /// Allocates blocks for `tokens` tokens of the running sequence at index `at` and preempts others if necessary.
    /// Returns `false` if the sequence itself was preempted; `at` is then the index of the next one.
    fn make_room(&mut self, key: SequenceKey, tokens: usize, at: &mut usize, budget: &mut Budget) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(key) else { return false };
            if self.kv.grow(&mut sequence.kv, tokens) {
                return true;
            }
            let Some(victim) = self.victim() else { return false };
            let victim_key = self.running[victim];
            if victim < *at {
                *at -= 1;
                if let Some(choice) = self.chosen.iter().position(|chosen| chosen.key == victim_key) {
                    budget.give_back(&self.chosen.remove(choice));
                }
            }
            self.preempt(victim);
            if victim_key == key {
                return false;
            }
        }
    }

    /// Returns the index of the running sequence to preempt: the last admitted one, or the last one in the order of the
    /// priority policy.
    fn victim(&self) -> Option<usize> {
        match self.config.policy {
            SchedulingPolicy::Fcfs => self.running.len().checked_sub(1),
            SchedulingPolicy::Priority => {
                let rank = |&index: &usize| self.sequences.get(self.running[index]).map(Rank::of);
                (0..self.running.len()).max_by_key(rank)
            }
        }
    }

    fn preempt(&mut self, index: usize) {
        let key = self.running.remove(index);
        let Some(sequence) = self.sequences.get_mut(key) else { return };
        if let Residence::Running(slot) = sequence.residence {
            self.slots.push(slot);
        }
        self.kv.release(&mut sequence.kv);
        sequence.preempt();
        self.waiting.push(key, sequence);
        self.preempted += 1;
    }

    /// Forgets the content of the prefix cache, unless sequences hold blocks. With `preempt`, the running sequences give
    /// up their blocks first.
    pub(crate) fn reset_prefix_cache(&mut self, preempt: bool) -> bool {
        if preempt {
            (0..self.running.len()).rev().for_each(|index| self.preempt(index));
        }
        self.kv.forget_prefixes()
    }

    /// Admits from the head of the queue until a resource runs out. No sequence overtakes the head. A sequence whose
    /// rows to score do not fit this step is admitted without tokens, so that it does not block the others.
    fn schedule_waiting(&mut self, mut budget: Budget) {
        let share = self.share();
        while let Some(key) = self.waiting.first()
            && budget.tokens > 0
            && !self.kv.exhausted()
        {
            let (Some(&slot), Some(sequence)) = (self.slots.last(), self.sequences.get_mut(key)) else { break };
            if sequence.pending > 0 {
                // It was preempted between two steps. Its last token is known when the step in flight has retired.
                break;
            }
            let most = sequence.may_be_cached();
            let hit = self.kv.lookup(&mut sequence.kv, &sequence.history, most);
            let known = sequence.history.len();
            let mut tokens = (known - hit.tokens).min(share).min(sequence.within_rows(hit.tokens, budget.scores));
            if tokens > budget.tokens {
                if !self.config.enable_chunked_prefill {
                    break;
                }
                tokens = budget.tokens;
            }
            if !self.kv.fits(hit, known) {
                break;
            }
            self.waiting.remove(sequence);
            self.slots.pop();
            sequence.admit(slot, hit.tokens, self.kv.layout());
            self.kv.attach(&mut sequence.kv, hit);
            let fits = self.kv.grow(&mut sequence.kv, hit.tokens + tokens);
            debug_assert!(fits, "the whole sequence was found to fit");
            self.running.push(key);
            self.admitted.push(key);
            if tokens > 0 {
                let scores = sequence.scores_until(hit.tokens + tokens).len();
                let chosen = Chosen { key, tokens, scores };
                self.chosen.push(chosen);
                budget.take(&chosen);
            }
        }
    }

    /// Records that the tokens which a step computed for `row` are in memory. Returns the number of prompt tokens among
    /// them, or `None` if the sequence has ended. The caller appends the sampled token and ends a sequence whose result
    /// is no token.
    pub(crate) fn retire(&mut self, row: &StepRow) -> Option<usize> {
        let sequence = self.sequences.get_mut(row.key)?;
        if sequence.preemptions == row.preemptions {
            sequence.retired = row.first + row.tokens;
            self.kv.commit(&mut sequence.kv, &sequence.history, sequence.retired);
        }
        if row.answer.is_some() {
            sequence.pending -= 1;
        }
        Some(row.prompt_tokens)
    }

    /// Checks the invariants between steps. The error describes the first violation.
    pub(crate) fn check_integrity(&mut self) -> Result<(), String> {
        let mut counts = std::mem::take(&mut self.counts);
        let blocks = self.kv.check(self.sequences.iter().map(|(_, sequence)| &sequence.kv), &mut counts);
        let result = blocks.and_then(|()| self.check_slots(&mut counts));
        self.counts = counts;
        result?;
        if self.running.len() + self.waiting.len() != self.sequences.len() {
            return Err(format!("{} sequences, {} queued", self.sequences.len(), self.waiting.len()));
        }
        if self.config.policy == SchedulingPolicy::Fcfs {
            self.check_order()?;
        }
        if self.is_idle() && self.kv.used() > 0 {
            return Err(format!("idle with {} blocks in use", self.kv.used()));
        }
        self.sequences.iter().try_for_each(|(_, sequence)| self.check_sequence(sequence))
    }

    /// Checks that every slot is free or held by one running sequence.
    fn check_slots(&self, counts: &mut Vec<u32>) -> Result<(), String> {
        counts.clear();
        counts.resize(self.config.max_num_seqs, 0);
        for slot in self.slots.iter().copied().chain(self.running.iter().filter_map(|&key| self.slot(key))) {
            counts[slot as usize] += 1;
        }
        match counts.iter().position(|&count| count != 1) {
            Some(slot) => Err(format!("slot {slot} is held {} times", counts[slot])),
            None => Ok(()),
        }
    }

    /// Checks that under FCFS the running list followed by the queue is in the order of submission.
    fn check_order(&self) -> Result<(), String> {
        let order = self.running.iter().copied().chain(self.waiting.first());
        let ids = order.filter_map(|key| self.sequences.get(key)).map(|sequence| sequence.id);
        if ids.is_sorted() { Ok(()) } else { Err("a request has overtaken another".into()) }
    }

    fn slot(&self, key: SequenceKey) -> Option<Slot> {
        match self.sequences.get(key)?.residence {
            Residence::Running(slot) => Some(slot),
            Residence::Waiting => None,
        }
    }

    fn check_sequence(&self, sequence: &Sequence) -> Result<(), String> {
        let Sequence { retired, submitted, pending, .. } = *sequence;
        let ordered = retired <= submitted && submitted <= sequence.total() && retired <= sequence.history.len();
        if !ordered || pending > 2 {
            return Err(format!("{}: retired {retired}, submitted {submitted}, pending {pending}", sequence.name));
        }
        self.kv.check_sequence(&sequence.kv, submitted, retired).map_err(|error| format!("{}: {error}", sequence.name))
    }
}
