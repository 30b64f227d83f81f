//! The pairs of tokens that are merged.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use super::Entries;

/// The merges of a model. The rank of a merge is its index: 0 is the best.
#[derive(Debug)]
pub(super) struct Merges {
    list: Vec<Merge>,
    /// The ranks of the pairs.
    ranks: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

#[derive(Clone, Copy, Debug)]
struct Merge {
    pair: (u32, u32),
    merged: u32,
}

impl Merges {
    /// Creates the table from pairs of entries, best first. Of equal pairs, the last one counts, as in the library.
    ///
    /// # Errors
    /// Returns an error if a part of a pair or its union is no entry.
    pub(super) fn new<'a>(entries: &Entries, pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Self, String> {
        let id = |text: &str| entries.id(text).ok_or_else(|| format!("Token `{text}` out of vocabulary"));
        let mut list = Vec::with_capacity(pairs.size_hint().0);
        let mut union = String::new();
        for (left, right) in pairs {
            union.clear();
            union.push_str(left);
            union.push_str(right);
            list.push(Merge { pair: (id(left)?, id(right)?), merged: id(&union)? });
        }
        list.shrink_to_fit();
        let hasher = DefaultHashBuilder::default();
        let mut ranks = HashTable::with_capacity(list.len());
        let hash = |&rank: &u32| hasher.hash_one(list[rank as usize].pair);
        for (rank, merge) in (0..).zip(&list) {
            let is_it = |&rank: &u32| list[rank as usize].pair == merge.pair;
            *ranks.entry(hasher.hash_one(merge.pair), is_it, hash).or_insert(rank).get_mut() = rank;
        }
        Ok(Self { list, ranks, hasher })
    }

    /// Returns the rank of the merge of two tokens.
    pub(super) fn rank(&self, left: u32, right: u32) -> Option<u32> {
        let pair = (left, right);
        self.ranks.find(self.hasher.hash_one(pair), |&rank| self.list[rank as usize].pair == pair).copied()
    }

    /// Returns the token of a merge.
    pub(super) fn merged(&self, rank: u32) -> u32 {
        self.list[rank as usize].merged
    }
}
