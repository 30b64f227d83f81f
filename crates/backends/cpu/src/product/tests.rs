use std::borrow::Cow;

use half::{bf16, f16};
use octavo_ops::testing::{MemoryWeights, TestRng, random_blocks};
use octavo_ops::{StorageType, TensorData, Weight, WeightPart};

use super::*;
use crate::activation::{Activation, Forms};
use crate::pool::Pool;
use crate::rows::GROUP;
use crate::weights::{Arena, Layout, Target, WeightDtype};

/// Returns a random weight in two parts, of which the first is not a whole number of panels.
fn matrix(storage: StorageType, cols: usize) -> Matrix {
    let mut rng = TestRng(3);
    matrix_of(storage, cols, WeightDtype::AsStored, |rows| random_blocks(storage, rows * cols, 0.5, &mut rng))
}

/// Returns such a weight with the stored bytes of each part.
fn matrix_of(storage: StorageType, cols: usize, dtype: WeightDtype, bytes: impl FnMut(usize) -> Vec<u8>) -> Matrix {
    loaded(storage, cols, (dtype, false), bytes)
}

/// Returns such a weight. `short` is whether bf16 may be kept in twelve bits.
fn loaded(
    storage: StorageType,
    cols: usize,
    (dtype, short): (WeightDtype, bool),
    mut bytes: impl FnMut(usize) -> Vec<u8>,
) -> Matrix {
    let mut weights = MemoryWeights::default();
    let parts = [("a", 23), ("b", 70)].map(|(name, rows)| {
        let bytes = Cow::Owned(bytes(rows));
        weights.tensors.insert(name.into(), TensorData { storage, shape: vec![rows, cols], bytes });
        WeightPart { tensor: name.into(), rows, storage, slab: None }
    });
    let weight = Weight { name: "w".into(), rows: 93, cols, parts: parts.into() };
    let mut target = Target { pool: &mut Pool::new(1).unwrap(), arenas: vec![Arena::default()], dtype, short };
    crate::weights::load(&weight, &mut target, &weights, &mut |_| {}).unwrap().remove(0)
}

/// Returns such a weight with the stored bytes of both parts, and its values.
fn matrix_and_values(storage: StorageType, cols: usize, blocks: &[u8]) -> (Matrix, Vec<f32>) {
    let mut values = vec![0.0; 93 * cols];
    storage.decoder().unwrap()(blocks, &mut values);
    let (first, second) = blocks.split_at(storage.bytes_for(23 * cols).unwrap());
    let part = |rows| if rows == 23 { first } else { second }.to_vec();
    (matrix_of(storage, cols, WeightDtype::AsStored, part), values)
}

/// Rows that are multiplied.
struct Input {
    cols: usize,
    rows: usize,
    /// Number of groups of threads among which they are divided.
    groups: usize,
}

/// Multiplies random rows with a whole matrix.
fn product(isa: Isa, matrix: &Matrix, cols: usize, rows: usize) -> Vec<f32> {
    product_in_groups(isa, matrix, &Input { cols, rows, groups: 1 })
}

/// Multiplies random rows that are divided among groups of threads.
fn product_in_groups(isa: Isa, matrix: &Matrix, input: &Input) -> Vec<f32> {
    let mut rng = TestRng(4);
    product_with(isa, matrix, forms(input.cols), input, || rng.signed())
}

/// Multiplies random rows in eight bits with a whole matrix. Some groups have outliers.
fn coarse_product(isa: Isa, matrix: &Matrix, cols: usize, rows: usize) -> Vec<f32> {
    let mut rng = TestRng(4);
    product_with(isa, matrix, Forms { coarse: true, ..forms(cols) }, &Input { cols, rows, groups: 1 }, || {
        rng.signed() * if rng.next_u64().is_multiple_of(97) { 20.0 } else { 1.0 }
    })
}

/// Multiplies rows of ones with a whole matrix.
fn product_of_ones(isa: Isa, matrix: &Matrix, cols: usize, rows: usize) -> Vec<f32> {
    product_with(isa, matrix, forms(cols), &Input { cols, rows, groups: 1 }, || 1.0)
}

/// Multiplies rows of which each has a single one, so that they are the matrix's columns, each after the other.
fn product_of_units(isa: Isa, matrix: &Matrix, cols: usize) -> Vec<f32> {
    let mut element = 0;
    product_with(isa, matrix, forms(cols), &Input { cols, rows: cols, groups: 1 }, || {
        element += 1;
        f32::from((element - 1) % (cols + 1) == 0)
    })
}

/// Returns the forms of rows that every kind of weights finds its own in.
fn forms(cols: usize) -> Forms {
    let quant = cols.is_multiple_of(GROUP);
    Forms { quant, coarse: false, words: quant, crossed: quant, bf16: true }
}

fn product_with(
    isa: Isa,
    matrix: &Matrix,
    forms: Forms,
    &Input { cols, rows, groups }: &Input,
    mut element: impl FnMut() -> f32,
) -> Vec<f32> {
    let mut input = Activation::new(cols, forms);
    let mut out = Activation::new(93, Forms::default());
    input.reserve(rows);
    out.reserve(rows);
    let (x, y) = (input.shared(), out.shared());
    for row in 0..rows {
        // SAFETY: only one thread uses the activations.
        unsafe {
            x.write(x.span(row)).iter_mut().for_each(|x| *x = element());
            x.prepare(isa, x.span(row));
        }
    }
    let product = Product { rows, groups, ..Product::new(matrix, x, y) };
    // SAFETY: as above.
    (0..product.pieces()).for_each(|piece| unsafe { product.run(isa, piece) });
    let mut results = Vec::new();
    out.append_rows(rows, &mut results);
    results
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
fn floating_point_weights_are_kept_in_the_chosen_type() {
    let encode = |storage, values: &[f32]| -> Vec<u8> {
        match storage {
            StorageType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            StorageType::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        }
    };
    let rounded = |storage, x: f32| match storage {
        StorageType::F32 => x,
        StorageType::F16 => f16::from_f32(x).to_f32(),
        _ => bf16::from_f32(x).to_f32(),
    };
    let floats = [StorageType::F32, StorageType::F16, StorageType::BF16];
    let chosen = [
        (WeightDtype::AsStored, floats),
        (WeightDtype::Halves, [StorageType::BF16, StorageType::F16, StorageType::BF16]),
        (WeightDtype::F32, [StorageType::F32; 3]),
        (WeightDtype::F16, [StorageType::F16; 3]),
        (WeightDtype::Bf16, [StorageType::BF16; 3]),
    ];
    for (dtype, kept) in chosen {
        // A row of an odd number of elements ends with half a pair.
        for (cols, (storage, kept)) in
            [64, 37].into_iter().flat_map(|cols| floats.into_iter().zip(kept).map(move |x| (cols, x)))
        {
            let mut rng = TestRng(7);
            let values: Vec<f32> = (0..93 * cols).map(|_| rounded(storage, 3.0 * rng.signed())).collect();
            let part = |rows: usize| if rows == 23 { &values[..23 * cols] } else { &values[23 * cols..] };
            let converted = matrix_of(storage, cols, dtype, |rows| encode(storage, part(rows)));
            let stored = matrix_of(kept, cols, WeightDtype::AsStored, |rows| encode(kept, part(rows)));
            assert_eq!(converted.bytes(), stored.bytes());
            let mut row = vec![0.0; cols];
            for (index, values) in values.chunks(cols).enumerate() {
                read_row(&converted, index, &mut row);
                assert!(row.iter().zip(values).all(|(x, y)| *x == rounded(kept, *y)), "{dtype:?}, {storage}");
            }
            let (ours, theirs) =
                (product(Isa::detect(), &converted, cols, 5), product(Isa::detect(), &stored, cols, 5));
            assert_eq!(ours, theirs, "{dtype:?}, {storage}");
        }
    }
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
                // Weights that are read are rounded to bf16, and those that are multiplied may not be.
                let rounds = isa.multiplies_bf16() && storage == StorageType::BF16 || is_packed(storage);
                let tolerance = if rounds { 5e-3 } else { 1e-3 };
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
    for storage in StorageType::ALL.into_iter().filter(|storage| storage.block_elements() > 1 && !is_packed(*storage)) {
        let matrix = matrix(storage, 256);
        for rows in [1, 2, 3, 4, 5, 16, 40] {
            for product in [product, coarse_product] {
                let results = |isa| product(isa, &matrix, 256, rows);
                let sets = Isa::ALL.into_iter().filter(|&isa| isa != Isa::Portable && isa.is_available());
                let found: Vec<_> = sets.map(results).collect();
                let bits = |results: &[f32]| results.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(found.windows(2).all(|pair| bits(&pair[0]) == bits(&pair[1])), "{storage}, {rows} rows");
                // It multiplies both parts of all rows alike.
                let expected = results(Isa::Portable);
                let most = expected.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                for (found, expected) in found.iter().flatten().zip(&expected) {
                    assert!((found - expected).abs() <= 1e-5 * most, "{storage}, {rows} rows: {found}, not {expected}");
                }
            }
        }
    }
}

#[test]
fn panels_hold_the_values_of_the_blocks() {
    for (storage, decode) in StorageType::ALL.into_iter().filter_map(|storage| Some((storage, storage.decoder()?))) {
        let mut expected = Vec::new();
        let mut rng = TestRng(9);
        let matrix = matrix_of(storage, 512, WeightDtype::AsStored, |rows| {
            let blocks = random_blocks(storage, rows * 512, 0.5, &mut rng);
            let mut values = vec![0.0; rows * 512];
            decode(&blocks, &mut values);
            expected.extend(values);
            blocks
        });
        let tolerance = match storage {
            _ if is_packed(storage) => 2e-3,
            // Its two scales are multiplied first, as the format says.
            StorageType::Nvfp4 => 0.0,
            _ => 1e-6,
        };
        let mut row = vec![0.0; 512];
        for (index, expected) in expected.chunks(512).enumerate() {
            read_row(&matrix, index, &mut row);
            for (found, expected) in row.iter().zip(expected) {
                assert!((found - expected).abs() <= tolerance, "{storage}, row {index}: {found}, expected {expected}");
            }
        }
    }
}

/// Returns whether a type is kept as floating-point numbers in fewer than 16 bits.
fn is_packed(storage: StorageType) -> bool {
    matches!(Layout::new(storage, 256).unwrap().kind, PanelKind::Packed(_))
}

#[test]
fn bf16_in_twelve_bits_has_the_bits_of_sixteen() {
    // Of some weights, the upper byte is not in the table of their panel.
    for (cols, rare) in [(32, 1 << 30), (37, 1 << 30), (576, 40), (576, 500), (1536, 700)] {
        let bytes = |rows: usize| {
            let mut rng = TestRng(rows as u64);
            let mut weight = |at: usize| {
                let x = rng.signed() * rng.signed();
                bf16::from_f32(if at % rare == rare - 1 { [0.0, 1e-20, -1e-9, 3e20][rng.below(4)] } else { x })
            };
            (0..rows * cols).flat_map(|at| weight(at).to_le_bytes()).collect()
        };
        let plain = loaded(StorageType::BF16, cols, (WeightDtype::AsStored, false), bytes);
        let short = loaded(StorageType::BF16, cols, (WeightDtype::AsStored, true), bytes);
        let kinds: Vec<_> = short.parts.iter().map(|part| part.layout.kind).collect();
        // One panel with too many exceptions is enough to keep a part in sixteen bits.
        assert_eq!(kinds, [if rare == 40 { PanelKind::Bf16 } else { PanelKind::Short }; 2], "{cols} inputs");
        assert!(rare == 40 || cols < 100 || 5 * short.bytes() < 4 * plain.bytes());
        let (mut one, mut other) = (vec![0.0; cols], vec![0.0; cols]);
        for row in 0..93 {
            read_row(&plain, row, &mut one);
            read_row(&short, row, &mut other);
            assert!(one.iter().zip(&other).all(|(x, y)| x.to_bits() == y.to_bits()), "{cols} inputs, row {row}");
        }
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for rows in [1, 2, 3, 5, 8, 9, 16, 17, 40, 300] {
                let bits = |matrix| product(isa, matrix, cols, rows).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(&short), bits(&plain), "{cols} inputs on {isa}, {rows} rows");
            }
        }
    }
}

#[test]
fn packed_numbers_have_the_bits_of_those_that_are_unpacked_when_they_are_loaded() {
    let packed: Vec<_> = StorageType::ALL.into_iter().filter(|storage| is_packed(*storage)).collect();
    assert_eq!(packed, [StorageType::F8E4M3, StorageType::Nf4, StorageType::Fp4]);
    for storage in packed {
        let decode = storage.decoder().unwrap();
        let blocks = |rows: usize| random_blocks(storage, rows * 192, 0.5, &mut TestRng(rows as u64));
        let unpacked = matrix_of(StorageType::F32, 192, WeightDtype::Bf16, |rows| {
            let mut values = vec![0.0; rows * 192];
            decode(&blocks(rows), &mut values);
            values.iter().flat_map(|x| x.to_le_bytes()).collect()
        });
        let packed = matrix_of(storage, 192, WeightDtype::Halves, blocks);
        assert!(4 * packed.bytes() < 3 * unpacked.bytes(), "{storage}");
        let (mut one, mut other) = (vec![0.0; 192], vec![0.0; 192]);
        for row in 0..93 {
            read_row(&packed, row, &mut one);
            read_row(&unpacked, row, &mut other);
            assert_eq!(one, other, "{storage}, row {row}");
        }
        let kind = Layout::new(storage, 192).unwrap().kind;
        let unpack = |isa: &Isa| isa.is_available() && !kind.takes_integers(*isa) && !kind.takes_rounded(*isa);
        for isa in Isa::ALL.into_iter().filter(unpack) {
            for rows in [1, 3, 20, 300] {
                let bits = |matrix| product(isa, matrix, 192, rows).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(&packed), bits(&unpacked), "{storage} on {isa}, {rows} rows");
            }
        }
    }
}

/// Returns the available instruction sets with which packed numbers are added as bf16 before they are scaled.
fn sets_with_rounded(storage: StorageType) -> impl Iterator<Item = Isa> {
    let kind = Layout::new(storage, 256).unwrap().kind;
    Isa::ALL.into_iter().filter(move |isa| isa.is_available() && kind.takes_rounded(*isa))
}

/// Gives each block of numbers a scale of its own: some are powers of two times each other.
fn unlike_scales(mut blocks: Vec<u8>, storage: StorageType, rng: &mut TestRng) -> Vec<u8> {
    for block in blocks.chunks_exact_mut(storage.block_bytes()) {
        let scale = [0.5, 1.0, 1.5][rng.below(3)] / 448.0 * 2f32.powi(rng.below(5) as i32);
        block[..4].copy_from_slice(&scale.to_le_bytes());
    }
    blocks
}

#[test]
fn packed_numbers_as_bf16_have_the_same_bits_for_any_number_of_rows() {
    let kinds = [StorageType::F8E4M3, StorageType::Nf4, StorageType::Fp4];
    for (storage, isa) in kinds.into_iter().flat_map(|kind| sets_with_rounded(kind).map(move |isa| (kind, isa))) {
        // Eight groups are unpacked at once.
        for cols in [64, 192, 576] {
            let mut rng = TestRng(3);
            let unlike = matrix_of(storage, cols, WeightDtype::AsStored, |rows| {
                unlike_scales(random_blocks(storage, rows * cols, 0.5, &mut rng), storage, &mut rng)
            });
            for matrix in [matrix(storage, cols), unlike] {
                let all = product(isa, &matrix, cols, 300);
                for rows in [1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 33, 64, 65, 257] {
                    let some = product(isa, &matrix, cols, rows);
                    let bits = |results: &[f32]| results.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&some), bits(&all[..some.len()]), "{storage}, {cols} inputs, {rows} rows");
                }
                let expected = expected(&matrix, cols, 300);
                let largest = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
                for (found, expected) in all.iter().zip(&expected) {
                    assert!((f64::from(*found) - expected).abs() < 5e-3 * largest, "{storage}, {cols} inputs");
                }
            }
        }
    }
}

/// Returns the available instruction sets with which packed numbers are multiplied as integers of 16 bits.
fn sets_with_integers_of(storage: StorageType) -> Vec<Isa> {
    let kind = Layout::new(storage, 256).unwrap().kind;
    Isa::ALL.into_iter().filter(|isa| isa.is_available() && kind.takes_integers(*isa)).collect()
}

/// As integers of 16 bits, numbers are nearly exact, and rows have 12 bits.
#[test]
fn packed_numbers_as_integers_are_not_rounded() {
    for storage in [StorageType::F8E4M3, StorageType::Nf4, StorageType::Fp4] {
        let decode = storage.decoder().unwrap();
        let blocks = |rows: usize| random_blocks(storage, rows * 192, 0.5, &mut TestRng(rows as u64));
        let unpacked = matrix_of(StorageType::F32, 192, WeightDtype::AsStored, |rows| {
            let mut values = vec![0.0; rows * 192];
            decode(&blocks(rows), &mut values);
            values.iter().flat_map(|x| x.to_le_bytes()).collect()
        });
        let packed = matrix_of(storage, 192, WeightDtype::AsStored, blocks);
        for isa in sets_with_integers_of(storage) {
            for rows in [1, 2, 3, 20, 300] {
                let (found, expected) = (product(isa, &packed, 192, rows), product(isa, &unpacked, 192, rows));
                let largest = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                for (found, expected) in found.iter().zip(&expected) {
                    let error = (found - expected).abs() / largest;
                    assert!(error < 1e-3, "{storage}, {rows} rows: {found}, expected {expected}");
                }
            }
        }
    }
}

#[test]
fn packed_numbers_as_integers_have_the_same_bits_on_every_set() {
    for storage in [StorageType::F8E4M3, StorageType::Nf4, StorageType::Fp4] {
        let matrix = matrix(storage, 192);
        for rows in [1, 2, 3, 8, 9, 20, 300] {
            let bits = |isa| product(isa, &matrix, 192, rows).into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let found: Vec<_> = sets_with_integers_of(storage).into_iter().map(bits).collect();
            assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "{storage}, {rows} rows");
        }
    }
}

#[test]
fn e4m3_numbers_are_near_whatever_the_size_of_their_group() {
    let storage = StorageType::F8E4M3;
    let mut rng = TestRng(11);
    let mut blocks = random_blocks(storage, 93 * 64, 0.5, &mut rng);
    for (index, block) in blocks.chunks_exact_mut(36).enumerate() {
        // The largest exponent of a block is from none to all bits; the largest mantissa has all bits in every third one.
        let largest = (index as u8 % 16) << 3 | if index.is_multiple_of(3) { 7 } else { 4 };
        block[4..].iter_mut().for_each(|code| *code = *code & 0x80 | (*code & 0x7f).min(largest).min(0x7e));
        block[..4].copy_from_slice(&2f32.powi(index as i32 % 9 - 4).to_le_bytes());
    }
    let (matrix, values) = matrix_and_values(storage, 64, &blocks);
    for isa in sets_with_integers_of(storage).into_iter().chain(sets_with_rounded(storage)) {
        let found = product_of_units(isa, &matrix, 64);
        for (row, values) in values.chunks(64).enumerate() {
            for (k, value) in values.iter().enumerate() {
                let group = &values[k / GROUP * GROUP..][..GROUP];
                let largest = group.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                let error = (found[k * 93 + row] - value).abs();
                assert!(error <= largest / 8000.0, "row {row}, {k}: {error} of {value}, the largest is {largest}");
            }
        }
    }
}

/// Gives the halves of NVFP4 blocks any scales, some of them far from each other.
fn spread_scales(blocks: &mut [u8], rng: &mut TestRng) {
    for block in blocks.chunks_exact_mut(StorageType::Nvfp4.block_bytes()) {
        block[4..6].fill_with(|| rng.below(0x7f) as u8);
    }
}

#[test]
fn nvfp4_numbers_are_exact_whatever_the_scales_of_their_halves() {
    let storage = StorageType::Nvfp4;
    let mut rng = TestRng(11);
    let mut blocks = random_blocks(storage, 93 * 64, 0.5, &mut rng);
    spread_scales(&mut blocks, &mut rng);
    let (matrix, values) = matrix_and_values(storage, 64, &blocks);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let found = product_of_units(isa, &matrix, 64);
        for (row, values) in values.chunks(64).enumerate() {
            for (k, value) in values.iter().enumerate() {
                let found = found[k * 93 + row];
                assert!((found - value).abs() <= 1e-6 * value.abs(), "{isa}, row {row}, {k}: {found}, not {value}");
            }
        }
    }
}

/// The sums of a row are the same whatever rows it is multiplied with.
#[test]
fn rows_of_quantised_weights_have_the_same_bits_in_any_number_of_rows() {
    for storage in StorageType::ALL.into_iter().filter(|storage| storage.block_elements() > 1) {
        let mut rng = TestRng(5);
        let matrix = matrix_of(storage, 256, WeightDtype::AsStored, |rows| {
            let mut blocks = random_blocks(storage, rows * 256, 0.5, &mut rng);
            if storage == StorageType::Nvfp4 {
                spread_scales(&mut blocks, &mut rng);
            }
            blocks
        });
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for product in [product, coarse_product] {
                let bits = |rows| product(isa, &matrix, 256, rows).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                let all = bits(40);
                for rows in [1, 2, 3, 4, 5, 7, 8, 16] {
                    assert_eq!(bits(rows), all[..rows * 93], "{storage} on {isa}, {rows} rows");
                }
            }
        }
    }
}

#[test]
fn rows_divided_among_groups_have_the_same_bits() {
    for storage in [StorageType::BF16, StorageType::Q4_1, StorageType::Q6K, StorageType::Nvfp4, StorageType::Nf4] {
        let matrix = matrix(storage, 256);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for rows in [7, 96, 112, 301] {
                let bits = |groups| {
                    let input = Input { cols: 256, rows, groups };
                    product_in_groups(isa, &matrix, &input).into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let all = bits(1);
                for groups in [2, 3, 5] {
                    assert_eq!(bits(groups), all, "{storage} on {isa}, {rows} rows in {groups} groups");
                }
            }
        }
    }
}

/// A thread has the same rows in stages that are divided by rows and in products, and each group has enough of them.
#[test]
fn blocks_are_the_rows_of_threads() {
    let matrix = matrix(StorageType::Q4_1, 32);
    let mut activation = Activation::new(32, forms(32));
    let none = activation.shared();
    for threads in [1, 2, 3, 8, 64] {
        for rows in [1, 31, 63, 64, 100, 257, 512, 700, 2048] {
            let groups = groups(16, rows, threads);
            assert!((1..=threads).contains(&groups) && (groups == 1 || rows / groups >= 16.max(4 * threads)));
            let product = Product { rows, groups, ..Product::new(&matrix, none, none) };
            let blocks = product.blocks();
            assert!(blocks.is_multiple_of(groups) && rows.div_ceil(blocks) <= PIECE_ROWS);
            for isa in [Isa::Avx2, Isa::Amx] {
                let blocks: Vec<_> = (0..blocks).map(|index| product.block(isa, index)).collect();
                assert!(blocks[0].start == 0 && blocks[blocks.len() - 1].end == rows);
                assert!(blocks.windows(2).all(|pair| pair[0].end == pair[1].start));
                if isa == Isa::Amx {
                    assert!(blocks.iter().all(|block| block.start.is_multiple_of(TILE)));
                } else if groups == threads {
                    let each = blocks.len() / threads;
                    assert!((0..threads).all(|thread| blocks[thread * each].start == thread * rows / threads));
                }
            }
        }
    }
}

/// Every code has its value: a row of ones adds a group of one code.
#[test]
fn every_code_of_packed_numbers_is_multiplied() {
    for (storage, codes) in [(StorageType::F8E4M3, 256), (StorageType::Nf4, 16), (StorageType::Fp4, 16)] {
        let decode = storage.decoder().unwrap();
        for code in (0..codes).filter(|code| storage != StorageType::F8E4M3 || code & 0x7f != 0x7f) {
            let byte = if codes == 16 { code as u8 * 0x11 } else { code as u8 };
            let mut block = vec![byte; storage.block_bytes()];
            block[..4].copy_from_slice(&0.375f32.to_le_bytes());
            let mut values = [0.0; 64];
            decode(&block, &mut values);
            let cols = storage.block_elements();
            let matrix = matrix_of(storage, cols, WeightDtype::AsStored, |rows| block.repeat(rows));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                for rows in [1, 2, 7] {
                    let (found, expected) = (product_of_ones(isa, &matrix, cols, rows), cols as f32 * values[0]);
                    let bound = expected.abs() / 256.0 + 1e-9;
                    assert!(
                        found.iter().all(|x| (x - expected).abs() <= bound),
                        "{storage}, {code:#x} on {isa}: {found:?}"
                    );
                }
            }
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

/// Multiplies rows again and again, for a counter of instructions: `OCTAVO_COUNTED` has a storage type, an instruction set,
/// a number of rows and a number of repetitions.
#[test]
#[ignore = "only for a counter of instructions"]
fn products_to_count() {
    let counted = std::env::var("OCTAVO_COUNTED").expect("OCTAVO_COUNTED is set");
    let [storage, isa, rows, repetitions] = counted.split(' ').collect::<Vec<_>>()[..] else { panic!("four words") };
    let storage = StorageType::ALL.into_iter().find(|known| known.to_string().eq_ignore_ascii_case(storage)).unwrap();
    let (isa, rows): (Isa, usize) = (isa.parse().unwrap(), rows.parse().unwrap());
    let matrix = matrix(storage, 1024);
    let mut input = Activation::new(1024, forms(1024));
    let mut out = Activation::new(93, Forms::default());
    input.reserve(rows);
    out.reserve(rows);
    let (x, y) = (input.shared(), out.shared());
    let product = Product { rows, ..Product::new(&matrix, x, y) };
    for _ in 0..repetitions.parse().unwrap() {
        // SAFETY: only one thread uses the activations.
        (0..product.pieces()).for_each(|piece| unsafe { product.run(isa, piece) });
    }
}
