//! Weights of bitsandbytes in 4 bits: codes of a table with a scale for each block.

use octavo_ops::{FP4_VALUES, NF4_VALUES, StorageType, WeightError};
use serde_json::Value;

use super::Matrix;
use super::integers::{BLOCK as HALF, nibbles};
use super::tensors::{Bytes, Module, U8};

/// Number of elements of a block of [`StorageType::Nf4`] or [`StorageType::Fp4`].
const BLOCK: usize = StorageType::Nf4.block_elements();

/// JSON with the shape and the sizes of blocks; the end of the name is the kind of codes.
const STATES: [&str; 2] = ["weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"];

/// Reads 4-bit codes. Without `values`, there is only the shape.
pub(super) fn read(module: &Module<'_>, values: bool) -> Result<Matrix, WeightError> {
    let suffix = STATES.into_iter().find(|suffix| module.has(suffix)).unwrap_or(STATES[0]);
    let invalid = |reason: &str| module.invalid(suffix, reason);
    let state: Value =
        serde_json::from_slice(module.bytes(suffix, &[U8])?.bytes).map_err(|_| invalid("it is no JSON"))?;
    let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let shape: Option<Vec<usize>> = state["shape"].as_array().and_then(|shape| shape.iter().map(size).collect());
    let (Some([rows, cols]), Some(block)) = (shape.as_deref(), size(&state["blocksize"])) else {
        return Err(invalid("it has no shape of a matrix or no size of a block"));
    };
    let (rows, cols) = (*rows, *cols);
    let Bytes { bytes, .. } = module.bytes("weight", &[U8])?;
    let elements = rows.checked_mul(cols).filter(|elements| elements.div_ceil(2) == bytes.len() && block > 0);
    let elements =
        elements.ok_or_else(|| module.invalid("weight", format!("it is no {rows} x {cols} codes of 4 bits")))?;
    // The packages do not agree on blocks that run across rows.
    if !cols.is_multiple_of(block) {
        return Err(module.invalid("weight", format!("its {cols} inputs are no whole blocks of {block}")));
    }
    let (_, map) = module.numbers("weight.quant_map")?;
    let storage = match map {
        _ if !block.is_multiple_of(BLOCK) => StorageType::F32,
        _ if map == NF4_VALUES => StorageType::Nf4,
        _ if map == FP4_VALUES => StorageType::Fp4,
        _ => StorageType::F32,
    };
    if !values {
        return Ok(Matrix::Blocks { storage, rows, cols, bytes: Vec::new() });
    }
    let scales = scales(module, &state, suffix)?;
    if map.len() != 16 || scales.len() != elements.div_ceil(block) {
        return Err(module.invalid("weight.absmax", "its size does not fit the codes"));
    }
    let codes: Vec<u8> = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(elements).collect();
    let bytes = match storage {
        StorageType::F32 => {
            let value = |(element, code): (usize, &u8)| map[usize::from(*code)] * scales[element / block];
            codes.iter().enumerate().map(value).flat_map(f32::to_le_bytes).collect()
        }
        _ => {
            let blocks = codes.as_chunks::<BLOCK>().0.iter();
            let scales = blocks.clone().enumerate().map(|(at, _)| scales[at * BLOCK / block].to_le_bytes());
            let block = |codes: &[u8; BLOCK]| codes.as_chunks::<HALF>().0.iter().flat_map(nibbles).collect::<Vec<_>>();
            blocks.zip(scales).flat_map(|(codes, scale)| scale.into_iter().chain(block(codes))).collect()
        }
    };
    Ok(Matrix::Blocks { storage, rows, cols, bytes })
}

/// Returns the scales of blocks, which may be quantised themselves.
fn scales(module: &Module<'_>, state: &Value, suffix: &str) -> Result<Vec<f32>, WeightError> {
    if !module.has("weight.nested_absmax") {
        return module.numbers("weight.absmax").map(|(_, scales)| scales);
    }
    let Bytes { bytes, .. } = module.bytes("weight.absmax", &[U8])?;
    let ((_, map), (_, nested)) = (module.numbers("weight.nested_quant_map")?, module.numbers("weight.nested_absmax")?);
    let block = state["nested_blocksize"].as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&block| block > 0);
    let (Some(block), Some(offset)) = (block, state["nested_offset"].as_f64()) else {
        return Err(module.invalid(suffix, "it has no size or offset of nested blocks"));
    };
    if map.len() != 256 || nested.len() != bytes.len().div_ceil(block) {
        return Err(module.invalid("weight.nested_absmax", "its size does not fit the codes"));
    }
    let scale = |(at, code): (usize, &u8)| map[usize::from(*code)] * nested[at / block] + offset as f32;
    Ok(bytes.iter().enumerate().map(scale).collect())
}
