//! Shared code of the kernel tests: element types, orders of threads, errors.

use half::{bf16, f16};
use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{Dtype, Instance};
use octavo_kernels::params::{DRAWN_TOKEN, Params};
use octavo_ops::testing::TestRng;

use crate::launcher::{Kernels, finds_races};

/// Returns a random generator for this run: random shapes differ between runs. `OCTAVO_TEST_SEED` repeats a run. While races
/// are found, the shapes are always the same.
pub(crate) fn rng() -> TestRng {
    if finds_races() {
        return TestRng(1);
    }
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let seed = std::env::var("OCTAVO_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(now);
    println!("OCTAVO_TEST_SEED={seed}");
    TestRng(seed)
}

/// Returns the bytes of a number rounded to `dtype`.
pub(crate) fn encode(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::F32 => value.to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    }
}

/// Returns the number with these bytes.
pub(crate) fn decode(dtype: Dtype, bytes: &[u8]) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes"))),
        Dtype::F16 => f16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f64(),
        Dtype::Bf16 => bf16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f64(),
    }
}

/// Returns token ids of a step, some of them references to rows of the preceding step, and the tokens that those rows
/// sampled.
pub(crate) fn by_rows(ids: &[u32], rng: &mut TestRng) -> (Vec<u32>, Vec<u32>) {
    let mut drawn = vec![u32::MAX];
    let mut name = |&id: &u32| match rng.below(2) {
        0 => id,
        _ => {
            drawn.push(id);
            DRAWN_TOKEN | (drawn.len() as u32 - 1)
        }
    };
    let named = ids.iter().map(&mut name).collect();
    (named, drawn)
}

/// Returns the result of `run` and checks that it is the same in every order of threads. Each order also repeats the launch.
pub(crate) fn in_every_order<R: PartialEq>(mut run: impl FnMut(Order) -> R) -> R {
    let result = run(Order::Forward);
    // What is unordered is so in every order.
    if finds_races() {
        assert!(run(Order::Random(7)) == result, "other bits in random order");
        return result;
    }
    for order in [Order::Reverse, Order::Random(7)] {
        assert!(run(order) == result, "other bits in order {order:?}");
    }
    result
}

/// Launches an instance with the shared memory that it declares.
pub(crate) fn launch<P: Params>(kernels: &Kernels, order: Order, instance: &Instance, grid: [u32; 3], params: &P) {
    kernels.launch(order, instance, grid, instance.dynamic_shared, params);
}

/// Checks that `found` is close to `expected`: the error's norm is at most `tolerance` times the norm, and no element
/// differs by more than twenty times that share of the largest. NaN is never close.
pub(crate) fn assert_near(found: &[f64], expected: &[f64], tolerance: f64, context: &str) {
    assert_eq!(found.len(), expected.len(), "{context}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let size = norm(&mut expected.iter().copied());
    assert!(error <= tolerance * size + 1e-30, "{context}: error {error:.3e} of {size:.3e}, tolerance {tolerance:.1e}");
    let largest = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 20.0 * tolerance * largest + 1e-30, "{context}: element {i} is {a}, not {b}");
    }
}
