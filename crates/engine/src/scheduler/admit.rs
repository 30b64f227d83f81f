//! Admission of waiting sequences.

use super::{Budget, Scheduler, Share};
use crate::clock::StepClock;
use crate::kv::Hit;
use crate::sequence::SequenceKey;
use crate::{ClientId, SchedulingPolicy};

/// Number of steps that may pass a sequence over for want of a step's own budget. It then blocks the queue until it is
/// admitted.
const MAX_PASSES: u32 = 64;

/// Number of waiting sequences that a step may pass over, so that their lookups cost a bounded time.
const MAX_DEFERRED: usize = 16;

/// Number of waiting sequences beside them that a step may pass over because there are no rows to score their prompts. That
/// needs no lookup. They wait for each other and not for those that pass, which leave them all of these rows.
pub(super) const MAX_WITHOUT_ROWS: usize = 512;

/// A sequence whose blocks did not fit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shortage {
    key: SequenceKey,
    /// Value of [`KvCache::gains`](crate::kv::KvCache::gains).
    gains: u64,
}

/// Result of an attempt to admit the head of the queue.
enum Admission {
    Admitted,
    /// It cannot be in this step, and others may.
    Deferred,
    /// It can neither, because all rows that may be scored are taken.
    WithoutRows,
    /// Seats, blocks or the budget have run out. No sequence overtakes the head.
    Blocked,
}

impl Scheduler {
    /// Admits the head of the queue or takes it out of the queue until the next step. Returns whether another sequence
    /// may be admitted.
    pub(super) fn admit_or_defer(&mut self, budget: &mut Budget, clock: Option<&StepClock>) -> bool {
        let Some(key) = self.waiting.first(&self.clients) else { return false };
        match self.admit(key, budget, clock) {
            Admission::Admitted => true,
            Admission::Blocked => false,
            Admission::Deferred => {
                self.defer(key);
                self.deferred.len() - budget.without_rows < MAX_DEFERRED
            }
            Admission::WithoutRows => {
                self.defer(key);
                budget.without_rows += 1;
                budget.without_rows < MAX_WITHOUT_ROWS
            }
        }
    }

    /// Takes the head out of the queue until the next step.
    fn defer(&mut self, key: SequenceKey) {
        if let Some(sequence) = self.sequences.get_mut(key) {
            sequence.deferred = true;
            self.waiting.remove(sequence);
            self.images.release(&mut sequence.images);
            self.deferred.push(key);
        }
    }

    /// Passes over a sequence for which the budget of this step is used up, unless that has happened too often.
    fn pass_over(&mut self, key: SequenceKey) -> Admission {
        let Some(sequence) = self.sequences.get_mut(key) else { return Admission::Blocked };
        sequence.passes += 1;
        if sequence.passes > MAX_PASSES { self.block(key) } else { Admission::Deferred }
    }

    fn block(&mut self, key: SequenceKey) -> Admission {
        self.release_images(key);
        Admission::Blocked
    }

    /// Preempts the last admitted sequence of the client that runs the most, if that is more than its part beside
    /// `client`. Sequences that are in the step already stay. Returns `false` if none makes way.
    fn make_way(&mut self, client: ClientId) -> bool {
        let Some(most) = self.clients.must_yield_to(client) else { return false };
        let yields = |key: SequenceKey| {
            let chosen = self.chosen.iter().any(|chosen| chosen.key == key);
            !chosen && self.sequences.get(key).is_some_and(|sequence| sequence.client == most)
        };
        let Some(victim) = self.running.iter().rposition(|&key| yields(key)) else { return false };
        self.preempt(victim);
        true
    }

    /// Admits the head of the queue if it gets tokens in this step. A sequence for which a budget of its own is used up,
    /// for scores, images or masks, lets others pass, and so does one whose prefix the step being planned computes.
    fn admit(&mut self, key: SequenceKey, budget: &mut Budget, clock: Option<&StepClock>) -> Admission {
        let share = self.share();
        let Some(sequence) = self.sequences.get(key) else { return Admission::Blocked };
        // The last token of a sequence that was preempted between two steps is known when the step in flight has retired.
        if sequence.pending > 0 || self.cannot_start(key) {
            return Admission::Blocked;
        }
        if sequence.scores.within(0, budget.scores) == 0 {
            return Admission::WithoutRows;
        }
        if let Some(adapter) = &sequence.adapter
            && !self.adapters.has_room(adapter)
        {
            return self.pass_over(key);
        }
        let Some(sequence) = self.sequences.get_mut(key) else { return Admission::Blocked };
        let (most, known) = (sequence.may_be_cached(), sequence.history.len());
        let hit = self.kv.lookup(&mut sequence.kv, &sequence.history, most);
        if hit.awaited {
            return Admission::Deferred;
        }
        let scored = sequence.scores.within(hit.tokens, budget.scores);
        let mut tokens = (known - hit.tokens).min(share).min(scored);
        if tokens == 0 {
            return self.pass_over(key);
        }
        if tokens > budget.tokens {
            if !self.config.enable_chunked_prefill {
                return Admission::Blocked;
            }
            tokens = budget.tokens;
        }
        // A prompt that must not be split takes the time that it takes.
        let time = Budget {
            seconds: if self.config.enable_chunked_prefill { budget.seconds } else { f64::INFINITY },
            ..*budget
        };
        let Some(sequence) = self.sequences.get(key) else { return Admission::Blocked };
        let share = self.uncut(sequence, hit.tokens, tokens, budget.tokens.min(known - hit.tokens));
        let Some(chosen) = self.choice(key, (hit.tokens, share), &time, clock) else { return Admission::Blocked };
        if chosen.tokens == 0 {
            return Admission::Blocked;
        }
        if chosen.masks() > budget.first_masks {
            return self.pass_over(key);
        }
        let Some(chosen) = self.with_images(chosen, &time, clock) else { return self.block(key) };
        if chosen.tokens == 0 {
            return self.pass_over(key);
        }
        if !self.find_room(key, hit, budget) {
            return self.block(key);
        }
        self.start(key, hit, chosen);
        budget.first_masks -= chosen.masks();
        self.choose_share(chosen, budget);
        if let (Some(reserved), Some(sequence)) = (&mut budget.reserved, self.sequences.get(key)) {
            *reserved += self.kv.missing(&sequence.kv, known);
        }
        Admission::Admitted
    }

    /// Returns whether the head of the queue cannot start, which is known without a lookup of its prefix.
    fn cannot_start(&self, key: SequenceKey) -> bool {
        let Some(sequence) = self.sequences.get(key) else { return true };
        if self.fair() && self.clients.must_yield_to(sequence.client).is_some() {
            return false;
        }
        let short = self.short.is_some_and(|short| short.key == key && short.gains == self.kv.gains());
        short || self.seats.is_empty() || self.kv.exhausted()
    }

    /// Returns whether there are a seat and blocks for a sequence with this hit, beside those that running sequences
    /// still need for the tokens that they have, and the head-room. Others make way if the policy is fair.
    fn find_room(&mut self, key: SequenceKey, hit: Hit, budget: &mut Budget) -> bool {
        loop {
            let Some(sequence) = self.sequences.get(key) else { return false };
            let (client, known) = (sequence.client, sequence.history.len());
            let reserved = *budget.reserved.get_or_insert_with(|| self.reserved());
            let head_room = if self.running.is_empty() { 0.0 } else { self.config.watermark };
            let fits = !self.kv.exhausted() && self.kv.fits(hit, known, reserved, head_room);
            if fits && !self.seats.is_empty() {
                return true;
            }
            if !self.fair() || !self.make_way(client) {
                if !fits {
                    self.short = Some(Shortage { key, gains: self.kv.gains() });
                }
                return false;
            }
            budget.reserved = None;
        }
    }

    /// Returns the number of blocks that the running sequences still need for the tokens that they have.
    fn reserved(&self) -> usize {
        let running = self.running.iter().filter_map(|&key| self.sequences.get(key));
        running.map(|sequence| self.kv.missing(&sequence.kv, sequence.total())).sum()
    }

    /// Moves the head of the queue to the running sequences, with blocks for its first share.
    fn start(&mut self, key: SequenceKey, hit: Hit, share: Share) {
        let (Some(seat), Some(sequence)) = (self.seats.pop(), self.sequences.get_mut(key)) else { return };
        self.waiting.remove(sequence);
        self.clients.start(sequence.client);
        sequence.adapter_slot = sequence.adapter.as_ref().and_then(|adapter| self.adapters.take(adapter, self.step));
        self.adapters_changed |= sequence.adapter.is_some();
        sequence.admit(seat, hit.tokens, self.kv.layout());
        self.kv.attach(&mut sequence.kv, hit);
        let fits = self.kv.grow(&mut sequence.kv, share.end());
        debug_assert!(fits, "the whole sequence was found to fit");
        let id = sequence.id;
        // Under FCFS, a sequence that was passed over comes before those that overtook it.
        let comes_before = |&key: &SequenceKey| {
            self.config.policy != SchedulingPolicy::Fcfs || self.sequences.get(key).is_some_and(|other| other.id < id)
        };
        let at = self.running.iter().rposition(comes_before).map_or(0, |last| last + 1);
        self.running.insert(at, key);
        self.admitted.push(key);
    }
}
