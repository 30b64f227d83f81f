//! Compares dequantised weights and products of quantised weights with the formats' definition in f64.

use half::f16;
use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Dtype, Instance};
use octavo_kernels::params::{DequantizeParams, QuantLinearParams, QuantizeParams};
use octavo_kernels::quant::{QuantFormat, QuantLayout};
use octavo_ops::testing::{TestRng, random_blocks};
use octavo_ops::{FP4_VALUES, NF4_VALUES, StorageType, e4m3};

use crate::common::{assert_near, by_rows, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes, has_sm80};
use crate::support::{Array, Tolerance, uniform};

fn storage(format: QuantFormat) -> StorageType {
    match format {
        QuantFormat::Q4_0 => StorageType::Q4_0,
        QuantFormat::Q4_1 => StorageType::Q4_1,
        QuantFormat::Q5_0 => StorageType::Q5_0,
        QuantFormat::Q5_1 => StorageType::Q5_1,
        QuantFormat::Q8_0 => StorageType::Q8_0,
        QuantFormat::Q2K => StorageType::Q2K,
        QuantFormat::Q3K => StorageType::Q3K,
        QuantFormat::Q4K => StorageType::Q4K,
        QuantFormat::Q5K => StorageType::Q5K,
        QuantFormat::Q6K => StorageType::Q6K,
        QuantFormat::Mxfp4 => StorageType::Mxfp4,
        QuantFormat::Nvfp4 => StorageType::Nvfp4,
        QuantFormat::Iq4Nl => StorageType::Iq4Nl,
        QuantFormat::Iq4Xs => StorageType::Iq4Xs,
        QuantFormat::Int4 => StorageType::Int4,
        QuantFormat::Int8 => StorageType::Int8,
        QuantFormat::F8E4M3 => StorageType::F8E4M3,
        QuantFormat::Nf4 => StorageType::Nf4,
        QuantFormat::Fp4 => StorageType::Fp4,
    }
}

/// Values of the codes of the IQ4 types.
const IQ4: [f64; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// Returns the elements of a block of a file, as the formats define them.
fn elements(format: QuantFormat, block: &[u8]) -> Vec<f64> {
    if format.block_elements() == 256 { of_super_block(format, block) } else { of_block(format, block) }
}

/// Returns the number in half precision at a place.
fn half_at(block: &[u8], at: usize) -> f64 {
    f64::from(f16::from_le_bytes([block[at], block[at + 1]]))
}

/// Returns the value of an e2m1 code.
fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code < 8 { magnitude } else { -magnitude }
}

fn low(byte: u8) -> f64 {
    f64::from(byte & 15)
}

fn high(byte: u8) -> f64 {
    f64::from(byte >> 4)
}

/// Returns the elements of a block of 32 or 64.
fn of_block(format: QuantFormat, block: &[u8]) -> Vec<f64> {
    let half = |at: usize| half_at(block, at);
    match format {
        QuantFormat::Q4_0 => {
            let codes = block[2..].iter().map(|b| low(*b)).chain(block[2..].iter().map(|b| high(*b)));
            codes.map(|q| half(0) * (q - 8.0)).collect()
        }
        QuantFormat::Q4_1 => {
            let codes = block[4..].iter().map(|b| low(*b)).chain(block[4..].iter().map(|b| high(*b)));
            codes.map(|q| half(0) * q + half(2)).collect()
        }
        QuantFormat::Q5_0 | QuantFormat::Q5_1 => {
            let (scales, rest) = block.split_at(format.block_bytes() - 20);
            let bits = u32::from_le_bytes(rest[..4].try_into().expect("four bytes"));
            let codes = rest[4..].iter().map(|b| low(*b)).chain(rest[4..].iter().map(|b| high(*b)));
            let codes = codes.enumerate().map(|(k, q)| q + f64::from(bits >> k & 1) * 16.0);
            let least = if scales.len() == 2 { -16.0 * half(0) } else { half(2) };
            codes.map(|q| half(0) * q + least).collect()
        }
        QuantFormat::Q8_0 => block[2..].iter().map(|b| half(0) * f64::from(*b as i8)).collect(),
        QuantFormat::Mxfp4 => {
            let codes = block[1..].iter().map(|b| b & 15).chain(block[1..].iter().map(|b| b >> 4));
            codes.map(|code| 2f64.powi(i32::from(block[0]) - 127) * e2m1(code)).collect()
        }
        QuantFormat::Nvfp4 => {
            let whole = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            let whole = if whole < 0.0 { -1.0 / f64::from(whole) } else { f64::from(whole) };
            let halves =
                block[6..].iter().map(|b| (block[4], b & 15)).chain(block[6..].iter().map(|b| (block[5], b >> 4)));
            halves.map(|(scale, code)| whole * f64::from(e4m3(scale)) * e2m1(code)).collect()
        }
        QuantFormat::Iq4Nl => {
            let codes = block[2..].iter().map(|b| b & 15).chain(block[2..].iter().map(|b| b >> 4));
            codes.map(|code| half(0) * IQ4[usize::from(code)]).collect()
        }
        QuantFormat::Int4 => {
            let codes = block[3..].iter().map(|b| low(*b)).chain(block[3..].iter().map(|b| high(*b)));
            codes.map(|q| half(0) * (q - f64::from(block[2]))).collect()
        }
        QuantFormat::F8E4M3 => {
            let scale = f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]]));
            block[4..].iter().map(|code| scale * f64::from(e4m3(*code))).collect()
        }
        QuantFormat::Nf4 | QuantFormat::Fp4 => {
            let scale = f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]]));
            let values = if format == QuantFormat::Nf4 { NF4_VALUES } else { FP4_VALUES };
            let halves = block[4..].chunks(16);
            let codes = halves.flat_map(|half| half.iter().map(|b| b & 15).chain(half.iter().map(|b| b >> 4)));
            codes.map(|code| scale * f64::from(values[usize::from(code)])).collect()
        }
        QuantFormat::Int8 => {
            let scale = f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]]));
            block[5..].iter().map(|q| scale * (f64::from(*q) - f64::from(block[4]))).collect()
        }
        other => unreachable!("{other:?} has larger blocks"),
    }
}

/// Returns the elements of a block of 256.
fn of_super_block(format: QuantFormat, block: &[u8]) -> Vec<f64> {
    let half = |at: usize| half_at(block, at);
    match format {
        QuantFormat::Q2K => {
            let value = |i: usize| {
                // A block has two halves of 128 elements, each with four quarters of 32.
                let (part, quarter, l) = (i / 128, i % 128 / 32, i % 32);
                let q = f64::from(block[16 + part * 32 + l] >> (2 * quarter) & 3);
                half(80) * low(block[i / 16]) * q - half(82) * high(block[i / 16])
            };
            (0..256).map(value).collect()
        }
        QuantFormat::Q3K => {
            let factor = |j: usize| {
                let packed = &block[96..108];
                let lower = if j < 8 { packed[j] & 15 } else { packed[j - 8] >> 4 };
                f64::from(lower | (packed[8 + j % 4] >> (2 * (j / 4)) & 3) << 4) - 32.0
            };
            let value = |i: usize| {
                let (part, quarter, l) = (i / 128, i % 128 / 32, i % 32);
                let q = f64::from(block[32 + part * 32 + l] >> (2 * quarter) & 3);
                let missing = if block[l] >> (i / 32) & 1 == 0 { 4.0 } else { 0.0 };
                half(108) * factor(i / 16) * (q - missing)
            };
            (0..256).map(value).collect()
        }
        QuantFormat::Q4K | QuantFormat::Q5K => {
            let packed = &block[4..16];
            let (fifth, codes) = block[16..].split_at(block.len() - 16 - 128);
            let factors = |j: usize| match j {
                0..4 => (packed[j] & 63, packed[j + 4] & 63),
                _ => (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4),
            };
            let group = |j: usize| {
                let (scale, min) = factors(j);
                codes[j / 2 * 32..][..32].iter().enumerate().map(move |(l, b)| {
                    let q = if j.is_multiple_of(2) { low(*b) } else { high(*b) };
                    let q = q + 16.0 * fifth.get(l).map_or(0.0, |bits| f64::from(bits >> j & 1));
                    half(0) * f64::from(scale) * q - half(2) * f64::from(min)
                })
            };
            (0..8).flat_map(group).collect()
        }
        QuantFormat::Iq4Xs => {
            let upper = u16::from_le_bytes([block[2], block[3]]);
            let group = |j: usize| {
                let lower = block[4 + j / 2] >> (4 * (j % 2)) & 15;
                let factor = f64::from(u16::from(lower) | (upper >> (2 * j) & 3) << 4) - 32.0;
                let bytes = &block[8 + 16 * j..][..16];
                let codes = bytes.iter().map(|b| b & 15).chain(bytes.iter().map(|b| b >> 4));
                codes.map(move |code| half(0) * factor * IQ4[usize::from(code)])
            };
            (0..8).flat_map(group).collect()
        }
        QuantFormat::Q6K => {
            let mut values = vec![0.0; 256];
            for (i, value) in values.iter_mut().enumerate() {
                // A block has two halves of 128 elements, each with four quarters of 32.
                let (part, quarter, l) = (i / 128, i % 128 / 32, i % 32);
                let byte = block[part * 64 + quarter % 2 * 32 + l];
                let lower = if quarter < 2 { byte & 15 } else { byte >> 4 };
                let upper = block[128 + part * 32 + l] >> (2 * quarter) & 3;
                let factor = block[192 + i / 16] as i8;
                *value = half(208) * f64::from(factor) * (f64::from(lower | upper << 4) - 32.0);
            }
            values
        }
        other => unreachable!("{other:?} has smaller blocks"),
    }
}

/// A random weight `[n, k]`: its values, and its layout on the device.
pub(crate) struct Weight {
    pub(crate) layout: QuantLayout,
    pub(crate) memory: Vec<u8>,
    pub(crate) values: Vec<f64>,
}

impl Weight {
    pub(crate) fn draw(rng: &mut TestRng, format: QuantFormat, n: usize, k: usize) -> Self {
        let blocks = random_blocks(storage(format), n * k, 1.0, rng);
        let layout = QuantLayout::new(format, n, k).expect("whole blocks");
        let mut bytes = vec![0; layout.bytes()];
        layout.repack(&blocks, &mut bytes);
        let values = blocks.chunks(format.block_bytes()).flat_map(|block| elements(format, block)).collect();
        Self { layout, memory: bytes, values }
    }
}

#[test]
fn values_are_those_of_the_format() {
    let mut rng = rng();
    for format in QuantFormat::ALL {
        let instances = dtypes().into_iter().map(|dtype| manifest::dequantize(format, dtype)).collect::<Vec<_>>();
        let kernels = Kernels::new(&instances);
        for (dtype, instance) in dtypes().into_iter().zip(&instances) {
            let (n, k) = (1 + rng.below(20), format.block_elements() * (1 + rng.below(5)));
            let weight = Weight::draw(&mut rng, format, n, k);
            // The rows are all in order, as in a weight, then some of them scaled, as in an embedding.
            let ids: Vec<u32> = (0..1 + rng.below(9)).map(|_| rng.below(n) as u32).collect();
            for (row_ids, scale) in [(None, 1.0f32), (Some(ids), 1.75)] {
                let rows: Vec<u32> = row_ids.clone().unwrap_or_else(|| (0..n as u32).collect());
                let (named, drawn) = by_rows(&rows, &mut rng);
                let found = in_every_order(|order| {
                    let mut out = Array::poisoned(dtype, rows.len() * k);
                    let params = DequantizeParams {
                        weight: weight.layout.planes(address(&weight.memory)),
                        row_ids: row_ids.as_ref().map_or(0, |_| address(&named)),
                        drawn: address(&drawn),
                        out: out.ptr_mut(),
                        rows: rows.len() as u32,
                        k: k as u32,
                        n: n as u32,
                        scale,
                    };
                    launch(&kernels, order, instance, params.grid(instance.threads), &params);
                    out
                });
                let row = |r: &u32| weight.values[*r as usize * k..][..k].iter().map(|x| x * f64::from(scale));
                let expected: Vec<f64> = rows.iter().flat_map(row).collect();
                assert_near(&found.values(), &expected, Tolerance::Elementwise.bound(dtype), &instance.name);
            }
        }
    }
}

/// Values in f32 are the nearest to those of the format where each is an integer times a scale.
#[test]
fn values_of_integers_and_scales_are_rounded_once() {
    use QuantFormat::{Int4, Int8, Iq4Nl, Mxfp4, Q4_0, Q5_0, Q8_0};
    if !dtypes().contains(&Dtype::F32) {
        return;
    }
    let mut rng = rng();
    for format in [Q4_0, Q5_0, Q8_0, Mxfp4, Iq4Nl, Int4, Int8] {
        let instance = manifest::dequantize(format, Dtype::F32);
        let kernels = Kernels::new(std::slice::from_ref(&instance));
        let (n, k) = (40, 320);
        let weight = Weight::draw(&mut rng, format, n, k);
        let mut found = Array::poisoned(Dtype::F32, n * k);
        let params = DequantizeParams {
            weight: weight.layout.planes(address(&weight.memory)),
            out: found.ptr_mut(),
            rows: n as u32,
            k: k as u32,
            n: n as u32,
            scale: 1.0,
            ..DequantizeParams::default()
        };
        launch(&kernels, Order::Forward, &instance, params.grid(instance.threads), &params);
        // Zeros may differ in their sign.
        assert!(found.values() == Array::new(Dtype::F32, &weight.values).values(), "{}", instance.name);
    }
}

/// 8-bit activations `[m, k]` from the kernel.
struct Activations {
    codes: Vec<i8>,
    /// Scale of each block of 32, and the scale times the sum of its codes.
    scales: Vec<[f32; 2]>,
}

fn quantize(kernels: &Kernels, input: &Array, m: usize, k: usize) -> Activations {
    let instance = manifest::quantize_activations(input.dtype);
    // Scales are compared by bits, because they may be NaN.
    let (codes, bits) = in_every_order(|order| {
        let (mut codes, mut scales) = (vec![-128i8; m * k], vec![[f32::NAN; 2]; m * k / 32]);
        let params = QuantizeParams {
            input: input.ptr(),
            codes: address_mut(&mut codes),
            scales: address_mut(&mut scales),
            m: m as u32,
            k: k as u32,
            ..QuantizeParams::default()
        };
        launch(kernels, order, &instance, params.grid(instance.threads), &params);
        (codes, scales.into_iter().map(|pair| pair.map(f32::to_bits)).collect::<Vec<_>>())
    });
    Activations { codes, scales: bits.into_iter().map(|pair| pair.map(f32::from_bits)).collect() }
}

#[test]
fn activations_are_rounded_to_the_nearest_of_255_levels() {
    let mut rng = rng();
    let instances = dtypes().into_iter().map(manifest::quantize_activations).collect::<Vec<_>>();
    let kernels = Kernels::new(&instances);
    for dtype in dtypes() {
        let (m, k) = (1 + rng.below(4), 32 * (1 + rng.below(40)));
        let mut input = uniform(dtype, m * k, 4.0, &mut rng);
        (0..32).for_each(|i| input.set(i, 0.0));
        let quantised = quantize(&kernels, &input, m, k);
        for (block, x) in input.values().chunks(32).enumerate() {
            let largest = x.iter().fold(0.0f64, |a, b| a.max(b.abs()));
            let codes = &quantised.codes[block * 32..][..32];
            let [scale, scaled_sum] = quantised.scales[block].map(f64::from);
            assert!((scale - largest / 127.0).abs() <= 1e-7 * largest, "{dtype:?}: the largest has code 127");
            let sum: i32 = codes.iter().map(|code| i32::from(*code)).sum();
            assert!((scaled_sum - scale * f64::from(sum)).abs() <= 1e-6 * scaled_sum.abs(), "{dtype:?}: the sum");
            for (code, x) in codes.iter().zip(x) {
                assert!((f64::from(*code) * scale - x).abs() <= 0.5001 * scale, "{dtype:?}: {x} is {code}");
            }
        }
    }
}

#[test]
fn small_block_that_is_not_finite_gives_nan_and_its_neighbours_do_not() {
    let instance = manifest::quantize_activations(Dtype::F32);
    let kernels = Kernels::new(&[instance]);
    for wrong in [f64::NAN, f64::INFINITY] {
        let mut values = vec![1.0; 96];
        values[40] = wrong;
        let scales = quantize(&kernels, &Array::new(Dtype::F32, &values), 1, 96).scales;
        assert_eq!([0, 1, 2].map(|block| scales[block].iter().all(|s| s.is_finite())), [true, false, true]);
        assert!(scales[1][1].is_nan(), "what it gives to a sum is NaN");
    }
}

/// Returns a product by an instance, in every order. `params` has the sizes and the addends.
fn product(
    kernels: &Kernels,
    instance: &Instance,
    weight: &Weight,
    x: &Activations,
    (params, out): (QuantLinearParams, Dtype),
) -> Array {
    in_every_order(|order| {
        let mut found = Array::poisoned(out, params.m as usize * params.out_stride as usize);
        let params = QuantLinearParams {
            weight: weight.layout.planes(address(&weight.memory)),
            input: address(&x.codes),
            scales: address(&x.scales),
            out: found.ptr_mut(),
            ..params
        };
        launch(kernels, order, instance, params.grid(), &params);
        found
    })
}

/// Maximum difference between a product with activations rounded to 8 bits and one with exact activations.
const ROUNDING: f64 = 1e-2;

#[test]
fn mmvq_of_drawn_shapes_is_near_the_formats_own_product() {
    let mut rng = rng();
    for format in QuantFormat::ALL.into_iter().filter(|format| !format.is_float()) {
        for out in dtypes() {
            let rows = [1, 2, 4, 8];
            let mut instances = rows.map(|rows| manifest::mmvq(format, out, rows)).to_vec();
            instances.push(manifest::quantize_activations(Dtype::F32));
            let kernels = Kernels::new(&instances);
            for (rows, instance) in rows.into_iter().zip(&instances) {
                assert_eq!(manifest::mmvq_rows(rows as usize), Some(rows));
                let m = rows as usize - rng.below((rows as usize).div_ceil(2));
                let (n, k) = (1 + rng.below(40), format.block_elements() * (1 + rng.below(8)));
                let weight = Weight::draw(&mut rng, format, n, k);
                let input = uniform(Dtype::F32, m * k, 2.0, &mut rng);
                let x = quantize(&kernels, &input, m, k);
                let bias: Vec<f32> = (0..n).map(|_| rng.signed()).collect();
                let add = uniform(out, m * n, 1.0, &mut rng);
                let params = QuantLinearParams {
                    bias: address(&bias),
                    add: add.ptr(),
                    m: m as u32,
                    n: n as u32,
                    k: k as u32,
                    out_stride: n as u32,
                    scale: 1.0,
                    ..QuantLinearParams::default()
                };
                let found = product(&kernels, instance, &weight, &x, (params, out));
                let widest = product(&kernels, &instances[3], &weight, &x, (params, out));
                assert!(found == widest, "{} differs from {}", instances[3].name, instance.name);

                let codes = x.codes.iter().enumerate();
                let rounded: Vec<f64> =
                    codes.map(|(i, code)| f64::from(*code) * f64::from(x.scales[i / 32][0])).collect();
                let expected = |input: &[f64]| -> Vec<f64> {
                    let dot = |i: usize, j: usize| -> f64 {
                        input[i * k..][..k].iter().zip(&weight.values[j * k..][..k]).map(|(a, b)| a * b).sum()
                    };
                    let value = |at: usize| dot(at / n, at % n) + f64::from(bias[at % n]) + add.get(at);
                    (0..m * n).map(value).collect()
                };
                let context = format!("{} m {m} n {n} k {k}", instance.name);
                let tolerance = Tolerance::Product.bound(out);
                let products = expected(&rounded);
                // With few products, all of them may be small compared with their summands.
                if m * n >= 64 {
                    assert_near(&found.values(), &products, tolerance, &context);
                    assert_near(&found.values(), &expected(&input.values()), ROUNDING.max(tolerance), &context);
                } else {
                    let magnitude = |at: usize| f64::from(bias[at % n].abs()).max(add.get(at).abs());
                    let largest = (0..m * n).map(magnitude).fold(0.0, f64::max);
                    let size = products.iter().fold(0.0f64, |size, x| size.max(x.abs()));
                    assert_near(&found.values(), &products, tolerance * (largest / size).max(1.0), &context);
                }
            }
        }
    }
}

/// Returns a product with activations that are not rounded, in every order.
fn exact(
    kernels: &Kernels,
    instance: &Instance,
    grid: impl Fn(&QuantLinearParams) -> [u32; 3],
    weight: &Weight,
    (input, params): (&Array, QuantLinearParams),
) -> Array {
    let out = if instance.name.contains("_f32_m") { Dtype::F32 } else { input.dtype };
    in_every_order(|order| {
        let mut found = Array::poisoned(out, params.m as usize * params.out_stride as usize);
        let params = QuantLinearParams {
            weight: weight.layout.planes(address(&weight.memory)),
            input: input.ptr(),
            out: found.ptr_mut(),
            ..params
        };
        launch(kernels, order, instance, grid(&params), &params);
        found
    })
}

/// Compares a product of few rows and a weight of floating-point numbers with that of its values.
fn check_few_rows(format: QuantFormat, dtype: Dtype, out: Dtype, rng: &mut TestRng) {
    let rows = [1, 2, 4, 8];
    let instances = rows.map(|rows| manifest::gemv_quant(format, dtype, out, rows));
    let kernels = Kernels::new(&instances);
    for (rows, instance) in rows.into_iter().zip(&instances) {
        let m = rows as usize - rng.below((rows as usize).div_ceil(2));
        let (n, k) = (1 + rng.below(40), format.block_elements() * (1 + rng.below(40)));
        let weight = Weight::draw(rng, format, n, k);
        let input = uniform(dtype, m * k, 2.0, rng);
        let bias: Vec<f32> = (0..n).map(|_| rng.signed()).collect();
        let params = QuantLinearParams {
            bias: address(&bias),
            m: m as u32,
            n: n as u32,
            k: k as u32,
            out_stride: n as u32,
            scale: 1.0,
            ..QuantLinearParams::default()
        };
        let run = |instance| exact(&kernels, instance, QuantLinearParams::grid, &weight, (&input, params));
        let found = run(instance);
        assert!(found == run(&instances[3]), "{} differs from {}", instances[3].name, instance.name);
        let x = input.values();
        let dot = |i: usize, j: usize| -> f64 {
            x[i * k..][..k].iter().zip(&weight.values[j * k..][..k]).map(|(a, b)| a * b).sum()
        };
        let expected: Vec<f64> = (0..m * n).map(|at| dot(at / n, at % n) + f64::from(bias[at % n])).collect();
        let context = format!("{} m {m} n {n} k {k}", instance.name);
        assert_near(&found.values(), &expected, Tolerance::Product.bound(out), &context);
    }
}

#[test]
fn few_rows_of_floating_point_codes_are_near_the_product_of_the_values() {
    let mut rng = rng();
    for format in QuantFormat::ALL.into_iter().filter(|format| format.is_float()) {
        for dtype in dtypes() {
            check_few_rows(format, dtype, dtype, &mut rng);
            if dtype != Dtype::F32 {
                check_few_rows(format, dtype, Dtype::F32, &mut rng);
            }
        }
    }
}

/// Returns the types of activations and outputs for which there are tiles.
fn tiled_types() -> Vec<(Dtype, Dtype)> {
    let narrow = dtypes().into_iter().filter(|dtype| *dtype != Dtype::F32 && has_sm80());
    narrow.flat_map(|dtype| [(dtype, dtype), (dtype, Dtype::F32)]).collect()
}

/// Compares with the product of the weight's values rounded to the activations' type: for a row alone, and with others
/// of which one is NaN.
pub(crate) fn check_tiled(format: QuantFormat, dtype: Dtype, out: Dtype, rng: &mut TestRng) {
    let instance = manifest::gemm_quant(format, dtype, out);
    let kernels = Kernels::new(std::slice::from_ref(&instance));
    let (m, n, k) = (1 + rng.below(40), 1 + rng.below(40), format.block_elements() * (1 + rng.below(4)));
    let weight = Weight::draw(rng, format, n, k);
    let mut input = uniform(dtype, m * k, 2.0, rng);
    let bias: Vec<f32> = (0..n).map(|_| rng.signed()).collect();
    let add = uniform(out, m * n, 1.0, rng);
    let params = |m: usize| QuantLinearParams {
        bias: address(&bias),
        m: m as u32,
        n: n as u32,
        k: k as u32,
        out_stride: n as u32,
        scale: 1.0,
        ..QuantLinearParams::default()
    };
    let run =
        |input: &Array, params| exact(&kernels, &instance, QuantLinearParams::gemm_grid, &weight, (input, params));
    let context = format!("{} m {m} n {n} k {k}", instance.name);
    let found = run(&input, QuantLinearParams { add: add.ptr(), ..params(m) });
    let (x, w) = (input.values(), Array::new(dtype, &weight.values).values());
    let dot = |i: usize, j: usize| -> f64 { x[i * k..][..k].iter().zip(&w[j * k..][..k]).map(|(a, b)| a * b).sum() };
    let value = |at: usize| dot(at / n, at % n) + f64::from(bias[at % n]) + add.get(at);
    let expected: Vec<f64> = (0..m * n).map(value).collect();
    assert_near(&found.values(), &expected, Tolerance::Product.bound(out), &context);

    let row = rng.below(m);
    let alone = Array::new(dtype, &input.range(row * k..(row + 1) * k));
    let alone = run(&alone, params(1));
    if m > 1 {
        let wrong = (row + 1) % m;
        input.set(wrong * k + rng.below(k), f64::NAN);
    }
    let all = run(&input, params(m));
    for i in 0..m {
        let is_nan = all.range(i * n..(i + 1) * n).iter().all(|x| x.is_nan());
        assert_eq!(is_nan, m > 1 && i == (row + 1) % m, "{context}: NaN stays in its row");
    }
    assert!(alone.bits(0..n) == all.bits(row * n..(row + 1) * n), "{context}: row {row} alone");
}

#[test]
fn tiles_of_drawn_shapes_are_near_the_product_of_the_values() {
    let mut rng = rng();
    for format in QuantFormat::ALL.into_iter().filter(|format| format.block_elements() < 256) {
        for (dtype, out) in tiled_types() {
            check_tiled(format, dtype, out, &mut rng);
        }
    }
}

#[test]
fn small_tiles() {
    let mut rng = rng();
    for format in [QuantFormat::Q4_0, QuantFormat::Q8_0] {
        tiled_types().into_iter().take(1).for_each(|(dtype, out)| check_tiled(format, dtype, out, &mut rng));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let mut rng = rng();
    for format in QuantFormat::ALL.into_iter().filter(|format| !format.is_float()) {
        let instances = [manifest::mmvq(format, Dtype::F32, 8), manifest::quantize_activations(Dtype::F32)];
        let kernels = Kernels::new(&instances);
        let (n, k) = (9, 512);
        let weight = Weight::draw(&mut rng, format, n, k);
        let input = uniform(Dtype::F32, 8 * k, 1.0, &mut rng);
        let run = |input: &Array| {
            let m = input.len() / k;
            let x = quantize(&kernels, input, m, k);
            let params = QuantLinearParams {
                m: m as u32,
                n: n as u32,
                k: k as u32,
                out_stride: n as u32,
                scale: 0.5,
                softcap: 30.0,
                ..QuantLinearParams::default()
            };
            product(&kernels, &instances[0], &weight, &x, (params, Dtype::F32))
        };
        let all = run(&input);
        let row = rng.below(8);
        let alone = run(&Array::new(Dtype::F32, &input.range(row * k..(row + 1) * k)));
        assert!(alone.bits(0..n) == all.bits(row * n..(row + 1) * n), "{format:?}");
    }
}
