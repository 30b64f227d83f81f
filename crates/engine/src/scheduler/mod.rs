//! The scheduler decides which sequences compute which tokens in the next step.
//!
//! There is no prefill phase and no decode phase: a step distributes a token budget so that computed tokens catch up
//! with known tokens. Running sequences come first, then waiting ones. [`Scheduler::schedule`] depends only on the
//! queues, the blocks and the estimate of a step's time that it is given: it reads no clock and uses no thread and no
//! randomness.

mod adapters;
mod admit;
#[cfg(test)]
mod admit_tests;
#[cfg(test)]
mod bound_tests;
mod check;
mod clients;
mod draft;
#[cfg(test)]
mod mask_tests;
mod preempt;
mod queue;
mod share;
#[cfg(test)]
mod sharing_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod window_tests;
mod write_plan;

use std::sync::Arc;

use crate::clock::StepClock;
use crate::draft::Drafter;
use crate::image::ImageCache;
use crate::inbox::RequestId;
use crate::kv::{KvCache, KvLayout};
use crate::sequence::{Residence, Sequence, SequenceKey, SequenceTable};
use crate::{ClientId, EngineConfig, ImageSpec, KvCacheSpec, SchedulingPolicy, Seat, StepId, StepPlan};
use adapters::AdapterSlots;
use clients::Clients;
use queue::WaitingQueue;
use share::Budget;
pub(crate) use share::{Share, StepRecord};

/// Number of tokens that the first share of a step may have even if the time is up, so that a prompt of a step that is
/// bounded too tightly is not computed token by token.
const LEAST_CHUNK: usize = 16;

/// The memory of an executor that sequences share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExecutorMemory<'a> {
    pub(crate) kv: &'a KvCacheSpec,
    pub(crate) images: Option<ImageSpec>,
    /// Number of slots for adapters.
    pub(crate) adapters: usize,
}

/// All sequences and blocks of the engine.
pub(crate) struct Scheduler {
    config: EngineConfig,
    /// Number of prompt rows that a step may score.
    scored_rows: usize,
    /// Number of masks that a step may have in which other rows need none, at least two. A quarter of them, and at least one, is left for
    /// sequences that the step admits.
    most_masks: usize,
    /// Sequence that took the last turn of those that need masks.
    last_turn: RequestId,
    kv: KvCache,
    images: ImageCache,
    adapters: AdapterSlots,
    /// Whether the adapters of running or waiting sequences may have changed since they were last asked for.
    adapters_changed: bool,
    sequences: SequenceTable,
    waiting: WaitingQueue,
    /// Clients of all sequences; empty unless the policy is fair.
    clients: Clients,
    /// Running sequences, in the order of admission.
    running: Vec<SequenceKey>,
    /// Free seats.
    seats: Vec<Seat>,
    /// Seats that sequences have left since the last plan.
    left: Vec<Seat>,
    /// Running sequences, in the order in which the step being planned serves them.
    order: Vec<SequenceKey>,
    /// Number of the latest step planned.
    step: StepId,
    /// Shares of the step being planned.
    chosen: Vec<Share>,
    /// Sequences that the last call of [`Scheduler::schedule`] admitted.
    admitted: Vec<SequenceKey>,
    /// Sequences that wait for another step and let others pass; they are not in the queue meanwhile.
    deferred: Vec<SequenceKey>,
    /// The head of the queue, if it found too few blocks.
    short: Option<admit::Shortage>,
    /// Number of preemptions since the last [`Scheduler::take_preempted`].
    preempted: u64,
    /// Buffer of [`Scheduler::check_integrity`], which runs after every step of a debug build.
    counts: Vec<u32>,
}

impl Scheduler {
    /// Creates an idle scheduler for an executor with this memory and `max_rows` rows in a step.
    pub(crate) fn new(config: EngineConfig, memory: ExecutorMemory<'_>, max_rows: usize) -> Self {
        let ExecutorMemory { kv: spec, images, adapters } = memory;
        let seats = config.max_num_seqs;
        let (rows, seen_whole) = images.map_or((0, false), |spec| (spec.cache_tokens, spec.seen_whole));
        Self {
            scored_rows: max_rows.saturating_sub(seats).max(1),
            most_masks: usize::MAX,
            last_turn: RequestId::default(),
            images: ImageCache::new(rows, seen_whole),
            adapters: AdapterSlots::new(adapters),
            adapters_changed: false,
            kv: KvCache::new(spec.blocks, KvLayout::for_engine(spec, &config)),
            sequences: SequenceTable::default(),
            waiting: WaitingQueue::new(config.policy),
            running: Vec::with_capacity(seats),
            seats: (0..seats as Seat).rev().collect(),
            left: Vec::with_capacity(seats),
            clients: Clients::default(),
            order: Vec::with_capacity(seats),
            step: 0,
            chosen: Vec::with_capacity(seats),
            admitted: Vec::with_capacity(seats),
            deferred: Vec::with_capacity(admit::MAX_WITHOUT_ROWS),
            short: None,
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

    pub(crate) fn images_mut(&mut self) -> &mut ImageCache {
        &mut self.images
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
    pub(crate) fn enqueue(&mut self, mut sequence: Sequence) {
        // It has waited since before the latest step, so it comes before those that were in that step.
        sequence.served = self.step.saturating_sub(1);
        if let Some(settings) = self.config.speculation
            && sequence.may_draft()
        {
            sequence.drafter = Some(Box::new(Drafter::new(settings)));
        }
        if self.fair() {
            self.clients.enter(sequence.client);
        }
        self.adapters_changed |= sequence.adapter.is_some();
        let key = self.sequences.insert(sequence);
        if let Some(sequence) = self.sequences.get(key) {
            self.waiting.push(key, sequence);
        }
    }

    /// Removes a sequence, running or waiting; its seat and blocks are free at once. Steps in flight may still read and
    /// write the blocks. That is safe because the executor runs steps in the order of submission, so the next owner of
    /// a block writes later.
    pub(crate) fn remove(&mut self, key: SequenceKey) -> Option<Box<Sequence>> {
        let mut sequence = self.sequences.remove(key)?;
        self.adapters_changed |= sequence.adapter.is_some();
        match sequence.residence {
            Residence::Waiting => self.waiting.remove(&sequence),
            Residence::Running(seat) => {
                self.running.retain(|&other| other != key);
                self.free_seat(seat, sequence.joined);
                self.clients.stop(sequence.client);
                self.kv.release(&mut sequence.kv);
                self.images.release(&mut sequence.images);
                if let Some(slot) = sequence.adapter_slot.take() {
                    self.adapters.release(slot);
                }
            }
        }
        self.clients.leave(sequence.client);
        Some(sequence)
    }

    /// Returns the names of the adapters of running and of waiting sequences, each name once and in order. `None` if they
    /// have not changed since the last call.
    pub(crate) fn take_adapter_names(&mut self) -> Option<[Vec<Arc<str>>; 2]> {
        if !std::mem::take(&mut self.adapters_changed) {
            return None;
        }
        let mut names = [Vec::new(), Vec::new()];
        for (_, sequence) in self.sequences() {
            if let Some(adapter) = &sequence.adapter {
                names[usize::from(sequence.residence == Residence::Waiting)].push(Arc::clone(adapter.name()));
            }
        }
        for names in &mut names {
            names.sort_unstable();
            names.dedup();
        }
        Some(names)
    }

    fn fair(&self) -> bool {
        self.config.policy == SchedulingPolicy::Fair
    }

    /// Bounds the masks of steps that have other rows too, which would wait for them. Sequences that need masks then take
    /// turns.
    pub(crate) fn bound_masks(&mut self, most: usize) {
        self.most_masks = most;
    }

    /// Plans a step. The plan is empty if nothing can be computed now. `clock` estimates the time of shares; without
    /// it, steps are bounded in tokens alone.
    pub(crate) fn schedule(
        &mut self,
        step: StepId,
        clock: Option<&StepClock>,
        plan: &mut StepPlan,
        record: &mut StepRecord,
    ) {
        self.admitted.clear();
        loop {
            let preempted = self.preempted;
            self.kv.begin(step);
            self.images.begin(step, self.config.max_num_encoder_tokens);
            self.choose(clock);
            // A sequence that was preempted last may have held what another lacked.
            if !self.chosen.is_empty() || self.preempted == preempted {
                break;
            }
        }
        self.step = step;
        record.work = clock.map(StepClock::step).unwrap_or_default();
        for chosen in &self.chosen {
            record.work += chosen.work;
            // Without the fair policy there are no clients.
            if let Some(sequence) = self.sequences.get(chosen.key) {
                let service = if clock.is_some() { chosen.seconds } else { chosen.tokens as f64 };
                self.clients.charge(sequence.client, service);
            }
        }
        self.write_plan(step, plan, record);
    }

    /// Chooses the sequences of a step.
    fn choose(&mut self, clock: Option<&StepClock>) {
        self.chosen.clear();
        self.pass_windows();
        let most = self.mask_budget();
        let first_masks = (most / 4).max(1);
        let mut budget = Budget {
            tokens: self.config.max_num_batched_tokens,
            masks: most - first_masks,
            first_masks,
            scores: self.scored_rows,
            without_rows: 0,
            // The rest is left for prompts that are scored.
            drafts: self.scored_rows / 2,
            token_seconds: None,
            seconds: clock.map_or(f64::INFINITY, StepClock::for_shares),
            reserved: None,
        };
        let bounded = budget.seconds.is_finite();
        let mut order = std::mem::take(&mut self.order);
        self.order_running(bounded, most < usize::MAX, &mut order);
        let (mut next, mut admits) = (0, true);
        while budget.tokens > 0 {
            let key = order.get(next).copied();
            if admits && self.waiting_is_next(key, bounded) {
                admits = self.admit_or_defer(&mut budget, clock);
            } else if let Some(key) = key {
                next += 1;
                budget.reserved = None;
                let preempted = self.preempted;
                self.serve(key, &mut budget, clock);
                admits &= self.preempted == preempted;
            } else {
                break;
            }
        }
        self.order = order;
        for key in self.deferred.drain(..) {
            if let Some(sequence) = self.sequences.get(key) {
                self.waiting.push(key, sequence);
            }
        }
    }

    /// Returns the number of masks that this step may have: any, unless others would wait for them.
    fn mask_budget(&self) -> usize {
        let waits = |key: &SequenceKey| {
            self.sequences.get(*key).is_some_and(|sequence| sequence.constraint.is_none() && sequence.wanted() > 0)
        };
        if self.most_masks < usize::MAX && self.running.iter().any(waits) { self.most_masks } else { usize::MAX }
    }

    /// Releases the blocks of running sequences that are behind the windows of all tokens to come. Steps in flight may still
    /// read them: the next owner of a block writes later.
    fn pass_windows(&mut self) {
        if !self.kv.layout().has_windows() {
            return;
        }
        for key in &self.running {
            if let Some(sequence) = self.sequences.get_mut(*key) {
                self.kv.pass(&mut sequence.kv, sequence.submitted);
            }
        }
    }

    /// Puts a share into the step being planned. Its blocks can be found at once, by sequences of later steps.
    ///
    /// A sequence whose prompt is scored is slow, and computes each row whatever is found. Others do not wait for it:
    /// its blocks can be found once they are in memory.
    fn choose_share(&mut self, share: Share, budget: &mut Budget) {
        budget.take(&share);
        self.chosen.push(share);
        if let Some(sequence) = self.sequences.get_mut(share.key)
            && !sequence.scores.requested()
        {
            self.kv.publish(&mut sequence.kv, &sequence.history, share.end().min(sequence.history.len()));
        }
    }

    /// Puts the running sequences in the order of service: that of admission, unless steps are bounded in time or in masks,
    /// or fair.
    ///
    /// In a step that is bounded, there may be no room for all. In time, those that were served longest ago come first, and a
    /// single token comes before a chunk of a prompt, which takes the time that is left. In masks, those come first that
    /// follow the last turn.
    fn order_running(&self, in_time: bool, in_masks: bool, order: &mut Vec<SequenceKey>) {
        order.clear();
        order.extend_from_slice(&self.running);
        if !in_time && !in_masks && !self.fair() {
            return;
        }
        order.sort_unstable_by_key(|&key| {
            self.sequences.get(key).map(|sequence| {
                let client = self.client_rank(sequence);
                let age = if in_time { (sequence.served, sequence.wanted() > 1) } else { Default::default() };
                let had_its_turn = in_masks && sequence.constraint.is_some() && sequence.id <= self.last_turn;
                (client, age, had_its_turn, sequence.id)
            })
        });
    }

    /// Returns the rank of a sequence's client; all are the same unless the policy is fair.
    fn client_rank(&self, sequence: &Sequence) -> (u64, ClientId) {
        let fair = self.fair();
        if fair { (self.clients.rank(sequence.client), sequence.client) } else { Default::default() }
    }

    /// Returns whether the head of the queue comes before the running sequence `next`.
    ///
    /// Running sequences come first. Under the fair policy, those of a client that has received more service come
    /// later; in a step that is bounded in time, those that have been served since the head arrived.
    fn waiting_is_next(&self, next: Option<SequenceKey>, bounded: bool) -> bool {
        let Some(head) = self.waiting.first(&self.clients).and_then(|key| self.sequences.get(key)) else {
            return false;
        };
        let Some(running) = next.and_then(|key| self.sequences.get(key)) else { return true };
        let (waits, runs) = (self.client_rank(head), self.client_rank(running));
        waits.0 < runs.0 || (waits.0 == runs.0 && (waits.1 != runs.1 || (bounded && head.served < running.served)))
    }

    /// Returns the maximum number of tokens that one sequence may compute in a step, apart from the budget.
    fn share(&self) -> usize {
        let alone = self.sequences.len() <= 1;
        match self.config.long_prefill_token_threshold {
            threshold if threshold > 0 && self.config.enable_chunked_prefill && !alone => threshold,
            _ => usize::MAX,
        }
    }

    /// Returns the share of a sequence that computes at most `most` tokens from `first` on and fits the time.
    fn choice(
        &self,
        key: SequenceKey,
        (first, most): (usize, usize),
        budget: &Budget,
        clock: Option<&StepClock>,
    ) -> Option<Share> {
        let sequence = self.sequences.get(key)?;
        let preemptions = sequence.preemptions;
        let choice = |tokens: usize| {
            let rows = sequence.rows_of(first, first + tokens);
            let work = clock.map(|clock| clock.share(tokens, first + tokens, rows.tokens())).unwrap_or_default();
            let seconds = clock.map_or(0.0, |clock| clock.seconds(&work));
            let constrained = sequence.constraint.is_some();
            Share { key, preemptions, first, tokens, rows, constrained, work, seconds }
        };
        let whole = choice(most);
        if whole.seconds <= budget.seconds {
            return Some(whole);
        }
        // An image that is not cut takes the time that it takes.
        let images = &sequence.images;
        let least =
            if self.chosen.is_empty() { self.images.least(images, first).max(LEAST_CHUNK).min(most) } else { 0 };
        // The most tokens that fit: `low` fit and `high` do not.
        let (mut low, mut high) = (least, most);
        while low + 1 < high {
            let middle = low.midpoint(high);
            if choice(middle).seconds <= budget.seconds { low = middle } else { high = middle }
        }
        Some(choice(self.images.uncut(images, first, low)))
    }

    /// Cuts a share of `most` tokens from `first` on where the step may end. An image that is not cut may exceed the share,
    /// up to `limit`.
    fn uncut(&self, sequence: &Sequence, first: usize, most: usize, limit: usize) -> usize {
        let least = self.images.least(&sequence.images, first);
        match self.images.uncut(&sequence.images, first, most) {
            0 if most > 0 && least <= limit => least,
            tokens => tokens,
        }
    }

    /// Cuts a share before the first image that the sequence cannot have in this step, and makes
    /// the sequence hold the images before.
    fn with_images(&mut self, share: Share, budget: &Budget, clock: Option<&StepClock>) -> Option<Share> {
        let sequence = self.sequences.get_mut(share.key)?;
        match self.images.acquire(&mut sequence.images, share.first, share.tokens) {
            tokens if tokens < share.tokens => self.choice(share.key, (share.first, tokens), budget, clock),
            _ => Some(share),
        }
    }

    fn release_images(&mut self, key: SequenceKey) {
        if let Some(sequence) = self.sequences.get_mut(key) {
            self.images.release(&mut sequence.images);
        }
    }

    /// Gives a running sequence its share, unless it was preempted for another.
    fn serve(&mut self, key: SequenceKey, budget: &mut Budget, clock: Option<&StepClock>) {
        let share = self.share();
        let runs = |sequence: &Sequence| sequence.residence != Residence::Waiting;
        if !self.sequences.get(key).is_some_and(runs) || !self.catch_up(key) {
            return;
        }
        self.draft(key, budget, clock);
        let Some(sequence) = self.sequences.get(key) else { return };
        let first = sequence.submitted;
        let limit = sequence.wanted().min(budget.tokens);
        let most =
            self.uncut(sequence, first, limit.min(share).min(sequence.scores.within(first, budget.scores)), limit);
        let Some(chosen) = self.choice(key, (first, most), budget, clock) else { return };
        if chosen.masks() > budget.masks {
            return;
        }
        let Some(chosen) = self.with_images(chosen, budget, clock) else { return };
        if chosen.tokens > 0 && self.make_room(key, chosen.end(), budget) {
            budget.masks -= chosen.masks();
            if chosen.masks() > 0
                && let Some(sequence) = self.sequences.get(key)
            {
                self.last_turn = sequence.id;
            }
            self.choose_share(chosen, budget);
        }
    }

    /// Gives a running sequence the blocks that others have computed of the rest of its prompt. Returns `false` if it
    /// waits for the next one, which another is computing.
    fn catch_up(&mut self, key: SequenceKey) -> bool {
        let Some(sequence) = self.sequences.get_mut(key) else { return false };
        let most = sequence.may_be_cached();
        let covered = self.kv.covered(&sequence.kv);
        if sequence.pending > 0 || most < covered {
            return true;
        }
        if sequence.submitted < covered {
            if !self.kv.replace_last(&mut sequence.kv, &sequence.history) {
                return true;
            }
            sequence.skip_to(covered);
            self.kv.pass(&mut sequence.kv, covered);
        }
        let hit = self.kv.lookup(&mut sequence.kv, &sequence.history, most);
        if hit.blocks > 0 {
            self.kv.attach(&mut sequence.kv, hit);
            sequence.skip_to(hit.tokens);
        }
        self.images.release_until(&mut sequence.images, sequence.submitted);
        !hit.awaited
    }

    /// Takes what a failed step was to write out of the prefix cache. Returns the sequences that have used it already,
    /// in a later step.
    pub(crate) fn withdraw(&mut self, step: StepId) -> Vec<SequenceKey> {
        let reads =
            |key: &SequenceKey| self.sequences.get(*key).is_some_and(|sequence| self.kv.reads_from(&sequence.kv, step));
        let readers = self.running.iter().copied().filter(reads).collect();
        self.kv.withdraw_since(step);
        self.images.withdraw(step);
        readers
    }

    /// Records that the tokens of a share are in memory, without the drafts after the first `accepted`. Returns the number
    /// of prompt tokens among them, or `None` if the sequence has ended. The caller appends the drawn tokens and ends a
    /// sequence whose result is no token.
    pub(crate) fn retire(&mut self, share: &Share, accepted: usize) -> Option<usize> {
        let sequence = self.sequences.get_mut(share.key)?;
        if sequence.preemptions == share.preemptions {
            sequence.retired = share.end() - (share.rows.drafts() - accepted);
            if sequence.retired < share.end() {
                sequence.submitted = sequence.retired;
                self.kv.shrink(&mut sequence.kv, sequence.retired);
            }
            // Accepted drafts are not known yet; see `commit`.
            let known = sequence.retired.min(sequence.history.len());
            self.kv.commit(&mut sequence.kv, &sequence.history, known);
        }
        if share.rows.completes {
            sequence.pending -= 1;
        }
        if let Some(drafter) = &mut sequence.drafter {
            drafter.verified(accepted);
        }
        Some(share.end().min(sequence.prompt_len()).saturating_sub(share.first))
    }
}
