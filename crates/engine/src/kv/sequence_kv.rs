//! The KV cache's part of a sequence.

use super::{BlockId, ChainKey, Extras, KvLayout, NULL_BLOCK, TokenHistory};

/// A sequence's part of the KV cache.
#[derive(Debug)]
pub(crate) struct SequenceKv {
    /// Block tables, one per KV group. Blocks that no token to come sees are the null block.
    pub(crate) tables: Vec<Vec<BlockId>>,
    /// Properties that are part of the keys of blocks.
    pub(super) extras: Extras,
    /// Keys of the leading full blocks, computed on demand. They outlive the tables of a preempted sequence.
    pub(super) keys: Vec<ChainKey>,
    /// Number of leading blocks that the plan of a step has added to the index, or would have if another block with
    /// their content were not there.
    pub(super) published: usize,
    /// Number of leading blocks that are in the index themselves, unless a window has passed them.
    pub(super) indexed: usize,
    /// Position of the first token to come. Windows have passed what it does not see.
    pub(super) position: usize,
    /// Number of leading blocks of each table that the executor knows.
    pub(super) told: usize,
    /// Value of `position` that the executor knows.
    told_position: usize,
}

impl SequenceKv {
    /// Creates the KV state without blocks. The caller's thread computes the keys of the prompt's full blocks here.
    pub(crate) fn new(layout: &KvLayout, history: &TokenHistory, extras: Extras) -> Self {
        let mut kv = Self {
            tables: vec![Vec::new(); layout.kinds().len()],
            extras,
            keys: Vec::new(),
            published: 0,
            indexed: 0,
            position: 0,
            told: 0,
            told_position: 0,
        };
        if layout.caching {
            kv.extend_keys(layout, history, history.len() / layout.block_size);
        }
        kv
    }

    /// Returns the number of blocks of each table.
    pub(super) fn len(&self) -> usize {
        self.tables.first().map_or(0, Vec::len)
    }

    /// Returns the position before which windows have passed what it does not see.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// Returns the ids of its blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.tables.iter().flatten().copied().filter(|id| *id != NULL_BLOCK)
    }

    /// Removes the blocks from index `len` on from the tables and hands them to `release`, the last first, so that a
    /// prefix that others may share is evicted after its continuation.
    pub(super) fn truncate(&mut self, len: usize, mut release: impl FnMut(BlockId)) {
        for block in (len..self.len()).rev() {
            self.tables.iter().map(|table| table[block]).filter(|id| *id != NULL_BLOCK).for_each(&mut release);
        }
        self.tables.iter_mut().for_each(|table| table.truncate(len));
        self.told = self.told.min(len);
    }

    /// Returns the number of blocks of each table and the position that the executor knows, and counts all as known.
    pub(crate) fn tell(&mut self) -> (usize, usize) {
        let known = (self.told, self.told_position);
        (self.told, self.told_position) = (self.len(), self.position);
        known
    }

    /// Computes the keys of the first `blocks` blocks, which must be full, unless they are known.
    pub(super) fn extend_keys(&mut self, layout: &KvLayout, history: &TokenHistory, blocks: usize) {
        if self.keys.len() >= blocks {
            return;
        }
        self.keys.reserve(blocks - self.keys.len());
        let mut parent = *self.keys.last().unwrap_or(&layout.root);
        for block in self.keys.len()..blocks {
            let extra = self.extras.of_block(block, layout.block_size);
            parent = parent.child(layout.block_tokens(history, block), extra);
            self.keys.push(parent);
        }
    }

    /// Reserves memory for the tables and keys of a sequence of `tokens` tokens, so that its steps allocate nothing.
    pub(crate) fn reserve(&mut self, layout: &KvLayout, tokens: usize) {
        let blocks = layout.blocks_for(tokens);
        for table in &mut self.tables {
            table.reserve(blocks.saturating_sub(table.len()));
        }
        if layout.caching {
            self.keys.reserve(blocks.saturating_sub(self.keys.len()));
        }
    }

    /// Forgets what no longer holds once all blocks are released.
    pub(super) fn reset(&mut self) {
        (self.published, self.indexed, self.position, self.told_position) = (0, 0, 0, 0);
    }
}
