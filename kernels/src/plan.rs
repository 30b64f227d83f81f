//! Plans of the attention kernels for a step: u32 arrays that the host writes beside the step's own.
//!
//! Sequences of one query are processed by decode, longer ones by prefill. Both plans depend only on the sequence
//! itself, so a sequence's sums are the same in every batch.

use crate::params::{KV_BLOCK, MAX_SPLIT_TOKENS, PagedDecodeParams};

/// Number of tokens in the smallest split of decode attention. For fewer tokens the fixed cost of a split would be
/// large compared with its keys.
const MIN_SPLIT_TOKENS: u32 = 128;

/// Maximum number of splits of a sequence, until they have [`MAX_SPLIT_TOKENS`] tokens. Every split is processed for
/// each KV head, so a single sequence occupies a device of a hundred multiprocessors.
const SPLITS: u32 = 32;

/// Returns the number of tokens in a split of decode attention for a sequence of `seq_len` tokens: many small splits as
/// long as there are few partial results. It depends on nothing else, so a sequence's sums are the same in every batch.
pub fn split_tokens(seq_len: u32) -> u32 {
    seq_len.div_ceil(SPLITS).next_power_of_two().clamp(MIN_SPLIT_TOKENS, MAX_SPLIT_TOKENS)
}

/// Returns the maximum number of splits of decode attention for a sequence of at most `seq_len` tokens.
pub fn most_splits(seq_len: usize) -> usize {
    let [splits, smallest, largest] = [SPLITS, MIN_SPLIT_TOKENS, MAX_SPLIT_TOKENS].map(|n| n as usize);
    seq_len.div_ceil(smallest).min(splits).max(seq_len.div_ceil(largest)).max(1)
}

/// The splits of decode attention: `[splits, 0, 0, 0]`, then four numbers per split (sequence, split, index of its
/// partial result, tokens of the sequence's splits). The splits of a sequence are contiguous.
///
/// A split has the keys `split · tokens ..` of its sequence, `tokens` of them. A sequence without keys has one empty
/// split, which writes zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodePlan {
    /// Number of splits.
    pub splits: u32,
}

impl DecodePlan {
    /// Returns the length of a plan of `splits` splits.
    pub const fn len(splits: usize) -> usize {
        4 + 4 * splits
    }

    /// Appends the plan of the sequences of one query to `out`. `query_start` is `[S + 1]`, `seq_lens` `[S]`.
    /// `split_tokens` returns the number of tokens in a split of a sequence of the given length: a multiple of
    /// [`KV_BLOCK`] of at most [`MAX_SPLIT_TOKENS`], like [`split_tokens`](self::split_tokens()).
    pub fn write(query_start: &[u32], seq_lens: &[u32], split_tokens: impl Fn(u32) -> u32, out: &mut Vec<u32>) -> Self {
        let head = out.len();
        out.extend([0; 4]);
        let mut splits = 0;
        for (sequence, (range, &len)) in query_start.windows(2).zip(seq_lens).enumerate() {
            if range[1] - range[0] != 1 {
                continue;
            }
            let tokens = split_tokens(len);
            debug_assert!((tokens as usize).is_multiple_of(KV_BLOCK) && (1..=MAX_SPLIT_TOKENS).contains(&tokens));
            for split in 0..len.div_ceil(tokens).max(1) {
                out.extend([sequence as u32, split, splits, tokens]);
                splits += 1;
            }
        }
        out[head] = splits;
        Self { splits }
    }
}

/// What the grid of a kernel of decode attention depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeTile {
    /// Number of query heads of a KV head that a CTA processes at once.
    pub heads: u32,
    /// Number of CTAs of a launch for each multiprocessor, which holds them at once.
    pub resident: u32,
}

impl DecodeTile {
    /// Returns the grid of a launch that processes `splits` splits on a device of `processors` multiprocessors. The result of
    /// the kernel does not depend on the number of CTAs, which share the splits of a KV head.
    ///
    /// All CTAs are resident at once: they share the work evenly, and a single CTA that had to wait for the others would
    /// double the time of the kernel.
    pub fn grid(self, params: &PagedDecodeParams, processors: u32, splits: u32) -> [u32; 3] {
        let rows = params.rows(self.heads);
        let columns = (processors * self.resident / rows.max(1)).min(splits).max(1);
        [columns, rows, 1]
    }
}

/// A tile of prefill attention, whose rows are the heads of its queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTile {
    /// Number of adjacent query heads, which share a KV head.
    pub heads: u32,
    /// Maximum number of queries.
    pub queries: u32,
}

impl PrefillTile {
    /// Number of queries that every tile has at least, unless its sequence has fewer.
    pub const LEAST_QUERIES: u32 = 4;

    /// Maximum number of heads: more would leave a tile few queries, and a plan many tiles.
    const MOST_HEADS: u32 = 16;

    /// Returns the tile of at most `rows` rows for layers with these numbers of query heads per KV head. Its heads divide each
    /// of them, so that all layers have the same tiles.
    pub fn new(rows: u32, groups: impl IntoIterator<Item = usize>) -> Self {
        let common = |heads: u32| move |group: &usize| group.is_multiple_of(heads as usize);
        let groups: Vec<usize> = groups.into_iter().collect();
        let heads = (1..=Self::MOST_HEADS).rev().find(|&heads| groups.iter().all(common(heads))).unwrap_or(1);
        let heads = if groups.is_empty() { 1 } else { heads };
        Self { heads, queries: rows / heads }
    }
}

/// The tiles of prefill attention: three numbers per tile (sequence, its first query within the sequence's rows, number of
/// queries).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillPlan {
    /// Number of tiles: the first dimension of the grid.
    pub tiles: u32,
}

impl PrefillPlan {
    /// Returns the length of a plan of `tiles` tiles.
    pub const fn len(tiles: usize) -> usize {
        3 * tiles
    }

    /// Appends the plan of all sequences to `out`, whose queries see keys on both sides. A tile has at most `most` queries.
    pub fn write_segments(query_start: &[u32], most: u32, out: &mut Vec<u32>) -> Self {
        let queries = |sequence: usize| query_start[sequence + 1] - query_start[sequence];
        Self::write_tiles(query_start, [1, most], |sequence, _| queries(sequence), out)
    }

    /// Appends the plan of the sequences of more than one query to `out`. A tile has at most `most` queries.
    pub fn write(query_start: &[u32], seq_lens: &[u32], most: u32, out: &mut Vec<u32>) -> Self {
        Self::write_tiles(query_start, [2, most], last_key(query_start, seq_lens), out)
    }

    /// Appends the plan of all sequences to `out`, also of those of one query. A tile has at most `most` queries.
    pub fn write_all(query_start: &[u32], seq_lens: &[u32], most: u32, out: &mut Vec<u32>) -> Self {
        Self::write_tiles(query_start, [1, most], last_key(query_start, seq_lens), out)
    }

    /// Appends the tiles of the sequences of at least `least` queries, starting with those that see most `keys`,
    /// because they take longest.
    fn write_tiles(
        query_start: &[u32],
        [least, most]: [u32; 2],
        keys: impl Fn(usize, u32) -> u32,
        out: &mut Vec<u32>,
    ) -> Self {
        let head = out.len();
        for (sequence, range) in query_start.windows(2).enumerate() {
            let queries = range[1] - range[0];
            if queries >= least {
                let firsts = (0..queries).step_by(most as usize);
                out.extend(firsts.flat_map(|first| [sequence as u32, first, most.min(queries - first)]));
            }
        }
        let (tiles, _) = out[head..].as_chunks_mut::<3>();
        let keys = |&[sequence, first, _]: &[u32; 3]| keys(sequence as usize, first);
        tiles.sort_unstable_by_key(|tile| (std::cmp::Reverse(keys(tile)), *tile));
        Self { tiles: tiles.len() as u32 }
    }
}

/// Returns the function from a sequence and one of its queries to the position of the query, the last key that it sees.
fn last_key<'a>(query_start: &'a [u32], seq_lens: &'a [u32]) -> impl Fn(usize, u32) -> u32 + 'a {
    |sequence, first| seq_lens[sequence].saturating_sub(query_start[sequence + 1] - query_start[sequence]) + first
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::AttentionParams;

    #[test]
    fn decode_takes_sequences_of_one_query() {
        let mut plan = vec![7];
        let written = DecodePlan::write(&[0, 1, 4, 5, 5, 6], &[33, 40, 32, 9, 0], |_| 32, &mut plan);
        assert_eq!(written.splits, 4);
        assert_eq!(plan, [7, 4, 0, 0, 0, 0, 0, 0, 32, 0, 1, 1, 32, 2, 0, 2, 32, 4, 0, 3, 32]);
        assert_eq!(plan.len() - 1, DecodePlan::len(4));
    }

    #[test]
    fn one_sequence_is_cut_finely_however_long_others_may_be() {
        assert_eq!(
            [0, 128, 1000, 4096, 4097, 40_000, 131_072, 1 << 20].map(split_tokens),
            [128, 128, 128, 128, 256, 2048, 2048, 2048]
        );
        let splits = |len: u32| len.div_ceil(split_tokens(len));
        // With eight KV heads, these are more CTAs than an H100 has multiprocessors.
        assert!((4096..=65_536).all(|len| (17..=32).contains(&splits(len))));
        assert_eq!([0, 1, 1000, 5000, 131_072].map(most_splits), [1, 1, 8, 32, 64]);
        assert!((1..200_000u32).all(|len| splits(len) as usize <= most_splits(len as usize)));
    }

    #[test]
    fn every_block_of_decode_is_resident() {
        let grid = |heads: [u32; 2], tile, processors, splits| {
            let [q_heads, kv_heads] = heads;
            let attention = AttentionParams { q_heads, kv_heads, ..AttentionParams::default() };
            let params = PagedDecodeParams { attention, ..PagedDecodeParams::default() };
            tile_of(tile).grid(&params, processors, splits)
        };
        // Qwen3-8B on an H200 has 8 KV heads with 4 query heads each, and 3 CTAs per multiprocessor.
        assert_eq!(grid([32, 8], [8, 3], 132, 1024), [49, 8, 1]);
        assert_eq!(grid([32, 8], [8, 3], 132, 7), [7, 8, 1]);
        // Here there are more heads than the CTAs that a device holds.
        assert_eq!(grid([2000, 500], [2, 2], 80, 5), [1, 1000, 1]);
    }

    const fn tile_of([heads, resident]: [u32; 2]) -> DecodeTile {
        DecodeTile { heads, resident }
    }

    #[test]
    fn prefill_takes_the_others_longest_first() {
        let mut plan = Vec::new();
        let written = PrefillPlan::write(&[0, 1, 71, 73, 73], &[33, 70, 100, 9], 64, &mut plan);
        assert_eq!(written.tiles, 3);
        assert_eq!(plan, [2, 0, 2, 1, 64, 6, 1, 0, 64]);
        plan.clear();
        let written = PrefillPlan::write_all(&[0, 1, 71, 73, 73], &[33, 70, 100, 9], 64, &mut plan);
        assert_eq!(written.tiles, 4);
        assert_eq!(plan, [2, 0, 2, 1, 64, 6, 0, 0, 1, 1, 0, 64]);
        assert_eq!(plan.len(), PrefillPlan::len(4));
    }

    #[test]
    fn segments_of_any_length_have_tiles_longest_first() {
        let mut plan = Vec::new();
        let written = PrefillPlan::write_segments(&[0, 1, 66, 66, 196], 64, &mut plan);
        assert_eq!(written, PrefillPlan { tiles: 6 });
        assert_eq!(plan, [3, 0, 64, 3, 64, 64, 3, 128, 2, 1, 0, 64, 1, 64, 1, 0, 0, 1]);
    }

    #[test]
    fn the_heads_of_a_tile_share_a_kv_head_in_every_layer() {
        let tile = |rows, groups: &[usize]| PrefillTile::new(rows, groups.iter().copied());
        assert_eq!(tile(128, &[4, 4]), PrefillTile { heads: 4, queries: 32 });
        assert_eq!(tile(128, &[12, 8]), PrefillTile { heads: 4, queries: 32 });
        assert_eq!(tile(64, &[7]), PrefillTile { heads: 7, queries: 9 });
        assert_eq!(tile(128, &[40]), PrefillTile { heads: 10, queries: 12 });
        assert_eq!(tile(64, &[71]), PrefillTile { heads: 1, queries: 64 });
        assert_eq!(tile(64, &[]), PrefillTile { heads: 1, queries: 64 });
        assert!((1..100).all(|group| tile(64, &[group]).queries >= PrefillTile::LEAST_QUERIES));
    }
}
