//! Minimum needs of a load, computed from the cost of the model's program.

use octavo_backend_cpu::probe::{Limits, Unit};
use octavo_ops::cost::{ElementBytes, StepShape, op_cost};
use octavo_ops::{Op, Program, StorageType};
use serde::Serialize;

use super::rows::Load;

/// Minimum needs of a load, of one of its steps or of some of its ops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Need {
    /// Number of weight and KV-cache bytes read and written. Activations do not count, because they can stay in the
    /// caches.
    pub bytes: f64,
    /// Number of operations on integer weights.
    pub integer: f64,
    /// Number of all other operations.
    pub float: f64,
    /// Roofline limit of the time on this machine, in seconds.
    pub seconds: f64,
}

impl Need {
    /// Returns the needs of a whole load. Its requests run concurrently, as many as allowed, in lockstep; a prompt is
    /// computed at once, and the shared prefix is already in the cache.
    ///
    /// Weights in bf16 count sixteen bits, as most servers read them.
    pub(super) fn for_load(program: &Program, load: &Load, limits: &Limits) -> Self {
        let mut wave = Self::default();
        for shape in steps(load) {
            wave.add(&Self::of_ops(program, &program.ops, &shape, ElementBytes::HALF, limits));
        }
        let waves = load.requests as f64 / load.at_a_time as f64;
        let Self { bytes, integer, float, seconds } = wave;
        Self { bytes: waves * bytes, integer: waves * integer, float: waves * float, seconds: waves * seconds }
    }

    /// Returns the needs of some ops of a step, which may overlap.
    pub fn of_ops<'a>(
        program: &Program,
        ops: impl IntoIterator<Item = &'a Op>,
        shape: &StepShape,
        elements: ElementBytes,
        limits: &Limits,
    ) -> Self {
        let mut need = Self::default();
        for op in ops {
            let cost = op_cost(program, op, shape, elements);
            need.bytes += (cost.weight_bytes + cost.kv_bytes) as f64;
            match is_integer(program, op) {
                true => need.integer += cost.flops as f64,
                false => need.float += cost.flops as f64,
            }
        }
        let float = best(limits, false).unwrap_or(f64::INFINITY);
        let integer = best(limits, true).unwrap_or(float);
        let compute = need.integer / integer + need.float / float;
        need.seconds = compute.max(need.bytes / limits.read_bandwidth);
        need
    }

    fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.integer += other.integer;
        self.float += other.float;
        self.seconds += other.seconds;
    }

    /// Returns the share of a unit's peak that the load takes if it completes within `seconds`.
    pub(super) fn share(&self, unit: Unit, seconds: f64, limits: &Limits) -> Option<f64> {
        let operations = if unit.is_integer() { self.integer } else { self.float };
        Some(operations / seconds / limits.peak(unit)?).filter(|_| operations > 0.0)
    }
}

/// Returns the steps of concurrent requests: their prompts, then one token of each at a time.
fn steps(load: &Load) -> impl Iterator<Item = StepShape> {
    let Load { at_a_time, prompt, .. } = *load;
    let input = load.input();
    let prefill = StepShape {
        tokens: at_a_time * prompt,
        sampled: at_a_time,
        sequences: vec![(prompt, input); at_a_time],
        ..StepShape::default()
    };
    let decode = (1..load.output as usize).map(move |token| StepShape::decode(at_a_time, input + token));
    std::iter::once(prefill).chain(decode)
}

/// Returns whether an op multiplies quantised weights, for which integer units can be used.
fn is_integer(program: &Program, op: &Op) -> bool {
    let weight = match op {
        Op::Linear(linear) => linear.weight,
        Op::Logits(logits) => logits.weight,
        _ => return false,
    };
    let plain = |storage| matches!(storage, StorageType::F32 | StorageType::F16 | StorageType::BF16);
    program.weights[weight.0].parts.iter().all(|part| !plain(part.storage))
}

/// Returns the highest peak for integers, or for the rest.
fn best(limits: &Limits, integer: bool) -> Option<f64> {
    let peaks = limits.peaks.iter().filter(|(unit, _)| unit.is_integer() == integer);
    peaks.map(|&(_, peak)| peak).max_by(f64::total_cmp)
}

/// Returns the highest of several measurements of each limit, which is the limit of an undisturbed machine.
pub fn highest(measured: &[Limits]) -> Option<Limits> {
    let mut all = measured.iter();
    let first = all.next()?.clone();
    Some(all.fold(first, |mut highest, limits| {
        highest.read_bandwidth = highest.read_bandwidth.max(limits.read_bandwidth);
        for (unit, peak) in &mut highest.peaks {
            *peak = limits.peak(*unit).map_or(*peak, |other| peak.max(other));
        }
        highest
    }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use octavo_models::{Checkpoint, build_program};

    use super::*;

    fn program() -> Program {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/testdata/llama");
        build_program(&Checkpoint::open(&path).unwrap()).unwrap()
    }

    fn limits(read_bandwidth: f64, fma: f64) -> Limits {
        Limits { threads: 2, read_bandwidth, peaks: vec![(Unit::Fma, fma)] }
    }

    const LOAD: Load = Load { requests: 6, at_a_time: 2, prefix: 10, prompt: 5, output: 3 };

    #[test]
    fn a_load_is_a_prefill_and_a_step_for_each_further_token() {
        let steps: Vec<StepShape> = steps(&LOAD).collect();
        assert_eq!(steps.len(), 3);
        assert_eq!((steps[0].tokens, steps[0].sampled), (10, 2));
        assert_eq!(steps[0].sequences, [(5, 15), (5, 15)]);
        assert_eq!(steps[2], StepShape::decode(2, 17));
    }

    #[test]
    fn the_roof_is_the_memory_or_the_arithmetic() {
        let program = program();
        let slow_memory = Need::for_load(&program, &LOAD, &limits(1e6, 1e30));
        assert!((slow_memory.seconds - slow_memory.bytes / 1e6).abs() < 1e-9 * slow_memory.seconds);
        let slow_units = Need::for_load(&program, &LOAD, &limits(1e30, 1e6));
        assert!((slow_units.seconds - slow_units.float / 1e6).abs() < 1e-9 * slow_units.seconds);
        // Weights are read in each of three steps, three times.
        assert!(slow_memory.bytes > 9.0 * 0.9 * program.weight_bytes() as f64 / 2.0);
        let share = slow_units.share(Unit::Fma, 2.0 * slow_units.seconds, &limits(1e30, 1e6)).unwrap();
        assert!((share - 0.5).abs() < 1e-9);
        assert_eq!(slow_units.share(Unit::Vnni, 1.0, &limits(1.0, 1.0)), None);
    }

    #[test]
    fn the_highest_of_each_limit_counts() {
        let highest = highest(&[limits(1.0, 5.0), limits(2.0, 4.0)]).unwrap();
        assert_eq!(highest, limits(2.0, 5.0));
    }
}
