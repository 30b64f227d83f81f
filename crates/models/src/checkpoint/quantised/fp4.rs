//! FP4 weights (e2m1): NVFP4 with an FP8 scale for 16 inputs and one for the matrix, and MXFP4 with a power of two for 32.

use octavo_ops::{E2M1_DOUBLED, StorageType, WeightError, nvfp4_scale};

use super::Matrix;
use super::integers::{BLOCK, nibbles};
use super::tensors::{Bytes, F8_E4M3, Module, U8};

/// Number of inputs with one scale of NVFP4.
const GROUP: usize = 16;

/// How the scale of the whole matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    /// As a divisor in this tensor.
    Divisor(&'static str),
    /// As a factor in this tensor.
    Factor(&'static str),
}

/// Smallest code of e4m3 that is no number, without its sign.
const NO_NUMBER: u8 = 0x7f;

/// Reads a module whose codes are in the tensor `codes`, two in a byte, the first in the low nibble. Without `values`, there is
/// only its shape.
pub(super) fn read(module: &Module<'_>, codes: &str, global: Global, values: bool) -> Result<Matrix, WeightError> {
    let Bytes { shape, bytes } = module.bytes(codes, &[U8])?;
    let &[rows, half] = shape else {
        return Err(module.invalid(codes, format!("its shape {shape:?} is not that of a matrix")));
    };
    let cols = half.saturating_mul(2);
    let is_nvidia = module.dtype("weight_scale") == Some(F8_E4M3);
    let (group, storage) = match is_nvidia {
        true if cols.is_multiple_of(BLOCK) => (GROUP, StorageType::Nvfp4),
        true => (GROUP, StorageType::F32),
        false => (BLOCK, StorageType::Mxfp4),
    };
    let scales = module.bytes("weight_scale", &[F8_E4M3, U8])?;
    if !cols.is_multiple_of(group) || scales.shape != [rows, cols / group] {
        let reason = format!("its shape {:?} does not fit a weight of {rows} x {cols}", scales.shape);
        return Err(module.invalid("weight_scale", reason));
    }
    if !values {
        return Ok(Matrix::Blocks { storage, rows, cols, bytes: Vec::new() });
    }
    let codes: Vec<u8> = bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
    let bytes = match storage {
        StorageType::Mxfp4 => {
            let blocks = codes.as_chunks::<BLOCK>().0.iter().zip(scales.bytes);
            blocks.flat_map(|(codes, exponent)| std::iter::once(*exponent).chain(nibbles(codes))).collect()
        }
        _ if scales.bytes.iter().any(|code| code & NO_NUMBER == NO_NUMBER) => {
            return Err(module.invalid("weight_scale", "a scale is no number"));
        }
        StorageType::Nvfp4 => {
            let whole = scale_of_all(module, global)?.to_le_bytes();
            let blocks = codes.as_chunks::<BLOCK>().0.iter().zip(scales.bytes.as_chunks::<{ BLOCK / GROUP }>().0);
            blocks.flat_map(|(codes, pair)| whole.into_iter().chain(*pair).chain(nibbles(codes))).collect()
        }
        _ => {
            let whole = scale_of_all(module, global)?;
            let groups = codes.chunks_exact(GROUP).zip(scales.bytes);
            groups
                .flat_map(|(codes, code)| codes.iter().map(move |at| value(*at, nvfp4_scale(whole, *code))))
                .flatten()
                .collect()
        }
    };
    Ok(Matrix::Blocks { storage, rows, cols, bytes })
}

fn value(code: u8, scale: f32) -> [u8; 4] {
    (f32::from(E2M1_DOUBLED[usize::from(code)]) / 2.0 * scale).to_le_bytes()
}

/// Returns the scale of the matrix as [`nvfp4_scale`] takes it.
fn scale_of_all(module: &Module<'_>, global: Global) -> Result<f32, WeightError> {
    let (Global::Divisor(suffix) | Global::Factor(suffix)) = global;
    let (_, found) = module.numbers(suffix)?;
    match found[..] {
        [scale] if scale.is_finite() && scale > 0.0 => Ok(match global {
            Global::Divisor(_) => -scale,
            Global::Factor(_) => scale,
        }),
        _ => Err(module.invalid(suffix, "it is no positive number")),
    }
}
