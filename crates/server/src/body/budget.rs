//! The memory of all bodies together.
//!
//! A body takes its share as it arrives. If memory runs out, uploads that are too slow give way, the slowest first, and a
//! body is refused only if there are none. Without this, a few clients that send most of a large body and then stop would
//! hold all of the memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::ConnectionLimits;
use crate::lock::lock;

/// Bytes of each body that do not count.
pub(super) const FREE_BYTES: usize = 64 << 10;

/// The period over which the rate of an upload is measured.
const PERIOD: Duration = Duration::from_secs(1);

/// Memory for bodies, shared by all connections.
#[derive(Clone)]
pub(crate) struct BodyBudget {
    shared: Arc<Mutex<Shared>>,
    /// An upload gives way if, at its present rate, it needed longer than this for what it holds.
    patience: Duration,
}

struct Shared {
    free: usize,
    /// The uploads that hold memory.
    uploads: HashMap<u64, Upload>,
    next_id: u64,
}

struct Upload {
    held: usize,
    rate: Rate,
    gives_way: Arc<Notify>,
}

/// The memory that a body holds; it is returned when this is dropped.
pub(super) struct Share {
    budget: BodyBudget,
    id: u64,
    state: State,
    gives_way: Arc<Notify>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its [`Upload`] knows what it holds.
    Arriving,
    /// It is complete, holds this many bytes and does not give way any more.
    Complete(usize),
}

impl BodyBudget {
    pub(crate) fn new(limits: &ConnectionLimits) -> Self {
        let shared = Shared { free: limits.max_buffered_bytes, uploads: HashMap::new(), next_id: 0 };
        Self { shared: Arc::new(Mutex::new(shared)), patience: limits.body_timeout }
    }

    /// The share of an upload that has just begun.
    pub(super) fn share(&self) -> Share {
        let mut shared = lock(&self.shared);
        shared.next_id += 1;
        let (id, gives_way) = (shared.next_id, Arc::new(Notify::new()));
        Share { budget: self.clone(), id, state: State::Arriving, gives_way }
    }
}

impl Share {
    /// Acquires the memory of a body that has grown to `len` bytes. Slower uploads may have to give way. It never waits,
    /// because waiting bodies would hold memory that others wait for. Returns whether there is enough memory.
    pub(super) fn grow(&self, len: usize, now: Instant) -> bool {
        let needed = len.saturating_sub(FREE_BYTES);
        if needed == 0 {
            return true;
        }
        let mut shared = lock(&self.budget.shared);
        let held = shared.uploads.get(&self.id).map_or(0, |upload| upload.held);
        let more = needed.saturating_sub(held);
        if !shared.make_room(more, self.id, self.budget.patience, now) {
            return false;
        }
        shared.free -= more;
        let upload = shared.uploads.entry(self.id).or_insert_with(|| Upload {
            held: 0,
            rate: Rate::new(now),
            gives_way: Arc::clone(&self.gives_way),
        });
        upload.held += more;
        upload.rate.add(more, now);
        true
    }

    /// Returns when this upload has to give way; its memory then belongs to others already.
    pub(super) async fn gives_way(&self) {
        self.gives_way.notified().await;
    }

    /// Keeps the memory of a body that is complete. `None` if it had to give way in the end.
    pub(super) fn complete(mut self, len: usize) -> Option<Self> {
        let upload = lock(&self.budget.shared).uploads.remove(&self.id);
        let held = match upload {
            Some(upload) => upload.held,
            None if len <= FREE_BYTES => 0,
            None => return None,
        };
        self.state = State::Complete(held);
        Some(self)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut shared = lock(&self.budget.shared);
        shared.free += match self.state {
            State::Arriving => shared.uploads.remove(&self.id).map_or(0, |upload| upload.held),
            State::Complete(held) => held,
        };
    }
}

impl Shared {
    /// Frees `wanted` bytes by the slowest uploads other than `own`, if that is possible.
    fn make_room(&mut self, wanted: usize, own: u64, patience: Duration, now: Instant) -> bool {
        if self.free >= wanted {
            return true;
        }
        let mut slow: Vec<(f64, u64, usize)> = self
            .uploads
            .iter()
            .map(|(&id, upload)| (upload.seconds_held(now), id, upload.held))
            .filter(|&(seconds, id, _)| id != own && seconds > patience.as_secs_f64())
            .collect();
        if self.free + slow.iter().map(|(_, _, held)| held).sum::<usize>() < wanted {
            return false;
        }
        slow.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
        for (_, id, _) in slow {
            if self.free >= wanted {
                break;
            }
            if let Some(upload) = self.uploads.remove(&id) {
                self.free += upload.held;
                upload.gives_way.notify_one();
            }
        }
        true
    }
}

impl Upload {
    /// The time that the upload would need at its present rate for what it holds.
    fn seconds_held(&self, now: Instant) -> f64 {
        self.held as f64 / self.rate.bytes_per_second(now)
    }
}

/// The rate of an upload over the present period and the one before.
#[derive(Clone, Copy, Debug)]
struct Rate {
    begun: Instant,
    bytes: usize,
    before: usize,
}

impl Rate {
    fn new(now: Instant) -> Self {
        Self { begun: now, bytes: 0, before: 0 }
    }

    fn add(&mut self, bytes: usize, now: Instant) {
        *self = self.at(now);
        self.bytes += bytes;
    }

    /// The rate with the period that `now` is in.
    fn at(self, now: Instant) -> Self {
        let elapsed = now.saturating_duration_since(self.begun);
        if elapsed < PERIOD {
            return self;
        }
        let before = if elapsed < 2 * PERIOD { self.bytes } else { 0 };
        let into = Duration::from_nanos((elapsed.as_nanos() % PERIOD.as_nanos()) as u64);
        Self { begun: now.checked_sub(into).unwrap_or(now), bytes: 0, before }
    }

    fn bytes_per_second(self, now: Instant) -> f64 {
        let Self { begun, bytes, before } = self.at(now);
        let time = PERIOD + now.saturating_duration_since(begun);
        (bytes + before) as f64 / time.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    const BUDGET: usize = 1 << 20;

    fn budget() -> BodyBudget {
        BodyBudget::new(&ConnectionLimits { max_buffered_bytes: BUDGET, ..ConnectionLimits::default() })
    }

    fn gave_way(share: &Share) -> bool {
        share.gives_way().now_or_never().is_some()
    }

    #[test]
    fn stalled_uploads_give_way_to_a_small_body() {
        let (budget, start) = (budget(), Instant::now());
        let stalled: Vec<_> = (0..6).map(|_| budget.share()).collect();
        for share in &stalled {
            assert!(share.grow(FREE_BYTES + BUDGET / 6, start));
        }
        let small = budget.share();
        assert!(!small.grow(80_000, start), "nobody is slow yet");
        let later = start + 3 * PERIOD;
        assert!(small.grow(80_000, later));
        assert_eq!(stalled.iter().filter(|share| gave_way(share)).count(), 1, "one is enough");
        drop((stalled, small));
        assert_eq!(lock(&budget.shared).free, BUDGET);
    }

    #[test]
    fn the_slowest_upload_gives_way_first_and_a_fast_one_never() {
        let (budget, start) = (budget(), Instant::now());
        let third = BUDGET / 3;
        let [fast, slow, slower] = [(); 3].map(|()| budget.share());
        for share in [&slow, &slower] {
            assert!(share.grow(FREE_BYTES + third - 2_000, start));
        }
        for period in 0..10 {
            let now = start + period * PERIOD;
            assert!(fast.grow(FREE_BYTES + third * (period as usize + 1) / 10, now));
            assert!(slow.grow(FREE_BYTES + third - 2_000 + 200 * period as usize, now));
        }
        let now = start + 10 * PERIOD;
        let newcomer = budget.share();
        assert!(newcomer.grow(FREE_BYTES + third / 2, now));
        assert!(gave_way(&slower) && !gave_way(&slow) && !gave_way(&fast));
        assert!(newcomer.grow(FREE_BYTES + third + third / 2, now));
        assert!(gave_way(&slow) && !gave_way(&fast));
        assert!(!newcomer.grow(FREE_BYTES + 3 * third, now), "the fast one stays");
        assert!(!gave_way(&fast));
    }

    #[test]
    fn a_complete_body_does_not_give_way() {
        let (budget, start) = (budget(), Instant::now());
        let share = budget.share();
        assert!(share.grow(FREE_BYTES + BUDGET, start));
        let complete = share.complete(FREE_BYTES + BUDGET).unwrap();
        assert!(!budget.share().grow(FREE_BYTES + 1, start + 100 * PERIOD));
        drop(complete);
        assert_eq!(lock(&budget.shared).free, BUDGET);
    }

    #[test]
    fn an_upload_that_gave_way_does_not_complete() {
        let (budget, start) = (budget(), Instant::now());
        let share = budget.share();
        assert!(share.grow(FREE_BYTES + BUDGET, start));
        assert!(budget.share().grow(FREE_BYTES + 1, start + 3 * PERIOD));
        assert!(share.complete(FREE_BYTES + BUDGET).is_none());
    }

    proptest! {
        #[test]
        fn memory_is_neither_lost_nor_spent_twice(
            steps in proptest::collection::vec((0..8_usize, 0..4_u8, 0..BUDGET, 0..3_000_u64), 0..200),
        ) {
            let (budget, mut now) = (budget(), Instant::now());
            let mut shares: Vec<Option<(Share, usize)>> = (0..8).map(|_| None).collect();
            for (slot, action, bytes, milliseconds) in steps {
                now += Duration::from_millis(milliseconds);
                match (action, shares[slot].take()) {
                    (0, _) => {}
                    (1, Some((share, len))) => shares[slot] = share.complete(len).map(|share| (share, len)),
                    (_, old) => {
                        let (share, len) = old.unwrap_or_else(|| (budget.share(), 0));
                        if share.state == State::Arriving && !gave_way(&share) && share.grow(len + bytes, now) {
                            shares[slot] = Some((share, len + bytes));
                        }
                    }
                }
                let shared = lock(&budget.shared);
                let arriving: usize = shared.uploads.values().map(|upload| upload.held).sum();
                let complete = shares.iter().flatten().map(|(share, _)| match share.state {
                    State::Complete(held) => held,
                    State::Arriving => 0,
                });
                prop_assert_eq!(shared.free + arriving + complete.sum::<usize>(), BUDGET);
            }
            drop(shares);
            prop_assert_eq!(lock(&budget.shared).free, BUDGET);
        }
    }
}
