//! The number of masks that delay a step by no more than the time that the device works on it.

use std::time::Duration;

/// Weight of a new observation.
const RATE: f64 = 0.125;

/// Means of the time of steps on the device, and of the work for a mask beside it, in seconds.
#[derive(Debug, Default)]
pub(crate) struct MaskPace {
    step: f64,
    fill: f64,
    accept: f64,
}

impl MaskPace {
    /// Records that the device worked on a step for the time `busy`.
    pub(crate) fn worked(&mut self, busy: Duration) {
        observe(&mut self.step, busy, 1);
    }

    /// Records that `masks` masks were filled.
    pub(crate) fn filled(&mut self, masks: usize, time: Duration) {
        observe(&mut self.fill, time, masks);
    }

    /// Records that as many constraints accepted a token.
    pub(crate) fn accepted(&mut self, tokens: usize, time: Duration) {
        observe(&mut self.accept, time, tokens);
    }

    /// Returns the number of masks that a step may have if other rows wait for them, at least two; `usize::MAX` if it is not
    /// known. They are filled while the device works, and for as long again.
    pub(crate) fn masks_in_a_step(&self) -> usize {
        let each = self.fill + self.accept;
        if self.step > 0.0 && each > 0.0 { ((2.0 * self.step / each) as usize).max(2) } else { usize::MAX }
    }
}

/// Moves a mean towards the time of each of `count` pieces of work. The first observation is the mean.
fn observe(mean: &mut f64, time: Duration, count: usize) {
    if count == 0 || time.is_zero() {
        return;
    }
    let each = time.as_secs_f64() / count as f64;
    *mean = if *mean == 0.0 { each } else { *mean + RATE * (each - *mean) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_follows_the_times() {
        let ms = Duration::from_millis;
        let mut pace = MaskPace::default();
        assert_eq!(pace.masks_in_a_step(), usize::MAX);
        pace.worked(ms(10));
        assert_eq!(pace.masks_in_a_step(), usize::MAX, "no mask was ever filled");
        pace.filled(64, ms(16));
        pace.accepted(32, ms(8));
        assert_eq!(pace.masks_in_a_step(), 40);
        pace.worked(Duration::ZERO);
        pace.filled(0, ms(100));
        assert_eq!(pace.masks_in_a_step(), 40, "what is not known counts for nothing");
        (0..100).for_each(|_| pace.worked(ms(5)));
        assert_eq!(pace.masks_in_a_step(), 20);
        (0..100).for_each(|_| pace.filled(1, ms(50)));
        assert_eq!(pace.masks_in_a_step(), 2, "some are always allowed");
    }
}
