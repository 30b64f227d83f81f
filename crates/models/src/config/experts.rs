//! The configuration of a mixture of experts.

use octavo_ops::{ExpertGroups, RouteScores};

use super::{ConfigError, Fields, Keys, LayerConfig, MAX_INTERMEDIATE, ModelConfig, factor, range};

/// Limit on the number of experts, far above any published model.
const MAX_EXPERTS: usize = 1 << 13;

/// A mixture of experts: the router, and the expert of all tokens if there is one.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts E.
    pub count: usize,
    /// Number of experts of each token k.
    pub chosen: usize,
    /// Function from the router's logits to scores.
    pub scores: RouteScores,
    /// Restriction of the choice to groups of experts.
    pub groups: Option<ExpertGroups>,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// Whether the scores have an addend that only the choice sees.
    pub correction: bool,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Expert of all tokens.
    pub shared: Option<SharedExpertConfig>,
}

/// An expert of all tokens, whose output is added to that of the chosen ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpertConfig {
    /// Number of columns of the gate.
    pub intermediate_size: usize,
    /// Whether a sigmoid gate multiplies its output.
    pub gated: bool,
}

impl ExpertsConfig {
    /// Returns experts that are chosen by the softmax of the router's logits, with weights that add up to 1.
    pub(crate) fn softmax(count: usize, chosen: usize) -> Self {
        Self {
            count,
            chosen,
            scores: RouteScores::Softmax,
            groups: None,
            router_bias: false,
            correction: false,
            normalise: true,
            scale: 1.0,
            shared: None,
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        range("the number of experts", self.count, 1, MAX_EXPERTS)?;
        range("the number of experts of a token", self.chosen, 1, self.count)?;
        if let Some(shared) = self.shared {
            range("the intermediate size of the shared expert", shared.intermediate_size, 1, MAX_INTERMEDIATE)?;
        }
        factor("the experts' scale", self.scale)
    }
}

impl ModelConfig {
    /// Gives the layers for which `has_experts` is true a mixture of experts with MLPs of `intermediate_size` columns.
    pub(crate) fn set_experts(
        &mut self,
        experts: &ExpertsConfig,
        intermediate_size: usize,
        has_experts: impl Fn(usize) -> bool,
    ) {
        for (_, layer) in self.layers.iter_mut().enumerate().filter(|(index, _)| has_experts(*index)) {
            let LayerConfig { mlp, experts: found, .. } = layer;
            mlp.intermediate_size = intermediate_size;
            *found = Some(experts.clone());
        }
    }

    /// Returns the mixture of experts of the first layer that has one.
    pub fn experts(&self) -> Option<&ExpertsConfig> {
        self.layers.iter().find_map(|layer| layer.experts.as_ref())
    }
}

/// Reads the numbers of experts of a `config.json`.
pub(crate) fn from_hf(fields: &Fields<'_>) -> Result<ExpertsConfig, ConfigError> {
    // Newer versions of transformers write the second name for Qwen too.
    let count = match fields.usize("num_experts")? {
        Some(count) => count,
        None => fields.required("num_local_experts")?,
    };
    Ok(ExpertsConfig::softmax(count, fields.required("num_experts_per_tok")?))
}

/// Reads the experts of a GGUF file, and their intermediate size.
pub(crate) fn from_gguf(keys: &Keys<'_>) -> Result<(ExpertsConfig, usize), ConfigError> {
    let experts = ExpertsConfig::softmax(keys.required("expert_count")?, keys.required("expert_used_count")?);
    let intermediate_size = match keys.usize("expert_feed_forward_length")? {
        Some(size) => size,
        None => keys.required("feed_forward_length")?,
    };
    Ok((experts, intermediate_size))
}
