//! FP8 weights (E4M3): one scale for the matrix, a row or a block.

use octavo_ops::WeightError;

use super::Matrix;
use super::config::Float8;
use super::tensors::{Bytes, F8_E4M3, Module};

/// Names of the scales, which are all factors.
const SCALES: [&str; 2] = ["weight_scale_inv", "weight_scale"];

/// Reads a module. Without `values`, there is only its shape.
pub(super) fn read(module: &Module<'_>, config: Float8, values: bool) -> Result<Matrix, WeightError> {
    let Bytes { shape, bytes } = module.bytes("weight", &[F8_E4M3])?;
    let &[rows, cols] = shape else {
        return Err(module.invalid("weight", format!("its shape {shape:?} is not that of a matrix")));
    };
    if !values {
        return Ok(Matrix::Values { rows, cols, values: Vec::new() });
    }
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
    let table: [f32; 256] = std::array::from_fn(|code| e4m3(code as u8));
    let across = cols.div_ceil(width.max(1));
    let mut out = Vec::with_capacity(bytes.len());
    for (n, row) in bytes.chunks_exact(cols.max(1)).enumerate() {
        let scales = &scales[n / height.max(1) * across..];
        for (codes, scale) in row.chunks(width).zip(scales) {
            out.extend(codes.iter().map(|&code| table[usize::from(code)] * scale));
        }
    }
    if out.iter().any(|value| value.is_nan()) {
        return Err(module.invalid("weight", "it has elements that are no number"));
    }
    Ok(Matrix::Values { rows, cols, values: out })
}

/// Returns the value of a code: 4 bits of the exponent with a bias of 7, 3 of the mantissa, no infinity.
pub(super) fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * (-9f32).exp2(),
        _ => (1.0 + mantissa / 8.0) * ((exponent - 7) as f32).exp2(),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_e4m3() {
        for (code, value) in
            [(0x00, 0.0), (0x01, 0.001_953_125), (0x08, 0.015_625), (0x38, 1.0), (0x7e, 448.0), (0xc0, -2.0)]
        {
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }
}
