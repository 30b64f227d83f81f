//! The weights of one pass: for every output sample, a run of input samples and an integer for each.

use super::Filter;

/// The highest number of bits after the binary point.
const MAX_PRECISION: u32 = 22;

/// The weights of a pass from `input` to `output` samples.
#[derive(Debug)]
pub(super) struct Weights {
    /// First input sample of each output and the place of its first weight in `values`. The weights of an output end
    /// where those of the next one begin; the last element only marks the end.
    runs: Vec<(usize, usize)>,
    values: Vec<i32>,
    /// Number of bits after the binary point.
    pub(super) precision: u32,
}

impl Weights {
    /// `input` and `output` are at least 1.
    pub(super) fn new(input: usize, output: usize, filter: Filter) -> Self {
        let scale = input as f64 / output as f64;
        let support = filter.support() * scale.max(1.0);
        // torchvision multiplies by the reciprocal, which rounds unlike a division.
        let squeeze = 1.0 / scale.max(1.0);
        let mut runs = Vec::with_capacity(output + 1);
        let mut exact = Vec::new();
        for i in 0..output {
            let centre = (i as f64 + 0.5) * scale;
            let low = (centre - support + 0.5).max(0.0) as usize;
            let high = ((centre + support + 0.5) as usize).min(input).max(low + 1);
            let first = exact.len();
            runs.push((low, first));
            exact.extend((low..high).map(|x| filter.at((x as f64 - centre + 0.5) * squeeze)));
            let sum: f64 = exact[first..].iter().sum();
            exact[first..].iter_mut().for_each(|weight| *weight /= sum);
        }
        runs.push((input, exact.len()));
        let precision = precision_of_16_bits(&exact);
        let unit = f64::from(1_u32 << precision);
        let values = exact.iter().map(|weight| (weight * unit + 0.5_f64.copysign(*weight)) as i32).collect();
        Self { runs, values, precision }
    }

    /// First input sample of output `i`, and the weights of the samples from there.
    pub(super) fn taps(&self, i: usize) -> (usize, &[i32]) {
        let (low, first) = self.runs[i];
        (low, &self.values[first..self.runs[i + 1].1])
    }
}

/// The highest precision at which the largest weight still fits into 16 bits.
fn precision_of_16_bits(weights: &[f64]) -> u32 {
    let largest = weights.iter().copied().fold(0.0, f64::max);
    (0..MAX_PRECISION).find(|bits| 0.5 + largest * f64::from(1_u32 << (bits + 1)) >= 32768.0).unwrap_or(MAX_PRECISION)
}
