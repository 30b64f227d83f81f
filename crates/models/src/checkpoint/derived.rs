//! Tensors that are cut from those of a file, whose layout is not that of a weight.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};
use octavo_ops::{StorageType, TensorData, WeightError, WeightSource};

use super::quantised::QuantisedWeight;
use super::{Checkpoint, TensorInfo};

/// Number of elements of an MXFP4 block, and size of their codes.
const BLOCK: usize = 32;
const CODES: usize = BLOCK / 2;

/// The quantised matrix of all heads that was read last, by its name, so that it is not unpacked for each of them.
#[derive(Debug, Default)]
pub(super) struct Unpacked(Mutex<Option<(String, Arc<TensorData<'static>>)>>);

impl Unpacked {
    fn read(&self, checkpoint: &Checkpoint, name: &str) -> Result<Arc<TensorData<'static>>, WeightError> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tensor)) = last.as_ref().filter(|(known, _)| known == name) {
            return Ok(Arc::clone(tensor));
        }
        let TensorData { storage, shape, bytes } = checkpoint.tensor(name)?;
        let tensor = Arc::new(TensorData { storage, shape, bytes: bytes.into_owned().into() });
        *last = Some((name.to_owned(), Arc::clone(&tensor)));
        Ok(tensor)
    }
}

/// A tensor that is made from others.
pub(crate) enum Derived<'a> {
    /// A tensor of one expert.
    Expert(ExpertTensor),
    /// The matrices of all experts.
    Unpacked(UnpackedExperts),
    /// A matrix of one head.
    Head(HeadTensor),
    /// The difference of two rows.
    Difference(RowDifference),
    /// A matrix whose rows are the columns of the named one.
    Transposed(String),
    /// The weight of a quantised module.
    Quantised(QuantisedWeight<'a>),
}

/// A row of a matrix minus another one, in f32.
pub(crate) struct RowDifference {
    /// Name of the matrix.
    pub(crate) source: String,
    /// Index of the row that is subtracted.
    pub(crate) from: usize,
    /// Index of the other row.
    pub(crate) to: usize,
}

impl RowDifference {
    fn describe(&self, checkpoint: &Checkpoint) -> Result<(StorageType, Vec<usize>), WeightError> {
        let (info, _) = find(checkpoint, &self.source)?;
        match info.shape[..] {
            [rows, cols] if self.from.max(self.to) < rows => Ok((StorageType::F32, vec![1, cols])),
            _ => {
                let reason = format!("its shape {:?} has no rows {} and {}", info.shape, self.from, self.to);
                Err(invalid(&self.source, reason))
            }
        }
    }

    fn read(&self, checkpoint: &Checkpoint) -> Result<TensorData<'static>, WeightError> {
        let (storage, shape) = self.describe(checkpoint)?;
        let (info, file) = find(checkpoint, &self.source)?;
        let size = self::storage(&self.source, info)?.block_bytes();
        let width = shape[1] * size;
        let row = |index: usize| file[info.range.clone()][index * width..][..width].chunks(size);
        let value = |bytes: &[u8]| match *bytes {
            [a, b] if info.storage == Ok(StorageType::F16) => f16::from_le_bytes([a, b]).to_f32(),
            [a, b] => bf16::from_le_bytes([a, b]).to_f32(),
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            _ => f32::NAN,
        };
        let bytes = row(self.to).zip(row(self.from)).flat_map(|(to, from)| (value(to) - value(from)).to_le_bytes());
        Ok(TensorData { storage, shape, bytes: Cow::Owned(bytes.collect()) })
    }
}

/// A tensor of one expert, made from those of all experts.
pub(crate) struct ExpertTensor {
    /// Tensors of all experts.
    pub(crate) source: Packed,
    /// Index of the expert.
    pub(crate) slab: usize,
    /// First of the outputs that are its rows.
    pub(crate) first: usize,
    /// Distance of these outputs.
    pub(crate) step: usize,
}

/// Tensors of all experts.
pub(crate) enum Packed {
    /// `[experts, inputs, outputs]`, or a vector `[experts, outputs]`.
    Columns(String),
    /// `blocks [experts, outputs, inputs/32, 16]` bytes and `scales [experts, outputs, inputs/32]`. A byte of a block has
    /// the codes of two adjacent elements.
    Mxfp4 { blocks: String, scales: String },
}

/// The matrices of all experts `[experts, inputs, outputs]` in bf16, in which MXFP4 is exact.
pub(crate) struct UnpackedExperts {
    /// Tensors as in [`Packed::Mxfp4`].
    pub(crate) blocks: String,
    pub(crate) scales: String,
}

/// Some rows of one head of a matrix `[heads · rows, cols]`.
pub(crate) struct HeadTensor {
    /// Name of the matrix.
    pub(crate) source: String,
    /// Number of heads.
    pub(crate) heads: usize,
    /// Index of the head.
    pub(crate) head: usize,
    /// Rows of the head.
    pub(crate) rows: Range<usize>,
    /// Whether they are the columns of the tensor.
    pub(crate) transposed: bool,
}

impl Derived<'_> {
    /// Returns storage type and shape.
    pub(super) fn describe(&self, checkpoint: &Checkpoint) -> Result<(StorageType, Vec<usize>), WeightError> {
        match self {
            Self::Expert(tensor) => tensor.describe(checkpoint),
            Self::Unpacked(experts) => experts.describe(checkpoint),
            Self::Head(tensor) => tensor.describe(checkpoint),
            Self::Difference(rows) => rows.describe(checkpoint),
            Self::Transposed(source) => transposed_shape(checkpoint, source),
            Self::Quantised(weight) => weight.describe(checkpoint),
        }
    }

    /// Reads the tensor.
    pub(super) fn read<'a>(&self, checkpoint: &'a Checkpoint) -> Result<TensorData<'a>, WeightError> {
        match self {
            Self::Expert(tensor) => tensor.read(checkpoint),
            Self::Unpacked(experts) => experts.read(checkpoint),
            Self::Head(tensor) => tensor.read(checkpoint),
            Self::Difference(rows) => rows.read(checkpoint),
            Self::Transposed(source) => transposed(checkpoint, source),
            Self::Quantised(weight) => weight.read(checkpoint),
        }
    }
}

fn transposed_shape(checkpoint: &Checkpoint, source: &str) -> Result<(StorageType, Vec<usize>), WeightError> {
    let (info, _) = find(checkpoint, source)?;
    match info.shape[..] {
        [rows, cols] => Ok((storage(source, info)?, vec![cols, rows])),
        _ => Err(invalid(source, format!("its shape {:?} is not that of a matrix", info.shape))),
    }
}

fn transposed<'a>(checkpoint: &'a Checkpoint, source: &str) -> Result<TensorData<'a>, WeightError> {
    let (storage, shape) = transposed_shape(checkpoint, source)?;
    let (info, file) = find(checkpoint, source)?;
    let bytes = columns(&file[info.range.clone()], storage.block_bytes(), shape[1], 0, 1);
    Ok(TensorData { storage, shape, bytes: Cow::Owned(bytes) })
}

impl HeadTensor {
    /// Returns storage type and shape. Quantised rows keep their blocks. Columns of blocks are no blocks, so that they become
    /// f32, in which every value is exact.
    fn describe(&self, checkpoint: &Checkpoint) -> Result<(StorageType, Vec<usize>), WeightError> {
        let Self { source, heads, head, rows, transposed } = self;
        let (storage, shape) = checkpoint.describe(source, &[])?;
        let cols = match shape[..] {
            [all, cols] if head < heads && all.is_multiple_of(*heads) && rows.end <= all / heads => cols,
            _ => {
                let reason = format!("its shape {shape:?} is not that of {heads} heads with these rows");
                return Err(invalid(source, reason));
            }
        };
        Ok(match *transposed {
            true if storage.block_elements() == 1 => (storage, vec![cols, rows.len()]),
            true => (StorageType::F32, vec![cols, rows.len()]),
            false => (storage, vec![rows.len(), cols]),
        })
    }

    fn read<'a>(&self, checkpoint: &'a Checkpoint) -> Result<TensorData<'a>, WeightError> {
        let (storage, shape) = self.describe(checkpoint)?;
        let (stored, whole) = checkpoint.describe(&self.source, &[])?;
        let (all, cols) = (whole[0], whole[1]);
        let unfit = || invalid(&self.source, format!("its {cols} columns are no whole blocks of {stored}"));
        let row = stored.bytes_for(cols).ok_or_else(unfit)?;
        let first = (all / self.heads * self.head + self.rows.start) * row;
        let range = first..first + self.rows.len() * row;
        if stored.block_elements() > 1 {
            let whole = checkpoint.unpacked.read(checkpoint, &self.source)?;
            let rows = &whole.bytes[range];
            let bytes =
                if self.transposed { self.columns(&in_f32(rows, stored, cols), storage) } else { rows.to_vec() };
            return Ok(TensorData { storage, shape, bytes: bytes.into() });
        }
        let bytes = match (self.transposed, checkpoint.tensor(&self.source)?.bytes) {
            (true, bytes) => self.columns(&bytes[range], storage).into(),
            (false, Cow::Borrowed(bytes)) => Cow::Borrowed(&bytes[range]),
            (false, Cow::Owned(bytes)) => Cow::Owned(bytes[range].to_vec()),
        };
        Ok(TensorData { storage, shape, bytes })
    }

    /// Returns the columns of the head's rows, each as a row.
    fn columns(&self, rows: &[u8], storage: StorageType) -> Vec<u8> {
        columns(rows, storage.block_bytes(), self.rows.len(), 0, 1)
    }
}

/// Returns quantised rows of `cols` elements in f32.
fn in_f32(rows: &[u8], storage: StorageType, cols: usize) -> Vec<u8> {
    let (Some(decode), Some(size)) = (storage.decoder(), storage.bytes_for(cols)) else { return Vec::new() };
    let mut values = vec![0.0; cols];
    let mut out = Vec::with_capacity(rows.len() / size.max(1) * cols * size_of::<f32>());
    for row in rows.chunks_exact(size.max(1)) {
        decode(row, &mut values);
        out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    out
}

impl ExpertTensor {
    fn describe(&self, checkpoint: &Checkpoint) -> Result<(StorageType, Vec<usize>), WeightError> {
        let (storage, tensor, info, outputs, inputs) = match &self.source {
            Packed::Columns(tensor) => {
                let info = find(checkpoint, tensor)?.0;
                let (outputs, inputs) = match info.shape[..] {
                    [_, outputs] => (outputs, None),
                    [_, inputs, outputs] => (outputs, Some(inputs)),
                    _ => return Err(unfit(tensor, &info.shape)),
                };
                (storage(tensor, info)?, tensor, info, outputs, inputs)
            }
            Packed::Mxfp4 { blocks, scales } => {
                let (info, scale) = (find(checkpoint, blocks)?.0, find(checkpoint, scales)?.0);
                let inputs = check_blocks(blocks, info, scales, scale)?;
                (StorageType::Mxfp4, blocks, info, info.shape[1], Some(inputs))
            }
        };
        if self.slab >= info.shape[0] {
            return Err(unfit(tensor, &info.shape));
        }
        Ok((storage, std::iter::once(self.rows(outputs)).chain(inputs).collect()))
    }

    fn read(&self, checkpoint: &Checkpoint) -> Result<TensorData<'static>, WeightError> {
        let (storage, shape) = self.describe(checkpoint)?;
        let slab = |name| find(checkpoint, name).map(|(info, file)| self.slab_of(info, file));
        let inputs = shape.get(1).copied().unwrap_or(1);
        let bytes = match &self.source {
            Packed::Columns(tensor) => columns(slab(tensor)?, storage.block_bytes(), inputs, self.first, self.step),
            Packed::Mxfp4 { blocks, scales } => {
                mxfp4(slab(blocks)?, slab(scales)?, inputs / BLOCK, self.first, self.step)
            }
        };
        Ok(TensorData { storage, shape, bytes: Cow::Owned(bytes) })
    }

    /// Returns the number of rows.
    fn rows(&self, outputs: usize) -> usize {
        outputs.saturating_sub(self.first).div_ceil(self.step)
    }

    /// Returns the bytes of the expert.
    fn slab_of<'a>(&self, info: &TensorInfo, file: &'a [u8]) -> &'a [u8] {
        let bytes = &file[info.range.clone()];
        let size = bytes.len() / info.shape[0].max(1);
        &bytes[self.slab * size..(self.slab + 1) * size]
    }
}

impl UnpackedExperts {
    fn describe(&self, checkpoint: &Checkpoint) -> Result<(StorageType, Vec<usize>), WeightError> {
        let (info, scale) = (find(checkpoint, &self.blocks)?.0, find(checkpoint, &self.scales)?.0);
        let inputs = check_blocks(&self.blocks, info, &self.scales, scale)?;
        Ok((StorageType::BF16, vec![info.shape[0], inputs, info.shape[1]]))
    }

    fn read(&self, checkpoint: &Checkpoint) -> Result<TensorData<'static>, WeightError> {
        let (storage, shape) = self.describe(checkpoint)?;
        let [experts, inputs, outputs] = [shape[0], shape[1], shape[2]];
        let bytes = |name| find(checkpoint, name).map(|(info, file)| &file[info.range.clone()]);
        let (blocks, scales) = (bytes(&self.blocks)?, bytes(&self.scales)?);
        let groups = outputs * inputs / BLOCK;
        let size = inputs * outputs * storage.block_bytes();
        let mut out = vec![0; experts * size];
        let each = experts.div_ceil(std::thread::available_parallelism().map_or(1, usize::from)).max(1);
        std::thread::scope(|scope| {
            let parts = blocks.chunks((each * groups * CODES).max(1)).zip(scales.chunks((each * groups).max(1)));
            for (out, (blocks, scales)) in out.chunks_mut((each * size).max(1)).zip(parts) {
                scope.spawn(move || {
                    let experts = blocks.chunks(groups * CODES).zip(scales.chunks(groups));
                    for (out, (blocks, scales)) in out.chunks_mut(size).zip(experts) {
                        unpack_mxfp4(&mxfp4(blocks, scales, inputs / BLOCK, 0, 1), inputs, out);
                    }
                });
            }
        });
        Ok(TensorData { storage, shape, bytes: out.into() })
    }
}

/// Writes rows of blocks as columns of bf16.
fn unpack_mxfp4(blocks: &[u8], inputs: usize, out: &mut [u8]) {
    let (Some(decode), Some(row)) = (StorageType::Mxfp4.decoder(), StorageType::Mxfp4.bytes_for(inputs)) else {
        return;
    };
    let outputs = blocks.len() / row.max(1);
    // As many rows as fill a cache line of each column.
    let mut values = vec![vec![0.0; inputs]; BLOCK];
    for (index, rows) in blocks.chunks(row.max(1) * BLOCK).enumerate() {
        let rows = rows.chunks_exact(row.max(1)).zip(&mut values).map(|(row, values)| decode(row, values)).count();
        for (input, column) in out.chunks_exact_mut(outputs * size_of::<bf16>()).enumerate() {
            let column = column.as_chunks_mut().0[index * BLOCK..][..rows].iter_mut();
            column.zip(&values).for_each(|(out, values)| *out = bf16::from_f32(values[input]).to_le_bytes());
        }
    }
}

/// Checks that blocks and scales are bytes of matching shapes. Returns the number of inputs.
fn check_blocks(blocks: &str, info: &TensorInfo, scales: &str, scale: &TensorInfo) -> Result<usize, WeightError> {
    let inputs = match info.shape[..] {
        [.., groups, CODES] if info.shape.len() == 4 && info.shape[..3] == scale.shape => groups.checked_mul(BLOCK),
        _ => None,
    };
    let inputs = inputs.ok_or_else(|| unfit(blocks, &info.shape))?;
    for (name, info) in [(blocks, info), (scales, scale)] {
        // Any other element type makes the range longer than one byte for each element.
        let elements = info.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if Some(info.range.len()) != elements {
            return Err(invalid(name, "its elements are not bytes".into()));
        }
    }
    Ok(inputs)
}

/// Returns every `step`-th column of rows, each as a row. The rows have elements of `size` bytes.
fn columns(bytes: &[u8], size: usize, rows: usize, first: usize, step: usize) -> Vec<u8> {
    let width = bytes.len() / size.max(1) / rows.max(1);
    let mut out = Vec::with_capacity(bytes.len() / step);
    for column in (first..width).step_by(step) {
        for row in 0..rows {
            out.extend_from_slice(&bytes[(row * width + column) * size..][..size]);
        }
    }
    out
}

/// Returns every `step`-th row of blocks as GGUF has them: a block is its scale, then bytes whose low halves are the
/// codes of the first 16 elements.
fn mxfp4(blocks: &[u8], scales: &[u8], groups: usize, first: usize, step: usize) -> Vec<u8> {
    let rows = blocks.chunks(groups.max(1) * CODES).zip(scales.chunks(groups.max(1)));
    let mut out = Vec::new();
    for (blocks, scales) in rows.skip(first).step_by(step) {
        for (block, &scale) in blocks.as_chunks::<CODES>().0.iter().zip(scales) {
            let code = |element: usize| block[element / 2] >> (element % 2 * 4) & 15;
            out.push(scale);
            out.extend((0..CODES).map(|at| code(at) | code(at + CODES) << 4));
        }
    }
    out
}

fn find<'a>(checkpoint: &'a Checkpoint, name: &str) -> Result<(&'a TensorInfo, &'a [u8]), WeightError> {
    checkpoint.find(name).ok_or_else(|| WeightError::Missing(name.to_owned()))
}

/// Returns the storage type of a tensor of plain numbers.
fn storage(name: &str, info: &TensorInfo) -> Result<StorageType, WeightError> {
    let storage = info.storage.clone().map_err(|dtype| super::unsupported(name, &dtype))?;
    match storage.block_elements() {
        1 => Ok(storage),
        _ => Err(invalid(name, format!("it is stored as {storage}, expected plain numbers"))),
    }
}

fn unfit(name: &str, shape: &[usize]) -> WeightError {
    invalid(name, format!("its shape {shape:?} is not that of a tensor of all experts"))
}

fn invalid(name: &str, reason: String) -> WeightError {
    WeightError::Invalid { name: name.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_rows() {
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(columns(&bytes, 1, 2, 0, 2), [1, 5, 3, 7]);
        assert_eq!(columns(&bytes, 1, 2, 1, 2), [2, 6, 4, 8]);
        assert_eq!(columns(&bytes, 2, 2, 0, 1), [1, 2, 5, 6, 3, 4, 7, 8]);
        assert_eq!(columns(&bytes, 1, 1, 1, 3), [2, 5, 8]);
    }

    #[test]
    fn rows_of_blocks_become_columns() {
        // Forty rows of two blocks, whose elements are all -1 times a power of two, but the first, which is 6 times that.
        let power = |row: usize, group: usize| ((row + 3 * group) % 9) as i32 - 4;
        let block = |row: usize, group: usize| {
            let codes = std::iter::once(0xa7).chain([0xaa; CODES - 1]);
            std::iter::once((power(row, group) + 127) as u8).chain(codes).collect::<Vec<_>>()
        };
        let blocks: Vec<u8> = (0..40).flat_map(|row| [block(row, 0), block(row, 1)].concat()).collect();
        let mut out = vec![0; 64 * 40 * 2];
        unpack_mxfp4(&blocks, 64, &mut out);
        for (at, value) in out.as_chunks().0.iter().enumerate() {
            let (input, row) = (at / 40, at % 40);
            let factor = if input % BLOCK == 0 { 6.0 } else { -1.0 };
            let expected = factor * (power(row, input / BLOCK) as f32).exp2();
            assert_eq!(bf16::from_le_bytes(*value).to_f32(), expected, "input {input}, row {row}");
        }
    }

    #[test]
    fn blocks_get_their_scale_and_their_halves() {
        // Element i of the second row has the code i mod 16.
        let row: Vec<u8> = (0..16u8).map(|byte| (2 * byte % 16) | (((2 * byte + 1) % 16) << 4)).collect();
        let blocks = [vec![0; 16], row].concat();
        let out = mxfp4(&blocks, &[7, 9], 1, 1, 2);
        let expected: Vec<u8> = (0..16u8).map(|at| at | at << 4).collect();
        assert_eq!((out[0], &out[1..]), (9, &expected[..]));
    }
}
