//! `--speculative-config`: vLLM's JSON object for speculative decoding.

use anyhow::{Context, Result, bail};
use octavo_engine::Speculation;
use serde_json::Value;

use crate::cli::JsonObject;

/// Length of the n-grams that are looked up, unless a key says otherwise, as in vLLM.
const LOOKUP: usize = 5;

/// Maximum number of drafts, which bounds the rows of a step.
const MAX_DRAFTS: usize = 32;

/// Keys of other methods, which say nothing about n-grams.
const OF_OTHER_METHODS: [&str; 8] = [
    "draft_sample_method",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "max_model_len",
    "model",
    "quantization",
    "rejection_sample_method",
    "revision",
];

/// Reads the object. `None` if there is none, or if its method is not supported: answers are the same without it.
///
/// # Errors
/// The method is missing, or a key of n-grams is unknown or has an invalid value.
pub(crate) fn config(object: Option<&JsonObject>) -> Result<Option<Speculation>> {
    let Some(JsonObject(keys)) = object else { return Ok(None) };
    let name = |key: &str| keys.get(key).and_then(Value::as_str);
    let method = name("method").or(name("model").filter(|model| *model == "ngram"));
    match method {
        Some("ngram") => {}
        None if name("model").is_none() => bail!("'method' is missing: ngram is supported"),
        other => {
            let method = other.unwrap_or("draft_model");
            tracing::warn!(
                "--speculative-config has no effect: the method {method} is not supported, ngram is; answers are the \
                 same without it, but slower"
            );
            return Ok(None);
        }
    }
    let (mut tokens, mut min, mut max) = (None, None, None);
    for (key, value) in keys {
        match key.replace('-', "_").as_str() {
            "method" => continue,
            "num_speculative_tokens" => tokens = Some(count(value).with_context(|| format!("'{key}'"))?),
            "prompt_lookup_min" => min = Some(count(value).with_context(|| format!("'{key}'"))?),
            "prompt_lookup_max" => max = Some(count(value).with_context(|| format!("'{key}'"))?),
            known if OF_OTHER_METHODS.contains(&known) => continue,
            _ => bail!("'{key}': unknown key"),
        }
    }
    let tokens = tokens.context("'num_speculative_tokens' is missing")?;
    if tokens > MAX_DRAFTS {
        bail!("'num_speculative_tokens' is {tokens}, but must be at most {MAX_DRAFTS}");
    }
    let lookup_min = min.or(max).unwrap_or(LOOKUP);
    let lookup_max = max.or(min).unwrap_or(LOOKUP);
    if lookup_min > lookup_max {
        bail!("'prompt_lookup_min' is {lookup_min}, but must be at most 'prompt_lookup_max', {lookup_max}");
    }
    Ok(Some(Speculation { tokens, lookup_min, lookup_max }))
}

fn count(value: &Value) -> Result<usize> {
    let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
    number.filter(|number| *number > 0).context("it must be a whole number of at least 1")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(object: Value) -> Result<Option<Speculation>> {
        let Value::Object(keys) = object else { panic!("an object") };
        config(Some(&JsonObject(keys)))
    }

    #[test]
    fn keys_and_defaults_are_vllms() {
        assert_eq!(config(None).unwrap(), None);
        for (object, expected) in [
            (json!({"method": "ngram", "num_speculative_tokens": 3}), (3, 5, 5)),
            (json!({"model": "ngram", "num-speculative-tokens": 3, "prompt-lookup-max": 4}), (3, 4, 4)),
            (json!({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 2}), (1, 2, 2)),
            (
                json!({"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
                    "draft_tensor_parallel_size": 1}),
                (8, 2, 4),
            ),
        ] {
            let (tokens, lookup_min, lookup_max) = expected;
            assert_eq!(read(object).unwrap(), Some(Speculation { tokens, lookup_min, lookup_max }));
        }
    }

    #[test]
    fn other_methods_change_nothing() {
        for object in [json!({"method": "eagle3", "model": "m", "num_speculative_tokens": 3}), json!({"model": "m"})] {
            assert_eq!(read(object).unwrap(), None);
        }
    }

    #[test]
    fn what_is_not_understood_is_told() {
        for (object, part) in [
            (json!({}), "'method' is missing"),
            (json!({"method": "ngram"}), "'num_speculative_tokens' is missing"),
            (json!({"method": "ngram", "num_speculative_tokens": 0}), "at least 1"),
            (json!({"method": "ngram", "num_speculative_tokens": 33}), "at most 32"),
            (json!({"method": "ngram", "num_speculative_tokens": 1, "lookup": 2}), "'lookup': unknown key"),
            (
                json!({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 3, "prompt_lookup_max": 2}),
                "must be at most 'prompt_lookup_max', 2",
            ),
        ] {
            let error = format!("{:#}", read(object.clone()).unwrap_err());
            assert!(error.contains(part), "{object}: {error}");
        }
    }
}
