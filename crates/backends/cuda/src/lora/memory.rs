//! The memory of adapters: their matrices by slot, and partial sums.

use std::sync::Arc;

use octavo_kernels::manifest::Dtype;
use octavo_kernels::params::{LORA_OUTPUTS, LORA_ROWS, LoraParams, LoraPart, Params, lora_splits};
use octavo_ops::{AdapterSource, BackendError, LoraMatrices, Program, SiteId, SiteKind};

use super::{most_tiles, serves};
use crate::arena::{Arena, Plan, Region};
use crate::driver::Gpu;
use crate::failed;
use crate::staged::Staged;
use crate::weights::{bytes_of, write_numbers};

/// Number of words that are copied at once.
const STAGING_WORDS: usize = 1 << 20;

/// Largest number of tiles of a launch that has a partial sum for each piece of the inputs. More tiles are enough work for
/// a GPU without that.
const FEW_TILES: usize = 16;

/// A part of a site's weight, and the places of its matrices in a slot.
#[derive(Clone, Copy, Debug)]
struct PartPlace {
    site: SiteId,
    /// Index among the parts of the site.
    index: usize,
    /// First column of the output and number of columns.
    first: usize,
    columns: usize,
    a: Region,
    b: Region,
}

impl PartPlace {
    /// Returns the number of columns of a row of the transposed B.
    const fn stride(&self) -> usize {
        self.columns.next_multiple_of(LORA_OUTPUTS as usize)
    }
}

/// Layout of the memory of adapters.
#[derive(Clone, Debug)]
pub(crate) struct AdapterPlan {
    /// Number of slots and largest rank.
    slots: usize,
    rank: usize,
    parts: Vec<PartPlace>,
    /// Index of the first part of each site, by [`SiteId`].
    site_parts: Vec<usize>,
    slot_bytes: u64,
    matrices: Region,
    /// Descriptions of the parts, by slot.
    described: Region,
    partial: Region,
    plan: Plan,
}

impl AdapterPlan {
    /// Plans the memory of `slots` adapters of at most a rank, for steps of at most `tokens` tokens.
    pub(crate) fn new(program: &Program, dtype: Dtype, (slots, rank): (usize, usize), tokens: usize) -> Self {
        let (mut slot, mut parts, mut site_parts, mut partial) = (Plan::default(), Vec::new(), Vec::new(), 0);
        let tiles = most_tiles(tokens, slots) as u64;
        for site in (0..program.sites.len()).map(SiteId) {
            site_parts.push(parts.len());
            if !serves(program, site) {
                continue;
            }
            let sizes = program.site_parts(site);
            let mut first = 0;
            for (index, &[columns, k]) in sizes.iter().enumerate() {
                let mut part = PartPlace { site, index, first, columns, a: Region::default(), b: Region::default() };
                let bytes = |numbers: usize| (numbers as u64).saturating_mul((rank * dtype.bytes()) as u64);
                (part.a, part.b) = (slot.take(bytes(k)), slot.take(bytes(part.stride())));
                parts.push(part);
                first += columns;
            }
            if program.sites[site.0].kind != SiteKind::Embedding {
                let splits = sizes.first().map_or(1, |[_, k]| lora_splits(*k as u32));
                let sums = tiles.max(tiles.min(FEW_TILES as u64) * u64::from(splits));
                partial = partial.max(sums.saturating_mul((sizes.len() * rank) as u64 * u64::from(LORA_ROWS)));
            }
        }
        let (mut plan, slot_bytes) = (Plan::default(), slot.bytes());
        let matrices = plan.take(slot_bytes.saturating_mul(slots as u64));
        let described = plan.take((slots * parts.len() * size_of::<LoraPart>()) as u64);
        let partial = plan.take(partial.saturating_mul(size_of::<f32>() as u64));
        Self { slots, rank, parts, site_parts, slot_bytes, matrices, described, partial, plan }
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.plan.bytes()
    }
}

/// Adapters on the device.
pub(crate) struct Adapters {
    staging: [Staged; 2],
    dtype: Dtype,
    layout: AdapterPlan,
    arena: Arena,
}

impl Adapters {
    /// Allocates empty slots.
    pub(crate) fn new(gpu: &Arc<Gpu>, dtype: Dtype, layout: AdapterPlan) -> Result<Self, BackendError> {
        let arena = Arena::new(gpu, layout.bytes(), "adapters")?;
        let staging = [Staged::new(gpu, STAGING_WORDS)?, Staged::new(gpu, STAGING_WORDS)?];
        let mut this = Self { staging, dtype, layout, arena };
        for slot in 0..this.layout.slots {
            this.describe(slot, |_| None)?;
        }
        Ok(this)
    }

    /// Returns the number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.layout.slots
    }

    /// Returns the largest rank.
    pub(crate) fn rank(&self) -> usize {
        self.layout.rank
    }

    /// Returns the parameters of a site with the addresses of its matrices and sums, for at most so many tiles.
    pub(crate) fn fill(&self, params: &LoraParams, site: SiteId, tiles: u32) -> LoraParams {
        let first = self.layout.site_parts[site.0] * size_of::<LoraPart>();
        LoraParams {
            partial: self.arena.at(self.layout.partial),
            matrices: self.arena.at(self.layout.matrices),
            parts_of: self.arena.at(self.layout.described) + first as u64,
            part_stride: self.layout.parts.len() as u32,
            rank: self.layout.rank as u32,
            splits: if tiles as usize > FEW_TILES { 1 } else { lora_splits(params.k) },
            ..*params
        }
    }

    /// Copies an adapter, which fits the program, into a slot. The slot is empty after an error.
    pub(crate) fn set(&mut self, slot: usize, adapter: &dyn AdapterSource) -> Result<(), BackendError> {
        self.describe(slot, |_| None)?;
        let start = self.arena.at(self.layout.matrices) + slot as u64 * self.layout.slot_bytes;
        for at in 0..self.layout.parts.len() {
            let part = self.layout.parts[at];
            let Some(LoraMatrices { rank, a, b, .. }) = adapter.matrices(part.site, part.index) else { continue };
            self.write(start + part.a.offset, a.len(), |index| a[index])?;
            let stride = part.stride();
            let transposed = |index: usize| {
                let (row, column) = (index % stride, index / stride);
                if row < part.columns { b[row * rank + column] } else { 0.0 }
            };
            self.write(start + part.b.offset, rank * stride, transposed)?;
        }
        self.describe(slot, |part| adapter.matrices(part.site, part.index).map(|of| (of.rank, of.scaling)))
    }

    /// Writes the descriptions of a slot's parts. `rank` returns rank and factor of the adapter's matrices for a part.
    fn describe(&mut self, slot: usize, rank: impl Fn(&PartPlace) -> Option<(usize, f32)>) -> Result<(), BackendError> {
        let AdapterPlan { parts, slot_bytes, described, .. } = &self.layout;
        let start = slot as u64 * slot_bytes;
        let words = parts.iter().flat_map(|part| {
            let (rank, scaling) = rank(part).unwrap_or((0, 0.0));
            let described = LoraPart {
                a: start + part.a.offset,
                b: start + part.b.offset,
                rank: rank as u32,
                scaling,
                first: part.first as u32,
                columns: part.columns as u32,
            };
            let words: Vec<u32> =
                described.bytes().as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            words
        });
        let words: Vec<u32> = words.collect();
        let to = self.arena.at(*described) + (slot * parts.len() * size_of::<LoraPart>()) as u64;
        for (chunk, first) in words.chunks(STAGING_WORDS).zip((0..).step_by(STAGING_WORDS)) {
            self.staging.reverse();
            self.staging[0].send(to + (first * size_of::<u32>()) as u64, chunk.len(), |out| {
                out.copy_from_slice(chunk);
                chunk.len()
            })?;
        }
        Ok(())
    }

    /// Copies numbers, of which `number` returns one, in the element type.
    fn write(&mut self, to: u64, count: usize, number: impl Fn(usize) -> f32) -> Result<(), BackendError> {
        let (dtype, size) = (self.dtype, self.dtype.bytes());
        let (most, mut fits) = (STAGING_WORDS * size_of::<u32>() / size, true);
        for first in (0..count).step_by(most) {
            let end = count.min(first + most);
            let bytes = (end - first) * size;
            self.staging.reverse();
            self.staging[0].send(to + (first * size) as u64, bytes.div_ceil(size_of::<u32>()), |out| {
                // The rest of the last word is behind the matrix, in front of the next region.
                fits &= write_numbers((first..end).map(&number), dtype, &mut bytes_of(out)[..bytes]);
                out.len()
            })?;
        }
        match fits {
            true => Ok(()),
            false => Err(failed("the adapter has values beyond the range of float16: use --dtype float32")),
        }
    }
}
