//! The paged KV cache of one group.

use std::fmt;

use octavo_ops::{BackendError, HeadShape, KvGroup};

use crate::failed;
use crate::memory::{Lines, Shared};
use crate::rows::CodedRow;

/// Tokens of a block: the lanes in which a query meets its keys.
pub(crate) const BLOCK: usize = 16;

/// Dimensions of a chunk of a value.
pub(crate) const CHUNK: usize = 16;

/// What the elements of the cache are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDtype {
    /// bfloat16.
    #[default]
    Bf16,
    /// Integers of 8 bits, with a scale for the key and one for the value of each token and head: about half the memory.
    Int8,
}

impl KvDtype {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::Int8 => "int8",
        }
    }

    /// Elements in a word.
    const fn in_a_word(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Int8 => 4,
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Keys and values of the layers of one KV group.
///
/// A layer's blocks follow each other; a block holds, head after head, its keys and then its values. In bf16 elements are
/// pairs in a word, the first in the low half: keys as `[D/2][slot]`, pairs of dimensions, so that sixteen slots meet one
/// pair of a query in one register; values as `[D/16][slot/2][16]`, pairs of slots, so that a weight meets sixteen
/// dimensions. Both are what tiles of bf16 want, too. Integers lie in the same way, four in a word for two, so that a row of
/// words becomes two rows of bf16, in which they are exact; the scales of the keys and of the values, `[slot]` each, follow
/// them, and are multiplied with scores and weights, not with keys and values.
pub(crate) struct KvCache {
    blocks: usize,
    layers: Vec<Layer>,
    data: Lines<u32>,
}

/// Where a layer lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    pub(crate) heads: HeadShape,
    pub(crate) dtype: KvDtype,
    start: usize,
}

impl Layer {
    /// Words of a head's keys in a block.
    fn key_words(&self) -> usize {
        self.heads.dim.div_ceil(self.dtype.in_a_word()) * BLOCK
    }

    /// Words of a head's values in a block.
    fn value_words(&self) -> usize {
        self.heads.dim.next_multiple_of(CHUNK) * BLOCK / self.dtype.in_a_word()
    }

    /// Words of a head's scales in a block.
    fn scale_words(&self) -> usize {
        match self.dtype {
            KvDtype::Bf16 => 0,
            KvDtype::Int8 => 2 * BLOCK,
        }
    }

    fn head_words(&self) -> usize {
        self.key_words() + self.value_words() + self.scale_words()
    }

    fn block_words(&self) -> usize {
        self.heads.kv * self.head_words()
    }

    /// Where a head's keys in a block begin; its values follow, and then their scales.
    fn at(&self, block: usize, head: usize) -> usize {
        self.start + block * self.block_words() + head * self.head_words()
    }
}

/// Bytes of a block over all layers of a group.
pub(crate) fn block_bytes(group: &KvGroup, dtype: KvDtype) -> u64 {
    let words = |heads: &HeadShape| Layer { heads: *heads, dtype, start: 0 }.block_words();
    group.layers.iter().map(|heads| (words(heads) * size_of::<u32>()) as u64).sum()
}

impl KvCache {
    /// Zeroed blocks for every layer of the group.
    pub(crate) fn new(group: &KvGroup, blocks: usize, dtype: KvDtype) -> Result<Self, BackendError> {
        let mut layers = Vec::with_capacity(group.layers.len());
        let mut start = 0usize;
        for &heads in &group.layers {
            let layer = Layer { heads, dtype, start };
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

/// A head's keys, values and scales in a block, as they lie.
pub(crate) struct HeadBlock<'a> {
    pub(crate) keys: &'a [u32],
    pub(crate) values: &'a [u32],
    /// Of the keys, then of the values; none in bf16. The bits of f32.
    pub(crate) scales: &'a [u32],
}

impl LayerCache {
    pub(crate) fn dtype(&self) -> KvDtype {
        self.layer.dtype
    }

    /// Writes a head's key and value, in bf16, to a slot.
    ///
    /// # Safety
    /// As for the type. Slots that share a word, which are of one block, must be written by the same thread.
    pub(crate) unsafe fn write(&self, slot: u32, head: usize, key: &[u16], value: &[u16]) {
        // SAFETY: as the caller promises.
        let (keys, values, _, slot) = unsafe { self.slot(slot, head) };
        for (pair, key) in key.chunks(2).enumerate() {
            let high = key.get(1).copied().unwrap_or(0);
            keys[pair * BLOCK + slot] = u32::from(key[0]) | u32::from(high) << 16;
        }
        let (shift, keep) = if slot.is_multiple_of(2) { (0, 0xffff_0000) } else { (16, 0xffff) };
        for (d, &value) in value.iter().enumerate() {
            let word = &mut values[(d / CHUNK * (BLOCK / 2) + slot / 2) * CHUNK + d % CHUNK];
            *word = *word & keep | u32::from(value) << shift;
        }
    }

    /// The same in integers.
    ///
    /// # Safety
    /// As for [`LayerCache::write`].
    pub(crate) unsafe fn write_codes(&self, slot: u32, head: usize, key: CodedRow<'_>, value: CodedRow<'_>) {
        // SAFETY: as the caller promises.
        let (keys, values, scales, slot) = unsafe { self.slot(slot, head) };
        for (quad, key) in key.codes.chunks(4).enumerate() {
            let bytes = std::array::from_fn(|i| key.get(i).copied().unwrap_or(0) as u8);
            keys[quad * BLOCK + slot] = u32::from_le_bytes(bytes);
        }
        let shift = slot % 4 * 8;
        for (d, &code) in value.codes.iter().enumerate() {
            let word = &mut values[(d / CHUNK * (BLOCK / 4) + slot / 4) * CHUNK + d % CHUNK];
            *word = *word & !(0xff << shift) | u32::from(code as u8) << shift;
        }
        scales[slot] = key.scale.to_bits();
        scales[BLOCK + slot] = value.scale.to_bits();
    }

    /// The parts of a head's block that a slot lies in, and where in them.
    ///
    /// # Safety
    /// As for [`LayerCache::write`].
    unsafe fn slot<'a>(&self, slot: u32, head: usize) -> (&'a mut [u32], &'a mut [u32], &'a mut [u32], usize) {
        let (block, slot) = (slot as usize / BLOCK, slot as usize % BLOCK);
        // SAFETY: as the caller promises.
        let words = unsafe { self.data.part(self.layer.at(block, head), self.layer.head_words()) };
        let (keys, rest) = words.split_at_mut(self.layer.key_words());
        let (values, scales) = rest.split_at_mut(self.layer.value_words());
        (keys, values, scales, slot)
    }

    /// A head's keys and values in a block.
    ///
    /// # Safety
    /// As for the type.
    pub(crate) unsafe fn read<'a>(&self, block: u32, head: usize) -> HeadBlock<'a> {
        // SAFETY: as the caller promises.
        let words = unsafe { self.data.view(self.layer.at(block as usize, head), self.layer.head_words()) };
        let (keys, rest) = words.split_at(self.layer.key_words());
        let (values, scales) = rest.split_at(self.layer.value_words());
        HeadBlock { keys, values, scales }
    }
}
