//! Conversion of weights from a checkpoint to panels.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};

use half::{bf16, f16};
use octavo_ops::{BackendError, StorageType, TensorData, Weight, WeightPart, WeightSource};

use super::blocks::{GroupScale, group, half_at, nibbles, pair, q2k, to_q8};
use super::layout::{Layout, Numbers, PanelKind};
use super::{Arena, Matrix, PANEL, Part, WeightDtype, kept_as, short};
use crate::memory::Shared;
use crate::pool::Pool;
use crate::rows::GROUP;

/// Number of elements of a super-block, the largest block.
const SUPER: usize = 256;

/// Where weights are loaded: once, or on each NUMA node by its own threads.
pub(crate) struct Target<'p> {
    pub(crate) pool: &'p mut Pool,
    /// Memory of each copy: one, or one for each node.
    pub(crate) arenas: Vec<Arena>,
    pub(crate) dtype: WeightDtype,
    /// Whether weights in bf16 are kept in twelve bits, if nothing is lost.
    pub(crate) short: bool,
}

/// Repacks the parts of a weight on all threads. Returns its copies. `progress` is called with the number of bytes read
/// since the last call.
pub(crate) fn load(
    weight: &Weight,
    target: &mut Target<'_>,
    source: &dyn WeightSource,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Matrix>, BackendError> {
    let mut copies: Vec<_> = target.arenas.iter().map(|_| Matrix { parts: Vec::new() }).collect();
    let mut first = 0;
    for part in &weight.parts {
        let kept = kept_as(part.storage, target.dtype);
        let plain = Layout::new(kept, weight.cols);
        let short = if target.short && kept == StorageType::BF16 { Layout::short(weight.cols) } else { None };
        let mut filled = rooms(weight, part, &mut target.arenas, short.or(plain), first)?;
        let data = part.read(weight.cols, source)?;
        if !repack(&mut filled, weight.cols, &data, target.pool) {
            target.arenas.iter_mut().zip(filled).for_each(|(arena, part)| arena.release(part.data));
            filled = rooms(weight, part, &mut target.arenas, plain, first)?;
            repack(&mut filled, weight.cols, &data, target.pool);
        }
        copies.iter_mut().zip(filled).for_each(|(copy, part)| copy.parts.push(part));
        first += part.rows;
        progress(data.bytes.len());
    }
    Ok(copies)
}

/// Reads the parts of a weight in order as numbers: norms, biases and routers.
pub(crate) fn load_vector(
    weight: &Weight,
    source: &dyn WeightSource,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<f32>, BackendError> {
    let mut values = Vec::new();
    for part in &weight.parts {
        let data = part.read(weight.cols, source)?;
        let cols = part.rows * weight.cols;
        let start = values.len();
        values.resize(start + cols, 0.0);
        read_row(part.storage, &data.bytes, &mut values[start..]);
        progress(data.bytes.len());
    }
    Ok(values)
}

/// Repacks a weight as F32: a router, whose logits must not be rounded.
pub(crate) fn load_exactly(
    weight: &Weight,
    target: &mut Target<'_>,
    source: &dyn WeightSource,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Matrix>, BackendError> {
    let (storage, rows) = (StorageType::F32, weight.rows);
    let whole = WeightPart { tensor: weight.name.clone(), rows, storage, slab: None };
    let mut parts = rooms(weight, &whole, &mut target.arenas, Layout::new(storage, weight.cols), 0)?;
    let values = load_vector(weight, source, progress)?;
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let data = TensorData { storage, shape: vec![rows, weight.cols], bytes: Cow::Owned(bytes) };
    repack(&mut parts, weight.cols, &data, target.pool);
    Ok(parts.into_iter().map(|part| Matrix { parts: vec![part] }).collect())
}

/// Repacks the weights of `count` experts, each as a matrix. Their parts are those of the weight, in order. Returns the
/// copies of all.
pub(crate) fn load_experts(
    weight: &Weight,
    count: usize,
    target: &mut Target<'_>,
    source: &dyn WeightSource,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Vec<Matrix>>, BackendError> {
    let each = weight.parts.len() / count.max(1);
    let expert = |parts: &[WeightPart]| Weight {
        name: weight.name.clone(),
        rows: parts.iter().map(|part| part.rows).sum(),
        cols: weight.cols,
        parts: parts.to_vec(),
    };
    let mut copies: Vec<_> = target.arenas.iter().map(|_| Vec::with_capacity(count)).collect();
    for parts in weight.parts.chunks(each.max(1)) {
        let matrices = load(&expert(parts), target, source, progress)?;
        copies.iter_mut().zip(matrices).for_each(|(copy, matrix)| copy.push(matrix));
    }
    Ok(copies)
}

/// Returns the size of a part in memory in bytes; `None` if it is too large a number.
fn size(part: &WeightPart, layout: Layout) -> Option<usize> {
    part.rows.div_ceil(PANEL).checked_mul(layout.bytes)
}

/// Returns the largest size of a weight in memory in bytes.
pub(crate) fn bytes_of(weight: &Weight, dtype: WeightDtype) -> u64 {
    let size = |part: &WeightPart| {
        let layout = Layout::new(kept_as(part.storage, dtype), weight.cols);
        layout.and_then(|layout| size(part, layout)).map_or(u64::MAX, |bytes| bytes as u64)
    };
    weight.parts.iter().map(size).fold(0, u64::saturating_add)
}

/// Allocates the copies of a part, as zeros. This happens before the checkpoint is read, so that a part that is too large, or has no
/// layout for that reason, fails immediately.
fn rooms(
    weight: &Weight,
    part: &WeightPart,
    arenas: &mut [Arena],
    layout: Option<Layout>,
    first: usize,
) -> Result<Vec<Part>, BackendError> {
    let what = || format!("weight '{}'", weight.name);
    let Some((layout, bytes)) = layout.and_then(|layout| Some((layout, size(part, layout)?))) else {
        return Err(BackendError::OutOfMemory { what: what(), needed: u64::MAX });
    };
    let room = |arena: &mut Arena| Ok(Part { first, rows: part.rows, layout, data: arena.zeroed(bytes, what)? });
    arenas.iter_mut().map(room).collect()
}

/// Writes the data of a part into each of its copies. The system places memory near the thread that writes to it first,
/// so the threads of a node write the copy that they will read. Returns whether the layout can represent the data.
fn repack(copies: &mut [Part], cols: usize, data: &TensorData<'_>, pool: &mut Pool) -> bool {
    let Some(&Part { rows, layout, .. }) = copies.first() else { return true };
    let row_bytes = data.storage.bytes_for(cols).unwrap_or_default();
    let panels = rows.div_ceil(PANEL);
    let outs: Vec<Shared<u8>> = copies.iter_mut().map(|part| Shared::new(&mut part.data)).collect();
    let fits = AtomicBool::new(true);
    pool.run(&|worker| {
        let mut scratch = Scratch { values: vec![0.0; cols], bf16: Vec::new() };
        let mut put = |out: &Shared<u8>, panel: usize| {
            // SAFETY: every panel of a copy is written by the one thread that took it.
            let out = unsafe { out.part(panel * layout.bytes, layout.bytes) };
            let rows = panel * PANEL..((panel + 1) * PANEL).min(rows);
            let bytes = &data.bytes[rows.start * row_bytes..rows.end * row_bytes];
            if !put_rows(&layout, data.storage, out, bytes, &mut scratch) {
                fits.store(false, Ordering::Relaxed);
            }
        };
        match &outs[..] {
            [out] => worker.share(panels, |panel| put(out, panel)),
            outs => worker.share_on_each_node(panels, |panel| put(&outs[worker.node()], panel)),
        }
    });
    fits.into_inner()
}

/// Scratch memory of a thread.
struct Scratch {
    /// The numbers of a row.
    values: Vec<f32>,
    /// A panel in bf16.
    bf16: Vec<u8>,
}

/// Writes up to sixteen rows of a checkpoint, contiguous in `bytes`, into their panel. Returns whether the layout can represent them.
fn put_rows(layout: &Layout, storage: StorageType, panel: &mut [u8], bytes: &[u8], scratch: &mut Scratch) -> bool {
    let Scratch { values, bf16 } = scratch;
    let cols = values.len();
    let row_bytes = storage.bytes_for(cols).unwrap_or_default();
    if row_bytes == 0 {
        return true;
    }
    match layout.kind {
        PanelKind::F32 => put_plain::<4>(panel, &floats(layout.kind, storage, bytes), 4 * cols),
        PanelKind::F16 => put_plain::<2>(panel, &floats(layout.kind, storage, bytes), 2 * cols),
        PanelKind::Bf16 => put_bf16(panel, &floats(layout.kind, storage, bytes), cols),
        PanelKind::Short => {
            bf16.clear();
            bf16.resize(layout.cols * PANEL * 2, 0);
            put_bf16(bf16, &floats(layout.kind, storage, bytes), cols);
            return short::pack(layout, bf16, panel);
        }
        PanelKind::Quant(..) => {
            for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
                put_groups(layout, storage, panel, row, bytes, values);
            }
        }
        PanelKind::Packed(numbers) => {
            for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
                put_numbers(layout, numbers, panel, row, bytes);
            }
        }
    }
    true
}

/// Writes rows in bf16 into a panel. Elements are stored in pairs; the last element of an odd row is half a pair.
fn put_bf16(panel: &mut [u8], bytes: &[u8], cols: usize) {
    put_plain::<4>(panel, bytes, 2 * cols);
    for (row, bytes) in bytes.chunks_exact(2 * cols).enumerate() {
        if let (pairs, [low, high]) = bytes.as_chunks::<4>() {
            panel[(pairs.len() * PANEL + row) * 4..][..2].copy_from_slice(&[*low, *high]);
        }
    }
}

/// Writes a row of packed numbers into its panel.
fn put_numbers(layout: &Layout, numbers: Numbers, panel: &mut [u8], row: usize, bytes: &[u8]) {
    match numbers {
        Numbers::F8 => {
            for (index, [a, b, c, d, codes @ ..]) in bytes.as_chunks::<36>().0.iter().enumerate() {
                let (scale, codes) = raised(f32::from_le_bytes([*a, *b, *c, *d]), *codes);
                layout.put_numbers(panel, row, index, scale.to_le_bytes(), &codes);
            }
        }
        Numbers::Nf4 | Numbers::Fp4 => {
            for (index, [a, b, c, d, codes @ ..]) in bytes.as_chunks::<36>().0.iter().enumerate() {
                for (half, codes) in codes.chunks_exact(GROUP / 2).enumerate() {
                    layout.put_numbers(panel, row, 2 * index + half, [*a, *b, *c, *d], &nibbles(codes));
                }
            }
        }
    }
}

/// Doubles e4m3 numbers as often as all remain finite, and halves their scale as often. Both are exact.
fn raised(mut scale: f32, mut codes: [u8; GROUP]) -> (f32, [u8; GROUP]) {
    const SIGN: u8 = 0x80;
    const LARGEST: u8 = 0x7e;
    // A mantissa without an exponent grows into one.
    let doubled = |code: u8| if code < 8 { 2 * code } else { code + 8 };
    let mut largest = codes.iter().fold(0, |largest: u8, code| largest.max(code & !SIGN));
    while largest > 0 && doubled(largest) <= LARGEST {
        largest = doubled(largest);
        codes = codes.map(|code| code & SIGN | doubled(code & !SIGN));
        scale *= 0.5;
    }
    (scale, codes)
}

/// Returns floating-point numbers in the type of `kind`, rounded to nearest.
fn floats(kind: PanelKind, storage: StorageType, bytes: &[u8]) -> Cow<'_, [u8]> {
    if let (StorageType::F32, PanelKind::F32)
    | (StorageType::F16, PanelKind::F16)
    | (StorageType::BF16, PanelKind::Bf16 | PanelKind::Short) = (storage, kind)
    {
        return Cow::Borrowed(bytes);
    }
    let mut values = vec![0.0; bytes.len() / storage.block_bytes() * storage.block_elements()];
    read_row(storage, bytes, &mut values);
    let values = values.into_iter();
    Cow::Owned(match kind {
        PanelKind::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        PanelKind::Bf16 | PanelKind::Short => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        PanelKind::F32 | PanelKind::Quant(..) | PanelKind::Packed(_) => values.flat_map(f32::to_le_bytes).collect(),
    })
}

/// Writes a row of integers into its panel.
fn put_groups(layout: &Layout, storage: StorageType, panel: &mut [u8], row: usize, bytes: &[u8], values: &mut [f32]) {
    match storage {
        StorageType::Q2K => {
            read_row(storage, bytes, values);
            for (index, group) in values.as_chunks().0.iter().enumerate() {
                layout.put(panel, row, index, &to_q8(group));
            }
        }
        // The codes of the most common formats are already in the panel's order and are copied.
        StorageType::Q4_0 => {
            put_stored::<18, 16>(layout, panel, row, bytes, |block| GroupScale::One(half_at(block, 0)))
        }
        StorageType::Q4_1 => {
            put_stored::<20, 16>(layout, panel, row, bytes, |block| {
                GroupScale::Two(half_at(block, 0), half_at(block, 2))
            });
        }
        StorageType::Mxfp4 => put_stored::<17, 16>(layout, panel, row, bytes, |block| GroupScale::Power(block[0])),
        StorageType::Nvfp4 => put_stored::<22, 16>(layout, panel, row, bytes, |block| pair(block)),
        StorageType::Int4 => {
            put_stored::<19, 16>(layout, panel, row, bytes, |block| GroupScale::Zero(half_at(block, 0), block[2]));
        }
        StorageType::Q8_0 => {
            put_stored::<34, 32>(layout, panel, row, bytes, |block| GroupScale::One(half_at(block, 0)))
        }
        _ => {
            for index in 0..layout.groups() {
                layout.put(panel, row, index, &group(storage, bytes, index));
            }
        }
    }
}

/// Writes a row of blocks of `BYTES` bytes, each of which ends with a group's `CODES` bytes of codes.
fn put_stored<const BYTES: usize, const CODES: usize>(
    layout: &Layout,
    panel: &mut [u8],
    row: usize,
    bytes: &[u8],
    scale: impl Fn(&[u8; BYTES]) -> GroupScale,
) {
    // Signed bytes become unsigned.
    let flip = if CODES == GROUP { 0x80 } else { 0 };
    for (index, block) in bytes.as_chunks::<BYTES>().0.iter().enumerate() {
        let codes: &[u8; CODES] = block.last_chunk().expect("a block holds its codes");
        layout.put_codes(panel, row, index, &codes.map(|code| code ^ flip));
        layout.put_scale(panel, row, index, scale(block));
    }
}

/// Interleaves elements of `SIZE` bytes of sixteen rows, a few elements of each row at a time, so that the destination
/// is still in the cache for the next row.
fn put_plain<const SIZE: usize>(panel: &mut [u8], bytes: &[u8], row_bytes: usize) {
    const AT_ONCE: usize = 16;
    let columns = panel.as_chunks_mut::<SIZE>().0.chunks_mut(AT_ONCE * PANEL);
    for (block, columns) in columns.enumerate() {
        for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
            let elements = bytes.as_chunks::<SIZE>().0;
            let elements = &elements[(block * AT_ONCE).min(elements.len())..];
            match (elements.first_chunk::<AT_ONCE>(), columns.first_chunk_mut::<{ AT_ONCE * PANEL }>()) {
                (Some(elements), Some(columns)) => {
                    for (k, x) in elements.iter().enumerate() {
                        columns[k * PANEL + row] = *x;
                    }
                }
                _ => {
                    for (column, x) in columns.chunks_mut(PANEL).zip(elements) {
                        column[row] = *x;
                    }
                }
            }
        }
    }
}

/// Reads the numbers of a row of a checkpoint.
fn read_row(storage: StorageType, bytes: &[u8], out: &mut [f32]) {
    match storage {
        StorageType::Q2K => {
            let blocks = bytes.chunks_exact(storage.block_bytes());
            for (out, block) in out.as_chunks_mut::<SUPER>().0.iter_mut().zip(blocks) {
                *out = q2k(block);
            }
        }
        _ => match storage.decoder() {
            Some(decode) => decode(bytes, out),
            None => {
                for (index, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
                    *out = group(storage, bytes, index).values(storage);
                }
            }
        },
    }
}
