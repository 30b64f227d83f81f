//! Batches of equal sequences.

use octavo_ops::{BlockTables, StepBatch};

/// The layout of sequences in the KV cache: each has the same number of consecutive blocks for
/// each KV group, from block 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLayout {
    /// Number of KV groups.
    pub groups: usize,
    /// Number of positions per token.
    pub streams: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks per sequence and group.
    pub blocks_each: usize,
    /// Exclusive upper bound of token ids.
    pub vocab_size: usize,
}

impl StepLayout {
    /// Number of blocks of `sequences` sequences, including the null block.
    pub const fn blocks(&self, sequences: usize) -> usize {
        1 + sequences * self.groups * self.blocks_each
    }

    /// The block of a sequence at an index of all its blocks, which are those of its first group, of its second and so on.
    pub const fn block(&self, sequence: usize, index: usize) -> u32 {
        (1 + sequence * self.groups * self.blocks_each + index) as u32
    }

    /// A batch of `rows` tokens from position `start` of each sequence; the last one is sampled.
    pub fn batch(&self, sequences: usize, start: usize, rows: usize) -> StepBatch {
        let size = self.block_size;
        let tokens = (0..sequences).flat_map(|s| (start..start + rows).map(move |p| (s, p)));
        let slots = |group: usize| {
            let block = |s, p| self.block(s, group * self.blocks_each + p / size);
            tokens.clone().map(|(s, p)| block(s, p) * size as u32 + (p % size) as u32).collect()
        };
        let tables = |group: usize| {
            let blocks = group * self.blocks_each..(group + 1) * self.blocks_each;
            BlockTables::from_iter((0..sequences).map(|s| blocks.clone().map(|index| self.block(s, index)).collect()))
        };
        StepBatch {
            token_ids: tokens.clone().map(|(s, p)| ((s * 131 + p * 17) % self.vocab_size) as u32).collect(),
            positions: (0..self.streams).flat_map(|_| tokens.clone().map(|(_, p)| p as u32)).collect(),
            slot_mapping: (0..self.groups).map(slots).collect(),
            block_tables: (0..self.groups).map(tables).collect(),
            query_start: (0..=sequences).map(|s| (s * rows) as u32).collect(),
            seq_lens: vec![(start + rows) as u32; sequences],
            sampled_rows: (1..=sequences).map(|s| (s * rows - 1) as u32).collect(),
            seats: (0..sequences as u32).collect(),
            ..StepBatch::default()
        }
    }
}
