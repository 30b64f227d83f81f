//! Drafts: which sequences of a step verify how many, and what became of them.

use super::{Budget, Scheduler, Share};
use crate::clock::StepClock;
use crate::sequence::{Sequence, SequenceKey};

impl Scheduler {
    /// Drafts tokens of a running sequence that the step being planned verifies, if they are worth their time and need
    /// nothing that others may need.
    pub(super) fn draft(&mut self, key: SequenceKey, budget: &mut Budget, clock: Option<&StepClock>) {
        let Some(sequence) = self.sequences.get_mut(key) else { return };
        let Some(drafter) = &mut sequence.drafter else { return };
        drafter.clear();
        if sequence.pending > 0 || sequence.total() != sequence.submitted + 1 {
            return;
        }
        let (total, running) = (sequence.total(), self.running.len());
        let room = budget.drafts.min(budget.scores).min(budget.tokens.saturating_sub(running));
        let room = room.min(sequence.draft_room());
        let Some(sequence) = self.sequences.get(key) else { return };
        let cost = clock.map_or(0.0, |clock| self.cost_of_draft(sequence, budget, clock));
        let Some(sequence) = self.sequences.get_mut(key) else { return };
        let limit = sequence.limit();
        let Sequence { drafter: Some(drafter), history, kv, .. } = sequence else { return };
        let worth = drafter.worth(cost, room);
        let most = if self.kv.has_room(kv, total + worth, running) { worth } else { 0 };
        drafter.propose(history, most, limit);
    }

    /// Returns what a draft costs, in times of what a token costs if every running sequence draws one.
    fn cost_of_draft(&self, sequence: &Sequence, budget: &mut Budget, clock: &StepClock) -> f64 {
        let total = sequence.total();
        let seconds = |tokens: usize| clock.seconds(&clock.share(tokens, total + tokens - 1, tokens));
        let token_seconds = *budget.token_seconds.get_or_insert_with(|| {
            let totals = self.running.iter().filter_map(|&key| self.sequences.get(key)).map(Sequence::total);
            let shares: f64 = totals.map(|total| clock.seconds(&clock.share(1, total, 1))).sum();
            (clock.seconds(&clock.step()) + shares) / self.running.len().max(1) as f64
        });
        (seconds(2) - seconds(1)) / token_seconds
    }

    /// Returns the number of drafts of a share that equal the tokens drawn in their places.
    pub(crate) fn accepted(&self, share: &Share, drawn: impl Iterator<Item = u32>) -> usize {
        let drafter = self.sequences.get(share.key).and_then(|sequence| sequence.drafter.as_ref());
        drafter.map_or(0, |drafter| drafter.accepted(drawn))
    }

    /// Indexes the blocks of accepted drafts, once they have been appended to their sequence.
    pub(crate) fn commit(&mut self, share: &Share) {
        if let Some(sequence) = self.sequences.get_mut(share.key)
            && sequence.preemptions == share.preemptions
        {
            self.kv.commit(&mut sequence.kv, &sequence.history, sequence.retired);
        }
    }
}
