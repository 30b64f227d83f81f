//! Tensors that are cut from those of a file, whose layout is not that of a weight.

use std::borrow::Cow;

use octavo_ops::{StorageType, TensorData, WeightError};

use super::{Checkpoint, TensorInfo};

/// Number of elements of an MXFP4 block, and size of their codes.
const BLOCK: usize = 32;
const CODES: usize = BLOCK / 2;

/// A tensor of one expert, made from one or two tensors of all experts. Its rows are every `step`-th output from `first`
/// on.
pub(crate) enum Derived {
    /// Outputs of `tensor [experts, inputs, outputs]`, which is transposed, or of the vector `tensor [experts, outputs]`.
    Columns { tensor: String, slab: usize, first: usize, step: usize },
    /// Rows of `blocks [experts, outputs, inputs/32, 16]` bytes and `scales [experts, outputs, inputs/32]`. A byte of a
    /// block has the codes of two adjacent elements.
    Mxfp4 { blocks: String, scales: String, slab: usize, first: usize, step: usize },
}

impl Derived {
    /// Returns storage type and shape.
    pub(super) fn describe(&self, checkpoint: &Checkpoint) -> Result<(StorageType, Vec<usize>), WeightError> {
        match self {
            Self::Columns { tensor, slab, first, step } => {
                let info = find(checkpoint, tensor)?.0;
                let storage = storage(tensor, info)?;
                match info.shape[..] {
                    [experts, outputs] if *slab < experts => Ok((storage, vec![chosen(outputs, *first, *step)])),
                    [experts, inputs, outputs] if *slab < experts => {
                        Ok((storage, vec![chosen(outputs, *first, *step), inputs]))
                    }
                    _ => Err(unfit(tensor, &info.shape)),
                }
            }
            Self::Mxfp4 { blocks, scales, slab, first, step } => {
                let (info, scale) = (find(checkpoint, blocks)?.0, find(checkpoint, scales)?.0);
                match (&info.shape[..], &scale.shape[..]) {
                    (&[experts, outputs, groups, CODES], &[a, b, c])
                        if *slab < experts && [a, b, c] == [experts, outputs, groups] =>
                    {
                        for (name, info) in [(blocks, info), (scales, scale)] {
                            // Any other element type makes the range longer than one byte for each element.
                            if Some(info.range.len()) != elements(&info.shape) {
                                return Err(invalid(name, "its elements are not bytes".into()));
                            }
                        }
                        let inputs = groups.checked_mul(BLOCK).ok_or_else(|| unfit(blocks, &info.shape))?;
                        Ok((StorageType::Mxfp4, vec![chosen(outputs, *first, *step), inputs]))
                    }
                    _ => Err(unfit(blocks, &info.shape)),
                }
            }
        }
    }

    /// Reads the tensor.
    pub(super) fn read(&self, checkpoint: &Checkpoint) -> Result<TensorData<'static>, WeightError> {
        let (storage, shape) = self.describe(checkpoint)?;
        let bytes = match self {
            Self::Columns { tensor, slab, first, step } => {
                let (info, file) = find(checkpoint, tensor)?;
                let inputs = shape.get(1).copied().unwrap_or(1);
                let slab = slab_of(&file[info.range.clone()], info.shape[0], *slab);
                columns(slab, storage.block_bytes(), inputs, *first, *step)
            }
            Self::Mxfp4 { blocks, scales, slab, first, step } => {
                let of = |name| find(checkpoint, name).map(|(info, file)| (info.shape[0], &file[info.range.clone()]));
                let [(count, blocks), (_, scales)] = [of(blocks)?, of(scales)?];
                let groups = shape[1] / BLOCK;
                mxfp4(slab_of(blocks, count, *slab), slab_of(scales, count, *slab), groups, *first, *step)
            }
        };
        Ok(TensorData { storage, shape, bytes: Cow::Owned(bytes) })
    }
}

/// Returns every `step`-th column of rows, each as a row. The rows have elements of `size` bytes.
fn columns(bytes: &[u8], size: usize, rows: usize, first: usize, step: usize) -> Vec<u8> {
    let width = bytes.len() / size.max(1) / rows.max(1);
    let mut out = Vec::with_capacity(chosen(width, first, step) * rows * size);
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

/// Returns one of `count` equal parts.
fn slab_of(bytes: &[u8], count: usize, index: usize) -> &[u8] {
    let size = bytes.len() / count.max(1);
    &bytes[index * size..(index + 1) * size]
}

fn chosen(outputs: usize, first: usize, step: usize) -> usize {
    outputs.saturating_sub(first).div_ceil(step)
}

fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
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
    fn blocks_get_their_scale_and_their_halves() {
        // Element i of the second row has the code i mod 16.
        let row: Vec<u8> = (0..16u8).map(|byte| (2 * byte % 16) | (((2 * byte + 1) % 16) << 4)).collect();
        let blocks = [vec![0; 16], row].concat();
        let out = mxfp4(&blocks, &[7, 9], 1, 1, 2);
        let expected: Vec<u8> = (0..16u8).map(|at| at | at << 4).collect();
        assert_eq!((out[0], &out[1..]), (9, &expected[..]));
    }
}
