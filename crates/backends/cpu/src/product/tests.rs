use std::borrow::Cow;

use octavo_ops::testing::{MemoryWeights, TestRng, random_blocks};
use octavo_ops::{StorageType, TensorData, Weight, WeightPart};

use super::*;
use crate::activation::{Activation, Forms};
use crate::pool::Pool;

/// Returns a random weight in two parts, of which the first is not a whole number of panels.
fn matrix(storage: StorageType, cols: usize) -> Matrix {
    let mut rng = TestRng(3);
    let mut weights = MemoryWeights::default();
    let parts = [("a", 23), ("b", 70)].map(|(name, rows)| {
        let bytes = Cow::Owned(random_blocks(storage, rows * cols, 0.5, &mut rng));
        weights.tensors.insert(name.into(), TensorData { storage, shape: vec![rows, cols], bytes });
        WeightPart { tensor: name.into(), rows, storage, slab: None }
    });
    let weight = Weight { name: "w".into(), rows: 93, cols, parts: parts.into() };
    crate::weights::load(&weight, &weights, &mut Pool::new(1).unwrap(), &mut |_| {}).unwrap()
}

/// Multiplies random rows with a whole matrix.
fn product(isa: Isa, matrix: &Matrix, cols: usize, rows: usize) -> Vec<f32> {
    let mut rng = TestRng(4);
    let mut input = Activation::new(cols, Forms { quant: cols.is_multiple_of(GROUP), coarse: false, bf16: true });
    let mut out = Activation::new(93, Forms::default());
    input.reserve(rows);
    out.reserve(rows);
    let (x, y) = (input.shared(), out.shared());
    for row in 0..rows {
        // SAFETY: only one thread uses the activations.
        unsafe {
            x.write(x.span(row)).iter_mut().for_each(|x| *x = rng.signed());
            x.prepare(isa, x.span(row));
        }
    }
    let product = Product { rows, ..Product::new(matrix, x, y) };
    // SAFETY: as above.
    (0..product.pieces()).for_each(|piece| unsafe { product.run(isa, piece) });
    out.rows(rows).to_vec()
}

/// Computes the same rows in f64 from the matrix as it is read back.
fn expected(matrix: &Matrix, cols: usize, rows: usize) -> Vec<f64> {
    let mut rng = TestRng(4);
    let x: Vec<Vec<f32>> = (0..rows).map(|_| (0..cols).map(|_| rng.signed()).collect()).collect();
    let mut weights = vec![vec![0.0; cols]; 93];
    for (row, out) in weights.iter_mut().enumerate() {
        read_row(matrix, row, out);
    }
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
    x.iter().flat_map(|x| weights.iter().map(|w| dot(x, w))).collect()
}

#[test]
fn products_are_near_their_definition_in_every_format() {
    for storage in StorageType::ALL {
        let (matrix, cols) = (matrix(storage, 512), 512);
        for rows in [1, 4, 7, 33, 300] {
            let expected = expected(&matrix, cols, rows);
            let largest = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let found = product(isa, &matrix, cols, rows);
                let tolerance = if storage == StorageType::BF16 && isa.multiplies_bf16() { 5e-3 } else { 1e-3 };
                for (found, expected) in found.iter().zip(&expected) {
                    let error = (f64::from(*found) - expected).abs() / largest;
                    assert!(error < tolerance, "{storage} on {isa}, {rows} rows: {found}, expected {expected}");
                }
            }
        }
    }
}

#[test]
fn integer_products_have_the_same_bits_on_every_set_that_fuses() {
    for storage in StorageType::ALL.into_iter().filter(|storage| storage.block_elements() > 1) {
        let matrix = matrix(storage, 256);
        for rows in [1, 2, 3, 4, 5, 16, 40] {
            let bits = |isa| product(isa, &matrix, 256, rows).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let sets = Isa::ALL.into_iter().filter(|&isa| isa != Isa::Portable && isa.is_available());
            let found: Vec<_> = sets.map(bits).collect();
            assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "{storage}, {rows} rows");
        }
    }
}

#[test]
fn odd_widths_are_padded() {
    for storage in [StorageType::F32, StorageType::F16, StorageType::BF16] {
        for cols in [1, 31, 33] {
            let matrix = matrix(storage, cols);
            let expected = expected(&matrix, cols, 6);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                for (found, expected) in product(isa, &matrix, cols, 6).iter().zip(&expected) {
                    assert!((f64::from(*found) - expected).abs() < 2e-2, "{storage}, {cols} columns on {isa}");
                }
            }
        }
    }
}
