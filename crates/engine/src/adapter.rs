//! Adapters of requests.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// An adapter that a sequence runs with. The engine knows its name and gives its weights to the executor.
///
/// Clones are the same adapter. Requests with the same adapter share the blocks of equal prefixes, and nobody else does.
#[derive(Clone)]
pub struct Adapter(Arc<Data>);

struct Data {
    number: u64,
    name: Arc<str>,
    origin: Arc<str>,
    weights: Box<dyn Any + Send + Sync>,
}

impl Adapter {
    /// Creates an adapter. `number` and the pair of `name` and `origin`, which is the path it was loaded from, must differ
    /// from those of every other adapter of this engine, past ones too: keys of blocks contain them. `weights` are for the
    /// executor.
    pub fn new(
        number: u64,
        name: impl Into<Arc<str>>,
        origin: impl Into<Arc<str>>,
        weights: impl Any + Send + Sync,
    ) -> Self {
        Self(Arc::new(Data { number, name: name.into(), origin: origin.into(), weights: Box::new(weights) }))
    }

    /// Returns the number, which counts from 1.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Returns the name.
    pub fn name(&self) -> &Arc<str> {
        &self.0.name
    }

    /// Returns the path it was loaded from, or what else tells it from other loads of its name.
    pub fn origin(&self) -> &str {
        &self.0.origin
    }

    /// Returns the weights, if they are of this type.
    pub fn weights<T: Any>(&self) -> Option<&T> {
        self.0.weights.downcast_ref()
    }
}

impl PartialEq for Adapter {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Adapter {}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adapter({}, {} from {})", self.number(), self.name(), self.origin())
    }
}
