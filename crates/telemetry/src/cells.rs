//! Cells that this crate keeps itself: histograms, and values that the statistics line reads back.
//!
//! All memory orderings are relaxed: a scrape may read series at slightly different moments, but every series is exact.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use metrics::{Counter, Gauge};

/// A counter that the statistics line reads back, which a handle of the facade does not allow.
#[derive(Debug)]
pub(crate) struct ReadableCounter {
    exported: Counter,
    value: AtomicU64,
}

impl ReadableCounter {
    pub(crate) fn increment(&self, value: u64) {
        self.exported.increment(value);
        self.value.fetch_add(value, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.value.load(Relaxed)
    }
}

impl From<Counter> for ReadableCounter {
    fn from(exported: Counter) -> Self {
        Self { exported, value: AtomicU64::new(0) }
    }
}

/// A gauge that the statistics line reads back, stored as the bits of an f64.
#[derive(Debug)]
pub(crate) struct ReadableGauge {
    exported: Gauge,
    bits: AtomicU64,
}

impl ReadableGauge {
    pub(crate) fn set(&self, value: f64) {
        self.exported.set(value);
        self.bits.store(value.to_bits(), Relaxed);
    }

    pub(crate) fn get(&self) -> f64 {
        f64::from_bits(self.bits.load(Relaxed))
    }
}

impl From<Gauge> for ReadableGauge {
    fn from(exported: Gauge) -> Self {
        Self { exported, bits: AtomicU64::new(0f64.to_bits()) }
    }
}

/// The unit that a histogram counts in. With integers, an observation is two atomic additions rather than a loop around a
/// float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Observed in nanoseconds, exported in seconds.
    Seconds,
    /// Items such as tokens, bytes and preemptions.
    Items,
}

impl Unit {
    const fn per_exported_unit(self) -> f64 {
        match self {
            Self::Seconds => 1e9,
            Self::Items => 1.0,
        }
    }
}

#[derive(Debug)]
struct Buckets {
    unit: Unit,
    /// Upper bounds in `unit`, ascending.
    bounds: Box<[u64]>,
    /// Counts that are not cumulative: one for each bound, and one for values above all bounds.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

/// A histogram with fixed buckets.
#[derive(Clone, Debug)]
pub(crate) struct Histogram(Arc<Buckets>);

impl Histogram {
    /// Creates a histogram with ascending `bounds` in the exported unit. Without bounds it is a sum and a count.
    pub(crate) fn new(unit: Unit, bounds: &[f64]) -> Self {
        let bounds: Box<[u64]> = bounds.iter().map(|b| (b * unit.per_exported_unit()).round() as u64).collect();
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Buckets { unit, bounds, counts, sum: AtomicU64::new(0) }))
    }

    /// Observes a number of items.
    pub(crate) fn observe(&self, value: u64) {
        let bucket = self.0.bounds.partition_point(|&bound| bound < value);
        self.0.counts[bucket].fetch_add(1, Relaxed);
        self.0.sum.fetch_add(value, Relaxed);
    }

    /// Observes a duration (up to 584 years).
    pub(crate) fn observe_duration(&self, value: Duration) {
        self.observe(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Cumulative counts: one for each bound, and one for all observations.
    pub(crate) fn cumulative(&self) -> impl Iterator<Item = u64> {
        self.0.counts.iter().scan(0, |total, count| {
            *total += count.load(Relaxed);
            Some(*total)
        })
    }

    /// Sum of the observations in the exported unit.
    pub(crate) fn sum(&self) -> f64 {
        self.0.sum.load(Relaxed) as f64 / self.0.unit.per_exported_unit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(h: &Histogram) -> Vec<u64> {
        h.cumulative().collect()
    }

    #[test]
    fn a_value_on_a_bound_belongs_to_its_bucket() {
        let h = Histogram::new(Unit::Items, &[1.0, 2.0, 5.0]);
        for value in [0, 1, 2, 3, 5, 6] {
            h.observe(value);
        }
        assert_eq!(counts(&h), [2, 3, 5, 6]);
        assert_eq!(h.sum(), 17.0);
    }

    #[test]
    fn durations_compare_exactly_at_decimal_bounds() {
        let h = Histogram::new(Unit::Seconds, &[0.001, 0.3]);
        h.observe_duration(Duration::from_millis(1));
        h.observe_duration(Duration::from_nanos(1_000_001));
        h.observe_duration(Duration::from_millis(300));
        assert_eq!(counts(&h), [1, 3, 3]);
        assert_eq!(h.sum(), 0.302_000_001);
    }

    #[test]
    fn observations_from_many_threads_all_count() {
        let h = Histogram::new(Unit::Items, &[10.0]);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|i| h.observe(i % 20)));
            }
        });
        assert_eq!(counts(&h).last(), Some(&40_000));
        assert_eq!(h.sum(), 4.0 * 500.0 * 190.0);
    }
}
