//! A token bucket, which is refilled steadily.

use std::time::{Duration, Instant};

/// Nanoseconds of a minute.
const MINUTE: i128 = 60_000_000_000;

/// An allowance per minute. A full bucket holds the allowance of one minute: after a pause that much may be taken at
/// once, and then as much as flows in. Over any time of t minutes, at most 1 + t times the allowance is taken, except
/// for debts, which are paid before anything else is taken.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    per_minute: u32,
    /// The content times the nanoseconds of a minute, so that no refill is rounded; negative for a debt.
    level: i128,
    /// Time of the last refill.
    at: Instant,
}

impl Bucket {
    /// A full bucket.
    pub(crate) fn new(per_minute: u32, now: Instant) -> Self {
        Self { per_minute, level: scaled(per_minute.into()), at: now }
    }

    /// The allowance.
    pub(crate) fn per_minute(&self) -> u32 {
        self.per_minute
    }

    /// Adds what has flowed in since the last refill. A time before it adds nothing.
    pub(crate) fn refill(&mut self, now: Instant) {
        let nanoseconds = i128::try_from(now.saturating_duration_since(self.at).as_nanos()).unwrap_or(i128::MAX);
        let added = nanoseconds.saturating_mul(self.per_minute.into());
        self.level = self.level.saturating_add(added).min(self.capacity());
        self.at = self.at.max(now);
    }

    /// Time until the bucket holds `amount`, zero if it does. If the amount is larger than the bucket, it is the time
    /// until the bucket is full.
    pub(crate) fn wait(&self, amount: u64) -> Duration {
        let missing = scaled(amount).min(self.capacity()) - self.level;
        let per_nanosecond = i128::from(self.per_minute.max(1));
        let nanoseconds = (missing.max(0) + per_nanosecond - 1) / per_nanosecond;
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// Takes `amount`, which leaves a debt if less is there.
    pub(crate) fn take(&mut self, amount: u64) {
        self.level = self.level.saturating_sub(scaled(amount));
    }

    /// Puts back what was taken.
    pub(crate) fn put_back(&mut self, amount: u64) {
        self.level = self.level.saturating_add(scaled(amount)).min(self.capacity());
    }

    /// Changes the allowance. A half-full bucket stays half full, and a debt takes as long to pay as before.
    pub(crate) fn resize(&mut self, per_minute: u32) {
        let factor = i128::from(per_minute);
        self.level = self.level.saturating_mul(factor) / i128::from(self.per_minute.max(1));
        self.per_minute = per_minute;
    }

    /// The content; zero if there is a debt.
    pub(crate) fn left(&self) -> u64 {
        u64::try_from(self.level.max(0) / MINUTE).unwrap_or(u64::MAX)
    }

    /// Time until the bucket is full.
    pub(crate) fn full_after(&self) -> Duration {
        self.wait(self.per_minute.into())
    }

    fn capacity(&self) -> i128 {
        scaled(self.per_minute.into())
    }
}

fn scaled(amount: u64) -> i128 {
    i128::from(amount) * MINUTE
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(start: Instant, milliseconds: u64) -> Instant {
        start + Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_minute_may_be_taken_at_once_and_then_flows_in() {
        let start = Instant::now();
        let mut bucket = Bucket::new(60, start);
        bucket.take(60);
        assert_eq!((bucket.left(), bucket.wait(1)), (0, Duration::from_secs(1)));
        bucket.refill(after(start, 999));
        assert_eq!((bucket.left(), bucket.wait(1)), (0, Duration::from_millis(1)));
        bucket.refill(after(start, 1000));
        assert_eq!((bucket.left(), bucket.wait(1), bucket.full_after()), (1, Duration::ZERO, Duration::from_secs(59)));
        bucket.refill(after(start, 3_600_000));
        assert_eq!((bucket.left(), bucket.full_after()), (60, Duration::ZERO), "it does not overflow");
    }

    #[test]
    fn an_allowance_that_does_not_divide_a_minute_is_exact() {
        let start = Instant::now();
        let mut bucket = Bucket::new(7, start);
        bucket.take(7);
        for step in 1..=60_000 {
            bucket.refill(after(start, step));
        }
        assert_eq!((bucket.left(), bucket.full_after()), (7, Duration::ZERO));
    }

    #[test]
    fn a_debt_is_paid_first() {
        let start = Instant::now();
        let mut bucket = Bucket::new(60, start);
        bucket.take(180);
        assert_eq!((bucket.left(), bucket.wait(1)), (0, Duration::from_secs(121)));
        bucket.refill(after(start, 121_000));
        assert_eq!(bucket.left(), 1);
        bucket.put_back(1000);
        assert_eq!(bucket.left(), 60);
    }

    #[test]
    fn an_amount_above_the_allowance_needs_a_full_bucket() {
        let start = Instant::now();
        let mut bucket = Bucket::new(60, start);
        assert_eq!(bucket.wait(1_000_000), Duration::ZERO);
        bucket.take(1);
        assert_eq!(bucket.wait(1_000_000), Duration::from_secs(1));
    }

    #[test]
    fn a_new_allowance_keeps_the_share_that_is_left() {
        let mut bucket = Bucket::new(100, Instant::now());
        bucket.take(50);
        bucket.resize(10);
        assert_eq!((bucket.left(), bucket.full_after()), (5, Duration::from_secs(30)));
        bucket.take(15);
        let debt = bucket.full_after();
        bucket.resize(1000);
        assert_eq!(bucket.full_after(), debt);
    }

    proptest! {
        /// Whatever is asked for and whenever, no more is taken than a minute's allowance and what flows in, and after
        /// the time that the bucket names, the amount is there.
        #[test]
        fn no_more_is_taken_than_flows_in(
            per_minute in 1..=5000_u32,
            calls in prop::collection::vec((0..=20_000_u64, 1..=200_u64), 1..200),
        ) {
            let start = Instant::now();
            let (mut bucket, mut now, mut taken) = (Bucket::new(per_minute, start), 0, 0);
            for (pause, amount) in calls {
                now += pause;
                bucket.refill(after(start, now));
                let amount = amount.min(per_minute.into());
                let wait = bucket.wait(amount);
                if wait.is_zero() {
                    bucket.take(amount);
                    taken += amount;
                } else {
                    let mut later = bucket.clone();
                    later.refill(after(start, now) + wait - Duration::from_nanos(1));
                    prop_assert!(!later.wait(amount).is_zero());
                    later.refill(after(start, now) + wait);
                    prop_assert!(later.wait(amount).is_zero() && later.left() >= amount);
                }
                let allowed = u128::from(per_minute) * (60_000 + u128::from(now));
                prop_assert!(u128::from(taken) * 60_000 <= allowed);
            }
        }

        /// The order of observations does not matter, nor do times that run backwards between threads.
        #[test]
        fn refills_in_any_order_end_alike(times in prop::collection::vec(0..=60_000_u64, 1..50), taken in 0..=500_u64) {
            let start = Instant::now();
            let mut bucket = Bucket::new(100, start);
            bucket.take(taken);
            let mut once = bucket.clone();
            times.iter().for_each(|&time| bucket.refill(after(start, time)));
            once.refill(after(start, times.iter().copied().max().unwrap_or(0)));
            prop_assert_eq!(bucket.level, once.level);
        }
    }
}
