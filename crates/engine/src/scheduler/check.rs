//! Checks of the scheduler's invariants.

use super::Scheduler;
use crate::sequence::{Residence, Sequence, SequenceKey};
use crate::{PromptImage, SchedulingPolicy, Seat};

impl Scheduler {
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
        if self.fair() && self.clients.counts() != (self.running.len(), self.sequences.len()) {
            return Err(format!("clients count {:?} running and all sequences", self.clients.counts()));
        }
        if self.is_idle() && self.kv.used() > 0 {
            return Err(format!("idle with {} blocks in use", self.kv.used()));
        }
        let adapted = self.sequences.iter().filter(|(_, sequence)| sequence.adapter_slot.is_some()).count();
        if self.adapters.holders() != adapted {
            return Err(format!("{adapted} sequences hold {} slots of adapters", self.adapters.holders()));
        }
        self.images.check(self.sequences.iter().map(|(_, sequence)| &sequence.images))?;
        self.sequences.iter().try_for_each(|(_, sequence)| self.check_sequence(sequence))
    }

    /// Checks that every seat is free or held by one running sequence.
    fn check_slots(&self, counts: &mut Vec<u32>) -> Result<(), String> {
        counts.clear();
        counts.resize(self.config.max_num_seqs, 0);
        for seat in self.seats.iter().copied().chain(self.running.iter().filter_map(|&key| self.seat(key))) {
            counts[seat as usize] += 1;
        }
        match counts.iter().position(|&count| count != 1) {
            Some(seat) => Err(format!("seat {seat} is held {} times", counts[seat])),
            None => Ok(()),
        }
    }

    /// Checks that under FCFS the running list is in the order of submission, and that no sequence of it has overtaken
    /// the head of the queue unless a step has passed that over.
    fn check_order(&self) -> Result<(), String> {
        let head = self.waiting.first(&self.clients).and_then(|key| self.sequences.get(key));
        let head = head.filter(|sequence| !sequence.deferred).map(|sequence| sequence.id);
        let ids = self.running.iter().filter_map(|&key| self.sequences.get(key)).map(|sequence| sequence.id);
        if ids.chain(head).is_sorted() { Ok(()) } else { Err("a request has overtaken another".into()) }
    }

    fn seat(&self, key: SequenceKey) -> Option<Seat> {
        match self.sequences.get(key)?.residence {
            Residence::Running(seat) => Some(seat),
            Residence::Waiting => None,
        }
    }

    fn check_sequence(&self, sequence: &Sequence) -> Result<(), String> {
        let Sequence { retired, submitted, pending, .. } = *sequence;
        let most = sequence.total() + sequence.drafts().len();
        let ordered = retired <= submitted && submitted <= most && retired <= sequence.history.len();
        if !ordered || pending > 2 {
            return Err(format!("{}: retired {retired}, submitted {submitted}, pending {pending}", sequence.name));
        }
        if let Some(image) = sequence.images.held().find(|image| !within(image, submitted)) {
            return Err(format!("{}: submitted {submitted}, holds the image at {}", sequence.name, image.span.start));
        }
        self.kv.check_sequence(&sequence.kv, submitted, retired).map_err(|error| format!("{}: {error}", sequence.name))
    }
}

/// Returns whether an image's tokens are computed in part.
fn within(image: &PromptImage, submitted: usize) -> bool {
    (image.span.start as usize) < submitted && submitted < image.span.end() as usize
}
