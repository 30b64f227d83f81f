//! Preemption: running sequences give up their blocks, and wait.

use super::queue::Rank;
use super::{Budget, Scheduler};
use crate::sequence::{Residence, SequenceKey};
use crate::{SchedulingPolicy, Seat};

impl Scheduler {
    /// Allocates blocks for `tokens` tokens of a running sequence and preempts others if necessary. Returns `false` if
    /// the sequence itself was preempted.
    pub(super) fn make_room(&mut self, key: SequenceKey, tokens: usize, budget: &mut Budget) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(key) else { return false };
            if self.kv.grow(&mut sequence.kv, tokens) {
                return true;
            }
            let Some(victim) = self.victim() else { return false };
            let victim_key = self.running[victim];
            if let Some(choice) = self.chosen.iter().position(|chosen| chosen.key == victim_key) {
                budget.give_back(&self.chosen.remove(choice));
                if let Some(sequence) = self.sequences.get(victim_key) {
                    self.kv.unpublish(&sequence.kv);
                }
            }
            self.preempt(victim);
            if victim_key == key {
                return false;
            }
        }
    }

    /// Frees a seat, of which the executor is told if it knows the sequence.
    pub(super) fn free_seat(&mut self, seat: Seat, joined: bool) {
        self.seats.push(seat);
        if joined {
            self.left.push(seat);
        }
    }

    /// Returns the index of the running sequence to preempt: the last admitted one, or the last one in the order of the
    /// priority policy.
    fn victim(&self) -> Option<usize> {
        match self.config.policy {
            SchedulingPolicy::Fcfs | SchedulingPolicy::Fair => self.running.len().checked_sub(1),
            SchedulingPolicy::Priority => {
                let rank = |&index: &usize| self.sequences.get(self.running[index]).map(Rank::new);
                (0..self.running.len()).max_by_key(rank)
            }
        }
    }

    pub(super) fn preempt(&mut self, index: usize) {
        let key = self.running.remove(index);
        let Some(sequence) = self.sequences.get(key) else { return };
        if let Residence::Running(seat) = sequence.residence {
            self.free_seat(seat, sequence.joined);
        }
        let Some(sequence) = self.sequences.get_mut(key) else { return };
        self.kv.release(&mut sequence.kv);
        self.images.release(&mut sequence.images);
        sequence.preempt();
        self.adapters_changed |= sequence.adapter.is_some();
        if let Some(slot) = sequence.adapter_slot.take() {
            self.adapters.release(slot);
        }
        self.clients.stop(sequence.client);
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
}
