//! Seeds for sequences of requests without a seed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A stream of seeds. With a fixed start, the same requests in the same order sample the same tokens.
#[derive(Debug)]
pub(crate) struct Seeds(AtomicU64);

impl Seeds {
    /// Creates the stream; without `start`, the start is random.
    pub(crate) fn new(start: Option<u64>) -> Self {
        Self(AtomicU64::new(start.unwrap_or_else(|| fastrand::u64(..))))
    }

    /// The next seed.
    pub(crate) fn next(&self) -> u64 {
        fastrand::Rng::with_seed(self.0.fetch_add(1, Relaxed)).u64(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_fixes_the_stream_and_without_one_it_is_random() {
        let seeds = |start| {
            let seeds = Seeds::new(start);
            [(); 4].map(|()| seeds.next())
        };
        assert_eq!(seeds(Some(7)), seeds(Some(7)));
        assert_ne!(seeds(None), seeds(None));
        let [first, rest @ ..] = seeds(Some(7));
        assert!(rest.iter().all(|seed| *seed != first));
        assert_ne!(first, seeds(Some(8))[0]);
    }
}
