//! The division of sequences into blocks.

use std::ops::Range;
use std::sync::Arc;

use super::{ChainKey, TokenHistory, TokenSpan, block_key};
use crate::{EngineConfig, KvCacheSpec, KvKind};

/// Properties of the KV cache that are needed to prepare a sequence.
#[derive(Clone, Debug)]
pub(crate) struct KvLayout {
    /// Number of tokens in a block; unused without groups.
    pub(super) block_size: usize,
    /// Kinds of the KV groups.
    pub(super) kinds: Arc<[KvKind]>,
    /// Maximum number of tokens of a sequence that a step computes.
    pub(super) step: usize,
    /// Whether full blocks are indexed and looked up.
    pub(super) caching: bool,
    /// Parent key of every sequence's first block.
    pub(super) root: ChainKey,
}

impl KvLayout {
    /// Creates the layout of an engine.
    pub(crate) fn for_engine(spec: &KvCacheSpec, config: &EngineConfig) -> Self {
        let layout = Self::new(spec, config.enable_prefix_caching);
        let root = config.prefix_seed.as_deref().map_or(layout.root, ChainKey::root);
        Self { root, step: config.max_num_batched_tokens, ..layout }
    }

    /// Creates a layout for steps of any size.
    pub(crate) fn new(spec: &KvCacheSpec, enable_prefix_caching: bool) -> Self {
        let kinds: Arc<[_]> = spec.groups.iter().map(|group| group.kind).collect();
        Self {
            block_size: spec.block_size.max(1),
            caching: enable_prefix_caching && !kinds.is_empty(),
            kinds,
            step: usize::MAX,
            root: ChainKey::root(block_key::DEFAULT_SEED),
        }
    }

    /// Returns whether prefixes are looked up.
    pub(crate) fn caching(&self) -> bool {
        self.caching
    }

    /// Returns the kinds of the KV groups.
    pub(crate) fn kinds(&self) -> &[KvKind] {
        &self.kinds
    }

    /// Returns whether blocks of a running sequence are passed by windows.
    pub(crate) fn has_windows(&self) -> bool {
        self.kinds.iter().any(|kind| *kind != KvKind::Full)
    }

    /// Returns the group whose blocks stand for all in events: a prefix is found only where it is.
    pub(super) fn told_group(&self) -> u32 {
        self.kinds.iter().position(|kind| *kind == KvKind::Full).unwrap_or(0) as u32
    }

    /// Returns the index of the first block that a token from `position` on sees.
    pub(crate) fn first_block(&self, kind: KvKind, position: usize) -> usize {
        kind.first_seen(position) / self.block_size
    }

    /// Returns the number of blocks that a sequence of `tokens` tokens still needs in a group if its table has `len`
    /// entries, of which it holds `held`.
    pub(super) fn missing(&self, kind: KvKind, tokens: usize, len: usize, held: usize) -> usize {
        let room = kind.most_blocks(self.step, self.block_size).saturating_sub(held);
        self.blocks_for(tokens).saturating_sub(len).min(room)
    }

    /// Returns the number of tokens that the index stores of a block.
    pub(super) fn indexed_tokens(&self) -> usize {
        if self.caching { self.block_size } else { 0 }
    }

    pub(super) fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    pub(super) fn block_tokens<'a>(&self, history: &'a TokenHistory, block: usize) -> TokenSpan<'a> {
        history.span(block * self.block_size..(block + 1) * self.block_size)
    }

    /// Returns the longest prefix, in blocks, that a group can serve of one that ends at `blocks.end`: a continuation sees
    /// none of its blocks that is not `usable`. The blocks before `blocks.start` are.
    pub(super) fn longest(&self, kind: KvKind, blocks: Range<usize>, usable: impl Fn(usize) -> bool) -> usize {
        let Range { start, mut end } = blocks;
        if kind == KvKind::Full {
            return (start..end).find(|&block| !usable(block)).unwrap_or(end);
        }
        // Every prefix that ends after a block which is missing, and before this one, lacks it too.
        loop {
            let first = self.first_block(kind, end * self.block_size).max(start);
            match (first..end).rev().find(|&block| !usable(block)) {
                Some(missing) => end = missing,
                None => return end,
            }
        }
    }
}
