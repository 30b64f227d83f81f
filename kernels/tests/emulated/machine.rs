//! Tests of the emulation itself: kernels with known defects are detected, and instructions follow the PTX ISA.

use octavo_kernels::emulation::{BankUse, Emulation, EmulationError, Order};
use octavo_kernels::manifest::{Chips, Instance};
use octavo_kernels::params::{GatherRowsParams, Params};
use octavo_kernels::sources::Source;

use crate::common::rng;

/// Kernels with [`GatherRowsParams`], which use `out` and `input` as arrays of f32 or u32.
pub(crate) const SOURCE: Source = Source { path: "machine.cu", text: include_str!("machine.cu") };

pub(crate) struct Machine {
    emulation: Emulation,
    instance: Instance,
}

impl Machine {
    fn new(name: &str, threads: u32) -> Self {
        let instance = Instance {
            source: SOURCE,
            name: name.to_owned(),
            call: format!("{name}_template<float>"),
            params: GatherRowsParams::NAME,
            params_bytes: size_of::<GatherRowsParams>(),
            threads,
            dynamic_shared: 4096,
            chips: Chips::All,
            resident: 0,
            stages: None,
            stage_keys: None,
            formats: Vec::new(),
        };
        Self { emulation: Emulation::new(std::slice::from_ref(&instance)).unwrap_or_else(|e| panic!("{e}")), instance }
    }

    /// Runs `ctas` CTAs on `input` and returns the content of `out`.
    fn run(&self, order: Order, ctas: u32, input: &[f32], outputs: usize) -> Result<Vec<f32>, EmulationError> {
        let mut out = vec![f32::NAN; outputs];
        let params =
            GatherRowsParams { out: out.as_mut_ptr() as u64, input: input.as_ptr() as u64, ..Default::default() };
        let shared = self.instance.dynamic_shared;
        // SAFETY: the kernels of machine.cu stay within `input` and `out`, whose sizes the tests choose accordingly.
        unsafe { self.emulation.launch(order, &self.instance, [ctas, 1, 1], shared, &params) }.map(|()| out)
    }

    fn error(&self, input: &[f32]) -> String {
        self.run(Order::Forward, 1, input, 256).expect_err("a defect").to_string()
    }
}

/// Returns the sum of 64 numbers. The kernel always reads 64.
pub(crate) fn sum_of(input: &[f32]) -> f32 {
    Machine::new("sum", 64).run(Order::Forward, 1, input, 1).expect("a sum")[0]
}

const ORDERS: [Order; 4] = [Order::Forward, Order::Reverse, Order::Random(1), Order::Random(2)];

#[test]
fn threads_that_wait_for_ever_are_an_error_and_not_a_hang() {
    let error = Machine::new("divergent_barrier", 64).error(&[]);
    assert!(error.contains("deadlock") && error.contains("warp 1: alive ffffffff"), "{error}");
    let error = Machine::new("partial_shuffle", 32).error(&[]);
    assert!(error.contains("deadlock") && error.contains("__shfl_sync"), "{error}");
    let error = Machine::new("foreign_mask", 32).error(&[]);
    assert!(error.contains("mask it is not in"), "{error}");
    let error = Machine::new("two_operations", 32).error(&[]);
    assert!(error.contains("different warp operations"), "{error}");
    // The machine works again after an error.
    assert_eq!(sum_of(&[1.0; 64]), 64.0);
}

#[test]
fn a_missing_barrier_shows_in_some_order() {
    let input: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let expected: Vec<f32> = input.iter().rev().copied().collect();
    let with = Machine::new("reverse_with_barrier", 64);
    let without = Machine::new("reverse_without_barrier", 64);
    assert!(ORDERS.iter().all(|&order| with.run(order, 1, &input, 64).unwrap() == expected));
    assert!(ORDERS.iter().any(|&order| without.run(order, 1, &input, 64).unwrap() != expected));
}

#[test]
fn shared_memory_is_nan_at_the_start_of_every_cta() {
    let out = Machine::new("read_shared", 32).run(Order::Forward, 3, &[], 3 * 64).unwrap();
    assert!(out.iter().all(|x| x.is_nan()), "{out:?}");
}

#[test]
fn background_copies_are_there_when_they_have_been_waited_for() {
    let input: Vec<f32> = (0..256).map(|i| i as f32).collect();
    let machine = Machine::new("copy_in_background", 32);
    for order in ORDERS {
        let out = machine.run(order, 1, &input, 3 * 128).unwrap();
        // The data is read at once; after the older of two groups; and after both, the second half of which must not be
        // copied. In random order, some of the data is there at once.
        let early = out[..128].iter().filter(|x| !x.is_nan()).count();
        let at_once = matches!(order, Order::Random(_));
        assert!(if at_once { (1..128).contains(&early) } else { early == 0 }, "{order:?}: {early} too early");
        assert_eq!(out[128..256], input[..128], "the older group");
        assert!(out[256..320] == input[128..192] && out[320..].iter().all(|&x| x == 0.0), "both");
    }
}

#[test]
fn ctas_run_at_once_in_random_order_only() {
    let machine = Machine::new("take_tickets", 64);
    for order in ORDERS {
        let out = machine.run(order, 8, &[], 9).unwrap();
        let at_once = out[1..].iter().any(|&between| between > 1.0);
        assert_eq!(at_once, matches!(order, Order::Random(_)), "{order:?}: {:?}", &out[1..]);
    }
}

#[test]
fn a_misaligned_access_is_an_error() {
    let error = Machine::new("misaligned", 32).error(&[0.0; 64]);
    assert!(error.contains("no multiple of its size"), "{error}");
}

#[test]
fn bank_conflicts_are_counted() {
    let machine = Machine::new("strided", 32);
    let bank_use = machine.emulation.bank_use(|| drop(machine.run(Order::Forward, 1, &[], 256)));
    // Eight lanes read at once. With rows of 64 bytes every second row begins in the same bank; with rows of 80 bytes
    // every eighth.
    assert_eq!(bank_use, BankUse { phases: 8, wavefronts: 4 * 4 + 4 });
    let none = machine.emulation.bank_use(|| ());
    assert_eq!(none, BankUse::default());
}

#[test]
fn refused_launches_say_why() {
    let machine = Machine::new("sum", 64);
    let params = GatherRowsParams::default();
    let launch = |instance: &Instance, grid, shared| {
        // SAFETY: all of these launches are refused.
        unsafe { machine.emulation.launch(Order::Forward, instance, grid, shared, &params) }.unwrap_err().to_string()
    };
    assert!(launch(&machine.instance, [0, 1, 1], 0).contains("grid"));
    assert!(launch(&machine.instance, [1, 70000, 1], 0).contains("grid"));
    assert!(launch(&machine.instance, [1; 3], 1 << 20).contains("4096 bytes"));
    let other = Instance { name: "other".into(), ..machine.instance.clone() };
    assert!(launch(&other, [1; 3], 0).contains("has not been compiled"));
}

/// Multiplies matrices whose fragments the kernels of machine.cu load by the formulas of the PTX ISA.
#[test]
fn small_matrix_products() {
    let rng = &mut rng();
    // Small integers are exact in every type, and so are their sums.
    let input: Vec<f32> = (0..768).map(|_| rng.below(9) as f32 - 4.0).collect();
    let product = |m: usize, n: usize, k: usize, at: usize, by_rows: bool| -> Vec<f32> {
        let (a, b) = input[at..].split_at(m * k);
        let b = |i: usize, j: usize| if by_rows { b[i * n + j] } else { b[j * k + i] };
        let sum = |(i, j): (usize, usize)| (0..k).map(|l| a[i * k + l] * b(l, j)).sum::<f32>();
        (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(sum).collect()
    };
    for order in ORDERS {
        for name in ["product_16x8x16_f16", "product_16x8x16_bf16"] {
            let out = Machine::new(name, 32).run(order, 1, &input, 128).unwrap();
            assert_eq!(out, product(16, 8, 16, 0, false), "{name}");
        }
        let out = Machine::new("product_16x8x32", 32).run(order, 1, &input, 128).unwrap();
        assert_eq!(out, product(16, 8, 32, 0, false));
        for (name, by_rows) in [("products_8x8x4_columns", false), ("products_8x8x4_rows", true)] {
            let out = Machine::new(name, 32).run(order, 1, &input, 256).unwrap();
            for q in 0..4 {
                assert_eq!(out[64 * q..64 * (q + 1)], product(8, 8, 4, 64 * q, by_rows), "{name}, product {q}");
            }
        }
        for name in ["product_by_ldmatrix", "product_by_ldmatrix_trans"] {
            let out = Machine::new(name, 32).run(order, 1, &input, 128).unwrap();
            assert_eq!(out, product(16, 8, 16, 0, name.ends_with("trans")), "{name}");
        }
    }
}

/// Converts every 16-bit value to float and back, and the midpoint of every two neighbours.
#[test]
fn a_product_and_a_sum_are_rounded_as_the_source_says() {
    let x = 1.0 + 3.0 * f32::EPSILON;
    let out = Machine::new("product_and_sum", 32).run(Order::Forward, 1, &[x, x, -1.0], 2).expect("two numbers");
    assert_eq!(out, [x * x - 1.0, x.mul_add(x, -1.0)]);
    assert_ne!(out[0], out[1]);
}

#[test]
fn conversions_round_to_nearest_even() {
    let out = Machine::new("round_trips", 32).run(Order::Forward, 1, &[], 4).unwrap();
    assert_eq!(out, [0.0; 4], "values that changed: f16, bf16; halves that were not rounded to even: f16, bf16");
}
