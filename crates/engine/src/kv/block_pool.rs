//! The blocks and their reference counts.

use super::{BlockId, BlockKey, NULL_BLOCK, PrefixIndex, TokenSpan};
use crate::StepId;

/// Stands for the step that will complete a block, until that step is planned.
pub(super) const UNFINISHED: StepId = StepId::MAX;

/// A block is used while it has references and is on the free list otherwise. A free block that is indexed still holds
/// its prefix: it can be found and referenced again until it is allocated.
///
/// The free list is a ring linked through the blocks, with the null block as its start, so that every operation is a
/// few index writes. Its order is the order of eviction: blocks without a prefix at the head, the others from least to
/// most recently released.
pub(crate) struct BlockPool {
    blocks: Box<[Block]>,
    free: usize,
    index: PrefixIndex,
}

#[derive(Clone, Copy, Default)]
struct Block {
    /// Number of block tables that hold the block.
    references: u32,
    /// Neighbours on the free list if the block is free.
    previous: BlockId,
    next: BlockId,
    /// Step that completes the block, if the block was indexed before its content was in memory; 0 otherwise.
    writer: StepId,
}

impl BlockPool {
    /// Creates a pool of `blocks` free blocks, including the null block, in the order of their ids.
    pub(crate) fn new(blocks: usize, block_size: usize) -> Self {
        let blocks = blocks.max(1);
        let mut pool = Self {
            blocks: vec![Block::default(); blocks].into(),
            free: 0,
            index: PrefixIndex::new(blocks, block_size),
        };
        for id in 1..blocks {
            pool.link(id as BlockId, pool.blocks[0].previous);
        }
        pool
    }

    /// Returns the number of blocks without the null block.
    pub(crate) fn total(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Returns the number of blocks without references, indexed or not.
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// Returns whether the block has no references.
    pub(crate) fn is_free(&self, id: BlockId) -> bool {
        self.blocks[id as usize].references == 0
    }

    /// Inserts a block into the free list after `previous`.
    fn link(&mut self, id: BlockId, previous: BlockId) {
        let next = self.blocks[previous as usize].next;
        self.blocks[previous as usize].next = id;
        self.blocks[next as usize].previous = id;
        let block = &mut self.blocks[id as usize];
        (block.previous, block.next) = (previous, next);
        self.free += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { previous, next, .. } = self.blocks[id as usize];
        self.blocks[previous as usize].next = next;
        self.blocks[next as usize].previous = previous;
        self.free -= 1;
    }

    /// Takes the head of the free list and evicts its content, whose key is returned.
    pub(crate) fn allocate(&mut self) -> Option<(BlockId, Option<BlockKey>)> {
        let id = self.blocks[NULL_BLOCK as usize].next;
        if id == NULL_BLOCK {
            return None;
        }
        self.unlink(id);
        let dropped = self.index.remove(id);
        let block = &mut self.blocks[id as usize];
        (block.references, block.writer) = (1, 0);
        Some((id, dropped))
    }

    /// Returns the block with this content, used or free.
    pub(crate) fn find(&self, key: &BlockKey, tokens: TokenSpan<'_>) -> Option<BlockId> {
        self.index.find(key, tokens)
    }

    /// Adds a reference to a block that [`BlockPool::find`] returned.
    pub(crate) fn attach(&mut self, id: BlockId) {
        if self.is_free(id) {
            self.unlink(id);
        }
        self.blocks[id as usize].references += 1;
    }

    /// Adds a full block of a sequence to the index. `writer` is the step that completes it, or 0 if it is in memory.
    /// Returns `false` if its content is already indexed.
    pub(crate) fn index(&mut self, id: BlockId, key: BlockKey, tokens: TokenSpan<'_>, writer: StepId) -> bool {
        debug_assert!(!self.is_free(id) && id != NULL_BLOCK);
        let new = self.index.insert(id, key, tokens);
        if new {
            self.blocks[id as usize].writer = writer;
        }
        new
    }

    /// Returns whether the block is indexed.
    pub(crate) fn is_indexed(&self, id: BlockId) -> bool {
        self.index.contains(id)
    }

    /// Returns the step that completes an indexed block; 0 if the block was indexed after that.
    pub(crate) fn writer(&self, id: BlockId) -> StepId {
        self.blocks[id as usize].writer
    }

    /// Sets the step that completes an indexed block.
    pub(crate) fn set_writer(&mut self, id: BlockId, step: StepId) {
        self.blocks[id as usize].writer = step;
    }

    /// Removes a block from the index and returns its key. A free block is then allocated before the indexed ones.
    pub(crate) fn withdraw(&mut self, id: BlockId) -> Option<BlockKey> {
        let key = self.index.remove(id)?;
        self.blocks[id as usize].writer = 0;
        if self.is_free(id) {
            self.unlink(id);
            self.link(id, NULL_BLOCK);
        }
        Some(key)
    }

    /// Returns the ids of all indexed blocks that a step or a later one completes.
    pub(crate) fn written_since(&self, step: StepId) -> Vec<BlockId> {
        let blocks = self.blocks.iter().enumerate();
        blocks.filter(|(_, block)| block.writer >= step).map(|(id, _)| id as BlockId).collect()
    }

    /// Removes every free block from the index and reports its key.
    pub(crate) fn forget(&mut self, mut forgotten: impl FnMut(BlockKey)) {
        for id in (1..self.blocks.len() as BlockId).filter(|&id| self.blocks[id as usize].references == 0) {
            if let Some(key) = self.index.remove(id) {
                forgotten(key);
            }
        }
    }

    /// Removes a reference. A block without references is allocated last if it holds a prefix, else first. One that no
    /// step completes holds none.
    pub(crate) fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.references > 0 && id != NULL_BLOCK);
        block.references -= 1;
        if block.references > 0 {
            return;
        }
        if block.writer == UNFINISHED {
            block.writer = 0;
            self.index.remove(id);
        }
        let behind = if self.index.contains(id) { self.blocks[NULL_BLOCK as usize].previous } else { NULL_BLOCK };
        self.link(id, behind);
    }

    /// Iterates over the free list from head to tail.
    pub(crate) fn free_list(&self) -> impl Iterator<Item = BlockId> {
        let next = |id: &BlockId| Some(self.blocks[*id as usize].next);
        std::iter::successors(Some(self.blocks[NULL_BLOCK as usize].next), next).take_while(|&id| id != NULL_BLOCK)
    }

    /// Checks that every block is used or free, as `references` (by block id) counts it, and that the free list is
    /// complete.
    pub(crate) fn check(&self, references: &[u32]) -> Result<(), String> {
        let mut listed = 0;
        let mut before = NULL_BLOCK;
        for id in self.free_list() {
            listed += 1;
            if listed > self.total() {
                return Err("the free list has a cycle".into());
            }
            let block = &self.blocks[id as usize];
            if block.references > 0 || block.previous != before {
                return Err(format!("block {id} is on the free list with {} references", block.references));
            }
            before = id;
        }
        if listed != self.free || self.blocks[NULL_BLOCK as usize].previous != before {
            return Err(format!("{} blocks are free, {listed} are on the free list", self.free));
        }
        let used = self.blocks.iter().filter(|block| block.references > 0).count();
        if used + self.free != self.total() || references[NULL_BLOCK as usize] > 0 {
            return Err(format!("{used} used + {} free blocks are not {}", self.free, self.total()));
        }
        for (id, (block, &held)) in self.blocks.iter().zip(references).enumerate() {
            if block.references != held {
                return Err(format!("block {id} counts {} references, tables hold {held}", block.references));
            }
        }
        self.index.check()
    }
}
