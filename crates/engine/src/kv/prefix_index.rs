//! Index from block contents to blocks.
//!
//! The hash table is linked through the blocks: a block is in at most one bucket's list, so the table never grows,
//! never moves and needs no allocation.

use std::hash::{BuildHasher, RandomState};

use super::{BlockId, BlockKey, NULL_BLOCK, TokenSpan};

/// Finds blocks by key. Each content is indexed once: the first block with it is indexed, later ones are ordinary
/// blocks.
pub(crate) struct PrefixIndex {
    /// First block of each bucket's list, or the null block. The length is a power of two.
    buckets: Box<[BlockId]>,
    /// List entries, by block id.
    entries: Box<[Entry]>,
    /// Token ids of indexed blocks, by block id.
    tokens: Box<[u32]>,
    block_size: usize,
    /// Random seed that keeps clients from choosing prompts which fall into one bucket.
    seed: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    key: Option<BlockKey>,
    /// Next block of the bucket's list, or the null block.
    next: BlockId,
}

impl PrefixIndex {
    /// Creates an index for this many blocks, including the null block.
    pub(crate) fn new(blocks: usize, block_size: usize) -> Self {
        Self {
            buckets: vec![NULL_BLOCK; blocks.next_power_of_two()].into(),
            entries: vec![Entry { key: None, next: NULL_BLOCK }; blocks].into(),
            tokens: vec![0; blocks * block_size].into(),
            block_size,
            seed: RandomState::new().hash_one(0),
        }
    }

    /// The multiplication spreads every bit of the key into the top bits, which select the bucket.
    fn bucket(&self, key: &BlockKey) -> usize {
        let mixed = (key.bits() ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.buckets.len() - 1)
    }

    fn stored(&self, id: BlockId) -> &[u32] {
        let start = id as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    /// Returns the block with this key, whatever its tokens.
    fn by_key(&self, key: &BlockKey) -> Option<BlockId> {
        let mut id = self.buckets[self.bucket(key)];
        while id != NULL_BLOCK {
            let entry = &self.entries[id as usize];
            if entry.key.as_ref() == Some(key) {
                return Some(id);
            }
            id = entry.next;
        }
        None
    }

    /// Returns the block with this key and these tokens.
    pub(crate) fn find(&self, key: &BlockKey, tokens: TokenSpan<'_>) -> Option<BlockId> {
        self.by_key(key).filter(|&id| tokens == *self.stored(id))
    }

    /// Returns whether the block is indexed.
    pub(crate) fn contains(&self, id: BlockId) -> bool {
        self.entries[id as usize].key.is_some()
    }

    /// Adds a block to the index. Returns `false` if the block is indexed or another one has the key.
    pub(crate) fn insert(&mut self, id: BlockId, key: BlockKey, tokens: TokenSpan<'_>) -> bool {
        debug_assert_eq!(tokens.len(), self.block_size);
        if self.contains(id) || self.by_key(&key).is_some() {
            return false;
        }
        let start = id as usize * self.block_size;
        let (head, tail) = self.tokens[start..start + self.block_size].split_at_mut(tokens.head.len());
        head.copy_from_slice(tokens.head);
        tail.copy_from_slice(tokens.tail);
        let bucket = self.bucket(&key);
        self.entries[id as usize] = Entry { key: Some(key), next: self.buckets[bucket] };
        self.buckets[bucket] = id;
        true
    }

    /// Removes a block from the index, if it is there, and returns its key.
    pub(crate) fn remove(&mut self, id: BlockId) -> Option<BlockKey> {
        let key = self.entries[id as usize].key.take()?;
        let after = std::mem::replace(&mut self.entries[id as usize].next, NULL_BLOCK);
        let bucket = self.bucket(&key);
        if self.buckets[bucket] == id {
            self.buckets[bucket] = after;
            return Some(key);
        }
        let mut before = self.buckets[bucket];
        while before != NULL_BLOCK {
            let next = &mut self.entries[before as usize].next;
            if *next == id {
                *next = after;
                return Some(key);
            }
            before = *next;
        }
        debug_assert!(false, "block {id} has a key but is in no bucket");
        Some(key)
    }

    /// Checks that every indexed block is found by its own key and that nothing else is found.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut listed = 0;
        for &first in &self.buckets {
            let mut id = first;
            while id != NULL_BLOCK {
                listed += 1;
                if listed > self.entries.len() {
                    return Err("a bucket's list has a cycle".into());
                }
                id = self.entries[id as usize].next;
            }
        }
        let mut indexed = 0;
        for (id, entry) in self.entries.iter().enumerate() {
            let Some(key) = &entry.key else { continue };
            indexed += 1;
            if self.by_key(key) != Some(id as BlockId) {
                return Err(format!("indexed block {id} is not found by its key"));
            }
        }
        if listed == indexed { Ok(()) } else { Err(format!("{indexed} blocks have a key, {listed} are listed")) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ChainKey;
    use super::*;

    fn key(n: u32) -> BlockKey {
        BlockKey { chain: ChainKey::root("").child(TokenSpan { head: &[n], tail: &[] }, None), group: 0 }
    }

    fn span(tokens: &[u32]) -> TokenSpan<'_> {
        TokenSpan { head: tokens, tail: &[] }
    }

    #[test]
    fn many_blocks_come_and_go() {
        let mut index = PrefixIndex::new(64, 2);
        for id in 1..64 {
            index.insert(id, key(id), span(&[id, id]));
        }
        index.check().unwrap();
        for id in (1..64).step_by(3) {
            index.remove(id);
            index.remove(id);
        }
        index.check().unwrap();
        for id in 1..64 {
            let expected = (id % 3 != 1).then_some(id);
            assert_eq!(index.find(&key(id), span(&[id, id])), expected);
            assert_eq!(index.contains(id), expected.is_some());
        }
    }

    #[test]
    fn tokens_are_compared_on_a_hit() {
        let mut index = PrefixIndex::new(4, 2);
        index.insert(1, key(7), span(&[5, 6]));
        assert_eq!(index.find(&key(7), TokenSpan { head: &[5], tail: &[6] }), Some(1));
        assert_eq!(index.find(&key(7), span(&[5, 7])), None, "a colliding key is no hit");
    }

    #[test]
    fn a_content_is_indexed_once() {
        let mut index = PrefixIndex::new(4, 1);
        index.insert(1, key(7), span(&[7]));
        index.insert(2, key(7), span(&[7]));
        assert!(!index.contains(2));
        assert_eq!(index.find(&key(7), span(&[7])), Some(1));
        index.insert(1, key(8), span(&[8]));
        assert_eq!(index.find(&key(8), span(&[8])), None, "an indexed block keeps its content");
        index.check().unwrap();
    }
}
