//! The memory of adapters: their matrices by slot, and partial sums.

use std::sync::Arc;

use octavo_kernels::manifest::Dtype;
use octavo_kernels::params::{
    LORA_OUTPUTS, LORA_ROWS, LORA_TILE_WORDS, LoraPairsParams, LoraParams, LoraPart, Params, expert_tiles, lora_splits,
};
use octavo_ops::{AdapterSource, BackendError, BufferId, Lora, LoraInput, LoraMatrices, Op, Program, SiteId, SiteKind};

use super::most_tiles;
use crate::arena::{Arena, Plan, Region};
use crate::driver::Gpu;
use crate::experts::is_routing;
use crate::failed;
use crate::staged::Staged;
use crate::uploads::bytes_of;
use crate::weights::write_numbers;

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
    /// First column of the output, or of an expert's, and number of columns.
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

/// Places of the tiles of pairs of tokens and experts.
#[derive(Clone, Copy, Debug)]
struct RoutedPlace {
    /// Buffer of the experts of each token.
    routing: BufferId,
    experts: usize,
    /// Number of experts of a token.
    chosen: usize,
    counts: Region,
    tiles: Region,
    rows: Region,
}

impl RoutedPlace {
    /// Takes memory for so many tokens and slots. `None` if adapters change no products of experts by this routing.
    fn new(program: &Program, routing: BufferId, (tokens, slots): (usize, usize), plan: &mut Plan) -> Option<Self> {
        let experts = program.ops.iter().find_map(|op| match op {
            Op::Lora(Lora { site, input: LoraInput::Experts { routing: of, .. }, .. }) if *of == routing => {
                match program.sites[site.0].kind {
                    SiteKind::Experts(experts) => Some(experts),
                    _ => None,
                }
            }
            _ => None,
        })?;
        let chosen = program.buffers[routing.0].cols;
        let tiles = routed_tiles(tokens * chosen, experts * slots);
        let mut words = |count: usize| plan.take((count as u64).saturating_mul(size_of::<u32>() as u64));
        let [counts, rows] = [experts * slots, tokens * chosen].map(&mut words);
        let tiles = words(1 + LORA_TILE_WORDS as usize * tiles);
        Some(Self { routing, experts, chosen, counts, tiles, rows })
    }
}

/// Returns the number of partial sums of `k` inputs in a launch for at most so many tiles.
pub(crate) const fn splits(tiles: u32, k: u32) -> u32 {
    if tiles as usize > FEW_TILES { 1 } else { lora_splits(k) }
}

/// Returns the largest number of tiles of pairs of so many kinds.
pub(crate) fn routed_tiles(pairs: usize, kinds: usize) -> usize {
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX / 2);
    expert_tiles(narrow(pairs), narrow(kinds), LORA_ROWS) as usize
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
    routed: Vec<RoutedPlace>,
    /// What is added to the logits of routers.
    deltas: Region,
    plan: Plan,
}

impl AdapterPlan {
    /// Plans the memory of `slots` adapters of at most a rank, for steps of at most `tokens` tokens.
    pub(crate) fn new(program: &Program, dtype: Dtype, (slots, rank): (usize, usize), tokens: usize) -> Self {
        let (mut slot, mut parts, mut site_parts, mut partial) = (Plan::default(), Vec::new(), Vec::new(), 0);
        let tiles = most_tiles(tokens, slots) as u64;
        for site in (0..program.sites.len()).map(SiteId) {
            site_parts.push(parts.len());
            let (sizes, each) = (program.site_parts(site), program.parts_each(site));
            for (index, (&[columns, k], outputs)) in sizes.iter().zip(program.site_outputs(site)).enumerate() {
                let (first, [a, b]) = (outputs.start, [Region::default(); 2]);
                let mut part = PartPlace { site, index, first, columns, a, b };
                let bytes = |numbers: usize| (numbers as u64).saturating_mul((rank * dtype.bytes()) as u64);
                (part.a, part.b) = (slot.take(bytes(k)), slot.take(bytes(part.stride())));
                parts.push(part);
            }
            let tiles = match program.sites[site.0].kind {
                SiteKind::Embedding => continue,
                SiteKind::Experts(experts) => routed_tiles(tokens * chosen(program, site), experts * slots) as u64,
                SiteKind::Linear | SiteKind::Head | SiteKind::Router => tiles,
            };
            let splits = sizes.first().map_or(1, |[_, k]| lora_splits(*k as u32));
            let sums = tiles.max(tiles.min(FEW_TILES as u64) * u64::from(splits));
            partial = partial.max(sums.saturating_mul((each * rank) as u64 * u64::from(LORA_ROWS)));
        }
        let (mut plan, slot_bytes) = (Plan::default(), slot.bytes());
        let matrices = plan.take(slot_bytes.saturating_mul(slots as u64));
        let described = plan.take((slots * parts.len() * size_of::<LoraPart>()) as u64);
        let partial = plan.take(partial.saturating_mul(size_of::<f32>() as u64));
        let routings = (0..program.buffers.len()).filter(|&buffer| is_routing(program, buffer)).map(BufferId);
        let routed =
            routings.filter_map(|routing| RoutedPlace::new(program, routing, (tokens, slots), &mut plan)).collect();
        let deltas = plan.take((tokens * router_rows(program) * size_of::<f32>()) as u64);
        Self { slots, rank, parts, site_parts, slot_bytes, matrices, described, partial, routed, deltas, plan }
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.plan.bytes()
    }
}

/// Returns the number of experts of a token at a site.
fn chosen(program: &Program, site: SiteId) -> usize {
    let of = |op: &Op| match op {
        Op::Lora(Lora { site: of, input: LoraInput::Experts { routing, .. }, .. }) if *of == site => {
            Some(program.buffers[routing.0].cols)
        }
        _ => None,
    };
    program.ops.iter().find_map(of).unwrap_or(0)
}

/// Returns the largest number of experts of a router that adapters may change.
fn router_rows(program: &Program) -> usize {
    let routers = program.sites.iter().filter(|site| site.kind == SiteKind::Router);
    routers.map(|site| program.weights[site.weight.0].rows).max().unwrap_or(0)
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
        gpu.zero(this.deltas(), this.layout.deltas.bytes)?;
        Ok(this)
    }

    /// Returns the address of what is added to the logits of routers. It is 0 between steps.
    pub(crate) fn deltas(&self) -> u64 {
        self.arena.at(self.layout.deltas)
    }

    fn routed(&self, routing: BufferId) -> Option<&RoutedPlace> {
        self.layout.routed.iter().find(|place| place.routing == routing)
    }

    /// Returns the largest number of tiles of the pairs of so many tokens, and the addresses of the tiles and the pairs.
    pub(crate) fn routed_tiles(&self, routing: BufferId, tokens: usize) -> (u32, u64, u64) {
        let Some(place) = self.routed(routing) else { return (0, 0, 0) };
        let tiles = routed_tiles(tokens * place.chosen, place.experts * self.layout.slots);
        (tiles as u32, self.arena.at(place.tiles), self.arena.at(place.rows))
    }

    /// Returns the parameters of the division of pairs, without what is of a step.
    pub(crate) fn pairs(&self, routing: BufferId) -> Option<LoraPairsParams> {
        let place = self.routed(routing)?;
        Some(LoraPairsParams {
            counts: self.arena.at(place.counts),
            tiles: self.arena.at(place.tiles),
            rows: self.arena.at(place.rows),
            chosen: place.chosen as u32,
            experts: place.experts as u32,
            slots: self.layout.slots as u32,
            ..LoraPairsParams::default()
        })
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
            splits: splits(tiles, params.k),
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

#[cfg(test)]
mod tests {
    use octavo_ops::testing::{TinyExperts, TinyModel};

    use super::*;

    #[test]
    fn a_slot_has_room_for_every_expert() {
        const RANK: usize = 16;
        let model = |count| TinyModel {
            experts: Some(TinyExperts { count, ..TinyExperts::default() }),
            hidden: 64,
            inner: 128,
            ..TinyModel::default()
        };
        let slot = |count: usize| {
            let (program, _) = model(count).build().unwrap();
            let program = program.with_adapters();
            let [one, two] = [1, 2].map(|slots| AdapterPlan::new(&program, Dtype::F16, (slots, RANK), 32));
            assert!(two.bytes() >= one.bytes() + one.slot_bytes);
            one.slot_bytes
        };
        // Gate, up and down, each with A and B of 64 and 128 columns in f16. A router has a row more, within the same region.
        let expert = (3 * RANK * (64 + 128) * 2) as u64;
        let layers = model(5).layers.len() as u64;
        assert_eq!(slot(7) - slot(5), layers * 2 * expert);
    }
}
