//! Adapters in the backend's slots.

use std::sync::Arc;

use octavo_engine::{AdapterChange, AdapterSlot};
use octavo_ops::{AdapterSource, Backend};

/// Room for adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterLimits {
    /// Number of adapters that a step may use.
    pub slots: usize,
    /// Largest rank.
    pub rank: usize,
}

/// The weights of an [`octavo_engine::Adapter`] that runs on a [`Runner`](crate::Runner).
pub struct AdapterWeights(pub Arc<dyn AdapterSource>);

/// Contents of slots that the backend does not have yet: new ones, and those for which it had no memory.
#[derive(Default)]
pub(crate) struct PendingAdapters {
    changes: Vec<(AdapterChange, String)>,
}

impl PendingAdapters {
    /// Gives the backend the new contents of slots, and those that it refused before.
    pub(crate) fn apply(&mut self, changes: &[AdapterChange], backend: &mut dyn Backend) {
        for change in changes {
            self.changes.retain(|(other, _)| other.slot != change.slot);
            self.changes.push((change.clone(), String::new()));
        }
        self.changes.retain_mut(|(change, error)| match load_adapter(backend, change) {
            Ok(()) => false,
            Err(reason) => {
                *error = reason;
                true
            }
        });
    }

    /// Returns why a slot does not have its adapter, if that is so.
    pub(crate) fn refused(&self, slot: AdapterSlot) -> Option<&str> {
        self.changes.iter().find(|(change, _)| change.slot == slot).map(|(_, error)| error.as_str())
    }
}

fn load_adapter(backend: &mut dyn Backend, change: &AdapterChange) -> Result<(), String> {
    let weights = change.adapter.weights::<AdapterWeights>();
    let weights = weights.ok_or_else(|| format!("the adapter '{}' has no weights", change.adapter.name()))?;
    let set = backend.set_adapter(change.slot as usize, &*weights.0);
    set.map_err(|error| format!("the adapter '{}' cannot be used: {error}", change.adapter.name()))
}
