//! The paged KV cache.

use std::alloc::{Layout, alloc_zeroed};

use octavo_ops::{BackendError, HeadShape, KvGroup, Values};

use crate::failed;

/// Keys and values in f32.
///
/// A block holds the layers of one KV group, one after the other: all keys of a layer and then all its values, if these are
/// no part of the keys. Both are `[Hkv, block_size, D]`, so that the part of one head is contiguous.
#[derive(Default)]
pub(crate) struct KvCache {
    block_size: usize,
    blocks: usize,
    /// Layers by KV group.
    groups: Vec<Vec<Layer>>,
    /// Distance of two blocks, which is the size of the largest group's.
    stride: usize,
    data: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Layer {
    heads: HeadShape,
    /// Start in a block.
    start: usize,
}

/// The key half or the value half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Key,
    Value,
}

/// A KV group, and a layer in it.
pub(crate) type Place = (usize, usize);

impl KvCache {
    /// Allocates zeroed blocks for groups that share them.
    pub(crate) fn new(groups: &[KvGroup], block_size: usize, blocks: usize) -> Result<Self, BackendError> {
        let stride = groups.iter().map(|group| group.elements_per_token() * block_size).max().unwrap_or(0);
        let data = zeroed(stride.saturating_mul(blocks), "the KV cache")?;
        let layers = |group: &KvGroup| {
            let mut start = 0;
            let layers = group.layers.iter().map(|&heads| {
                let layer = Layer { heads, start };
                start += block_size * heads.cache_cols();
                layer
            });
            layers.collect()
        };
        Ok(Self { block_size, blocks, groups: groups.iter().map(layers).collect(), stride, data })
    }

    /// Returns the number of tokens in a block.
    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns the number of blocks, including the null block.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Writes a token's keys or values `[Hkv, D]` to a slot.
    pub(crate) fn write(&mut self, place: Place, half: Half, slot: u32, row: &[f32]) {
        let dim = self.groups[place.0][place.1].heads.dim;
        let (block, offset) = (slot as usize / self.block_size, slot as usize % self.block_size);
        for (head, elements) in row.chunks_exact(dim).enumerate() {
            let at = self.index(place, half, block, head) + offset * dim;
            self.data[at..at + dim].copy_from_slice(elements);
        }
    }

    /// Returns the part of one head in one block: `[block_size, D]`. Values that are the first elements of the keys are
    /// returned with the rest of the keys.
    pub(crate) fn read(&self, place: Place, half: Half, block: u32, head: usize) -> &[f32] {
        let at = self.index(place, half, block as usize, head);
        &self.data[at..at + self.block_size * self.groups[place.0][place.1].heads.dim]
    }

    /// Copies whole blocks `(from, to)`.
    pub(crate) fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        for &(from, to) in pairs {
            if from.max(to) as usize >= self.blocks {
                return Err(failed(format!("cannot copy block {from} to {to}: there are {} blocks", self.blocks)));
            }
            let [from, to] = [from, to].map(|block| block as usize * self.stride);
            self.data.copy_within(from..from + self.stride, to);
        }
        Ok(())
    }

    fn index(&self, (group, layer): Place, half: Half, block: usize, head: usize) -> usize {
        let Layer { heads, start } = self.groups[group][layer];
        let is_key = half == Half::Key || heads.values != Values::Own;
        let before = if is_key { head } else { heads.kv + head };
        block * self.stride + start + before * self.block_size * heads.dim
    }
}

/// Allocates zeros that the system maps on first use. Returns an error instead of aborting if there is not enough
/// memory.
pub(crate) fn zeroed(elements: usize, what: &str) -> Result<Vec<f32>, BackendError> {
    let out_of_memory = || BackendError::OutOfMemory {
        what: what.into(),
        needed: (elements as u64).saturating_mul(size_of::<f32>() as u64),
    };
    let layout = Layout::array::<f32>(elements).map_err(|_| out_of_memory())?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout's size is not zero.
    let pointer = unsafe { alloc_zeroed(layout) }.cast::<f32>();
    if pointer.is_null() {
        return Err(out_of_memory());
    }
    // SAFETY: the global allocator returned the pointer for the layout of `elements` f32; all-zero bytes are the f32
    // 0.0.
    Ok(unsafe { Vec::from_raw_parts(pointer, elements, elements) })
}
