//! `--kv-events-config`: vLLM's JSON object for publishing KV events.

use anyhow::{Context, Result, bail};
use octavo_kv_events::{Encoding, KvEventsConfig};
use serde_json::Value;

use crate::cli::{Environment, JsonObject};

/// vLLM's variable for publishing hashes as numbers.
const INT_HASHES: &str = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES";

/// Reads the object; `None` if events are disabled.
///
/// # Errors
/// A key is unknown or a value is invalid.
pub(crate) fn config(object: Option<&JsonObject>, environment: &Environment<'_>) -> Result<Option<KvEventsConfig>> {
    let Some(JsonObject(keys)) = object else { return Ok(None) };
    let mut config = KvEventsConfig {
        int_hashes: environment(INT_HASHES).is_none_or(|value| !matches!(value.trim(), "0" | "false" | "False")),
        ..KvEventsConfig::default()
    };
    let (mut enabled, mut publisher) = (false, None);
    for (key, value) in keys {
        set_field(&mut config, &mut enabled, &mut publisher, key, value).with_context(|| format!("'{key}'"))?;
    }
    match publisher.as_deref() {
        Some("null") => return Ok(None),
        None | Some("zmq") => {}
        Some(other) => bail!("'publisher' is '{other}', but must be null or zmq"),
    }
    Ok(enabled.then_some(config))
}

fn set_field(
    config: &mut KvEventsConfig,
    enabled: &mut bool,
    publisher: &mut Option<String>,
    key: &str,
    value: &Value,
) -> Result<()> {
    match key {
        "enable_kv_cache_events" => *enabled = value.as_bool().context("it must be true or false")?,
        "publisher" => *publisher = (!value.is_null()).then(|| text(value)).transpose()?,
        "endpoint" => config.endpoint = text(value)?,
        "replay_endpoint" => config.replay_endpoint = (!value.is_null()).then(|| text(value)).transpose()?,
        "topic" => config.topic = text(value)?,
        "buffer_steps" => config.buffer_steps = count(value)?,
        "hwm" => config.hwm = count(value)?,
        "max_queue_size" => config.max_queue_size = count(value)?,
        "encoding" => {
            config.encoding = match value.as_str() {
                Some("map") => Encoding::Maps,
                Some("array") => Encoding::Arrays,
                _ => bail!("it must be map, the format of vLLM 0.33, or array, that of older releases"),
            }
        }
        _ => bail!("unknown key"),
    }
    Ok(())
}

fn text(value: &Value) -> Result<String> {
    value.as_str().map(str::to_owned).context("it must be a text")
}

fn count(value: &Value) -> Result<usize> {
    let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
    number.context("it must be a whole number")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(object: Value) -> Result<Option<KvEventsConfig>> {
        let Value::Object(keys) = object else { panic!("an object") };
        config(Some(&JsonObject(keys)), &|_| None)
    }

    #[test]
    fn nothing_is_published_unless_it_is_enabled() {
        assert!(config(None, &|_| None).unwrap().is_none());
        for off in
            [json!({}), json!({"publisher": "zmq"}), json!({"enable_kv_cache_events": true, "publisher": "null"})]
        {
            assert!(read(off.clone()).unwrap().is_none(), "{off}");
        }
        let on = read(json!({"enable_kv_cache_events": true})).unwrap();
        assert_eq!(on, Some(KvEventsConfig::default()), "vLLM's defaults");
    }

    #[test]
    fn keys_are_vllms() {
        let given = json!({
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2",
            "topic": "kv@a", "buffer_steps": 3, "hwm": 4, "max_queue_size": 5, "encoding": "array",
        });
        let expected = KvEventsConfig {
            endpoint: "tcp://*:1".into(),
            replay_endpoint: Some("tcp://*:2".into()),
            topic: "kv@a".into(),
            buffer_steps: 3,
            hwm: 4,
            max_queue_size: 5,
            encoding: Encoding::Arrays,
            int_hashes: true,
        };
        assert_eq!(read(given).unwrap(), Some(expected));
        let variable = |name: &str| (name == INT_HASHES).then(|| "0".to_owned());
        let enabled = [("enable_kv_cache_events".to_owned(), json!(true))].into_iter().collect();
        assert!(!config(Some(&JsonObject(enabled)), &variable).unwrap().unwrap().int_hashes);
    }

    #[test]
    fn what_is_not_understood_is_told() {
        for (object, part) in [
            (json!({"enable_kv_cache_events": "yes"}), "enable_kv_cache_events"),
            (json!({"endpoints": "tcp://*:1"}), "'endpoints': unknown key"),
            (json!({"publisher": "kafka"}), "kafka"),
            (json!({"hwm": -1}), "whole number"),
            (json!({"encoding": "json"}), "map"),
        ] {
            let error = format!("{:#}", read(object.clone()).unwrap_err());
            assert!(error.contains(part), "{object}: {error}");
        }
    }
}
