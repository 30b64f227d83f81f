//! The paged KV cache.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use octavo_ops::{BackendError, HeadShape, KvGroup, KvScales, Values};

use crate::ahead::{MapAhead, Step};
use crate::failed;
use crate::memory::{HUGE, Level, Lines, Shared};
use crate::rows::CodedRow;

/// Number of tokens in a block: the number of lanes in which keys are multiplied with a query.
pub(crate) const BLOCK: usize = 16;

/// Number of dimensions in a chunk of a value.
pub(crate) const CHUNK: usize = 16;

/// Element type of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDtype {
    /// bfloat16.
    #[default]
    Bf16,
    /// 8-bit integers with one scale for the key and one for the value of each token and head; about half the memory.
    Int8,
    /// 8-bit floating-point numbers (e4m3) up to 448, times the scales of the checkpoint or 1; half the memory.
    Fp8,
}

impl KvDtype {
    /// Returns the name for display.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8_e4m3",
        }
    }

    /// Returns the number of elements in a word.
    const fn in_a_word(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Int8 | Self::Fp8 => 4,
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Keys and values.
///
/// A block holds all layers of one KV group, so that a short sequence touches little memory, and one that is copied is one
/// range. A layer's part of a block has, head after head, the keys and then the values. In bf16,
/// elements are stored as pairs in a word, the first in the low half. Keys are `[D/2][slot]` in pairs of dimensions, so
/// that one register multiplies sixteen slots with one pair of a query. Values are `[D/16][slot/2][16]` in pairs of
/// slots, so that one weight is multiplied with sixteen dimensions. Both are also the layout of bf16 tiles. Elements of
/// 8 bits have the same layout with four in a word instead of two, so that a row of words becomes two rows of bf16, which
/// represents them exactly. The scales of integer keys and values, `[slot]` each, follow them and are multiplied
/// with scores and weights, not with keys and values. Values that are the first dimensions of the keys are not stored
/// again: attention turns the keys of a block into the layout of values.
#[derive(Default)]
pub(crate) struct KvCache {
    /// Ends before the data is freed.
    ahead: MapAhead,
    /// Number of pages from the first to the last that steps have written.
    used: usize,
    /// Number of them when pages were last to be mapped ahead.
    known: usize,
    blocks: usize,
    /// Layers by KV group.
    groups: Vec<Vec<Layer>>,
    /// Distance of two blocks in words.
    stride: usize,
    data: Lines<u32>,
    /// Whether a step has written a page, by page.
    written: Vec<bool>,
}

/// Number of words in a huge page.
const PAGE: usize = HUGE / size_of::<u32>();

/// Largest number of pages that are mapped before they are used: 256 MiB.
const PAGES_AHEAD: usize = 128;

/// A page of the cache that no step has written.
///
/// The system clears a page when it is first written. If two threads are the first at the same time, which is likely because
/// they write adjacent tokens, both clear it and one has worked in vain.
#[derive(Clone, Copy)]
pub(crate) struct FreshPage {
    data: Shared<u32>,
    word: usize,
}

impl FreshPage {
    /// Lets the system map the page. Its content stays the same.
    ///
    /// # Safety
    /// The cache must not be moved, and no other thread may use the page during the call.
    pub(crate) unsafe fn map(self) {
        // SAFETY: the caller guarantees this; the word is aligned.
        let word = unsafe { AtomicU32::from_ptr(&mut self.data.part(self.word, 1)[0]) };
        // One instruction that reads and writes: after a read, the system would map a page of zeros and later small pages. The
        // compiler must not know that nothing changes, or it would only read.
        word.fetch_or(std::hint::black_box(0), Ordering::Relaxed);
    }
}

/// Location of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    pub(crate) heads: HeadShape,
    pub(crate) dtype: KvDtype,
    /// Scales of e4m3 numbers; 1 for other types.
    scales: KvScales,
    /// Start in a block.
    start: usize,
    /// Distance of two blocks in words.
    stride: usize,
}

impl Layer {
    /// Returns the number of words of a head's keys in a block.
    fn key_words(&self) -> usize {
        self.heads.dim.div_ceil(self.dtype.in_a_word()) * BLOCK
    }

    /// Returns the number of words of a head's values in a block.
    fn value_words(&self) -> usize {
        match self.heads.values {
            Values::Own => self.heads.dim.next_multiple_of(CHUNK) * BLOCK / self.dtype.in_a_word(),
            Values::Prefix(_) => 0,
        }
    }

    /// Returns the number of words of a head's scales in a block.
    fn scale_words(&self) -> usize {
        match self.dtype {
            KvDtype::Bf16 | KvDtype::Fp8 => 0,
            KvDtype::Int8 => 2 * BLOCK,
        }
    }

    fn head_words(&self) -> usize {
        self.key_words() + self.value_words() + self.scale_words()
    }

    fn block_words(&self) -> usize {
        self.heads.kv * self.head_words()
    }

    /// Returns the start of a head's keys in a block. Its values and then their scales follow.
    fn at(&self, block: usize, head: usize) -> usize {
        block * self.stride + self.start + head * self.head_words()
    }
}

/// Returns the layers of a group and the distance of two blocks in words.
///
/// Attention reads the keys of one head block after block. If the distance were a multiple of a large power of two, they
/// would all lie in the same few sets of a cache. It is at most one of the size of these keys. The blocks of a few heads are
/// moved by a thirty-second of their size, which spreads the keys of a context as well and takes less memory.
fn layout(group: &KvGroup, dtype: KvDtype) -> Option<(Vec<Layer>, usize)> {
    let layer = |(index, &heads)| {
        let scales = if dtype == KvDtype::Fp8 { group.scales(index) } else { KvScales::ONE };
        Layer { heads, dtype, scales, start: 0, stride: 0 }
    };
    let mut layers: Vec<_> = group.layers.iter().enumerate().map(layer).collect();
    let mut stride = 0usize;
    for layer in &mut layers {
        layer.start = stride;
        stride = stride.checked_add(layer.block_words())?;
    }
    let keys = layers.iter().map(Layer::key_words).min().unwrap_or(0).max(1).ilog2();
    if stride > 0 && stride.trailing_zeros() > keys {
        stride = stride.checked_add(1 << keys.min(stride.ilog2().saturating_sub(5)))?;
    }
    layers.iter_mut().for_each(|layer| layer.stride = stride);
    Some((layers, stride))
}

/// Returns the size of a block over all layers of a group, in bytes.
pub(crate) fn block_bytes(group: &KvGroup, dtype: KvDtype) -> u64 {
    layout(group, dtype).map_or(u64::MAX, |(_, stride)| (stride * size_of::<u32>()) as u64)
}

impl KvCache {
    /// Allocates zeroed blocks for groups that share them.
    pub(crate) fn new(groups: &[KvGroup], blocks: usize, dtype: KvDtype) -> Result<Self, BackendError> {
        let layouts: Vec<_> = groups.iter().map(|group| layout(group, dtype).unwrap_or_default()).collect();
        let stride = layouts.iter().map(|(_, stride)| *stride).max().unwrap_or(0);
        let data = Lines::zeroed(stride.saturating_mul(blocks), || "the KV cache".into())?;
        let mut groups: Vec<_> = layouts.into_iter().map(|(layers, _)| layers).collect();
        groups.iter_mut().flatten().for_each(|layer| layer.stride = stride);
        let written = vec![false; data.len().div_ceil(PAGE)];
        Ok(Self { blocks, groups, stride, data, written, ..Self::default() })
    }

    /// Returns the number of blocks, including the null block.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Writes access to the layers of each group, for the threads of a region, into `out`, and the pages of a step's slots that no step has
    /// written into `fresh`.
    pub(crate) fn share(&mut self, slots: &[Vec<u32>], out: &mut Vec<Vec<LayerCache>>, fresh: &mut Vec<FreshPage>) {
        let data = Shared::new(&mut self.data);
        out.resize_with(self.groups.len(), Vec::new);
        for (out, layers) in out.iter_mut().zip(&self.groups) {
            out.clear();
            out.extend(layers.iter().map(|&layer| LayerCache { layer, data }));
        }
        fresh.clear();
        for (slots, layers) in slots.iter().zip(&self.groups) {
            let words = layers.last().map_or(0, |layer| layer.start + layer.block_words());
            for block in slots.chunk_by(|a, b| a / BLOCK as u32 == b / BLOCK as u32) {
                let start = block[0] as usize / BLOCK * self.stride;
                for page in start / PAGE..(start + words).div_ceil(PAGE) {
                    if !std::mem::replace(&mut self.written[page], true) {
                        fresh.push(FreshPage { data, word: page * PAGE });
                        self.used = self.used.max(page + 1);
                    }
                }
            }
        }
    }

    /// Notes that a step begins, of whatever program, and that it ends when the result is dropped.
    pub(crate) fn step(&self) -> Step {
        self.ahead.step()
    }

    /// Lets pages be mapped while no step runs: as many as have been in use, after those. Sequences get blocks in ascending order until
    /// each has been in use.
    pub(crate) fn map_ahead(&mut self) {
        if self.used > self.known {
            self.known = self.used;
            let whole = self.data.len() / PAGE;
            self.ahead.map(&self.data, self.used..(self.used + self.used.min(PAGES_AHEAD)).min(whole));
        }
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
}

/// A layer of the cache in a region. Its methods are safe as long as the cache is not moved, each slot is written by
/// one thread, and it is not read before the next barrier.
#[derive(Clone, Copy)]
pub(crate) struct LayerCache {
    layer: Layer,
    data: Shared<u32>,
}

/// A head's keys, values and scales in a block, in their stored layout.
pub(crate) struct HeadBlock<'a> {
    pub(crate) keys: &'a [u32],
    /// Empty if they are a part of the keys.
    pub(crate) values: &'a [u32],
    /// Scales of the keys, then of the values, as the bits of f32; empty if elements are not integers.
    pub(crate) scales: &'a [u32],
}

impl LayerCache {
    pub(crate) fn dtype(&self) -> KvDtype {
        self.layer.dtype
    }

    pub(crate) fn heads(&self) -> HeadShape {
        self.layer.heads
    }

    /// Returns the factors of all keys and of all values.
    pub(crate) fn scales(&self) -> KvScales {
        self.layer.scales
    }

    /// Writes a head's key and value, in bf16, to a slot. The value is empty if it is a part of the key.
    ///
    /// # Safety
    /// The conditions of the type apply. Slots that share a word, which are in one block, must be written by the same
    /// thread.
    pub(crate) unsafe fn write(&self, slot: u32, head: usize, key: &[u16], value: &[u16]) {
        // SAFETY: the caller guarantees this.
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

    /// Writes a head's key and value, in 8 bits, to a slot. The value has no codes if it is a part of the key. The scales
    /// are those of integers.
    ///
    /// # Safety
    /// The conditions of [`LayerCache::write`] apply.
    pub(crate) unsafe fn write_codes(&self, slot: u32, head: usize, key: CodedRow<'_>, value: CodedRow<'_>) {
        // SAFETY: the caller guarantees this.
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
        if self.layer.dtype == KvDtype::Int8 {
            scales[slot] = key.scale.to_bits();
            scales[BLOCK + slot] = value.scale.to_bits();
        }
    }

    /// Prefetches the lines to which a head's key and value are written in a slot: one for each word of the key and for each chunk of
    /// the value.
    pub(crate) fn prefetch(&self, slot: u32, head: usize) {
        let (block, slot) = (slot as usize / BLOCK, slot as usize % BLOCK);
        let keys = self.layer.at(block, head);
        let values = keys + self.layer.key_words();
        for word in (0..self.layer.key_words()).step_by(BLOCK) {
            self.data.prefetch(Level::Written, keys + word, 1);
        }
        let in_a_word = self.layer.dtype.in_a_word();
        for chunk in (0..self.layer.value_words()).step_by(BLOCK / in_a_word * CHUNK) {
            self.data.prefetch(Level::Written, values + chunk + slot / in_a_word * CHUNK, 1);
        }
    }

    /// Prefetches what attention reads first of a head's block: the keys, or all of it if it is widened.
    pub(crate) fn prefetch_block(&self, block: u32, head: usize) {
        let words = match self.layer.dtype {
            KvDtype::Bf16 => self.layer.key_words(),
            KvDtype::Int8 | KvDtype::Fp8 => self.layer.head_words(),
        };
        self.data.prefetch(Level::Second, self.layer.at(block as usize, head), words);
    }

    /// Returns the parts of a head's block that contain a slot, and its index in them.
    ///
    /// # Safety
    /// The conditions of [`LayerCache::write`] apply.
    unsafe fn slot<'a>(&self, slot: u32, head: usize) -> (&'a mut [u32], &'a mut [u32], &'a mut [u32], usize) {
        let (block, slot) = (slot as usize / BLOCK, slot as usize % BLOCK);
        // SAFETY: the caller guarantees this.
        let words = unsafe { self.data.part(self.layer.at(block, head), self.layer.head_words()) };
        let (keys, rest) = words.split_at_mut(self.layer.key_words());
        let (values, scales) = rest.split_at_mut(self.layer.value_words());
        (keys, values, scales, slot)
    }

    /// Returns a head's keys and values in a block.
    ///
    /// # Safety
    /// The conditions of the type apply.
    #[inline]
    pub(crate) unsafe fn read<'a>(&self, block: u32, head: usize) -> HeadBlock<'a> {
        // SAFETY: the caller guarantees this.
        let words = unsafe { self.data.view(self.layer.at(block as usize, head), self.layer.head_words()) };
        let (keys, rest) = words.split_at(self.layer.key_words());
        let (values, scales) = rest.split_at(self.layer.value_words());
        HeadBlock { keys, values, scales }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_fresh_once() {
        let heads = HeadShape { q: 8, kv: 8, dim: 128, values: Values::Own };
        let group = KvGroup { layers: vec![heads; 6], scales: Vec::new(), window: None };
        // A block has 393 216 bytes and a gap of 4096.
        let mut cache = KvCache::new(&[group], 24, KvDtype::Bf16).unwrap();
        assert_eq!(cache.stride * size_of::<u32>(), 397_312);
        let (mut layers, mut fresh) = (Vec::new(), Vec::new());
        let mut pages = |slots: &[u32]| -> Vec<usize> {
            cache.share(&[slots.to_vec()], &mut layers, &mut fresh);
            // SAFETY: the cache is not moved, and nothing else uses it.
            fresh.iter().for_each(|page| unsafe { page.map() });
            fresh.iter().map(|page| page.word / PAGE).collect()
        };
        assert_eq!(pages(&[0, 1, 2, 16, 17]), [0]);
        assert_eq!(pages(&[18]), []);
        // A block that ends in the next page.
        assert_eq!(pages(&[79, 80, 81]), [1]);
        assert_eq!(pages(&[23 * 16 + 15, 160]), [4, 2]);
    }
}
