//! Distributions: mean, percentiles and cumulative curve.

use serde::Serialize;

use crate::plot::FEW_POINTS;

/// Number of steps of a cumulative curve, as many as a plot can show.
const CURVE_STEPS: u32 = 200;

/// The figures of a distribution, in the unit of its values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Arithmetic mean.
    pub mean: f64,
    /// 50th percentile.
    pub median: f64,
    /// Population standard deviation.
    pub std: f64,
    /// `(percent, value)`.
    pub percentiles: Vec<(f64, f64)>,
}

impl Summary {
    /// Summarises finite values; `None` without values. Percentiles are between 0 and 100.
    pub fn new(mut values: Vec<f64>, percentiles: &[f64]) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        Some(Self {
            mean,
            median: percentile(&values, 50.0),
            std: variance.sqrt(),
            percentiles: percentiles.iter().map(|&p| (p, percentile(&values, p))).collect(),
        })
    }

    /// A table cell with the median and the first percentile, or a dash.
    pub fn cell(summary: Option<&Self>) -> String {
        summary.map_or("-".to_owned(), |summary| {
            let tail = summary.percentiles.first().map_or(f64::NAN, |&(_, value)| value);
            format!("{:.2} / {tail:.2}", summary.median)
        })
    }
}

/// The cumulative curve of values: `(value, percentage of values up to it)`. Few values are the points of their curve;
/// without values it is empty.
pub(crate) fn cumulative(mut values: Vec<f64>) -> Vec<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    if values.len() <= FEW_POINTS {
        let last = values.len().saturating_sub(1).max(1) as f64;
        let single = values.len() == 1;
        let percent = |rank: usize| if single { 100.0 } else { 100.0 * rank as f64 / last };
        return values.into_iter().enumerate().map(|(rank, value)| (value, percent(rank))).collect();
    }
    let percents = (0..=CURVE_STEPS).map(|step| 100.0 * f64::from(step) / f64::from(CURVE_STEPS));
    percents.map(|percent| (percentile(&values, percent), percent)).collect()
}

/// Linear interpolation between the two nearest ranks, numpy's default.
fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
    low + (high - low) * rank.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_numpys() {
        let sorted = [1.0, 2.0, 4.0, 8.0];
        for (percent, expected) in [(0.0, 1.0), (50.0, 3.0), (90.0, 6.8), (99.0, 7.88), (100.0, 8.0)] {
            assert!((percentile(&sorted, percent) - expected).abs() < 1e-12, "{percent}");
        }
        assert_eq!(percentile(&[5.0], 99.0), 5.0);
        assert_eq!(Summary::new(Vec::new(), &[99.0]), None);
    }

    #[test]
    fn a_curve_goes_from_the_least_to_the_most() {
        let curve = cumulative((0..=100).map(f64::from).rev().collect());
        assert_eq!((curve[0], curve[100], curve[200]), ((0.0, 0.0), (50.0, 50.0), (100.0, 100.0)));
        assert!(curve.windows(2).all(|pair| pair[0].0 <= pair[1].0 && pair[0].1 < pair[1].1));
        assert!(cumulative(Vec::new()).is_empty());
    }

    #[test]
    fn few_values_are_the_points_of_their_curve() {
        assert_eq!(cumulative(vec![3.0, 1.0, 2.0]), [(1.0, 0.0), (2.0, 50.0), (3.0, 100.0)]);
        assert_eq!(cumulative(vec![3.0]), [(3.0, 100.0)]);
    }
}
