//! The cost model of a program, for the engine's estimate of how long a step takes.

use octavo_engine::{StepCost, StepWork};
use octavo_ops::cost::{Cost, Peaks, StepPricer};

/// Rates of a device whose peaks are unknown. The engine measures the speed, so only their proportion matters: it is
/// that of a processor.
const NOMINAL: Peaks = Peaks { bandwidth: 1e10, flops: 1e11 };

/// Prices of a program on a device of nominal speed.
pub(crate) struct ProgramCost {
    pricer: StepPricer,
    peaks: Peaks,
}

impl ProgramCost {
    pub(crate) fn new(pricer: StepPricer, peaks: Option<Peaks>) -> Self {
        Self { pricer, peaks: peaks.unwrap_or(NOMINAL) }
    }

    /// Returns the time of moving the bytes and of the arithmetic, one after the other. Unlike the greater of the two,
    /// the sum of parts is then the time of the whole.
    fn seconds(&self, cost: Cost) -> f64 {
        cost.bytes() as f64 / self.peaks.bandwidth + cost.flops as f64 / self.peaks.flops
    }
}

impl StepCost for ProgramCost {
    fn step(&self) -> StepWork {
        StepWork { step: self.seconds(self.pricer.fixed()), ..StepWork::default() }
    }

    fn share(&self, tokens: usize, context: usize, rows: usize) -> StepWork {
        StepWork {
            step: 0.0,
            tokens: self.seconds(self.pricer.of_tokens(tokens)),
            attention: self.seconds(self.pricer.of_attention(tokens, context)),
            rows: self.seconds(self.pricer.of_rows(rows)),
        }
    }
}

#[cfg(test)]
mod tests {
    use octavo_ops::cost::{ElementBytes, StepShape, step_cost};
    use octavo_ops::testing::{TinyExperts, TinyModel};

    use super::*;

    #[test]
    fn the_parts_of_a_step_are_its_cost() {
        let (program, _) = TinyModel::default().build().unwrap();
        let cost = ProgramCost::new(StepPricer::new(&program, ElementBytes::HALF), None);
        let shape = StepShape { tokens: 13, sampled: 3, sequences: vec![(1, 9), (12, 20)], ..StepShape::default() };
        let whole = cost.seconds(step_cost(&program, &shape, ElementBytes::HALF));
        let mut parts = cost.step();
        parts += cost.share(1, 9, 1);
        parts += cost.share(12, 20, 2);
        let sum = parts.step + parts.tokens + parts.attention + parts.rows;
        assert!((sum / whole - 1.0).abs() < 1e-9, "{sum} instead of {whole}");
    }

    #[test]
    fn a_step_is_assumed_to_use_all_experts() {
        let model = TinyModel { experts: Some(TinyExperts::default()), ..TinyModel::default() };
        let (program, _) = model.build().unwrap();
        let cost = ProgramCost::new(StepPricer::new(&program, ElementBytes::HALF), None);
        for (tokens, is_exact) in [(1, false), (64, true)] {
            let whole = cost.seconds(step_cost(&program, &StepShape::prefill(tokens), ElementBytes::HALF));
            let mut parts = cost.step();
            parts += cost.share(tokens, tokens, 1);
            let ratio = (parts.step + parts.tokens + parts.attention + parts.rows) / whole;
            assert!(ratio > 1.0 - 1e-9 && (ratio < 1.0 + 1e-9) == is_exact, "{tokens} tokens: {ratio}");
        }
    }
}
