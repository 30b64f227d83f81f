//! KV blocks: the block tables of sequences, and the blocks whose prefix others can reuse.

mod block_key;
mod block_pool;
mod events;
mod prefix_index;
#[cfg(test)]
mod tests;
mod tokens;

use crate::KvCacheSpec;
use block_key::BlockKey;
pub use block_key::ExtraKey;
pub(crate) use block_key::{ChainKey, Extras};
use block_pool::BlockPool;
use events::EventLog;
pub use events::{BlockHash, KvEvent, KvEventSink};
use prefix_index::PrefixIndex;
pub(crate) use tokens::{TokenHistory, TokenSpan};

/// Index of a block in its group's memory.
pub(crate) type BlockId = u32;

/// The null block: never allocated, counted in no total, and used for padding.
pub(crate) const NULL_BLOCK: BlockId = 0;

/// A sequence's part of the KV cache.
#[derive(Debug)]
pub(crate) struct SequenceKv {
    /// Block tables, one per KV group.
    pub(crate) tables: Vec<Vec<BlockId>>,
    /// Properties that are part of the keys of blocks.
    extras: Extras,
    /// Keys of the leading full blocks, computed on demand. They outlive the tables of a preempted sequence.
    keys: Vec<ChainKey>,
    /// Number of leading blocks that came from the index or were added to it.
    indexed: usize,
}

impl SequenceKv {
    /// Creates the KV state without blocks. The caller's thread computes the keys of the prompt's full blocks here.
    pub(crate) fn new(layout: &KvLayout, history: &TokenHistory, extras: Extras) -> Self {
        let mut kv = Self { tables: vec![Vec::new(); layout.groups], extras, keys: Vec::new(), indexed: 0 };
        if layout.caching {
            kv.extend_keys(layout, history, history.len() / layout.block_size);
        }
        kv
    }

    /// Computes the keys of the first `blocks` blocks, which must be full, unless they are known.
    fn extend_keys(&mut self, layout: &KvLayout, history: &TokenHistory, blocks: usize) {
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
}

/// Properties of the KV cache that are needed to prepare a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvLayout {
    /// Number of tokens in a block; unused without groups.
    block_size: usize,
    groups: usize,
    /// Whether full blocks are indexed and looked up.
    caching: bool,
    /// Parent key of every sequence's first block.
    root: ChainKey,
}

impl KvLayout {
    pub(crate) fn new(spec: &KvCacheSpec, enable_prefix_caching: bool) -> Self {
        let groups = spec.groups.len();
        let root = ChainKey::root(block_key::DEFAULT_SEED);
        Self { block_size: spec.block_size.max(1), groups, caching: enable_prefix_caching && groups > 0, root }
    }

    /// Returns the layout with keys that begin with `seed`.
    pub(crate) fn seeded(self, seed: Option<&str>) -> Self {
        Self { root: seed.map_or(self.root, ChainKey::root), ..self }
    }

    /// Returns whether prefixes are looked up.
    pub(crate) fn caching(&self) -> bool {
        self.caching
    }

    /// Returns the number of tokens that the index stores of a block.
    fn indexed_tokens(&self) -> usize {
        if self.caching { self.block_size } else { 0 }
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    fn block_tokens<'a>(&self, history: &'a TokenHistory, block: usize) -> TokenSpan<'a> {
        history.span(block * self.block_size..(block + 1) * self.block_size)
    }
}

/// The blocks of all KV groups. A model may have one group, several or none.
pub(crate) struct KvCache {
    layout: KvLayout,
    pools: Vec<BlockPool>,
    /// Blocks that the last [`KvCache::lookup`] found, by group.
    found: Vec<Vec<BlockId>>,
    /// Changes of the first group's blocks, if they are recorded. One group stands for all, because a prefix is found
    /// only where all groups have it.
    events: Option<EventLog>,
}

/// A prefix found in the cache. It is valid until the cache changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hit {
    blocks: usize,
    /// Number of tokens that need not be computed.
    pub(crate) tokens: usize,
}

impl KvCache {
    pub(crate) fn new(spec: &KvCacheSpec, layout: KvLayout) -> Self {
        Self {
            layout,
            events: None,
            pools: spec.groups.iter().map(|group| BlockPool::new(group.blocks, layout.indexed_tokens())).collect(),
            found: spec.groups.iter().map(|group| Vec::with_capacity(group.blocks)).collect(),
        }
    }

    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Starts recording events.
    pub(crate) fn record_events(&mut self) {
        self.events = Some(EventLog::default());
    }

    /// Returns the events since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.as_mut().map(EventLog::take).unwrap_or_default()
    }

    /// Returns the number of blocks in use over all groups.
    pub(crate) fn used(&self) -> usize {
        self.pools.iter().map(|pool| pool.total() - pool.free()).sum()
    }

    /// Returns the used share, 0 to 1, of the fullest group, which runs out first.
    pub(crate) fn usage(&self) -> f64 {
        let share = |pool: &BlockPool| 1.0 - pool.free() as f64 / pool.total().max(1) as f64;
        self.pools.iter().map(share).fold(0.0, f64::max)
    }

    /// Returns whether some group has no free block, so that nothing can be admitted.
    pub(crate) fn exhausted(&self) -> bool {
        self.pools.iter().any(|pool| pool.free() == 0)
    }

    /// Finds the longest prefix of whole blocks that every group still holds, up to `most` tokens. At least one token
    /// is left to compute, because its logits are needed.
    pub(crate) fn lookup(&mut self, kv: &mut SequenceKv, history: &TokenHistory, most: usize) -> Hit {
        let Self { layout, pools, found, .. } = self;
        let most = most.min(history.len() - 1);
        let mut blocks = if layout.caching { most / layout.block_size } else { 0 };
        kv.extend_keys(layout, history, blocks);
        for (group, (pool, found)) in pools.iter().zip(&mut *found).enumerate() {
            let find = |(block, &chain): (usize, &ChainKey)| {
                pool.find(&BlockKey { chain, group: group as u32 }, layout.block_tokens(history, block))
            };
            found.clear();
            found.extend(kv.keys[..blocks].iter().enumerate().map_while(find));
            blocks = found.len();
        }
        found.iter_mut().for_each(|found| found.truncate(blocks));
        Hit { blocks, tokens: blocks * layout.block_size }
    }

    /// Returns whether a sequence of `tokens` tokens fits once the hit is attached.
    pub(crate) fn fits(&self, hit: Hit, tokens: usize) -> bool {
        let need = self.layout.blocks_for(tokens) - hit.blocks;
        self.pools.iter().zip(&self.found).all(|(pool, found)| {
            let revived = found.iter().filter(|&&id| pool.is_free(id)).count();
            pool.free() - revived >= need
        })
    }

    /// Attaches the hit of the last lookup to a sequence without blocks.
    pub(crate) fn attach(&mut self, kv: &mut SequenceKv, hit: Hit) {
        for ((pool, found), table) in self.pools.iter_mut().zip(&self.found).zip(&mut kv.tables) {
            debug_assert!(table.is_empty() && found.len() == hit.blocks);
            found.iter().for_each(|&id| pool.attach(id));
            table.extend_from_slice(found);
        }
        kv.indexed = hit.blocks;
    }

    /// Extends the tables to cover `tokens` tokens. Returns `false` and changes nothing if some group has too few free
    /// blocks.
    #[must_use]
    pub(crate) fn grow(&mut self, kv: &mut SequenceKv, tokens: usize) -> bool {
        let need = self.layout.blocks_for(tokens);
        let short = |(pool, table): (&BlockPool, &Vec<BlockId>)| pool.free() < need.saturating_sub(table.len());
        if self.pools.iter().zip(&kv.tables).any(short) {
            return false;
        }
        for (group, (pool, table)) in self.pools.iter_mut().zip(&mut kv.tables).enumerate() {
            while table.len() < need {
                let Some((id, dropped)) = pool.allocate() else { return false };
                table.push(id);
                if let (0, Some(key), Some(events)) = (group, dropped, &mut self.events) {
                    events.removed(key.chain);
                }
            }
        }
        true
    }

    /// Indexes the full blocks among the first `tokens` tokens. Their keys and values must be in memory and their ids
    /// final.
    pub(crate) fn commit(&mut self, kv: &mut SequenceKv, history: &TokenHistory, tokens: usize) {
        let full = tokens / self.layout.block_size;
        if !self.layout.caching || full <= kv.indexed {
            return;
        }
        kv.extend_keys(&self.layout, history, full);
        for (group, (pool, table)) in self.pools.iter_mut().zip(&kv.tables).enumerate() {
            let blocks = table.iter().zip(&kv.keys).enumerate().take(full).skip(kv.indexed);
            for (block, (&id, &chain)) in blocks {
                let (key, tokens) = (BlockKey { chain, group: group as u32 }, self.layout.block_tokens(history, block));
                let new = pool.index(id, key, tokens);
                if let (0, true, Some(events)) = (group, new, &mut self.events) {
                    events.stored(block, &kv.keys, tokens, kv.extras.of_block(block, self.layout.block_size));
                }
            }
        }
        kv.indexed = full;
    }

    /// Releases all blocks, the last first, so that a prefix that others may share is evicted after its continuation.
    pub(crate) fn release(&mut self, kv: &mut SequenceKv) {
        for (pool, table) in self.pools.iter_mut().zip(&mut kv.tables) {
            table.drain(..).rev().for_each(|id| pool.release(id));
        }
        kv.indexed = 0;
    }

    /// Removes every block from the index. Returns `false` and changes nothing if a block is used.
    pub(crate) fn forget_prefixes(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        for (group, pool) in self.pools.iter_mut().enumerate() {
            pool.forget(|key| {
                if let (0, Some(events)) = (group, &mut self.events) {
                    events.removed(key.chain);
                }
            });
        }
        true
    }

    /// Checks that every block is in exactly one state and that the sequences' tables match the pools' reference
    /// counts. `references` is a buffer for the counts.
    pub(crate) fn check<'a>(
        &self,
        sequences: impl Iterator<Item = &'a SequenceKv> + Clone,
        references: &mut Vec<u32>,
    ) -> Result<(), String> {
        for (group, pool) in self.pools.iter().enumerate() {
            references.clear();
            references.resize(pool.total() + 1, 0);
            for &id in sequences.clone().flat_map(|kv| &kv.tables[group]) {
                references[id as usize] += 1;
            }
            pool.check(references).map_err(|error| format!("KV group {group}: {error}"))?;
        }
        Ok(())
    }

    /// Checks that a sequence's tables cover its `submitted` tokens and no block more, and that only blocks whose
    /// tokens are all `retired` are indexed.
    pub(crate) fn check_sequence(&self, kv: &SequenceKv, submitted: usize, retired: usize) -> Result<(), String> {
        let blocks = self.layout.blocks_for(submitted);
        if let Some(table) = kv.tables.iter().find(|table| table.len() != blocks) {
            return Err(format!("{} blocks for {submitted} tokens", table.len()));
        }
        if kv.indexed * self.layout.block_size > retired {
            return Err(format!("{} blocks indexed, {retired} tokens retired", kv.indexed));
        }
        Ok(())
    }
}
