//! The waiting queue.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::SchedulingPolicy;
use crate::inbox::RequestId;
use crate::sequence::{Sequence, SequenceKey};

/// The order of the priority policy: lower priority value first, then earlier arrival; ties go by submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    priority: i64,
    arrival: Instant,
    id: RequestId,
}

impl Rank {
    pub(super) fn of(sequence: &Sequence) -> Self {
        Self { priority: sequence.priority, arrival: sequence.timeline.arrival(), id: sequence.id }
    }
}

/// Place of a sequence in the queue; smaller is nearer to the head. A queue uses one kind.
///
/// Under FCFS it is the order of submission, also for a preempted sequence, which must come back at the front: the last
/// admitted goes first, so whatever waits was submitted after whatever runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Turn(RequestId),
    Rank(Rank),
}

/// Sequences that wait for a slot and blocks. Any of them can leave in O(log n): clients go away.
pub(super) struct WaitingQueue {
    policy: SchedulingPolicy,
    order: BTreeMap<Place, SequenceKey>,
    /// Sequences among them that have run before.
    preempted: usize,
}

impl WaitingQueue {
    pub(super) fn new(policy: SchedulingPolicy) -> Self {
        Self { policy, order: BTreeMap::new(), preempted: 0 }
    }

    fn place(&self, sequence: &Sequence) -> Place {
        match self.policy {
            SchedulingPolicy::Fcfs => Place::Turn(sequence.id),
            SchedulingPolicy::Priority => Place::Rank(Rank::of(sequence)),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Sequences among them that have run before.
    pub(super) fn preempted(&self) -> usize {
        self.preempted
    }

    /// The head.
    pub(super) fn first(&self) -> Option<SequenceKey> {
        self.order.first_key_value().map(|(_, &key)| key)
    }

    /// Takes a sequence in, new or preempted.
    pub(super) fn push(&mut self, key: SequenceKey, sequence: &Sequence) {
        if sequence.preemptions > 0 {
            self.preempted += 1;
        }
        self.order.insert(self.place(sequence), key);
    }

    /// Lets a sequence out.
    pub(super) fn remove(&mut self, sequence: &Sequence) {
        let removed = self.order.remove(&self.place(sequence));
        debug_assert!(removed.is_some());
        if sequence.preemptions > 0 {
            self.preempted -= 1;
        }
    }
}
