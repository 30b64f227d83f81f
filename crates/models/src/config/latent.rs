//! The configuration of multi-head latent attention.

use octavo_ops::HeadShape;

use super::{AttentionConfig, ConfigError, MAX_HEAD_DIM, MAX_HIDDEN, ModelConfig, range};

/// Attention whose keys and values are products of one latent row per token, in place of heads of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentConfig {
    /// Number of columns of the low-rank form of the queries; `None` if they are one product of the input.
    pub query_rank: Option<usize>,
    /// Number of elements R of the latent.
    pub rank: usize,
    /// Number of elements of a head that are not rotated, which the latent determines for a key.
    pub content: usize,
    /// Number of elements of a head that are rotated, which all heads share for a key.
    pub rotated: usize,
    /// Number of elements of a value.
    pub value: usize,
    /// Value added under the root of the norms of the latent and of the low-rank form of the queries.
    pub norm_eps: f32,
}

impl LatentConfig {
    /// Returns the number of elements of a head of the queries before the latent's projection is absorbed.
    pub const fn query_dim(&self) -> usize {
        self.content + self.rotated
    }

    pub(super) fn check(&self, attention: &AttentionConfig) -> Result<(), ConfigError> {
        range("the rank of the keys and values", self.rank, 1, MAX_HEAD_DIM - 1)?;
        range("the rotated part of a head", self.rotated, 2, MAX_HEAD_DIM)?;
        range("the content part of a head", self.content, 1, MAX_HEAD_DIM)?;
        range("the size of a value", self.value, 1, MAX_HEAD_DIM)?;
        if let Some(rank) = self.query_rank {
            range("the rank of the queries", rank, 1, MAX_HIDDEN)?;
        }
        let turned = attention.rope.as_ref().map_or(0, |rope| rope.rotary_dim);
        if turned != self.rotated {
            let rotated = self.rotated;
            return Err(ConfigError::Invalid(format!(
                "the rotary embedding is of {turned} elements, but {rotated} of a head are rotated"
            )));
        }
        if !attention.causal {
            return Err(ConfigError::Unsupported("latent attention to later tokens".into()));
        }
        if attention.qkv_bias || attention.output_bias {
            return Err(ConfigError::Unsupported("latent attention with biases".into()));
        }
        Ok(())
    }
}

impl ModelConfig {
    /// Gives all layers latent attention. The factor of the scores is that of a head's size, times `magnitude` twice.
    pub(crate) fn set_latent(&mut self, latent: LatentConfig, magnitude: f64) {
        let scale = (magnitude * magnitude / (latent.query_dim() as f64).sqrt()) as f32;
        for attention in self.layers.iter_mut().map(|layer| &mut layer.attention) {
            attention.heads = HeadShape::latent(attention.heads.q, latent.rank, latent.rotated);
            (attention.latent, attention.scale) = (Some(latent), scale);
        }
    }
}
