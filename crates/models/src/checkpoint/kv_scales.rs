//! The type and the scales of keys and values that a checkpoint is made for.

use octavo_ops::{KvScales, Values, WeightError};

use super::quantised::Module;
use super::{Checkpoint, Files};
use crate::program::names::Role;

/// Type of the KV cache for which a checkpoint has scales (`kv_cache_scheme`, `kv_cache_quant_algo`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvScheme {
    /// 8-bit floating-point numbers (e4m3) with one scale for the keys and one for the values of a layer.
    Fp8,
    /// Any other type, by a description such as `8 bits, int, attn_head`.
    Other(String),
}

/// Names of the scale of the keys (`k`) or values (`v`) of a layer's attention: of vLLM's and Hugging Face's own writers,
/// of ModelOpt, of fused projections, and of compressed-tensors.
const SUFFIXES: [&str; 5] = ["?_scale", "attn.?_scale", "?_proj.?_scale", "qkv_proj.?_scale", "?_proj.output_scale"];

/// The scale of both in older checkpoints.
const SHARED: &str = "kv_scale";

impl Checkpoint {
    /// Returns the type of the KV cache for which the checkpoint is made; `None` if it names none.
    pub const fn kv_scheme(&self) -> Option<&KvScheme> {
        match &self.files {
            Files::HuggingFace { kv_scheme, .. } => kv_scheme.as_ref(),
            Files::Gguf { .. } | Files::Dummy { .. } => None,
        }
    }

    /// Returns the scales of the keys and values of a layer. Without any they are 1; one without the other is that of both.
    /// Scales by head are not read: [`Checkpoint::kv_scheme`] names them.
    pub(crate) fn kv_scales(&self, layer: usize, values: Values) -> Result<KvScales, WeightError> {
        if !matches!(self.files, Files::HuggingFace { .. }) {
            return Ok(KvScales::ONE);
        }
        let output = self.config.family.names.weight(self.format(), Role::Output, layer);
        let Some((attention, _)) = output.rsplit_once('.').and_then(|(module, _)| module.rsplit_once('.')) else {
            return Ok(KvScales::ONE);
        };
        let module = Module { checkpoint: self, name: attention };
        let [key, value] = ["k", "v"].map(|which| {
            let names = SUFFIXES.iter().map(|suffix| suffix.replace('?', which));
            let found = names.into_iter().find(|name| module.has(name));
            found.map_or(Ok(None), |name| scale(&module, &name))
        });
        let (key, value) = match (key?, value?) {
            (None, None) if module.has(SHARED) => (scale(&module, SHARED)?, None),
            found => found,
        };
        let Some(first) = key.or(value) else { return Ok(KvScales::ONE) };
        // Values that are a part of the keys are read as these.
        let value = value.filter(|_| values == Values::Own);
        Ok(KvScales { key: first, value: value.unwrap_or(first) })
    }
}

/// Returns the only number of a tensor; `None` if it has several.
fn scale(module: &Module<'_>, name: &str) -> Result<Option<f32>, WeightError> {
    let (_, numbers) = module.numbers(name)?;
    let &[number] = numbers.as_slice() else { return Ok(None) };
    if number.is_finite() && number > 0.0 {
        Ok(Some(number))
    } else {
        Err(module.invalid(name, format!("a scale of keys or values is a positive number, not {number}")))
    }
}
