//! FP8 weights (E4M3): one scale for the matrix, a row or a block.

use octavo_ops::{StorageType, WeightError, e4m3};

use super::Matrix;
use super::config::Float8;
use super::integers::BLOCK;
use super::tensors::{Bytes, F8_E4M3, Module};

/// Names of the scales, which are all factors.
const SCALES: [&str; 2] = ["weight_scale_inv", "weight_scale"];

/// Reads a module. Without `values`, there is only its shape.
pub(super) fn read(module: &Module<'_>, config: Float8, values: bool) -> Result<Matrix, WeightError> {
    let Bytes { shape, bytes } = module.bytes("weight", &[F8_E4M3])?;
    let &[rows, cols] = shape else {
        return Err(module.invalid("weight", format!("its shape {shape:?} is not that of a matrix")));
    };
    let suffix = SCALES.into_iter().find(|suffix| module.has(suffix)).unwrap_or(SCALES[1]);
    let (shape, scales) = module.numbers(suffix)?;
    // Rows and columns that share a scale.
    let [height, width] = match shape {
        _ if scales.len() == 1 => [rows, cols],
        [n] | [n, 1] if *n == rows => [1, cols],
        [n, k] if [*n, *k] == [rows.div_ceil(config.block[0]), cols.div_ceil(config.block[1])] => config.block,
        _ => {
            return Err(module.invalid(suffix, format!("its shape {shape:?} does not fit a weight of {rows} x {cols}")));
        }
    };
    let is_packed = cols.is_multiple_of(BLOCK) && (width.is_multiple_of(BLOCK) || width == cols);
    let storage = if is_packed { StorageType::F8E4M3 } else { StorageType::F32 };
    if !values {
        return Ok(Matrix::Blocks { storage, rows, cols, bytes: Vec::new() });
    }
    if bytes.iter().any(|code| code & 0x7f == 0x7f) || !scales.iter().all(|scale| scale.is_finite()) {
        return Err(module.invalid("weight", "it has elements that are no number"));
    }
    let across = cols.div_ceil(width.max(1));
    let mut out = Vec::with_capacity(rows * storage.bytes_for(cols).unwrap_or(0));
    for (n, row) in bytes.chunks_exact(cols.max(1)).enumerate() {
        let scales = &scales[n / height.max(1) * across..];
        for (codes, scale) in row.chunks(width).zip(scales) {
            if is_packed {
                codes.chunks_exact(BLOCK).for_each(|codes| {
                    out.extend(scale.to_le_bytes());
                    out.extend(codes);
                });
            } else {
                out.extend(codes.iter().flat_map(|&code| (e4m3(code) * scale).to_le_bytes()));
            }
        }
    }
    Ok(Matrix::Blocks { storage, rows, cols, bytes: out })
}
