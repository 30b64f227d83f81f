//! Checks of the cache's invariants.

use super::{KvCache, NULL_BLOCK, SequenceKv};

impl KvCache {
    /// Checks that every block is in exactly one state and that the sequences' tables match the pool's reference counts.
    /// `references` is a buffer for the counts.
    pub(crate) fn check<'a>(
        &self,
        sequences: impl Iterator<Item = &'a SequenceKv>,
        references: &mut Vec<u32>,
    ) -> Result<(), String> {
        references.clear();
        references.resize(self.pool.total() + 1, 0);
        sequences.flat_map(SequenceKv::blocks).for_each(|id| references[id as usize] += 1);
        self.pool.check(references)
    }

    /// Checks that a sequence's tables cover its `submitted` tokens and no block more, that it holds what later tokens see
    /// and nothing else, and that what it holds of the blocks whose tokens are all `retired` can be found.
    pub(crate) fn check_sequence(&self, kv: &SequenceKv, submitted: usize, retired: usize) -> Result<(), String> {
        let blocks = self.layout.blocks_for(submitted);
        if let Some(table) = kv.tables.iter().find(|table| table.len() != blocks) {
            return Err(format!("{} blocks for {submitted} tokens", table.len()));
        }
        if kv.published * self.layout.block_size > submitted || kv.indexed > kv.published {
            return Err(format!("{} blocks published, {submitted} tokens submitted", kv.published));
        }
        if kv.position() > submitted {
            return Err(format!("windows are at {}, {submitted} tokens submitted", kv.position()));
        }
        let full = if self.layout.caching { (retired / self.layout.block_size).max(kv.indexed) } else { 0 };
        for (kind, table) in self.layout.kinds().iter().zip(&kv.tables) {
            let first = self.layout.first_block(*kind, kv.position()).min(blocks);
            let is_held = |id: &u32| *id != NULL_BLOCK;
            if table[..first].iter().any(is_held) || !table[first..].iter().all(is_held) {
                return Err(format!("{kind:?} at {} holds {table:?}", kv.position()));
            }
            if let Some(id) =
                table[first..].iter().take(full.saturating_sub(first)).find(|id| !self.pool.is_indexed(**id))
            {
                return Err(format!("block {id} of {retired} retired tokens cannot be found"));
            }
        }
        Ok(())
    }
}
