//! Seeds for sequences of requests without a seed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use uuid::Uuid;

/// A stream of seeds. With a fixed start, the same requests in the same order sample the same tokens.
#[derive(Debug)]
pub(crate) struct Seeds(AtomicU64);

impl Seeds {
    /// Creates the stream; without `start`, the start is random.
    pub(crate) fn new(start: Option<u64>) -> Self {
        Self(AtomicU64::new(start.unwrap_or_else(random)))
    }

    /// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    pub(crate) fn next(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let z = self.0.fetch_add(STEP, Relaxed).wrapping_add(STEP);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A version-4 UUID has 122 random bits, the fixed ones at different places of its halves.
fn random() -> u64 {
    let (high, low) = Uuid::new_v4().as_u64_pair();
    high.rotate_left(32) ^ low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_splitmix64() {
        let seeds = Seeds::new(Some(1_234_567));
        let first = [seeds.next(), seeds.next(), seeds.next()];
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn without_a_start_streams_differ() {
        assert_ne!(Seeds::new(None).next(), Seeds::new(None).next());
    }
}
