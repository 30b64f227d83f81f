//! Weights of bitsandbytes: 4-bit codes of a table with a scale for each block, and 8-bit integers with one for each row.

use octavo_ops::WeightError;
use serde_json::Value;

use super::Matrix;
use super::tensors::{Bytes, I8, Module, U8};

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
    if !values {
        return Ok(Matrix::Values { rows, cols, values: Vec::new() });
    }
    let scales = scales(module, &state, suffix)?;
    let (_, map) = module.numbers("weight.quant_map")?;
    if map.len() != 16 || scales.len() != elements.div_ceil(block) {
        return Err(module.invalid("weight.absmax", "its size does not fit the codes"));
    }
    let codes = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(elements);
    let value = |(element, code): (usize, u8)| map[usize::from(code)] * scales[element / block];
    Ok(Matrix::Values { rows, cols, values: codes.enumerate().map(value).collect() })
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

/// Reads 8-bit integers. Without `values`, there is only the shape.
pub(super) fn int8(module: &Module<'_>, values: bool) -> Result<Matrix, WeightError> {
    let Bytes { shape, bytes } = module.bytes("weight", &[I8])?;
    let &[rows, cols] = shape else {
        return Err(module.invalid("weight", format!("its shape {shape:?} is not that of a matrix")));
    };
    if module.has("weight_format") && module.bytes("weight_format", &[U8])?.bytes != [0] {
        return Err(module.invalid("weight_format", "its rows are not in order"));
    }
    if !values {
        return Ok(Matrix::Values { rows, cols, values: Vec::new() });
    }
    let (_, largest) = module.numbers("SCB")?;
    if largest.len() != rows {
        return Err(module.invalid("SCB", format!("it has {} elements for {rows} rows", largest.len())));
    }
    let rows_of = bytes.chunks_exact(cols.max(1)).zip(&largest);
    let row = |(codes, largest): (&[u8], &f32)| {
        let scale = largest / 127.0;
        codes.iter().map(|&code| f32::from(code as i8) * scale).collect::<Vec<_>>()
    };
    Ok(Matrix::Values { rows, cols, values: rows_of.flat_map(row).collect() })
}
