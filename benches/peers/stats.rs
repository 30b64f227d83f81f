//! Medians and spreads of a few rounds.

use serde::Serialize;

/// Summary of the values of some rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Spread {
    /// Median: the middle value, or the mean of the two middle values.
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

impl Spread {
    /// Summarises values; `None` if there are none.
    pub(super) fn over(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&least, &most) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Self { median, least, most })
    }

    /// Returns the ratio of two medians, and the range of the ratios of the rounds that both have.
    pub(super) fn ratio(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        let rounds: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
        let median = Self::over(ours)?.median / Self::over(theirs)?.median;
        Some(Self { median, ..Self::over(&rounds)? })
    }

    /// Formats a cell of a table: `12.3 (11.9–12.8)`, or only the value if there was one round.
    pub(super) fn cell(spread: Option<Self>) -> String {
        match spread {
            None => "–".to_owned(),
            Some(Self { median, least, most }) if least == most => number(median),
            Some(Self { median, least, most }) => format!("{} ({}–{})", number(median), number(least), number(most)),
        }
    }
}

/// Formats a number with three digits, or with all digits before the point.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(Spread::over(&[]), None);
        assert_eq!(Spread::over(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, least: 1.0, most: 3.0 }));
        assert_eq!(Spread::over(&[4.0, 1.0, 2.0, 9.0]).unwrap().median, 3.0);
        assert_eq!(Spread::over(&[7.0]), Some(Spread { median: 7.0, least: 7.0, most: 7.0 }));
    }

    #[test]
    fn ratios_are_of_medians_and_their_range_of_rounds() {
        let ratio = Spread::ratio(&[10.0, 12.0, 20.0], &[5.0, 4.0, 6.0]).unwrap();
        assert_eq!(ratio, Spread { median: 12.0 / 5.0, least: 2.0, most: 20.0 / 6.0 });
        assert_eq!(Spread::ratio(&[10.0], &[]), None);
    }

    #[test]
    fn cells_have_three_digits() {
        assert_eq!(Spread::cell(None), "–");
        assert_eq!(Spread::cell(Spread::over(&[5441.3])), "5441");
        assert_eq!(Spread::cell(Spread::over(&[54.84, 9.994, 0.123])), "9.99 (0.12–54.8)");
        assert_eq!(number(99.96), "100");
    }
}
