//! KV blocks: the block tables of sequences, and the blocks whose prefix others can reuse.

mod block_key;
mod block_pool;
mod check;
mod events;
mod layout;
mod prefix_index;
mod sequence_kv;
#[cfg(test)]
mod tests;
mod tokens;

use crate::{KvKind, StepId};
use block_key::BlockKey;
pub use block_key::ExtraKey;
pub(crate) use block_key::{ChainKey, Extras};
use block_pool::{BlockPool, UNFINISHED};
use events::EventLog;
pub use events::{BlockHash, KvEvent, KvEventSink};
pub(crate) use layout::KvLayout;
use prefix_index::PrefixIndex;
pub(crate) use sequence_kv::SequenceKv;
pub(crate) use tokens::{TokenHistory, TokenSpan};

/// Index of a block.
pub(crate) type BlockId = u32;

/// The null block: never allocated, counted in no total, and used for padding.
pub(crate) const NULL_BLOCK: BlockId = 0;

/// The blocks, which all KV groups share. A model may have one group, several or none.
pub(crate) struct KvCache {
    layout: KvLayout,
    pool: BlockPool,
    /// Step being planned.
    step: StepId,
    /// Number of changes by which more blocks can be had.
    gains: u64,
    /// Number of lookups of at least one block.
    #[cfg(test)]
    pub(crate) lookups: usize,
    /// Blocks that the last [`KvCache::lookup`] found, by group; the null block where a group has none, or needs none.
    found: Vec<Vec<BlockId>>,
    /// Changes of the blocks of one group, if they are recorded.
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
    /// Creates a cache of `blocks` free blocks, including the null block.
    pub(crate) fn new(blocks: usize, layout: KvLayout) -> Self {
        let groups = layout.kinds().len();
        let blocks = if groups == 0 { 0 } else { blocks };
        Self {
            events: None,
            step: 0,
            gains: 0,
            #[cfg(test)]
            lookups: 0,
            pool: BlockPool::new(blocks, layout.indexed_tokens()),
            found: (0..groups).map(|_| Vec::with_capacity(blocks)).collect(),
            layout,
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

    /// Returns the number of blocks in use.
    pub(crate) fn used(&self) -> usize {
        self.pool.total() - self.pool.free()
    }

    /// Returns the used share, 0 to 1.
    pub(crate) fn usage(&self) -> f64 {
        self.used() as f64 / self.pool.total().max(1) as f64
    }

    /// Returns whether there are too few free blocks for any further sequence.
    pub(crate) fn exhausted(&self) -> bool {
        self.pool.free() < self.layout.kinds().len()
    }

    /// Begins the plan of a step.
    pub(crate) fn begin(&mut self, step: StepId) {
        self.step = step;
    }

    /// Finds the longest prefix that goes on after the blocks of a sequence, up to position `most`, and that every group can
    /// serve. At least one token is left to compute, because its logits are needed.
    pub(crate) fn lookup(&mut self, kv: &mut SequenceKv, history: &TokenHistory, most: usize) -> Hit {
        #[cfg(test)]
        {
            self.lookups += usize::from(history.len() > (kv.len() + 1) * self.layout.block_size);
        }
        let held = kv.len();
        let most = most.min(history.len() - 1);
        let end = if self.layout.caching { (most / self.layout.block_size).max(held) } else { held };
        if end > held {
            kv.extend_keys(&self.layout, history, end);
        }
        let end = self.find_all(kv, history, (held, end));
        let all = self.longest(held, end, |_| true);
        let ready = self.longest(held, all, |id| {
            let writer = self.pool.writer(id);
            writer != UNFINISHED && (writer != self.step || writer == 0)
        });
        for (kind, found) in self.layout.kinds().iter().zip(&mut self.found) {
            found.truncate(ready - held);
            let first = self.layout.first_block(*kind, ready * self.layout.block_size);
            found.iter_mut().take(first.saturating_sub(held)).for_each(|id| *id = NULL_BLOCK);
        }
        Hit { blocks: ready - held, tokens: ready * self.layout.block_size, awaited: ready < all }
    }

    /// Finds the blocks of a prefix from index `held` on. The result is the end of what groups that see all tokens have.
    fn find_all(&mut self, kv: &SequenceKv, history: &TokenHistory, (held, mut end): (usize, usize)) -> usize {
        let Self { layout, pool, found, .. } = self;
        let find = |group: usize, block: usize| {
            let key = BlockKey { chain: kv.keys[block], group: group as u32 };
            pool.find(&key, layout.block_tokens(history, block))
        };
        let sees_all = |group: &usize| layout.kinds()[*group] == KvKind::Full;
        let groups = 0..found.len();
        for group in groups.clone().filter(sees_all) {
            found[group].clear();
            found[group].extend((held..end).map_while(|block| find(group, block)));
            end = held + found[group].len();
        }
        for group in groups.filter(|group| !sees_all(group)) {
            found[group].clear();
            found[group].extend((held..end).map(|block| find(group, block).unwrap_or(NULL_BLOCK)));
        }
        end
    }

    /// Returns the end of the longest prefix up to block `end` for which every group has found what a continuation sees.
    fn longest(&self, held: usize, mut end: usize, usable: impl Fn(BlockId) -> bool) -> usize {
        loop {
            let before = end;
            for (kind, found) in self.layout.kinds().iter().zip(&self.found) {
                let is_there = |block: usize| found[block - held] != NULL_BLOCK && usable(found[block - held]);
                end = self.layout.longest(*kind, held..end, is_there);
            }
            if end == before {
                return end;
            }
        }
    }

    /// Returns the number of tokens that the blocks of a sequence hold.
    pub(crate) fn covered(&self, kv: &SequenceKv) -> usize {
        kv.len() * self.layout.block_size
    }

    /// Returns whether a sequence of `tokens` tokens fits once the hit is attached, beside `reserved` blocks and a share of
    /// all blocks.
    pub(crate) fn fits(&self, hit: Hit, tokens: usize, reserved: usize, share: f64) -> bool {
        let missing = |(kind, found): (&KvKind, &Vec<BlockId>)| {
            let held = found.iter().filter(|id| **id != NULL_BLOCK).count();
            self.layout.missing(*kind, tokens, hit.blocks, held)
        };
        let need = self.layout.kinds().iter().zip(&self.found).map(missing).sum::<usize>() + reserved;
        let found = self.found.iter().flatten().filter(|id| **id != NULL_BLOCK);
        let revived = found.filter(|id| self.pool.is_free(**id)).count();
        self.pool.free() - revived >= need + (share * self.pool.total() as f64) as usize
    }

    /// Returns the number of blocks that a sequence still needs for `tokens` tokens, in all groups.
    pub(crate) fn missing(&self, kv: &SequenceKv, tokens: usize) -> usize {
        let (layout, len) = (&self.layout, kv.len());
        let missing = |kind: &KvKind| {
            let passed = layout.first_block(*kind, kv.position).min(len);
            layout.missing(*kind, tokens, len, len - passed)
        };
        layout.kinds().iter().map(missing).sum()
    }

    /// Returns a number that changes whenever more blocks can be had: some were released or are shared.
    pub(crate) fn gains(&self) -> u64 {
        self.gains
    }

    /// Appends the hit of the last lookup to a sequence's tables. Windows pass what a continuation does not see.
    pub(crate) fn attach(&mut self, kv: &mut SequenceKv, hit: Hit) {
        let held = kv.len();
        self.gains += 1;
        for (found, table) in self.found.iter().zip(&mut kv.tables) {
            debug_assert!(table.len() == held && found.len() == hit.blocks);
            found.iter().filter(|id| **id != NULL_BLOCK).for_each(|&id| self.pool.attach(id));
            table.extend_from_slice(found);
        }
        kv.published = kv.published.max(held + hit.blocks);
        if kv.indexed == held {
            kv.indexed = held + hit.blocks;
        }
        self.pass(kv, hit.tokens);
    }

    /// Extends the tables to cover `tokens` tokens. Returns `false` and changes nothing if there are too few free blocks.
    #[must_use]
    pub(crate) fn grow(&mut self, kv: &mut SequenceKv, tokens: usize) -> bool {
        let need = self.layout.blocks_for(tokens);
        if self.pool.free() < need.saturating_sub(kv.len()) * kv.tables.len() {
            return false;
        }
        for table in &mut kv.tables {
            while table.len() < need {
                let Some((id, dropped)) = self.pool.allocate() else { return false };
                table.push(id);
                if let (Some(key), Some(events)) = (dropped, &mut self.events)
                    && key.group == self.layout.told_group()
                {
                    events.removed(key.chain);
                }
            }
        }
        true
    }

    /// Returns whether a sequence can be extended to `tokens` tokens while `others` sequences can get a block for each
    /// group.
    pub(crate) fn has_room(&self, kv: &SequenceKv, tokens: usize, others: usize) -> bool {
        self.pool.free() >= self.missing(kv, tokens) + others * self.layout.kinds().len()
    }

    /// Releases the blocks of a sequence that no token from `position` on sees.
    pub(crate) fn pass(&mut self, kv: &mut SequenceKv, position: usize) {
        if position <= kv.position {
            return;
        }
        for (kind, table) in self.layout.kinds().iter().zip(&mut kv.tables) {
            let [first, end] = [kv.position, position].map(|position| self.layout.first_block(*kind, position));
            for id in table.iter_mut().take(end).skip(first).filter(|id| **id != NULL_BLOCK) {
                self.pool.release(std::mem::replace(id, NULL_BLOCK));
                self.gains += 1;
            }
        }
        kv.position = position;
    }

    /// Releases the blocks of a sequence after those of its first `tokens` tokens.
    pub(crate) fn shrink(&mut self, kv: &mut SequenceKv, tokens: usize) {
        kv.truncate(self.layout.blocks_for(tokens), |id| self.pool.release(id));
        self.gains += 1;
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
        for group in 0..kv.tables.len() {
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
        for group in 0..kv.tables.len() {
            for block in kv.indexed..full {
                let id = kv.tables[group][block];
                let key = BlockKey { chain: kv.keys[block], group: group as u32 };
                let pool = &mut self.pool;
                if id == NULL_BLOCK || pool.is_indexed(id) {
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
        for (group, found) in self.found.iter_mut().enumerate() {
            let pool = &self.pool;
            let other = pool.find(&BlockKey { chain: kv.keys[last], group: group as u32 }, tokens);
            let other =
                other.filter(|&id| id != kv.tables[group][last] && ![UNFINISHED, self.step].contains(&pool.writer(id)));
            let Some(other) = other else { return false };
            found.clear();
            found.push(other);
        }
        for (found, table) in self.found.iter().zip(&mut kv.tables) {
            self.gains += 1;
            self.pool.attach(found[0]);
            self.pool.release(std::mem::replace(&mut table[last], found[0]));
        }
        kv.published = kv.published.max(kv.len());
        kv.told = kv.told.min(last);
        true
    }

    /// Adds a block of a sequence to a group's index unless another one has its content. `writer` is the step that
    /// completes it, or 0 if it is in memory.
    fn index(&mut self, kv: &SequenceKv, history: &TokenHistory, (group, block): (usize, usize), writer: StepId) {
        let (pool, id) = (&mut self.pool, kv.tables[group][block]);
        let tokens = self.layout.block_tokens(history, block);
        let key = BlockKey { chain: kv.keys[block], group: group as u32 };
        if pool.is_indexed(id) {
            pool.set_writer(id, writer);
        } else if id == NULL_BLOCK || !pool.index(id, key, tokens, writer) {
            return;
        }
        if let Some(events) = &mut self.events
            && key.group == self.layout.told_group()
            && writer != UNFINISHED
        {
            events.stored(block, &kv.keys, tokens, kv.extras.of_block(block, self.layout.block_size));
        }
    }

    /// Removes the blocks of a sequence from the index that the step being planned was to write.
    pub(crate) fn unpublish(&mut self, kv: &SequenceKv) {
        for id in kv.blocks() {
            if self.pool.writer(id) == self.step {
                self.withdraw(id);
            }
        }
    }

    /// Removes the blocks from the index that a failed step and later ones were to write. Those of later steps are
    /// indexed again when their steps have completed.
    pub(crate) fn withdraw_since(&mut self, step: StepId) {
        for id in self.pool.written_since(step) {
            self.withdraw(id);
        }
    }

    fn withdraw(&mut self, id: BlockId) {
        let finished = self.pool.writer(id) != UNFINISHED;
        let key = self.pool.withdraw(id).filter(|key| finished && key.group == self.layout.told_group());
        if let (Some(key), Some(events)) = (key, &mut self.events) {
            events.removed(key.chain);
        }
    }

    /// Returns whether a sequence holds an indexed block that a step writes.
    pub(crate) fn reads_from(&self, kv: &SequenceKv, step: StepId) -> bool {
        kv.blocks().any(|id| self.pool.writer(id) == step)
    }

    /// Releases all blocks.
    pub(crate) fn release(&mut self, kv: &mut SequenceKv) {
        self.gains += 1;
        kv.truncate(0, |id| self.pool.release(id));
        kv.reset();
    }

    /// Removes every block from the index. Returns `false` and changes nothing if a block is used.
    pub(crate) fn forget_prefixes(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        let told = self.layout.told_group();
        self.pool.forget(|key| {
            if let Some(events) = self.events.as_mut().filter(|_| key.group == told) {
                events.removed(key.chain);
            }
        });
        true
    }
}
