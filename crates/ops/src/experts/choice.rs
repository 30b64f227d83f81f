//! The choice of experts on the host, shared by the backends that make it there.

use super::{ExpertGroups, GroupScore, Route, RouteScores};

/// Addend of the sum of chosen scores, so that it is never 0 (DeepSeek-V3's).
pub(crate) const LEAST_SUM: f32 = 1e-20;

/// Rank of a score that is NaN: below all others, and finite even if two are added.
const LOWEST: f32 = -1e30;

/// Memory for the choice of one token, which is kept between calls.
#[derive(Clone, Debug, Default)]
pub struct ChoiceScratch {
    scores: Vec<f32>,
    /// Values by which experts are chosen; −∞ for those that are not eligible or already chosen.
    ranks: Vec<f32>,
    groups: Vec<f32>,
}

impl Route {
    /// Chooses the experts of one token from its logits `[E]`. `correction` is empty or `[E]`. Writes the experts
    /// `[k]`, in ascending order, and their weights `[k]`; k is at most E.
    ///
    /// A NaN among the logits gives weights that are NaN, and experts that exist.
    pub fn choose(
        &self,
        logits: &[f32],
        correction: &[f32],
        scratch: &mut ChoiceScratch,
        experts: &mut [u32],
        weights: &mut [f32],
    ) {
        let ChoiceScratch { scores, ranks, groups } = scratch;
        self.score(logits, scores);
        ranks.clear();
        ranks.extend(scores.iter().map(|&score| if score.is_nan() { LOWEST } else { score }));
        ranks.iter_mut().zip(correction).for_each(|(rank, correction)| *rank += correction);
        if let Some(kept) = self.groups {
            kept.restrict(ranks, groups);
        }
        for expert in experts.iter_mut() {
            *expert = take_largest(ranks) as u32;
        }
        experts.sort_unstable();
        let mut sum = 0.0;
        for (weight, &expert) in weights.iter_mut().zip(experts.iter()) {
            *weight = scores[expert as usize];
            sum += *weight;
        }
        let factor = if self.normalise { self.scale / (sum + LEAST_SUM) } else { self.scale };
        weights.iter_mut().for_each(|weight| *weight *= factor);
    }

    fn score(&self, logits: &[f32], scores: &mut Vec<f32>) {
        scores.clear();
        match self.scores {
            RouteScores::Sigmoid => scores.extend(logits.iter().map(|x| 1.0 / (1.0 + (-x).exp()))),
            RouteScores::Softmax => {
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                scores.extend(logits.iter().map(|x| (x - largest).exp()));
                let sum: f32 = scores.iter().sum();
                scores.iter_mut().for_each(|score| *score /= sum);
            }
        }
    }
}

impl ExpertGroups {
    /// Sets the ranks of the experts outside the best groups to −∞. `values` is scratch memory.
    fn restrict(self, ranks: &mut [f32], values: &mut Vec<f32>) {
        let size = (ranks.len() / self.count.max(1)).max(1);
        values.clear();
        values.extend(ranks.chunks(size).map(|group| {
            let mut best = [f32::NEG_INFINITY; 2];
            for &rank in group {
                if rank > best[0] {
                    best = [rank, best[0]];
                } else if rank > best[1] {
                    best[1] = rank;
                }
            }
            match self.score {
                GroupScore::BestTwo if size > 1 => best[0] + best[1],
                GroupScore::Best | GroupScore::BestTwo => best[0],
            }
        }));
        for _ in 0..self.kept {
            take_largest(values);
        }
        // The groups that were taken are those that remain.
        for (group, value) in ranks.chunks_mut(size).zip(values) {
            if *value != f32::NEG_INFINITY {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Returns the index of the largest value, the first among equals, and sets it to −∞. The values are not NaN.
fn take_largest(values: &mut [f32]) -> usize {
    let mut found = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[found] {
            found = index;
        }
    }
    values[found] = f32::NEG_INFINITY;
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BufferId, WeightId};

    fn route(scores: RouteScores) -> Route {
        Route {
            site: None,
            weight: WeightId(0),
            bias: None,
            correction: None,
            scores,
            groups: None,
            normalise: false,
            scale: 1.0,
            input: BufferId(0),
            out: BufferId(1),
        }
    }

    fn chosen<const K: usize>(route: &Route, logits: &[f32], correction: &[f32]) -> ([u32; K], [f32; K]) {
        let (mut experts, mut weights) = ([0; K], [0.0; K]);
        route.choose(logits, correction, &mut ChoiceScratch::default(), &mut experts, &mut weights);
        (experts, weights)
    }

    fn near(found: &[f32], expected: &[f32]) {
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}, expected {expected:?}");
    }

    #[test]
    fn the_largest_scores_are_chosen_and_the_first_of_equal_ones() {
        let (experts, weights) = chosen::<2>(&route(RouteScores::Softmax), &[0.0, 1.0, 3.0, 1.0], &[]);
        assert_eq!(experts, [1, 2]);
        let sum = 1.0 + 2.0 * 1f32.exp() + 3f32.exp();
        near(&weights, &[1f32.exp() / sum, 3f32.exp() / sum]);
        let normalised = Route { normalise: true, scale: 2.0, ..route(RouteScores::Softmax) };
        let (_, weights) = chosen::<2>(&normalised, &[0.0, 1.0, 3.0, 1.0], &[]);
        let sum = 1f32.exp() + 3f32.exp();
        near(&weights, &[2.0 * 1f32.exp() / sum, 2.0 * 3f32.exp() / sum]);
    }

    #[test]
    fn a_correction_changes_the_choice_and_not_the_weights() {
        let (experts, weights) = chosen::<1>(&route(RouteScores::Sigmoid), &[2.0, 0.0], &[0.0, 1.0]);
        assert_eq!(experts, [1]);
        near(&weights, &[0.5]);
    }

    #[test]
    fn only_the_best_groups_are_eligible() {
        let logits = [5.0, 0.0, 4.0, 3.9, 1.0, 1.0];
        let of = |score, kept| {
            let groups = Some(ExpertGroups { count: 3, kept, score });
            chosen::<2>(&Route { groups, ..route(RouteScores::Sigmoid) }, &logits, &[]).0
        };
        assert_eq!(of(GroupScore::Best, 1), [0, 1]);
        assert_eq!(of(GroupScore::BestTwo, 1), [2, 3]);
        assert_eq!(of(GroupScore::Best, 2), [0, 2]);
    }

    #[test]
    fn logits_that_are_not_numbers_choose_experts_that_exist() {
        for scores in [RouteScores::Softmax, RouteScores::Sigmoid] {
            let (experts, weights) = chosen::<3>(&route(scores), &[f32::NAN; 4], &[]);
            assert_eq!(experts, [0, 1, 2]);
            assert!(weights.iter().all(|weight| weight.is_nan()));
            let infinite = [f32::NEG_INFINITY, f32::INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY];
            let (experts, _) = chosen::<3>(&route(scores), &infinite, &[]);
            let mut distinct = experts.to_vec();
            distinct.dedup();
            assert_eq!(distinct.len(), 3, "{experts:?}");
        }
    }
}
