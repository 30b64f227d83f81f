//! The paged KV cache of one group, in bf16.

use octavo_ops::{BackendError, HeadShape, KvGroup};

use crate::failed;
use crate::memory::{Lines, Shared};

/// Tokens of a block: the lanes in which a query meets its keys.
pub(crate) const BLOCK: usize = 16;

/// Dimensions of a chunk of a value.
pub(crate) const CHUNK: usize = 16;

/// Keys and values of the layers of one KV group.
///
/// A layer's blocks follow each other; a block holds, head after head, its keys and then its values. Elements are pairs of
/// bf16 in a word, the first in the low half: keys as `[D/2][slot]`, pairs of dimensions, so that sixteen slots meet one
/// pair of a query in one register; values as `[D/16][slot/2][16]`, pairs of slots, so that a weight meets sixteen
/// dimensions. Both are what tiles of bf16 want, too.
pub(crate) struct KvCache {
    blocks: usize,
    layers: Vec<Layer>,
    data: Lines<u32>,
}

/// Where a layer lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    pub(crate) heads: HeadShape,
    start: usize,
}

/// Words of a head's keys in a block.
fn key_words(dim: usize) -> usize {
    dim.div_ceil(2) * BLOCK
}

/// Words of a head's values in a block.
fn value_words(dim: usize) -> usize {
    dim.div_ceil(CHUNK) * CHUNK * BLOCK / 2
}

impl Layer {
    fn block_words(&self) -> usize {
        self.heads.kv * (key_words(self.heads.dim) + value_words(self.heads.dim))
    }

    /// Where a head's keys in a block begin; its values follow.
    fn at(&self, block: usize, head: usize) -> usize {
        let head_words = key_words(self.heads.dim) + value_words(self.heads.dim);
        self.start + block * self.block_words() + head * head_words
    }
}

/// Bytes of a block over all layers of a group.
pub(crate) fn block_bytes(group: &KvGroup) -> u64 {
    let words = |heads: &HeadShape| Layer { heads: *heads, start: 0 }.block_words();
    group.layers.iter().map(|heads| (words(heads) * size_of::<u32>()) as u64).sum()
}

impl KvCache {
    /// Zeroed blocks for every layer of the group.
    pub(crate) fn new(group: &KvGroup, blocks: usize) -> Result<Self, BackendError> {
        let mut layers = Vec::with_capacity(group.layers.len());
        let mut start = 0usize;
        for &heads in &group.layers {
            let layer = Layer { heads, start };
            start = layer.block_words().checked_mul(blocks).and_then(|n| n.checked_add(start)).unwrap_or(usize::MAX);
            layers.push(layer);
        }
        Ok(Self { blocks, layers, data: Lines::zeroed(start, || "the KV cache".into())? })
    }

    /// Blocks, the null block included.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Access to a layer for the threads of a region.
    pub(crate) fn shared(&mut self, layer: usize) -> LayerCache {
        LayerCache { layer: self.layers[layer], data: Shared::new(&mut self.data) }
    }

    /// Copies whole blocks `(from, to)`, over all layers.
    pub(crate) fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        for &(from, to) in pairs {
            if from.max(to) as usize >= self.blocks {
                return Err(failed(format!("cannot copy block {from} to {to}: there are {} blocks", self.blocks)));
            }
            for layer in &self.layers {
                let [from, to] = [from, to].map(|block| layer.at(block as usize, 0));
                self.data.copy_within(from..from + layer.block_words(), to);
            }
        }
        Ok(())
    }
}

/// A layer of the cache in a region. Its methods are safe as long as the cache stays where it is, and each slot is written
/// by one thread, and not read before the next barrier.
#[derive(Clone, Copy)]
pub(crate) struct LayerCache {
    layer: Layer,
    data: Shared<u32>,
}

impl LayerCache {
    /// Writes a head's key and value, in bf16, to a slot.
    ///
    /// # Safety
    /// As for the type. Slots that share a word must be written by the same thread: [`LayerCache::same_word`].
    pub(crate) unsafe fn write(&self, slot: u32, head: usize, key: &[u16], value: &[u16]) {
        let dim = self.layer.heads.dim;
        let (block, slot) = (slot as usize / BLOCK, slot as usize % BLOCK);
        let at = self.layer.at(block, head);
        // SAFETY: as the caller promises.
        let keys = unsafe { self.data.part(at, key_words(dim)) };
        for (pair, key) in key.chunks(2).enumerate() {
            let high = key.get(1).copied().unwrap_or(0);
            keys[pair * BLOCK + slot] = u32::from(key[0]) | u32::from(high) << 16;
        }
        // SAFETY: as the caller promises.
        let values = unsafe { self.data.part(at + key_words(dim), value_words(dim)) };
        let (shift, keep) = if slot.is_multiple_of(2) { (0, 0xffff_0000) } else { (16, 0xffff) };
        for (d, &value) in value.iter().enumerate() {
            let word = &mut values[(d / CHUNK * (BLOCK / 2) + slot / 2) * CHUNK + d % CHUNK];
            *word = *word & keep | u32::from(value) << shift;
        }
    }

    /// A head's keys and values in a block.
    ///
    /// # Safety
    /// As for the type.
    pub(crate) unsafe fn read<'a>(&self, block: u32, head: usize) -> (&'a [u32], &'a [u32]) {
        let dim = self.layer.heads.dim;
        let at = self.layer.at(block as usize, head);
        // SAFETY: as the caller promises.
        unsafe { (self.data.view(at, key_words(dim)), self.data.view(at + key_words(dim), value_words(dim))) }
    }
}
