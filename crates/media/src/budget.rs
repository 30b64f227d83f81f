//! A bound on the memory of images in flight.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of a permit. A semaphore counts in 32 bits, and this reaches 4 TiB.
const UNIT: u64 = 1 << 10;

/// Bytes that images may occupy together. Those that find no room wait in their order.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    units: Arc<Semaphore>,
    total: u32,
}

/// A part of a budget, returned when dropped.
#[derive(Debug)]
pub(crate) struct Lease(OwnedSemaphorePermit);

impl Budget {
    pub(crate) fn new(bytes: u64) -> Self {
        let total = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).clamp(1, Semaphore::MAX_PERMITS as u32);
        Self { units: Arc::new(Semaphore::new(total as usize)), total }
    }

    /// Waits until there is room for `bytes`. What is larger than the budget gets all of it, and so runs alone.
    pub(crate) async fn reserve(&self, bytes: u64) -> Lease {
        let permit = Arc::clone(&self.units).acquire_many_owned(self.units_of(bytes)).await;
        Lease(permit.expect("the semaphore is never closed"))
    }

    /// Takes `bytes`, or nothing if they are not free. What is larger than the budget needs all of it.
    pub(crate) fn take(&self, bytes: u64) -> Option<Lease> {
        Arc::clone(&self.units).try_acquire_many_owned(self.units_of(bytes)).ok().map(Lease)
    }

    /// Bytes of the whole budget.
    pub(crate) fn total(&self) -> u64 {
        u64::from(self.total) * UNIT
    }

    fn units_of(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.total)
    }

    /// Bytes that are free.
    #[cfg(test)]
    pub(crate) fn free(&self) -> u64 {
        self.units.available_permits() as u64 * UNIT
    }
}

impl Lease {
    /// Adds `more` to this lease.
    pub(crate) fn merge(&mut self, more: Lease) {
        self.0.merge(more.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_exceeds_the_budget_runs_alone() {
        let budget = Budget::new(10 * UNIT);
        let mut small = budget.reserve(1).await;
        small.merge(budget.reserve(3 * UNIT).await);
        assert_eq!(budget.free(), 6 * UNIT);
        let large = tokio::spawn({
            let budget = budget.clone();
            async move { budget.reserve(u64::MAX).await }
        });
        tokio::task::yield_now().await;
        assert!(!large.is_finished());
        drop(small);
        let large = large.await.unwrap();
        assert_eq!(budget.free(), 0);
        drop(large);
        assert_eq!(budget.free(), 10 * UNIT);
    }
}
