//! The executor's slots of adapters.

use crate::{Adapter, AdapterChange, AdapterSlot, StepId};

/// Slots, each with at most one adapter. Running sequences hold the slot of their adapter; a slot that nobody holds keeps
/// its adapter until another needs the room.
#[derive(Debug, Default)]
pub(crate) struct AdapterSlots {
    slots: Vec<Slot>,
    /// Changes of which the executor does not know.
    changes: Vec<AdapterChange>,
}

#[derive(Debug, Default)]
struct Slot {
    adapter: Option<Adapter>,
    /// Number of running sequences that hold it.
    holders: usize,
    /// Step in which it was last taken.
    taken: StepId,
}

impl AdapterSlots {
    /// Creates empty slots.
    pub(crate) fn new(count: usize) -> Self {
        Self { slots: (0..count).map(|_| Slot::default()).collect(), changes: Vec::new() }
    }

    /// Returns the slot that a sequence with this adapter would take: its own, or the free one that was used the longest
    /// ago.
    fn find(&self, adapter: &Adapter) -> Option<usize> {
        let own = self.slots.iter().position(|slot| slot.adapter.as_ref() == Some(adapter));
        own.or_else(|| {
            let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.holders == 0);
            free.min_by_key(|(_, slot)| (slot.adapter.is_some(), slot.taken)).map(|(index, _)| index)
        })
    }

    /// Returns whether a sequence with this adapter can run.
    pub(crate) fn has_room(&self, adapter: &Adapter) -> bool {
        self.find(adapter).is_some()
    }

    /// Gives a sequence the slot of its adapter, if there is one.
    pub(crate) fn take(&mut self, adapter: &Adapter, step: StepId) -> Option<AdapterSlot> {
        let index = self.find(adapter)?;
        let slot = &mut self.slots[index];
        slot.holders += 1;
        slot.taken = step;
        if slot.adapter.as_ref() != Some(adapter) {
            slot.adapter = Some(adapter.clone());
            self.changes.retain(|change| change.slot as usize != index);
            self.changes.push(AdapterChange { slot: index as AdapterSlot, adapter: adapter.clone() });
        }
        Some(index as AdapterSlot)
    }

    /// Takes a slot back from a sequence.
    pub(crate) fn release(&mut self, slot: AdapterSlot) {
        self.slots[slot as usize].holders -= 1;
    }

    /// Moves the changes into a plan.
    pub(crate) fn write(&mut self, changes: &mut Vec<AdapterChange>) {
        changes.append(&mut self.changes);
    }

    /// Returns the number of sequences that hold slots.
    pub(crate) fn holders(&self) -> usize {
        self.slots.iter().map(|slot| slot.holders).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_shared_and_reused_when_nobody_holds_it() {
        let [a, b, c] = [1, 2, 3].map(|number| Adapter::new(number, "a", number.to_string(), ()));
        let mut slots = AdapterSlots::new(2);
        assert_eq!([slots.take(&a, 1), slots.take(&a, 2), slots.take(&b, 3)], [Some(0), Some(0), Some(1)]);
        assert!(!slots.has_room(&c) && slots.has_room(&b));
        assert_eq!(slots.take(&c, 4), None);
        slots.release(0);
        assert!(!slots.has_room(&c), "one of two still holds it");
        slots.release(1);
        slots.release(0);
        let mut changes = Vec::new();
        slots.write(&mut changes);
        assert_eq!(changes.len(), 2);
        assert_eq!(slots.take(&a, 5), Some(0), "it is still there");
        slots.release(0);
        assert_eq!(slots.take(&c, 6), Some(1), "that of b was taken the longest ago");
        changes.clear();
        slots.write(&mut changes);
        assert_eq!(changes, [AdapterChange { slot: 1, adapter: c.clone() }]);
        assert_eq!(slots.holders(), 1);
        assert!(!AdapterSlots::new(0).has_room(&a));
    }
}
