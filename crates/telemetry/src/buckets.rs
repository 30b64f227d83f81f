//! The bucket bounds of vLLM's histograms.

/// Request latencies, in seconds.
pub(crate) const LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];

/// Time to first token, in seconds.
pub(crate) const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];

/// Time between tokens, in seconds.
pub(crate) const TOKEN: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];

/// Tokens of a step.
pub(crate) const ITERATION: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// `n` of a request.
pub(crate) const SAMPLES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// Preemptions of a request.
pub(crate) const PREEMPTIONS: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];

/// HTTP durations by handler, in seconds.
pub(crate) const HTTP: &[f64] = &[0.1, 0.5, 1.0];

/// HTTP durations over all handlers, in seconds.
pub(crate) const HTTP_FINE: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
];

/// The 1-2-5 series up to the last value that is at most `max`, but at least 1, in tokens.
pub(crate) fn lengths(max: usize) -> Vec<f64> {
    let mut bounds = vec![1.0];
    let mut decade = 1usize;
    loop {
        for step in [2, 5, 10] {
            match decade.checked_mul(step) {
                Some(value) if value <= max => bounds.push(value as f64),
                _ => return bounds,
            }
        }
        decade *= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::lengths;

    #[test]
    fn lengths_stop_at_the_last_value_that_fits() {
        assert_eq!(lengths(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(lengths(8192), [1., 2., 5., 10., 20., 50., 100., 200., 500., 1000., 2000., 5000.]);
        assert_eq!(lengths(0), [1.0]);
        assert_eq!(lengths(1), [1.0]);
        assert_eq!(lengths(2), [1.0, 2.0]);
        assert!(lengths(usize::MAX).len() < 64);
    }
}
