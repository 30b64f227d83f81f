//! What turns the raw results of a model into those of an answer.

use crate::config::Activation;

/// The last step of results. Sums are in f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// Nothing.
    Raw,
    /// Vectors are scaled to length 1.
    Normalise,
    /// Each score becomes a probability.
    Sigmoid,
    /// The scores become a distribution.
    Softmax,
}

impl From<Activation> for Finish {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Identity => Self::Raw,
            Activation::Sigmoid => Self::Sigmoid,
            Activation::Softmax => Self::Softmax,
        }
    }
}

impl Finish {
    /// Changes one result.
    pub(crate) fn apply(self, result: &mut [f32]) {
        match self {
            Self::Raw => {}
            Self::Normalise => {
                let length = dot(result, result).sqrt();
                if length > 0.0 {
                    result.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
                }
            }
            Self::Sigmoid => result.iter_mut().for_each(|x| *x = (1.0 / (1.0 + (-f64::from(*x)).exp())) as f32),
            Self::Softmax => {
                let most = result.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let power = |x: f32| f64::from(x - most).exp();
                let sum: f64 = result.iter().map(|&x| power(x)).sum();
                result.iter_mut().for_each(|x| *x = (power(*x) / sum) as f32);
            }
        }
    }
}

/// Lengths below this count as this, as in PyTorch.
const LEAST_LENGTH: f64 = 1e-8;

/// The cosine of the angle between two vectors.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let lengths = dot(a, a).sqrt().max(LEAST_LENGTH) * dot(b, b).sqrt().max(LEAST_LENGTH);
    (dot(a, b) / lengths) as f32
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished<const N: usize>(finish: Finish, mut result: [f32; N]) -> [f32; N] {
        finish.apply(&mut result);
        result
    }

    #[test]
    fn vectors_have_length_one_unless_they_are_zero() {
        assert_eq!(finished(Finish::Normalise, [3.0, 4.0]), [0.6, 0.8]);
        assert_eq!(finished(Finish::Normalise, [0.0, 0.0]), [0.0, 0.0]);
        assert_eq!(finished(Finish::Normalise, [3e20, 4e20]), [0.6, 0.8]);
        assert_eq!(finished(Finish::Raw, [3.0, 4.0]), [3.0, 4.0]);
    }

    #[test]
    fn scores_become_probabilities() {
        assert_eq!(finished(Finish::Sigmoid, [0.0, 1e9, -1e9]), [0.5, 1.0, 0.0]);
        assert_eq!(finished(Finish::Softmax, [7.0, 7.0]), [0.5, 0.5]);
        assert_eq!(finished(Finish::Softmax, [1e30, -1e30]), [1.0, 0.0]);
        let [a, b, c] = finished(Finish::Softmax, [1.0, 2.0, 3.0]);
        assert!((b / a - 1f32.exp()).abs() < 1e-5 && (a + b + c - 1.0).abs() < 1e-6);
        assert_eq!(finished(Finish::Softmax, []), [0.0_f32; 0]);
    }

    #[test]
    fn a_cosine_does_not_depend_on_lengths() {
        assert_eq!(cosine(&[1.0, 0.0], &[5.0, 0.0]), 1.0);
        assert_eq!(cosine(&[1.0, 1.0], &[-3.0, 3.0]), 0.0);
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 1.0]), 0.0);
        assert!((cosine(&[1.0, 0.0], &[1.0, 1.0]) - 0.5f32.sqrt()).abs() < 1e-7);
    }
}
