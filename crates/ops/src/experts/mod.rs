//! The ops of a mixture of experts: E weights of the same shape, of which each token uses k.
//!
//! [`Route`] chooses the experts, and [`ExpertLinear`] multiplies each pair of a token and one of its experts, a row of
//! k·T. [`ExpertSum`] adds the k rows of each token. A backend may keep the rows of k·T in any order, such as by expert:
//! only these ops and row-wise ones see them.

mod choice;

pub use choice::ChoiceScratch;
#[cfg(feature = "testing")]
pub(crate) use choice::LEAST_SUM;

use crate::adapter::SiteId;
use crate::program::{BufferId, WeightId};

/// Function from a router's logits to the scores of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteScores {
    /// Softmax over all experts. With [`Route::normalise`], this is also the softmax over the chosen experts alone.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
}

/// Value by which a group of experts is compared with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The best score in the group (DeepSeek-V2).
    Best,
    /// The sum of the best two (DeepSeek-V3).
    BestTwo,
}

/// Restriction of the choice to some groups of consecutive experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, all of the same size.
    pub count: usize,
    /// Number of groups with the best values, to which the choice is restricted. They have at least k experts.
    pub kept: usize,
    /// Value of a group.
    pub score: GroupScore,
}

/// `input[T,H] → out[T,k]`: the experts of each token and their weights.
///
/// The logits `input · weightᵀ (+ bias)` are in f32, as are the scores. Adapters add to the logits at the site. The k experts with the largest scores (plus
/// `correction`) are chosen; of equal ones, those with the lower index. The weight of a chosen expert is its score,
/// without the correction, over the sum of the k scores if `normalise`, times `scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// Weight `[E,H]`.
    pub weight: WeightId,
    /// Bias `[E]` of the logits.
    pub bias: Option<WeightId>,
    /// Site of the weight, if adapters add to its product.
    pub site: Option<SiteId>,
    /// Addend `[E]` of the scores that only the choice sees (DeepSeek-V3).
    pub correction: Option<WeightId>,
    /// Scores.
    pub scores: RouteScores,
    /// Restriction to groups of experts.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of the chosen experts are divided by their sum, plus 1e-20.
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Input `[T,H]`.
    pub input: BufferId,
    /// Output `[T,k]`, a [routing](crate::Element::Routing).
    pub out: BufferId,
}

/// `input[T,K] or [k·T,K] → out[k·T,N]`: the row of a token and one of its experts e is `input · weight_eᵀ (+ bias_e)`.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertLinear {
    /// Weight `[E·N,K]`, one expert after the other. Each expert has the same number of parts, of the same sizes.
    pub weight: WeightId,
    /// Bias `[E·N]`.
    pub bias: Option<WeightId>,
    /// Number of experts E.
    pub experts: usize,
    /// Input: the row of the token if it is `[T,K]`, or the row of token and expert if it is `[k·T,K]`.
    pub input: BufferId,
    /// Experts of each token `[T,k]`.
    pub routing: BufferId,
    /// Output `[k·T,N]`.
    pub out: BufferId,
}

/// `input[k·T,N] → out[T,N]`: `scale · Σ weight · row (+ add)` over the experts of each token in ascending order, in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertSum {
    /// Input `[k·T,N]`.
    pub input: BufferId,
    /// Experts of each token and their weights `[T,k]`.
    pub routing: BufferId,
    /// Factor of the sum (1 for most models, the residual multiplier for Granite).
    pub scale: f32,
    /// Buffer of the output's shape that is added. It may be `out` itself.
    pub add: Option<BufferId>,
    /// Output `[T,N]`.
    pub out: BufferId,
}

/// `out[.,C] ← sigmoid(gate[.,1]) · out`, in place: the gate of a shared expert (Qwen2-MoE).
#[derive(Clone, Debug, PartialEq)]
pub struct GateRows {
    /// Gate `[.,1]`.
    pub gate: BufferId,
    /// Rows `[.,C]`, read and written.
    pub out: BufferId,
}

/// Returns the expected number of distinct experts that `tokens` tokens use, if each chooses `chosen` of `experts` at
/// random, rounded: `E · (1 − (1 − k/E)^T)`.
pub fn expected_experts(experts: usize, chosen: usize, tokens: usize) -> u64 {
    if experts == 0 {
        return 0;
    }
    let missed = (1.0 - chosen.min(experts) as f64 / experts as f64).powf(tokens as f64);
    (experts as f64 * (1.0 - missed)).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_tokens_use_more_experts_up_to_all() {
        assert_eq!(expected_experts(128, 8, 0), 0);
        assert_eq!(expected_experts(128, 8, 1), 8);
        // 128 · (1 − 0.9375²) = 15.5.
        assert_eq!(expected_experts(128, 8, 2), 16);
        assert_eq!(expected_experts(128, 8, 1000), 128);
        assert_eq!(expected_experts(4, 4, 1), 4);
        assert_eq!(expected_experts(0, 2, 1), 0);
    }
}
