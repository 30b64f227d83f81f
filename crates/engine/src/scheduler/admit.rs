//! Admission of waiting sequences.

use super::{Budget, Chosen, Scheduler};
use crate::clock::StepClock;
use crate::kv::Hit;
use crate::sequence::SequenceKey;
use crate::{ClientId, SchedulingPolicy};

/// Number of waiting sequences that a step may pass over, so that their lookups cost a bounded time.
pub(super) const MAX_DEFERRED: usize = 16;

/// Result of an attempt to admit the head of the queue.
enum Admission {
    Admitted,
    /// It cannot be in this step, and others may.
    Deferred,
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
                if let Some(sequence) = self.sequences.get_mut(key) {
                    sequence.deferred = true;
                    self.waiting.remove(sequence);
                    self.deferred.push(key);
                }
                self.deferred.len() < MAX_DEFERRED
            }
        }
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

    /// Admits the head of the queue. A sequence whose rows to score do not fit this step is admitted without tokens, so
    /// that it does not block the others. One whose prefix the step being planned computes waits until it can use it.
    fn admit(&mut self, key: SequenceKey, budget: &mut Budget, clock: Option<&StepClock>) -> Admission {
        let share = self.share();
        let Some(sequence) = self.sequences.get_mut(key) else { return Admission::Blocked };
        // It was preempted between two steps. Its last token is known when the step in flight has retired.
        if sequence.pending > 0 {
            return Admission::Blocked;
        }
        let (client, most, known) = (sequence.client, sequence.may_be_cached(), sequence.history.len());
        let hit = self.kv.lookup(&mut sequence.kv, &sequence.history, most);
        if hit.awaited {
            return Admission::Deferred;
        }
        let scored = sequence.within_rows(hit.tokens, budget.scores);
        let mut tokens = (known - hit.tokens).min(share).min(scored);
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
        let Some(chosen) = self.with_images(chosen, hit.tokens, &time, clock) else { return Admission::Blocked };
        if chosen.tokens == 0 && tokens > 0 {
            return Admission::Blocked;
        }
        while self.slots.is_empty() || self.kv.exhausted() || !self.kv.fits(hit, known) {
            if !self.fair() || !self.make_way(client) {
                self.release_images(key);
                return Admission::Blocked;
            }
        }
        self.start(key, hit, chosen);
        if chosen.tokens > 0 {
            self.choose_share(chosen, hit.tokens + chosen.tokens, budget);
        }
        Admission::Admitted
    }

    /// Moves the head of the queue to the running sequences, with blocks for its first share.
    fn start(&mut self, key: SequenceKey, hit: Hit, chosen: Chosen) {
        let (Some(slot), Some(sequence)) = (self.slots.pop(), self.sequences.get_mut(key)) else { return };
        self.waiting.remove(sequence);
        self.clients.start(sequence.client);
        sequence.admit(slot, hit.tokens, self.kv.layout());
        self.kv.attach(&mut sequence.kv, hit);
        let fits = self.kv.grow(&mut sequence.kv, hit.tokens + chosen.tokens);
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
