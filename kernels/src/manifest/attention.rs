//! Instances for attention: `QkvPost`, `LatentPost`, `PagedAttention`.

use super::linear::tensor_chips;
use super::{Chip, Chips, Dtype, Instance};
use crate::params::{
    AttentionParams, FusedDecodeParams, KV_BLOCK, LATENT_ROWS, LatentPostParams, MAX_HEAD_SIZE, MAX_LATENT_SIZE,
    PagedDecodeParams, QkvPostParams,
};
use crate::plan::{DecodeTile, PrefillTile};
use crate::sources;

/// Head sizes supported by the kernels of 16-bit types; [`paged_attention`] supports the others.
pub const HEAD_SIZES: [usize; 4] = [64, 96, 128, 256];

/// Head sizes supported by [`paged_prefill`]: also that of the encoders of Qwen3-VL and SigLIP, which never decode.
pub const PREFILL_HEAD_SIZES: [usize; 5] = [64, 72, 96, 128, 256];

/// Sizes of the latent and of a row of the cache supported by [`latent_decode`] and [`latent_prefill`]: those of
/// DeepSeek-V2 and V3.
pub const LATENT_SIZES: [(usize, usize); 1] = [(512, 576)];

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CacheType {
    /// That of activations.
    #[default]
    Activation,
    /// 8-bit floating-point numbers (e4m3), times a scale of the keys and one of the values of a layer.
    E4m3,
}

impl CacheType {
    /// All types.
    pub const ALL: [Self; 2] = [Self::Activation, Self::E4m3];

    /// Returns the size of an element in bytes beside activations of type `dtype`.
    pub const fn bytes(self, dtype: Dtype) -> usize {
        match self {
            Self::Activation => dtype.bytes(),
            Self::E4m3 => 1,
        }
    }

    /// Returns the last argument of a template, and the ending of the instance's name.
    const fn endings(self) -> (&'static str, &'static str) {
        match self {
            Self::Activation => ("", ""),
            Self::E4m3 => (", e4m3", "_e4m3"),
        }
    }
}

/// Element types of activations and of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionTypes {
    /// Type of activations.
    pub dtype: Dtype,
    /// Type of the cache.
    pub cache: CacheType,
}

impl From<Dtype> for AttentionTypes {
    fn from(dtype: Dtype) -> Self {
        Self { dtype, cache: CacheType::Activation }
    }
}

/// Number of keys in a tile of latent attention.
const LATENT_KEYS: usize = 32;

/// Numbers of query heads that a CTA of decode attention processes at once on tensor cores, whose rows are the heads.
const HEAD_TILES: [u32; 2] = [8, 16];

/// Those of chips before sm_80.
const VOLTA_HEAD_TILES: [u32; 4] = [1, 2, 4, 8];

/// A kernel of decode attention, with what its grid depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeKernel {
    /// The kernel itself.
    pub instance: Instance,
    /// What its grid depends on.
    pub tile: DecodeTile,
}

impl DecodeKernel {
    const fn new(instance: Instance, heads: u32, resident: u32) -> Self {
        Self { instance, tile: DecodeTile { heads, resident } }
    }
}

/// Returns the instance for the split of qkv, norm and rotary embedding of q and k, and cache write.
pub fn qkv_post(types: impl Into<AttentionTypes>) -> Instance {
    let AttentionTypes { dtype, cache } = types.into();
    let (argument, ending) = cache.endings();
    let call = format!("qkv_post<{}{argument}>", dtype.c_name());
    let name = format!("qkv_post_{}{ending}", dtype.name());
    // By default the compiler fits all threads of an sm_70 at once, for which it spills, as it does for six CTAs in f32 on an
    // sm_100.
    let resident = if dtype == Dtype::F32 { 5 } else { 8 };
    Instance::new::<QkvPostParams>(sources::QKV_POST, name, call, 128).typed(dtype).resident(resident)
}

/// Returns the instance for what latent attention does before attention itself.
pub fn latent_post(types: impl Into<AttentionTypes>) -> Instance {
    let AttentionTypes { dtype, cache } = types.into();
    let (argument, ending) = cache.endings();
    let call = format!("latent_post<{}{argument}>", dtype.c_name());
    let name = format!("latent_post_{}{ending}", dtype.name());
    Instance::new::<LatentPostParams>(sources::LATENT_POST, name, call, 128).typed(dtype).resident(8)
}

/// Returns the instance for attention of any head size, in decode and prefill, with f32 arithmetic. Heads of more than
/// [`MAX_HEAD_SIZE`] elements are those of latent attention.
pub fn paged_attention(types: impl Into<AttentionTypes>, head_size: usize) -> Instance {
    const THREADS: usize = 128;
    let AttentionTypes { dtype, cache } = types.into();
    let (argument, ending) = cache.endings();
    let largest = if head_size <= MAX_HEAD_SIZE { MAX_HEAD_SIZE } else { MAX_LATENT_SIZE };
    let call = format!("paged_attention<{}, {}{argument}>", dtype.c_name(), largest / THREADS);
    let name = match largest {
        MAX_HEAD_SIZE => format!("paged_attention_{}{ending}", dtype.name()),
        _ => format!("paged_attention_{}_d{largest}{ending}", dtype.name()),
    };
    let instance = Instance::new::<AttentionParams>(sources::ATTENTION_PLAIN, name, call, THREADS as u32).typed(dtype);
    // By default the compiler spills to fit more CTAs of large heads on an sm_70, and on an sm_120 to fit six.
    match (largest, dtype) {
        (_, Dtype::F32) => instance.resident(5),
        (MAX_HEAD_SIZE, _) => instance,
        _ => instance.resident(8),
    }
}

/// Returns the template's arguments and the name's ending for latent attention; `None` if [`paged_attention`] must be
/// used.
fn latent(chip: Chip, types: AttentionTypes, sizes: (usize, usize)) -> Option<(String, String)> {
    let (AttentionTypes { dtype, cache }, (rank, size)) = (types, sizes);
    let (argument, ending) = cache.endings();
    let is_known = dtype != Dtype::F32 && LATENT_SIZES.contains(&sizes) && chip.has_sm80();
    is_known.then(|| {
        (format!("<{}, {rank}, {size}{argument}>", dtype.c_name()), format!("{}_d{size}{ending}", dtype.name()))
    })
}

/// Returns an instance with the shared memory of latent attention: the queries and two tiles of keys in 16-bit elements,
/// in rows with 16 bytes of padding, and the scores of a tile in rows with a padding of 8.
fn with_latent_memory(instance: Instance, size: usize) -> Instance {
    let rows = LATENT_ROWS as usize;
    let shared = (rows + 2 * LATENT_KEYS) * (size + 8) * 2 + rows * (LATENT_KEYS + 8) * 4;
    instance.with_shared(shared).resident(1).on(Chips::FromSm80)
}

/// Returns the number of CTAs of latent attention on a multiprocessor, as many as its shared memory holds: those of data
/// centres from Hopper on have enough for two.
const fn latent_ctas(chip: Chip) -> u32 {
    if matches!(chip.major, 9 | 10) { 2 } else { 1 }
}

/// Returns the kernel for decode of latent attention, with a latent and a row of the cache of these sizes; `None` if
/// [`paged_attention`] must be used.
pub fn latent_decode(chip: Chip, types: impl Into<AttentionTypes>, sizes: (usize, usize)) -> Option<DecodeKernel> {
    let (arguments, ending) = latent(chip, types.into(), sizes)?;
    let (call, name) = (format!("latent_decode{arguments}"), format!("latent_decode_{ending}"));
    let instance = Instance::new::<PagedDecodeParams>(sources::ATTENTION_LATENT, name, call, 128);
    let instance = with_latent_memory(instance, sizes.1);
    Some(DecodeKernel::new(instance, LATENT_ROWS, latent_ctas(chip)))
}

/// Returns the instance for prefill of latent attention; `None` if [`paged_attention`] must be used.
pub fn latent_prefill(chip: Chip, types: impl Into<AttentionTypes>, sizes: (usize, usize)) -> Option<Instance> {
    let (arguments, ending) = latent(chip, types.into(), sizes)?;
    let (call, name) = (format!("latent_prefill{arguments}"), format!("latent_prefill_{ending}"));
    let instance = Instance::new::<AttentionParams>(sources::ATTENTION_LATENT, name, call, 128);
    Some(with_latent_memory(instance, sizes.1))
}

/// Returns the kernel for decode attention with `group` query heads per KV head; `None` if [`paged_attention`] must be used.
/// It processes all query heads of a KV head at once, or as many as the largest tile has.
pub fn paged_decode(
    chip: Chip,
    types: impl Into<AttentionTypes>,
    head_size: usize,
    group: usize,
) -> Option<DecodeKernel> {
    let types = types.into();
    if types.dtype == Dtype::F32 || !chip.has(types.dtype) || !HEAD_SIZES.contains(&head_size) {
        return None;
    }
    if chip.has_sm80() {
        return Some(tensor_decode(chip, types, head_size, tile_of(head_tiles(head_size), group)));
    }
    let tile = tile_of(&VOLTA_HEAD_TILES, group);
    let (argument, ending) = types.cache.endings();
    let call = format!("paged_decode_volta<{head_size}, {tile}{argument}>");
    let name = format!("paged_decode_volta_d{head_size}_g{tile}{ending}");
    let instance = Instance::new::<PagedDecodeParams>(sources::ATTENTION_DECODE_VOLTA, name, call, 128);
    // As many as keep their loads in flight without spilled registers.
    let resident = match tile {
        1 | 2 => 4,
        4 => 3,
        _ => 2,
    };
    let instance = instance.resident(resident).on(Chips::BeforeSm80);
    Some(DecodeKernel::new(instance, tile, resident))
}

/// Returns the kernel that completes the heads of q, k and v before decode attention; `None` if that is a launch of its own. Its tile
/// is that of [`paged_decode`].
pub fn paged_decode_fused(
    chip: Chip,
    types: impl Into<AttentionTypes>,
    head_size: usize,
    group: usize,
) -> Option<DecodeKernel> {
    let types = types.into();
    // Some compilers spill for large heads of a cache in e4m3.
    let is_large = head_size > 128 && types.cache == CacheType::E4m3;
    let kernel = paged_decode(chip, types, head_size, group).filter(|_| chip.has_sm80() && !is_large)?;
    let DecodeKernel { instance, tile } = kernel;
    let call = instance.call.replacen("paged_decode<", "paged_decode_fused<", 1);
    let name = instance.name.replacen("paged_decode_", "paged_decode_fused_", 1);
    let fused = Instance::new::<FusedDecodeParams>(instance.source, name, call, instance.threads);
    let Instance { params, params_bytes, name, call, .. } = fused;
    // Steps of few rows need no more CTAs, for which the compiler would spill.
    let instance = Instance { params, params_bytes, name, call, ..instance }.resident(1);
    let rows = (tile.heads as usize + 2) * (head_size + 8) * types.dtype.bytes();
    let resident = decode_ctas(chip, instance.dynamic_shared + rows, tile.heads).min(2);
    Some(DecodeKernel::new(instance, tile.heads, resident))
}

/// Returns the least of the head tiles that holds a group of query heads, or the largest.
fn tile_of(tiles: &[u32], group: usize) -> u32 {
    *tiles.iter().find(|&&tile| group <= tile as usize).unwrap_or(&tiles[tiles.len() - 1])
}

/// Returns the head tiles of a head size on tensor cores: registers do not hold outputs of 16 large heads.
fn head_tiles(head_size: usize) -> &'static [u32] {
    if head_size > 128 { &HEAD_TILES[..1] } else { &HEAD_TILES }
}

/// Number of bytes of keys and values in a stage of decode attention beyond which a warp's ring has two stages.
const LARGE_STAGE: usize = 5 << 10;

/// Returns the kernel of decode attention on tensor cores with this head tile. Each warp has a ring of stages, which together
/// have as many bytes in flight as the memory needs, and so few that a multiprocessor of a data centre holds three CTAs.
fn tensor_decode(chip: Chip, types: AttentionTypes, head_size: usize, tile: u32) -> DecodeKernel {
    let AttentionTypes { dtype, cache } = types;
    let warps = if head_size > 128 { 2 } else { 4 };
    // A stage has the keys and the values of a block, in rows with 16 bytes of padding.
    let stage = 2 * KV_BLOCK * (head_size * cache.bytes(dtype) + 16);
    let stages = if stage > LARGE_STAGE { 2 } else { 3 };
    let (argument, ending) = cache.endings();
    let call = format!("paged_decode<{}, {head_size}, {tile}, {warps}, {stages}{argument}>", dtype.c_name());
    let name = format!("paged_decode_{}_d{head_size}_g{tile}{ending}", dtype.name());
    let instance = Instance::new::<PagedDecodeParams>(sources::ATTENTION_DECODE, name, call, 32 * warps);
    let shared = warps as usize * stages * stage;
    let instance = instance.with_shared(shared).with_stages(stages).with_stage_keys(KV_BLOCK).on(Chips::FromSm80);
    DecodeKernel::new(instance, tile, decode_ctas(chip, shared, tile))
}

/// Returns the number of CTAs of decode attention on a multiprocessor at once, with so many bytes of shared memory. A CTA has less
/// than a KiB of other memory, and the system takes one.
fn decode_ctas(chip: Chip, shared: usize, head_tile: u32) -> u32 {
    // The registers allow four, or three with 16 heads.
    let by_registers = if head_tile > 8 { 3 } else { 4 };
    (shared_memory(chip) / (shared + (2 << 10))).min(by_registers) as u32
}

/// Returns the shared memory of a multiprocessor in bytes, from sm_80 on.
const fn shared_memory(chip: Chip) -> usize {
    match (chip.major, chip.minor) {
        (8, 0 | 7) => 164 << 10,
        (9 | 10, _) => 228 << 10,
        _ => 100 << 10,
    }
}

/// Number of stages of keys and values of a CTA of prefill attention.
pub(super) const PREFILL_STAGES: usize = 2;

/// Sizes of a CTA of prefill attention.
struct PrefillShape {
    warps: usize,
    /// Number of fragments of a warp, of 16 rows each.
    fragments: usize,
    /// Number of keys of a tile.
    keys: usize,
    /// Number of CTAs of a multiprocessor.
    resident: u32,
}

/// Number of rows of a fragment.
const FRAGMENT_ROWS: usize = 16;

impl PrefillShape {
    /// Returns the sizes for a head size. The chips of data centres multiply so fast that two fragments must share what a
    /// warp loads, and twice as many rows what a CTA copies. The shared memory of all chips holds two CTAs, except for large
    /// heads, whose output fills the registers.
    const fn of(chip: Chip, head_size: usize) -> Self {
        let is_large = head_size > 128;
        // Other chips of data centres have too little shared memory, or their compiler would spill.
        let keys = if chip.major == 9 { 64 } else { 32 };
        match (has_large_tiles(chip), is_large) {
            (true, false) => Self { warps: 4, fragments: 2, keys, resident: 2 },
            (true, true) => Self { warps: 8, fragments: 1, keys, resident: 1 },
            (false, _) => Self { warps: 4, fragments: 1, keys, resident: if is_large { 1 } else { 2 } },
        }
    }

    const fn rows(&self) -> usize {
        self.warps * self.fragments * FRAGMENT_ROWS
    }

    /// Returns the size of shared memory in bytes: two stages of keys and values, or one and the codes of the next, and the queries
    /// if they do not fit into registers. A row is a head of whole instructions and 16 bytes of padding, in 16-bit elements.
    fn shared(&self, head_size: usize, cache: CacheType) -> usize {
        let row = head_size.next_multiple_of(16);
        let queries = if self.fragments * row > 128 { self.rows() } else { 0 };
        let (stages, codes) = match cache {
            CacheType::Activation => (PREFILL_STAGES, 0),
            CacheType::E4m3 => (1, 2 * self.keys * head_size),
        };
        (queries + stages * 2 * self.keys) * (row + 8) * 2 + codes
    }
}

/// Returns whether a chip has large tiles of prefill attention: those of data centres.
const fn has_large_tiles(chip: Chip) -> bool {
    chip.has_sm80() && shared_memory(chip) > 100 << 10
}

/// Returns the tile of prefill attention for layers with these numbers of query heads per KV head.
pub fn prefill_tile(chip: Chip, groups: impl IntoIterator<Item = usize>) -> PrefillTile {
    const VOLTA: PrefillTile = PrefillTile { heads: 1, queries: VOLTA_QUERIES as u32 };
    let rows = PrefillShape::of(chip, HEAD_SIZES[0]).rows() as u32;
    if chip.has_sm75() { PrefillTile::new(rows, groups) } else { VOLTA }
}

/// Number of queries in a tile of Volta.
const VOLTA_QUERIES: usize = 64;

/// Returns the instance for prefill attention on a chip's tensor cores; `None` if [`paged_attention`] must be used.
pub fn paged_prefill(chip: Chip, types: impl Into<AttentionTypes>, head_size: usize) -> Option<Instance> {
    let AttentionTypes { dtype, cache } = types.into();
    let sizes = if cache == CacheType::Activation { &PREFILL_HEAD_SIZES[..] } else { &HEAD_SIZES };
    if dtype == Dtype::F32 || !sizes.contains(&head_size) {
        return None;
    }
    let (argument, ending) = cache.endings();
    if chip.has_sm75() {
        let shape = PrefillShape::of(chip, head_size);
        let PrefillShape { warps, fragments, keys, resident } = shape;
        let call = format!("paged_prefill<{}, {head_size}, {warps}, {fragments}, {keys}{argument}>", dtype.c_name());
        let name = format!("paged_prefill_{}_d{head_size}_{}x{keys}{ending}", dtype.name(), shape.rows());
        let threads = 32 * warps as u32;
        let instance = Instance::new::<AttentionParams>(sources::ATTENTION_PREFILL, name, call, threads);
        let instance =
            instance.with_shared(shape.shared(head_size, cache)).with_stages(PREFILL_STAGES).with_stage_keys(keys);
        let instance = instance.resident(resident).on(tensor_chips(dtype));
        // A multiprocessor of sm_75 has 64 KiB of shared memory.
        return (chip.has_sm80() || instance.dynamic_shared <= 64 << 10).then_some(instance);
    }
    if dtype != Dtype::F16 {
        return None;
    }
    // Shared memory holds queries, a tile of 32 keys and one of values, and each query's weights of the tile, in rows
    // of 32 with a padding of 8.
    let row_bytes = (head_size.next_multiple_of(16) + 8) * 2;
    let shared = (VOLTA_QUERIES + 2 * 32) * row_bytes + VOLTA_QUERIES * (32 + 8) * 2;
    let call = format!("paged_prefill_volta<{head_size}{argument}>");
    let name = format!("paged_prefill_volta_d{head_size}{ending}");
    let instance = Instance::new::<AttentionParams>(sources::ATTENTION_PREFILL_VOLTA, name, call, 128);
    let instance = instance.with_shared(shared).on(Chips::BeforeSm75);
    // By default the compiler spills a little to fit a fourth CTA, for which there is not enough shared memory.
    Some(if head_size == 72 { instance.resident(3) } else { instance })
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    let mut instances = Vec::new();
    let dtypes = Dtype::ALL.into_iter().filter(|&d| chip.has(d));
    for types in dtypes.flat_map(|dtype| CacheType::ALL.map(|cache| AttentionTypes { dtype, cache })) {
        instances.extend([qkv_post(types), latent_post(types)]);
        instances.extend([MAX_HEAD_SIZE, MAX_LATENT_SIZE].map(|size| paged_attention(types, size)));
        for sizes in LATENT_SIZES {
            instances.extend(latent_decode(chip, types, sizes).map(|kernel| kernel.instance));
            instances.extend(latent_prefill(chip, types, sizes));
        }
        for size in HEAD_SIZES {
            let groups = if chip.has_sm80() { head_tiles(size) } else { &VOLTA_HEAD_TILES };
            for kernel in [paged_decode, paged_decode_fused] {
                let kernels = groups.iter().filter_map(|&group| kernel(chip, types, size, group as usize));
                instances.extend(kernels.map(|kernel| kernel.instance));
            }
        }
        instances.extend(PREFILL_HEAD_SIZES.into_iter().filter_map(|size| paged_prefill(chip, types, size)));
    }
    instances
}
