//! `logit_bias`: values that are added to the logits of tokens.

use std::fmt;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::api::shared::fields::FieldValue;

/// Maximum number of biased tokens.
pub(crate) const MAX_BIASED_TOKENS: usize = 32 << 10;

/// The biases of a request: token ids, not yet checked against the vocabulary, and their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LogitBias {
    pub(crate) entries: Vec<(i64, f64)>,
    /// The number of all biases, of which [`MAX_BIASED_TOKENS`] are kept.
    pub(crate) count: usize,
    /// The first key that is no token id, or token whose value is no number, as a sentence.
    pub(crate) error: Option<String>,
}

impl FieldValue for LogitBias {
    const ERROR: &'static str = "dict_type";
    const MESSAGE: &'static str = "Input should be a valid dictionary";
    const SCHEMA: &'static str = r#"{"type": "object", "additionalProperties": {"type": "number"}}"#;
}

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = LogitBias;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let mut bias = LogitBias::default();
                while bias.entries.len() < MAX_BIASED_TOKENS && bias.error.is_none() {
                    let Some((key, value)) = map.next_entry::<String, &RawValue>()? else { break };
                    bias.count += 1;
                    match entry(&key, value) {
                        Ok(entry) => bias.entries.push(entry),
                        Err(error) => bias.error = Some(error),
                    }
                }
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    bias.count += 1;
                }
                Ok(bias)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

fn entry(key: &str, value: &RawValue) -> Result<(i64, f64), String> {
    let start: String = key.chars().take(64).collect();
    let id = key.parse().map_err(|_| format!("Invalid key in 'logit_bias': '{start}' is not a token id."))?;
    let value = f64::read(value).ok_or_else(|| format!("The bias of token {id} in 'logit_bias' must be a number."))?;
    Ok((id, value))
}
