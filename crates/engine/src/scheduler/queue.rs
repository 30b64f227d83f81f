//! The waiting queue.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Instant;

use super::clients::Clients;
use crate::inbox::RequestId;
use crate::sequence::{Sequence, SequenceKey};
use crate::{ClientId, SchedulingPolicy};

/// Rank under the priority policy: lower priority value first, then earlier arrival; ties by submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    priority: i64,
    arrival: Instant,
    id: RequestId,
}

impl Rank {
    pub(super) fn new(sequence: &Sequence) -> Self {
        Self { priority: sequence.priority, arrival: sequence.timeline.arrival(), id: sequence.id }
    }
}

/// Position of a sequence in the queue. Smaller is nearer to the head. A queue uses only one variant.
///
/// Under FCFS the position is the order of submission, also for a preempted sequence, which must return to the front:
/// the last admitted sequence is preempted first, so every waiting sequence was submitted after every running one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Turn(RequestId),
    Rank(Rank),
    /// Under the fair policy, each client has a queue of its own.
    Client(ClientId, RequestId),
}

/// Sequences that wait for a seat and blocks. Any of them can be removed in O(log n), because clients disconnect.
pub(super) struct WaitingQueue {
    policy: SchedulingPolicy,
    order: BTreeMap<Place, SequenceKey>,
    /// Number of sequences in the queue that have run before.
    preempted: usize,
}

impl WaitingQueue {
    pub(super) fn new(policy: SchedulingPolicy) -> Self {
        Self { policy, order: BTreeMap::new(), preempted: 0 }
    }

    fn place(&self, sequence: &Sequence) -> Place {
        match self.policy {
            SchedulingPolicy::Fcfs => Place::Turn(sequence.id),
            SchedulingPolicy::Priority => Place::Rank(Rank::new(sequence)),
            SchedulingPolicy::Fair => Place::Client(sequence.client, sequence.id),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Returns the number of sequences in the queue that have run before.
    pub(super) fn preempted(&self) -> usize {
        self.preempted
    }

    /// Returns the head: under the fair policy, the head of the client that has received the least service.
    pub(super) fn first(&self, clients: &Clients) -> Option<SequenceKey> {
        let (mut place, &first) = self.order.first_key_value()?;
        let mut least = ((u64::MAX, usize::MAX), first);
        while let Place::Client(client, _) = *place {
            let claim = clients.claim(client);
            if claim < least.0 {
                least = (claim, *self.order.get(place)?);
            }
            let next = (Bound::Excluded(Place::Client(client, RequestId::MAX)), Bound::Unbounded);
            match self.order.range(next).next() {
                Some((next, _)) => place = next,
                None => break,
            }
        }
        Some(least.1)
    }

    /// Adds a sequence, new or preempted.
    pub(super) fn push(&mut self, key: SequenceKey, sequence: &Sequence) {
        if sequence.preemptions > 0 {
            self.preempted += 1;
        }
        self.order.insert(self.place(sequence), key);
    }

    /// Removes a sequence.
    pub(super) fn remove(&mut self, sequence: &Sequence) {
        let removed = self.order.remove(&self.place(sequence));
        debug_assert!(removed.is_some());
        if sequence.preemptions > 0 {
            self.preempted -= 1;
        }
    }
}
