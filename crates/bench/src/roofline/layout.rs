//! Batches of sequences that are all alike.

use octavo_ops::{BlockTables, StepBatch};

/// Where sequences lie in the KV cache: each has as many blocks, one sequence's after the other's, from block 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLayout {
    /// KV groups.
    pub groups: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks of a sequence.
    pub blocks_each: usize,
    /// Token ids are below it.
    pub vocab_size: usize,
}

impl StepLayout {
    /// Blocks of so many sequences, the null block included.
    pub const fn blocks(&self, sequences: usize) -> usize {
        1 + sequences * self.blocks_each
    }

    /// A sequence's block by its place.
    pub const fn block(&self, sequence: usize, index: usize) -> u32 {
        (1 + sequence * self.blocks_each + index) as u32
    }

    /// `rows` tokens from position `start` of each sequence, the last of which is sampled.
    pub fn batch(&self, sequences: usize, start: usize, rows: usize) -> StepBatch {
        let size = self.block_size;
        let slot = |s: usize, p: usize| self.block(s, p / size) * size as u32 + (p % size) as u32;
        let tokens = (0..sequences).flat_map(|s| (start..start + rows).map(move |p| (s, p)));
        let slots: Vec<u32> = tokens.clone().map(|(s, p)| slot(s, p)).collect();
        let ids = (0..sequences).flat_map(|s| (0..self.blocks_each).map(move |index| self.block(s, index))).collect();
        StepBatch {
            token_ids: tokens.clone().map(|(s, p)| ((s * 131 + p * 17) % self.vocab_size) as u32).collect(),
            positions: tokens.map(|(_, p)| p as u32).collect(),
            slot_mapping: vec![slots; self.groups],
            block_tables: vec![BlockTables { stride: self.blocks_each, ids }; self.groups],
            query_start: (0..=sequences).map(|s| (s * rows) as u32).collect(),
            seq_lens: vec![(start + rows) as u32; sequences],
            sampled_rows: (1..=sequences).map(|s| (s * rows - 1) as u32).collect(),
            slots: (0..sequences as u32).collect(),
            pooled_rows: vec![],
        }
    }
}
