//! The times at which requests arrive.

use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Gamma};

use super::LoadConfig;

/// How the request rate grows during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RampUp {
    /// The shape of the growth.
    pub strategy: RampUpStrategy,
    /// Requests per second at the start.
    pub start: f64,
    /// Requests per second at the end.
    pub end: f64,
}

/// The shape of a [`RampUp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RampUpStrategy {
    /// The same amount with every request.
    Linear,
    /// By the same factor with every request.
    Exponential,
}

impl RampUp {
    /// The rate at `progress` of the run, from 0 to 1.
    fn rate(self, progress: f64) -> f64 {
        match self.strategy {
            RampUpStrategy::Linear => self.start + (self.end - self.start) * progress,
            RampUpStrategy::Exponential => self.start * (self.end / self.start).powf(progress),
        }
    }
}

/// The start time of each request: random gaps around the configured rate, or all at once without a rate.
pub(crate) fn arrivals(config: &LoadConfig) -> Vec<Duration> {
    let mut random = StdRng::seed_from_u64(config.seed ^ 0x61_72_72_69_76_61_6c_73);
    let last = config.requests.saturating_sub(1).max(1) as f64;
    let mut at = 0.0;
    let mut next = |index: usize| {
        let rate = match config.ramp_up {
            Some(ramp_up) => ramp_up.rate(index as f64 / last),
            None => config.request_rate?,
        };
        let now = at;
        // The mean of the distribution is 1 / rate; a burstiness of 1 makes it exponential.
        let gaps = Gamma::new(config.burstiness, 1.0 / (rate * config.burstiness)).ok()?;
        at += gaps.sample(&mut random);
        Some(Duration::from_secs_f64(now))
    };
    (0..config.requests).map(|index| next(index).unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(config: &LoadConfig) -> Vec<f64> {
        arrivals(config).iter().map(Duration::as_secs_f64).collect()
    }

    /// The standard deviation of the gaps in multiples of their mean.
    fn variation(at: &[f64]) -> f64 {
        let gaps: Vec<f64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        variance.sqrt() / mean
    }

    #[test]
    fn arrivals_have_the_rate_asked_for() {
        let config = LoadConfig { requests: 20_000, request_rate: Some(50.0), ..LoadConfig::default() };
        let at = seconds(&config);
        assert_eq!(at[0], 0.0);
        assert!(at.windows(2).all(|pair| pair[0] <= pair[1]));
        let rate = at.len() as f64 / at[at.len() - 1];
        assert!((rate - 50.0).abs() < 1.5, "{rate}");
        let all_at_once = arrivals(&LoadConfig { request_rate: None, ..config });
        assert!(all_at_once.iter().all(Duration::is_zero));
    }

    #[test]
    fn burstiness_is_the_variation_of_the_gaps() {
        let config =
            |burstiness| LoadConfig { requests: 20_000, request_rate: Some(50.0), burstiness, ..LoadConfig::default() };
        // A gamma distribution of shape k varies by 1 / √k.
        for (burstiness, expected) in [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)] {
            let at = seconds(&config(burstiness));
            assert!((variation(&at) - expected).abs() < 0.1 * expected, "{burstiness}: {}", variation(&at));
            let rate = at.len() as f64 / at[at.len() - 1];
            assert!((rate - 50.0).abs() < 3.0, "{burstiness}: {rate}");
        }
    }

    #[test]
    fn a_ramp_up_goes_from_its_first_rate_to_its_last() {
        for strategy in [RampUpStrategy::Linear, RampUpStrategy::Exponential] {
            let ramp_up = RampUp { strategy, start: 10.0, end: 1000.0 };
            assert!((ramp_up.rate(0.0) - 10.0).abs() < 1e-9 && (ramp_up.rate(1.0) - 1000.0).abs() < 1e-6);
            let at = seconds(&LoadConfig { requests: 4000, ramp_up: Some(ramp_up), ..LoadConfig::default() });
            let (first, last) = (at[100] - at[0], at[3999] - at[3899]);
            assert!(first > 5.0 * last, "{strategy:?}: {first} {last}");
        }
        assert!((RampUp { strategy: RampUpStrategy::Linear, start: 1.0, end: 3.0 }.rate(0.5) - 2.0).abs() < 1e-9);
    }
}
