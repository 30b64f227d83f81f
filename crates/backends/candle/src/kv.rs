//! The paged KV cache of one group.

use std::alloc::{Layout, alloc_zeroed};

use octavo_ops::{BackendError, HeadShape, KvGroup, Values};

use crate::failed;

/// Keys and values of the layers of one KV group, in f32.
///
/// One array holds, layer after layer, all key blocks and then all value blocks, if values are no part of the keys. A
/// block is `[Hkv, block_size, D]`, so that the part of one head is contiguous.
pub(crate) struct KvCache {
    block_size: usize,
    blocks: usize,
    layers: Vec<Layer>,
    data: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Layer {
    heads: HeadShape,
    /// Index of the layer's first key. Its values follow all its keys.
    start: usize,
}

/// The key half or the value half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Key,
    Value,
}

impl KvCache {
    /// Allocates zeroed blocks for every layer of the group.
    pub(crate) fn new(group: &KvGroup, block_size: usize, blocks: usize) -> Result<Self, BackendError> {
        let elements = group.elements_per_token().checked_mul(block_size).and_then(|n| n.checked_mul(blocks));
        let data = zeroed(elements.unwrap_or(usize::MAX), "the KV cache")?;
        let mut start = 0;
        let mut layers = Vec::with_capacity(group.layers.len());
        for &heads in &group.layers {
            layers.push(Layer { heads, start });
            start += blocks * block_size * heads.cache_cols();
        }
        Ok(Self { block_size, blocks, layers, data })
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
    pub(crate) fn write(&mut self, layer: usize, half: Half, slot: u32, row: &[f32]) {
        let dim = self.layers[layer].heads.dim;
        let (block, offset) = (slot as usize / self.block_size, slot as usize % self.block_size);
        for (head, elements) in row.chunks_exact(dim).enumerate() {
            let at = self.index(layer, half, block, head) + offset * dim;
            self.data[at..at + dim].copy_from_slice(elements);
        }
    }

    /// Returns the part of one head in one block: `[block_size, D]`. Values that are the first elements of the keys are
    /// returned with the rest of the keys.
    pub(crate) fn read(&self, layer: usize, half: Half, block: u32, head: usize) -> &[f32] {
        let at = self.index(layer, half, block as usize, head);
        &self.data[at..at + self.block_size * self.layers[layer].heads.dim]
    }

    /// Copies whole blocks `(from, to)` in all layers.
    pub(crate) fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        for &(from, to) in pairs {
            if from.max(to) as usize >= self.blocks {
                return Err(failed(format!("cannot copy block {from} to {to}: there are {} blocks", self.blocks)));
            }
            for layer in 0..self.layers.len() {
                let size = self.block_size * self.layers[layer].heads.kv_cols();
                for half in self.halves(layer) {
                    let [from, to] = [from, to].map(|block| self.index(layer, *half, block as usize, 0));
                    self.data.copy_within(from..from + size, to);
                }
            }
        }
        Ok(())
    }

    /// Returns the halves that a layer has.
    fn halves(&self, layer: usize) -> &'static [Half] {
        match self.layers[layer].heads.values {
            Values::Own => &[Half::Key, Half::Value],
            Values::Prefix(_) => &[Half::Key],
        }
    }

    fn index(&self, layer: usize, half: Half, block: usize, head: usize) -> usize {
        let Layer { heads, start } = self.layers[layer];
        let is_key = half == Half::Key || heads.values != Values::Own;
        let block = if is_key { block } else { self.blocks + block };
        start + (block * heads.kv + head) * self.block_size * heads.dim
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
