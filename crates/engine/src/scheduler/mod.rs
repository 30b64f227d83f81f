//! Which sequences compute which tokens in the next step.
//!
//! There is no prefill phase and no decode phase: a step hands out a token budget so that what is computed catches up
//! with what is known. Running sequences come first, then waiting ones. [`Scheduler::schedule`] looks at the queues and
//! the blocks and at nothing else: no clock, no thread, no randomness.

mod queue;
#[cfg(test)]
mod tests;
mod write_plan;

use crate::inbox::RequestId;
use crate::kv::{KvCache, KvLayout};
use crate::sequence::{Answer, Residence, Sequence, SequenceKey, SequenceTable};
use crate::{EngineConfig, KvCacheSpec, SchedulingPolicy, Slot, StepId, StepPlan};
use queue::{Rank, WaitingQueue};

/// One sequence's share of a step, as the engine remembers it until the step retires.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRow {
    pub(crate) key: SequenceKey,
    /// [`Sequence::preemptions`] when it was planned.
    preemptions: u32,
    first: usize,
    tokens: usize,
    /// Of `tokens`, those of the prompt.
    prompt_tokens: usize,
    /// Rows of the output that score the prompt; they come before the one that is drawn.
    pub(crate) scores: usize,
    /// What becomes of its last token, if that was the last one known.
    pub(crate) answer: Option<Answer>,
    pub(crate) constrained: bool,
}

impl StepRow {
    /// A token is drawn.
    pub(crate) fn samples(&self) -> bool {
        self.answer == Some(Answer::Token)
    }

    /// The hidden state is returned.
    pub(crate) fn pools(&self) -> bool {
        self.answer == Some(Answer::Embedding)
    }
}

/// What a step in flight will mean to the sequences in it.
#[derive(Debug, Default)]
pub(crate) struct StepRecord {
    pub(crate) step: StepId,
    /// In the order of the plan's sequences.
    pub(crate) rows: Vec<StepRow>,
    /// Its sampling has been started.
    pub(crate) sampling: bool,
}

impl StepRecord {
    /// Rows and embeddings of its output.
    pub(crate) fn outputs(&self) -> (usize, usize) {
        let rows = self.rows.iter().map(|row| row.scores + usize::from(row.samples())).sum();
        (rows, self.rows.iter().filter(|row| row.pools()).count())
    }

    /// Sequences that draw under a mask.
    pub(crate) fn constrained_rows(&self) -> usize {
        self.rows.iter().filter(|row| row.constrained).count()
    }
}

/// A choice of the step being planned.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    key: SequenceKey,
    tokens: usize,
    /// Rows of the prompt that are scored.
    scores: usize,
}

/// What a step may still compute.
#[derive(Clone, Copy, Debug)]
struct Budget {
    tokens: usize,
    /// Rows that are scored.
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
    /// In the order of admission.
    running: Vec<SequenceKey>,
    /// Slots that no running sequence has.
    slots: Vec<Slot>,
    /// The step being planned.
    chosen: Vec<Chosen>,
    /// Sequences that the last call of [`Scheduler::schedule`] admitted.
    admitted: Vec<SequenceKey>,
    /// Preemptions since they were last asked for.
    preempted: u64,
    /// Memory of [`Scheduler::check_integrity`], which runs after every step of a debug build.
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

    /// Nothing runs and nothing waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.sequences.len() == 0
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences in the waiting queue that have run before.
    pub(crate) fn waiting_preempted(&self) -> usize {
        self.waiting.preempted()
    }

    /// Preemptions since the last call.
    pub(crate) fn take_preempted(&mut self) -> u64 {
        std::mem::take(&mut self.preempted)
    }

    /// Sequences that the last call of [`Scheduler::schedule`] admitted.
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

    /// Takes a new sequence into the waiting queue.
    pub(crate) fn enqueue(&mut self, sequence: Sequence) {
        let key = self.sequences.insert(sequence);
        if let Some(sequence) = self.sequences.get(key) {
            self.waiting.push(key, sequence);
        }
    }

    /// Takes a sequence out, wherever it is; its slot and blocks are free at once. Steps in flight may still read and
    /// write the blocks: the executor runs steps in the order of submission, so whoever gets a block next writes later.
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

    /// Plans a step. An empty plan means that nothing can be computed now.
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

    /// Most tokens that one sequence may compute in a step, the budget apart.
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

    /// Gives the running sequence at index `at` blocks for `tokens` tokens, preempting others for them. `false` if it
    /// had to go itself: then `at` is the index of the next one.
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

    /// Index of the running sequence that gives way: the last admitted, or the last in the order of the priority policy.
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

    /// Admits from the head of the queue until something runs out; no sequence passes the one at the head. One whose
    /// rows to score do not fit this step is admitted without tokens, so that it keeps nobody else waiting.
    fn schedule_waiting(&mut self, mut budget: Budget) {
        let share = self.share();
        while let Some(key) = self.waiting.first()
            && budget.tokens > 0
            && !self.kv.exhausted()
        {
            let (Some(&slot), Some(sequence)) = (self.slots.last(), self.sequences.get_mut(key)) else { break };
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

    /// A step is complete: what it computed for `row` is in memory. Returns how many prompt tokens that were, or `None`
    /// if the sequence has ended. The caller appends what the row drew and ends the sequence if its answer is no token.
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

    /// The invariants between steps. An error names the first that does not hold.
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

    /// Every slot is free or held by one running sequence.
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

    /// Under FCFS nobody has overtaken anybody: the running list, then the queue, are in the order of submission.
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
