//! Limits on the difference from PyTorch's numbers, for each checkpoint and kind of instruction set.

use octavo_backend_cpu::Isa;

use crate::measured::MEASURED;
use crate::support::{mean_difference, relative_difference};

/// A difference from PyTorch's numbers, or a limit on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Difference {
    /// The largest, relative to the largest number.
    pub(crate) largest: f32,
    /// The root mean square, relative to that of the numbers. Defects change it most.
    pub(crate) mean: f64,
}

/// The candle backend: both sides compute in f32 with sums in another order, and PyTorch computes rotary angles in f32.
/// The largest that was measured are 3.7e-6 and 1.5e-6.
pub(crate) const CANDLE: Difference = Difference { largest: 8e-6, mean: 3e-6 };
/// The candle backend with weights that were merged in another order, which may be rounded to the other of two numbers in
/// 16 bits. 3.0e-4 and 7.9e-5 were measured.
pub(crate) const MERGED: Difference = Difference { largest: 5e-4, mean: 1.5e-4 };
/// A limit of the CPU backend is this many times what was measured.
const MARGIN: f64 = 1.5;
/// A defect changes the mean at least by this many times the largest limit of a backend.
pub(crate) const DEFECT: f64 = 1.5;

/// What was measured for a checkpoint: the largest and the mean difference.
pub(crate) type Pair = [f64; 2];

impl Difference {
    pub(crate) fn between(found: &[f32], expected: &[f32]) -> Self {
        Self { largest: relative_difference(found, expected), mean: mean_difference(found, expected) }
    }

    fn times([largest, mean]: Pair, factor: f64) -> Self {
        Self { largest: (factor * largest) as f32, mean: factor * mean }
    }

    /// Prints the difference and checks that it is within a limit.
    pub(crate) fn assert_within(self, limit: Self, what: &str) {
        let Self { largest, mean } = self;
        println!("{what}: largest difference {largest:.1e} of the largest number, {mean:.1e} in the mean");
        assert!(largest <= limit.largest && mean <= limit.mean, "{what}: {self:?} exceeds {limit:?}");
    }
}

/// Returns the limit of the CPU backend with an instruction set.
pub(crate) fn on_cpu(name: &str, isa: Isa) -> Difference {
    let [others, bf16] = limits(name);
    if matches!(isa.name(), "amx" | "avx512-bf16" | "i8mm-bf16") { bf16 } else { others }
}

/// Returns the limit of the CPU backend with an instruction set, or that of the candle backend.
pub(crate) fn limit(name: &str, isa: Option<Isa>) -> Difference {
    isa.map_or(CANDLE, |isa| on_cpu(name, isa))
}

/// Returns the largest mean difference that any backend may have. A defect must exceed it on each of them.
pub(crate) fn largest_mean(name: &str) -> f64 {
    limits(name).map(|limit| limit.mean).into_iter().fold(CANDLE.mean, f64::max)
}

/// Returns the limit of instruction sets without and with products of bf16.
fn limits(name: &str) -> [Difference; 2] {
    let row = MEASURED.iter().find(|row| row.0 == name);
    let &(_, others, bf16) = row.unwrap_or_else(|| panic!("{name} has no row in measured.rs"));
    [others, bf16].map(|measured| Difference::times(measured, MARGIN))
}
