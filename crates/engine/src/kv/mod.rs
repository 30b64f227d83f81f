//! KV blocks: the block tables of sequences, and the blocks whose prefix others can reuse.

mod block_key;
mod block_pool;
mod events;
mod prefix_index;
#[cfg(test)]
mod tests;
mod tokens;

use crate::{KvCacheSpec, StepId};
use block_key::BlockKey;
pub use block_key::ExtraKey;
pub(crate) use block_key::{ChainKey, Extras};
use block_pool::{BlockPool, UNFINISHED};
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
    /// Number of leading blocks that the plan of a step has added to the index, or would have if another block with
    /// their content were not there.
    published: usize,
    /// Number of leading blocks that are in the index themselves.
    indexed: usize,
    /// Number of leading blocks of each table that the executor knows.
    told: usize,
}

impl SequenceKv {
    /// Creates the KV state without blocks. The caller's thread computes the keys of the prompt's full blocks here.
    pub(crate) fn new(layout: &KvLayout, history: &TokenHistory, extras: Extras) -> Self {
        let mut kv = Self {
            tables: vec![Vec::new(); layout.groups],
            extras,
            keys: Vec::new(),
            published: 0,
            indexed: 0,
            told: 0,
        };
        if layout.caching {
            kv.extend_keys(layout, history, history.len() / layout.block_size);
        }
        kv
    }

    /// Returns the number of blocks of each table.
    fn len(&self) -> usize {
        self.tables.first().map_or(0, Vec::len)
    }

    /// Returns the number of blocks of each table that the executor knows, and counts all as known.
    pub(crate) fn tell(&mut self) -> usize {
        let known = self.told;
        self.told = self.len();
        known
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
    /// Step being planned.
    step: StepId,
    /// Number of changes by which more blocks can be had.
    gains: u64,
    /// Number of lookups of at least one block.
    #[cfg(test)]
    pub(crate) lookups: usize,
    /// Blocks that the last [`KvCache::lookup`] found, by group.
    found: Vec<Vec<BlockId>>,
    /// Changes of the first group's blocks, if they are recorded. One group stands for all, because a prefix is found
    /// only where all groups have it.
    events: Option<EventLog>,
}

/// A prefix found in the cache. It is valid until the cache changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hit {
    /// Number of blocks found.
    pub(crate) blocks: usize,
    /// Number of tokens that need not be computed.
    pub(crate) tokens: usize,
    /// Whether the step being planned writes the block after them. Only a later step can read it.
    pub(crate) awaited: bool,
}

impl KvCache {
    pub(crate) fn new(spec: &KvCacheSpec, layout: KvLayout) -> Self {
        Self {
            layout,
            events: None,
            step: 0,
            gains: 0,
            #[cfg(test)]
            lookups: 0,
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

    /// Begins the plan of a step.
    pub(crate) fn begin(&mut self, step: StepId) {
        self.step = step;
    }

    /// Finds the blocks after those of a sequence that every group holds, up to position `most`. At least one token is
    /// left to compute, because its logits are needed.
    pub(crate) fn lookup(&mut self, kv: &mut SequenceKv, history: &TokenHistory, most: usize) -> Hit {
        #[cfg(test)]
        {
            self.lookups += usize::from(history.len() > (kv.len() + 1) * self.layout.block_size);
        }
        let Self { layout, pools, found, step, .. } = self;
        let held = kv.len();
        let most = most.min(history.len() - 1);
        let mut blocks = if layout.caching { (most / layout.block_size).max(held) } else { held };
        if blocks > held {
            kv.extend_keys(layout, history, blocks);
        }
        let mut ready = blocks;
        for (group, (pool, found)) in pools.iter().zip(&mut *found).enumerate() {
            found.clear();
            for block in held..blocks {
                let key = BlockKey { chain: kv.keys[block], group: group as u32 };
                let Some(id) = pool.find(&key, layout.block_tokens(history, block)) else { break };
                let writer = pool.writer(id);
                if writer == UNFINISHED || (writer == *step && writer > 0) {
                    ready = ready.min(block);
                }
                found.push(id);
            }
            blocks = held + found.len();
        }
        let ready = ready.min(blocks);
        found.iter_mut().for_each(|found| found.truncate(ready - held));
        Hit { blocks: ready - held, tokens: ready * layout.block_size, awaited: ready < blocks }
    }

    /// Returns the number of tokens that the blocks of a sequence hold.
    pub(crate) fn covered(&self, kv: &SequenceKv) -> usize {
        kv.len() * self.layout.block_size
    }

    /// Returns whether a sequence of `tokens` tokens fits once the hit is attached, beside `reserved` blocks and a share of
    /// all blocks.
    pub(crate) fn fits(&self, hit: Hit, tokens: usize, reserved: usize, share: f64) -> bool {
        let need = self.layout.blocks_for(tokens) - hit.blocks + reserved;
        self.pools.iter().zip(&self.found).all(|(pool, found)| {
            let revived = found.iter().filter(|&&id| pool.is_free(id)).count();
            pool.free() - revived >= need + (share * pool.total() as f64) as usize
        })
    }

    /// Returns the number of blocks that a sequence lacks for `tokens` tokens, in each group.
    pub(crate) fn missing(&self, kv: &SequenceKv, tokens: usize) -> usize {
        if self.pools.is_empty() { 0 } else { self.layout.blocks_for(tokens).saturating_sub(kv.len()) }
    }

    /// Returns a number that changes whenever more blocks can be had: some were released or are shared.
    pub(crate) fn gains(&self) -> u64 {
        self.gains
    }

    /// Appends the hit of the last lookup to a sequence's tables.
    pub(crate) fn attach(&mut self, kv: &mut SequenceKv, hit: Hit) {
        let held = kv.len();
        self.gains += 1;
        for ((pool, found), table) in self.pools.iter_mut().zip(&self.found).zip(&mut kv.tables) {
            debug_assert!(table.len() == held && found.len() == hit.blocks);
            found.iter().for_each(|&id| pool.attach(id));
            table.extend_from_slice(found);
        }
        kv.published = kv.published.max(held + hit.blocks);
        if kv.indexed == held {
            kv.indexed = held + hit.blocks;
        }
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

    /// Returns whether a sequence can be extended to `tokens` tokens and at least `spare` blocks of each group stay free.
    pub(crate) fn has_room(&self, kv: &SequenceKv, tokens: usize, spare: usize) -> bool {
        let missing = self.missing(kv, tokens);
        self.pools.iter().all(|pool| pool.free() >= missing + spare)
    }

    /// Releases the blocks of a sequence after those of its first `tokens` tokens.
    pub(crate) fn shrink(&mut self, kv: &mut SequenceKv, tokens: usize) {
        let blocks = self.layout.blocks_for(tokens);
        for (pool, table) in self.pools.iter_mut().zip(&mut kv.tables) {
            table.drain(blocks.min(table.len())..).rev().for_each(|id| pool.release(id));
        }
        self.gains += 1;
        kv.told = kv.told.min(blocks);
    }

    /// Indexes the blocks of the first `tokens` tokens, which the step being planned completes, so that later steps can
    /// use them. The block that it leaves unfinished is indexed too if its tokens are known: others wait for it.
    pub(crate) fn publish(&mut self, kv: &mut SequenceKv, history: &TokenHistory, tokens: usize) {
        let (full, known) = (tokens / self.layout.block_size, history.len() / self.layout.block_size);
        let (full, touched) = (full.min(known), self.layout.blocks_for(tokens).min(known));
        if !self.layout.caching || touched <= kv.published {
            return;
        }
        kv.extend_keys(&self.layout, history, touched);
        for group in 0..self.pools.len() {
            for block in kv.published..touched {
                let writer = if block < full { self.step } else { UNFINISHED };
                self.index(kv, history, (group, block), writer);
            }
        }
        kv.published = full;
    }

    /// Indexes the full blocks among the first `tokens` tokens, whose keys and values are in memory. A block whose
    /// content another one has makes way for the indexed one, so that what a sequence holds can always be found.
    pub(crate) fn commit(&mut self, kv: &mut SequenceKv, history: &TokenHistory, tokens: usize) {
        let full = tokens / self.layout.block_size;
        if !self.layout.caching || full <= kv.indexed {
            return;
        }
        kv.extend_keys(&self.layout, history, full);
        for group in 0..self.pools.len() {
            for block in kv.indexed..full {
                let id = kv.tables[group][block];
                let key = BlockKey { chain: kv.keys[block], group: group as u32 };
                let pool = &mut self.pools[group];
                if pool.is_indexed(id) {
                    continue;
                }
                match pool.find(&key, self.layout.block_tokens(history, block)) {
                    Some(other) if pool.writer(other) != UNFINISHED => {
                        pool.attach(other);
                        pool.release(id);
                        self.gains += 1;
                        kv.tables[group][block] = other;
                        kv.told = kv.told.min(block);
                    }
                    other => {
                        if let Some(unfinished) = other {
                            pool.withdraw(unfinished);
                        }
                        self.index(kv, history, (group, block), 0);
                    }
                }
            }
        }
        kv.indexed = full;
        kv.published = kv.published.max(full);
    }

    /// Replaces a sequence's last block by the one that others find with its content. Returns `false` and changes nothing
    /// if that is the block itself or not complete, or if the block's tokens are not all known or needed.
    pub(crate) fn replace_last(&mut self, kv: &mut SequenceKv, history: &TokenHistory) -> bool {
        let Some(last) = kv.len().checked_sub(1) else { return false };
        if !self.layout.caching || kv.keys.len() <= last || kv.len() * self.layout.block_size >= history.len() {
            return false;
        }
        let tokens = self.layout.block_tokens(history, last);
        for (group, (pool, found)) in self.pools.iter().zip(&mut self.found).enumerate() {
            let other = pool.find(&BlockKey { chain: kv.keys[last], group: group as u32 }, tokens);
            let other =
                other.filter(|&id| id != kv.tables[group][last] && ![UNFINISHED, self.step].contains(&pool.writer(id)));
            let Some(other) = other else { return false };
            found.clear();
            found.push(other);
        }
        for ((pool, found), table) in self.pools.iter_mut().zip(&self.found).zip(&mut kv.tables) {
            self.gains += 1;
            pool.attach(found[0]);
            pool.release(std::mem::replace(&mut table[last], found[0]));
        }
        kv.published = kv.published.max(kv.len());
        kv.told = kv.told.min(last);
        true
    }

    /// Adds a block of a sequence to a group's index unless another one has its content. `writer` is the step that
    /// completes it, or 0 if it is in memory.
    fn index(&mut self, kv: &SequenceKv, history: &TokenHistory, (group, block): (usize, usize), writer: StepId) {
        let (pool, id) = (&mut self.pools[group], kv.tables[group][block]);
        let tokens = self.layout.block_tokens(history, block);
        if pool.is_indexed(id) {
            pool.set_writer(id, writer);
        } else if !pool.index(id, BlockKey { chain: kv.keys[block], group: group as u32 }, tokens, writer) {
            return;
        }
        if let (0, Some(events)) = (group, &mut self.events)
            && writer != UNFINISHED
        {
            events.stored(block, &kv.keys, tokens, kv.extras.of_block(block, self.layout.block_size));
        }
    }

    /// Removes the blocks of a sequence from the index that the step being planned was to write.
    pub(crate) fn unpublish(&mut self, kv: &SequenceKv) {
        for (group, table) in kv.tables.iter().enumerate() {
            for &id in table {
                if self.pools[group].writer(id) == self.step {
                    self.withdraw(group, id);
                }
            }
        }
    }

    /// Removes the blocks from the index that a failed step and later ones were to write. Those of later steps are
    /// indexed again when their steps have completed.
    pub(crate) fn withdraw_since(&mut self, step: StepId) {
        for group in 0..self.pools.len() {
            for id in self.pools[group].written_since(step) {
                self.withdraw(group, id);
            }
        }
    }

    fn withdraw(&mut self, group: usize, id: BlockId) {
        let finished = self.pools[group].writer(id) != UNFINISHED;
        let key = self.pools[group].withdraw(id);
        if let (0, Some(key), Some(events), true) = (group, key, &mut self.events, finished) {
            events.removed(key.chain);
        }
    }

    /// Returns whether a sequence holds an indexed block that a step writes.
    pub(crate) fn reads_from(&self, kv: &SequenceKv, step: StepId) -> bool {
        let blocks = self.pools.iter().zip(&kv.tables);
        blocks.into_iter().any(|(pool, table)| table.iter().any(|&id| pool.writer(id) == step))
    }

    /// Releases all blocks, the last first, so that a prefix that others may share is evicted after its continuation.
    pub(crate) fn release(&mut self, kv: &mut SequenceKv) {
        self.gains += 1;
        for (pool, table) in self.pools.iter_mut().zip(&mut kv.tables) {
            table.drain(..).rev().for_each(|id| pool.release(id));
        }
        (kv.published, kv.indexed, kv.told) = (0, 0, 0);
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

    /// Checks that a sequence's tables cover its `submitted` tokens and no block more, and that it holds what can be
    /// found of the blocks whose tokens are all `retired`.
    pub(crate) fn check_sequence(&self, kv: &SequenceKv, submitted: usize, retired: usize) -> Result<(), String> {
        let blocks = self.layout.blocks_for(submitted);
        if let Some(table) = kv.tables.iter().find(|table| table.len() != blocks) {
            return Err(format!("{} blocks for {submitted} tokens", table.len()));
        }
        if kv.published * self.layout.block_size > submitted || kv.indexed > kv.published {
            return Err(format!("{} blocks published, {submitted} tokens submitted", kv.published));
        }
        if !self.layout.caching {
            return Ok(());
        }
        let full = (retired / self.layout.block_size).max(kv.indexed);
        for (pool, table) in self.pools.iter().zip(&kv.tables) {
            if let Some(id) = table[..full].iter().find(|&&id| !pool.is_indexed(id)) {
                return Err(format!("block {id} of {retired} retired tokens cannot be found"));
            }
        }
        Ok(())
    }
}
