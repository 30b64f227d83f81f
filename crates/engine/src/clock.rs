//! The estimate of how long a step takes, which bounds steps in time, weighs the work of clients and tells a long step
//! from a device that hangs.

use std::time::Duration;

/// Work of a step or of a sequence's share in it, by kind, in seconds on a device of nominal speed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Work of every step, such as reading the weights.
    pub step: f64,
    /// Work that grows with the number of tokens, without attention.
    pub tokens: f64,
    /// Work of attention.
    pub attention: f64,
    /// Work of the rows that reach the head, with their sampling.
    pub rows: f64,
}

impl StepWork {
    const fn parts(&self) -> [f64; 4] {
        [self.step, self.tokens, self.attention, self.rows]
    }
}

impl std::ops::AddAssign for StepWork {
    fn add_assign(&mut self, other: Self) {
        self.step += other.step;
        self.tokens += other.tokens;
        self.attention += other.attention;
        self.rows += other.rows;
    }
}

/// Cost model of an executor. The work must not decrease with any argument.
pub trait StepCost: Send {
    /// Returns the work that every step has.
    fn step(&self) -> StepWork;

    /// Returns the work of the last `tokens` of `context` tokens of a sequence, of which `rows` reach the head.
    fn share(&self, tokens: usize, context: usize, rows: usize) -> StepWork;
}

/// Weight of a new observation once enough steps have been measured.
const RATE: f64 = 0.125;

/// Range of the ratio of a measured time to its estimate. A single step that took longer, for example because the
/// process was suspended, counts as much as this.
const RATIO: (f64, f64) = (0.25, 4.0);

/// Least time for the shares of a step, in times of the work that every step has. It bounds the part of a full step that
/// a limit can waste, here to a fifth.
const SHARES: f64 = 4.0;

/// Range of the factors between nominal and measured time.
const FACTOR: (f64, f64) = (1e-9, 1e9);

/// Time that a step may take before the device counts as hung, in times of its estimate: before any step has been
/// measured, and afterwards.
const PATIENCE: (f64, f64) = (32.0, 8.0);

/// Number of tokens of the decoder that take about as long as a token of an image takes in the encoder, which computes a
/// row for each of its patches.
const ROWS_OF_IMAGE_TOKEN: usize = 4;

/// A cost model with measured speeds.
pub(crate) struct StepClock {
    cost: Box<dyn StepCost>,
    /// Time that a step may take, in seconds; infinite if steps are not bounded in time.
    limit: f64,
    /// Measured seconds per nominal second, for each kind of work.
    factors: [f64; 4],
    /// Number of steps measured.
    measured: u64,
}

impl StepClock {
    pub(crate) fn new(cost: Box<dyn StepCost>, limit: Option<Duration>) -> Self {
        Self { cost, limit: limit.map_or(f64::INFINITY, |limit| limit.as_secs_f64()), factors: [1.0; 4], measured: 0 }
    }

    /// Returns the time for the shares of a step, in seconds. It is at least [`SHARES`] times that of the work that
    /// every step has: where reading the weights takes about as long as the limit, small steps would do little else.
    pub(crate) fn for_shares(&self) -> f64 {
        let step = self.seconds(&self.cost.step());
        (self.limit - step).max(SHARES * step)
    }

    /// Returns the work that every step has.
    pub(crate) fn step(&self) -> StepWork {
        self.cost.step()
    }

    /// Returns the work of a share; see [`StepCost::share`].
    pub(crate) fn share(&self, tokens: usize, context: usize, rows: usize) -> StepWork {
        self.cost.share(tokens, context, rows)
    }

    /// Returns the estimated time of some work, in seconds.
    pub(crate) fn seconds(&self, work: &StepWork) -> f64 {
        work.parts().iter().zip(&self.factors).map(|(part, factor)| part * factor).sum()
    }

    /// Returns the time that a step may take before the device counts as hung. The step also encodes images of
    /// `image_tokens` tokens, about which the cost model knows nothing.
    pub(crate) fn patience(&self, work: &StepWork, image_tokens: usize) -> Duration {
        let rows = image_tokens * ROWS_OF_IMAGE_TOKEN;
        let images = self.seconds(&self.share(rows, rows, 0));
        let times = if self.measured == 0 { PATIENCE.0 } else { PATIENCE.1 };
        Duration::try_from_secs_f64(times * (self.seconds(work) + images)).unwrap_or(Duration::MAX)
    }

    /// Moves the estimate towards a measured step. Each kind of work takes the blame in proportion to its share of the
    /// estimate, so steps of different composition tell the kinds apart.
    pub(crate) fn measure(&mut self, work: &StepWork, took: Duration) {
        let estimate = self.seconds(work);
        let ratio = took.as_secs_f64() / estimate;
        if !ratio.is_finite() || ratio <= 0.0 {
            return;
        }
        let first = self.measured == 0;
        self.measured += 1;
        let rate = RATE.max(1.0 / self.measured as f64);
        for (factor, part) in self.factors.iter_mut().zip(work.parts()) {
            let share = part * *factor / estimate;
            // The first step tells how fast the device is altogether.
            let change = if first { ratio } else { 1.0 + rate * share * (ratio.clamp(RATIO.0, RATIO.1) - 1.0) };
            *factor = (*factor * change).clamp(FACTOR.0, FACTOR.1);
        }
    }
}

/// A cost model for tests: a nominal second for each token and for each row.
#[cfg(test)]
pub(crate) struct UnitCost;

#[cfg(test)]
impl StepCost for UnitCost {
    fn step(&self) -> StepWork {
        StepWork { step: 1.0, ..StepWork::default() }
    }

    fn share(&self, tokens: usize, _context: usize, rows: usize) -> StepWork {
        StepWork { tokens: tokens as f64, rows: rows as f64, ..StepWork::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(step: f64, tokens: f64, rows: f64) -> StepWork {
        StepWork { step, tokens, rows, ..StepWork::default() }
    }

    /// Time on a device on which a step takes 20 ms, a token 3 ms and a row 0.5 ms.
    fn device(work: &StepWork) -> Duration {
        Duration::from_secs_f64(work.step * 20e-3 + work.tokens * 3e-3 + work.rows * 0.5e-3)
    }

    fn measured() -> StepClock {
        let mut clock = StepClock::new(Box::new(UnitCost), None);
        for turn in 0..400 {
            let work = [work(1.0, 1.0, 1.0), work(1.0, 64.0, 1.0), work(1.0, 20.0, 20.0)][turn % 3];
            clock.measure(&work, device(&work));
        }
        clock
    }

    fn error(clock: &StepClock, work: &StepWork) -> f64 {
        (clock.seconds(work) / device(work).as_secs_f64() - 1.0).abs()
    }

    #[test]
    fn the_estimate_follows_measured_steps_of_any_composition() {
        let clock = measured();
        for work in [work(1.0, 1.0, 1.0), work(1.0, 64.0, 1.0), work(1.0, 20.0, 20.0), work(1.0, 200.0, 2.0)] {
            assert!(error(&clock, &work) < 0.15, "{work:?}: {}", clock.seconds(&work));
        }
    }

    #[test]
    fn one_suspended_step_hardly_moves_the_estimate() {
        let mut clock = measured();
        let usual = work(1.0, 20.0, 20.0);
        clock.measure(&usual, Duration::from_secs(3600));
        assert!(error(&clock, &usual) < 0.5, "{}", clock.seconds(&usual));
    }

    #[test]
    fn patience_follows_the_estimate_and_counts_images() {
        let usual = work(1.0, 100.0, 1.0);
        let new = StepClock::new(Box::new(UnitCost), None);
        assert_eq!(new.patience(&usual, 0), Duration::from_secs(102 * 32), "nominal speed may be far off");
        let clock = measured();
        let [plain, image] = [0, 50].map(|tokens| clock.patience(&usual, tokens).as_secs_f64());
        let expected = 8.0 * device(&usual).as_secs_f64();
        assert!((plain / expected - 1.0).abs() < 0.15, "{plain} instead of {expected}");
        assert!(image > 2.5 * plain, "{image}");
    }

    #[test]
    fn a_step_without_time_or_work_changes_nothing() {
        let mut clock = measured();
        let before = clock.factors;
        clock.measure(&StepWork::default(), Duration::from_millis(5));
        clock.measure(&work(1.0, 1.0, 1.0), Duration::ZERO);
        assert_eq!(clock.factors, before);
    }
}
