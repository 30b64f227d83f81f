//! What the attention kernels are to do in a step: arrays of u32 that the host writes beside the step's own.
//!
//! A sequence of one query is decode's, a longer one prefill's. Neither plan depends on anything but the sequence itself, so
//! a sequence's sums are the same in every batch.

use crate::params::KV_BLOCK;

/// The splits of decode attention: `[splits, 0, 0, 0]`, then four numbers a split (sequence, split, index of its partial result, 0), a
/// sequence's splits one after the other.
///
/// A split is the keys `split · split_tokens ..` of its sequence. A sequence of no keys has one empty split, which writes
/// zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodePlan {
    /// Splits.
    pub splits: u32,
}

impl DecodePlan {
    /// Splits of a sequence of `seq_len` tokens.
    pub fn splits_of(seq_len: u32, split_tokens: u32) -> u32 {
        seq_len.div_ceil(split_tokens).max(1)
    }

    /// Numbers of a plan of `splits` splits.
    pub const fn len(splits: usize) -> usize {
        4 + 4 * splits
    }

    /// Appends the plan of the sequences of one query to `out`. `query_start` is `[S + 1]`, `seq_lens` `[S]`.
    pub fn write(query_start: &[u32], seq_lens: &[u32], split_tokens: u32, out: &mut Vec<u32>) -> Self {
        debug_assert!((split_tokens as usize).is_multiple_of(KV_BLOCK) && split_tokens > 0);
        let head = out.len();
        out.extend([0; 4]);
        let mut splits = 0;
        for (sequence, (range, &len)) in query_start.windows(2).zip(seq_lens).enumerate() {
            if range[1] - range[0] != 1 {
                continue;
            }
            for split in 0..Self::splits_of(len, split_tokens) {
                out.extend([sequence as u32, split, splits, 0]);
                splits += 1;
            }
        }
        out[head] = splits;
        Self { splits }
    }
}

/// The tiles of prefill attention: two numbers a tile (sequence, its first query within the sequence's rows).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillPlan {
    /// Tiles: the first number of the grid.
    pub tiles: u32,
}

impl PrefillPlan {
    /// Queries of a tile.
    pub const QUERIES: u32 = 64;

    /// Appends the plan of the sequences of more than one query to `out`, those that see most keys first: they take longest.
    pub fn write(query_start: &[u32], seq_lens: &[u32], out: &mut Vec<u32>) -> Self {
        let head = out.len();
        for (sequence, range) in query_start.windows(2).enumerate() {
            let queries = range[1] - range[0];
            if queries > 1 {
                let firsts = (0..queries).step_by(Self::QUERIES as usize);
                out.extend(firsts.flat_map(|first| [sequence as u32, first]));
            }
        }
        let (tiles, _) = out[head..].as_chunks_mut::<2>();
        let last_key = |&[sequence, first]: &[u32; 2]| {
            let [start, end] = [query_start[sequence as usize], query_start[sequence as usize + 1]];
            seq_lens[sequence as usize].saturating_sub(end - start) + first
        };
        tiles.sort_unstable_by_key(|tile| (std::cmp::Reverse(last_key(tile)), *tile));
        Self { tiles: tiles.len() as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_takes_sequences_of_one_query() {
        let mut plan = vec![7];
        let written = DecodePlan::write(&[0, 1, 4, 5, 5, 6], &[33, 40, 32, 9, 0], 32, &mut plan);
        assert_eq!(written.splits, 4);
        assert_eq!(plan, [7, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 2, 0, 2, 0, 4, 0, 3, 0]);
        assert_eq!(plan.len() - 1, DecodePlan::len(4));
    }

    #[test]
    fn prefill_takes_the_others_longest_first() {
        let mut plan = Vec::new();
        let written = PrefillPlan::write(&[0, 1, 71, 73, 73], &[33, 70, 100, 9], &mut plan);
        assert_eq!(written.tiles, 3);
        assert_eq!(plan, [2, 0, 1, 64, 1, 0]);
    }
}
