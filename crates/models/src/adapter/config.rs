//! `adapter_config.json` of PEFT.

use std::path::Path;

use regex::Regex;
use serde_json::{Map, Value};

use super::AdapterError;
use crate::config::{ConfigError, Fields};

/// Settings that must be missing, `null`, `false` or empty, because they change what an adapter means.
const UNSUPPORTED: [&str; 14] = [
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
    "trainable_token_indices",
    "ensure_weight_tying",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
];

/// Prefixes of `init_lora_weights` for which the weights of the base model were changed too.
const CHANGED_BASES: [&str; 4] = ["pissa", "olora", "corda", "loftq"];

/// Scaling of an adapter's modules.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    rank: usize,
    alpha: f64,
    /// Whether alpha is divided by the rank's square root, not by the rank.
    by_root: bool,
    ranks: Patterns,
    alphas: Patterns,
}

/// Values of modules by a pattern of their names; the first that matches counts.
type Patterns = Vec<(Regex, f64)>;

impl AdapterConfig {
    /// Reads the configuration.
    ///
    /// # Errors
    /// Returns an error that names the setting which is missing, wrong or not supported.
    pub(super) fn read(path: &Path, object: &Map<String, Value>) -> Result<Self, AdapterError> {
        let fail = |source| AdapterError::Config { path: path.to_owned(), source };
        Self::from_fields(&Fields::new(object)).map_err(fail)
    }

    fn from_fields(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        let unsupported = |setting: &str, value: &str| {
            ConfigError::Unsupported(format!("an adapter with '{setting}': {}", value.escape_debug()))
        };
        match fields.str("peft_type")? {
            Some("LORA") => {}
            other => return Err(unsupported("peft_type", other.unwrap_or("missing"))),
        }
        if let Some(setting) = UNSUPPORTED.into_iter().find(|setting| fields.value(setting).is_some_and(is_set)) {
            return Err(unsupported(setting, &fields.value(setting).map(Value::to_string).unwrap_or_default()));
        }
        if let Some(bias) = fields.str("bias")?.filter(|bias| *bias != "none") {
            return Err(unsupported("bias", bias));
        }
        if let Some(Value::String(kind)) = fields.value("init_lora_weights")
            && CHANGED_BASES.iter().any(|changed| kind.to_ascii_lowercase().starts_with(changed))
        {
            return Err(unsupported("init_lora_weights", kind));
        }
        Ok(Self {
            rank: fields.required("r")?,
            alpha: fields.f64("lora_alpha")?.ok_or_else(|| ConfigError::missing("lora_alpha"))?,
            by_root: fields.bool("use_rslora")?.unwrap_or(false),
            ranks: patterns(fields, "rank_pattern")?,
            alphas: patterns(fields, "alpha_pattern")?,
        })
    }

    /// Returns the rank of a module.
    pub(super) fn rank(&self, module: &str) -> usize {
        matching(&self.ranks, module).map_or(self.rank, |rank| rank as usize)
    }

    /// Returns the factor of a module's product: alpha over the rank, or over its square root (rsLoRA, Kalajdzievski 2023).
    pub(super) fn scaling(&self, module: &str) -> f32 {
        let (alpha, rank) = (matching(&self.alphas, module).unwrap_or(self.alpha), self.rank(module) as f64);
        (alpha / if self.by_root { rank.sqrt() } else { rank }) as f32
    }
}

/// Returns whether a setting says anything.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Array(items) => !items.is_empty(),
        Value::Object(items) => !items.is_empty(),
        Value::Number(_) | Value::String(_) => true,
    }
}

/// Reads patterns of whole names, or of their ends after a dot.
fn patterns(fields: &Fields<'_>, key: &str) -> Result<Patterns, ConfigError> {
    let Some(found) = fields.object(key)? else { return Ok(Vec::new()) };
    let wrong = || ConfigError::wrong_type(key, "an object of patterns and numbers");
    let entry = |(pattern, value): (&str, &Value)| {
        let pattern = Regex::new(&format!(r"^(.*\.)?({pattern})$")).map_err(|_| wrong())?;
        Ok((pattern, value.as_f64().filter(|value| *value > 0.0).ok_or_else(wrong)?))
    };
    found.entries().map(entry).collect()
}

/// Returns the value of a module, or of its only parameter.
fn matching(patterns: &Patterns, module: &str) -> Option<f64> {
    let parameter = format!("{module}.weight");
    let matches = |pattern: &Regex| pattern.is_match(module) || pattern.is_match(&parameter);
    patterns.iter().find(|(pattern, _)| matches(pattern)).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(settings: Value) -> Result<AdapterConfig, String> {
        let mut object = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16});
        object.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        AdapterConfig::read(Path::new("a.json"), object.as_object().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn scaling_follows_the_patterns() {
        let plain = read(json!({})).unwrap();
        assert_eq!((plain.rank("a.q_proj"), plain.scaling("a.q_proj")), (8, 2.0));
        let rooted = read(json!({"use_rslora": true, "r": 16, "lora_alpha": 8})).unwrap();
        assert_eq!(rooted.scaling("x"), 2.0);
        let by_pattern = read(json!({
            "rank_pattern": {"layers\\.0\\..*q_proj": 4, "q_proj": 2, "gate.weight": 3}, "alpha_pattern": {"v_proj": 32.0},
        }));
        let by_pattern = by_pattern.unwrap();
        let of = |module| (by_pattern.rank(module), by_pattern.scaling(module));
        assert_eq!(of("model.layers.0.self_attn.q_proj"), (4, 4.0));
        assert_eq!(of("model.layers.1.self_attn.q_proj"), (2, 8.0));
        assert_eq!(of("model.layers.1.self_attn.v_proj"), (8, 4.0));
        assert_eq!(of("model.layers.1.self_attn.kq_proj"), (8, 2.0), "not after a dot");
        assert_eq!(of("model.layers.1.mlp.gate").0, 3, "the parameter of the module");
    }

    #[test]
    fn other_kinds_of_adapters_are_refused() {
        for (settings, part) in [
            (json!({"peft_type": "IA3"}), "'peft_type': IA3"),
            (json!({"use_dora": true}), "'use_dora': true"),
            (json!({"modules_to_save": ["lm_head"]}), "'modules_to_save': [\\\"lm_head\\\"]"),
            (json!({"bias": "all"}), "'bias': all"),
            (json!({"init_lora_weights": "pissa_niter_4"}), "'init_lora_weights': pissa_niter_4"),
            (json!({"rank_pattern": {"(": 4}}), "'rank_pattern'"),
            (json!({"alpha_pattern": {"a": 0}}), "'alpha_pattern'"),
            (json!({"r": -1}), "'r'"),
            (json!({"lora_alpha": null}), "'lora_alpha' is missing"),
        ] {
            let error = read(settings.clone()).unwrap_err();
            assert!(error.contains(part), "{settings}: {error}");
        }
        let fine = json!({"target_parameters": ["mlp.experts.down_proj"], "use_dora": false, "modules_to_save": null, "layer_replication": [], "init_lora_weights": true});
        assert!(read(fine).is_ok());
    }
}
