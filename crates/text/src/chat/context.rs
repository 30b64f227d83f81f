//! Conversion of JSON to template values.

use minijinja::Value;
use serde_json::Value as Json;

/// Converts a JSON value. Keeps the order of keys and the distinction of integers and floats.
pub(super) fn to_template_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (None, Some(integer)) => Value::from(integer),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(to_template_value).collect(),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), to_template_value(value)))),
    }
}

/// Converts a list of JSON values.
pub(super) fn to_template_list(items: &[Json]) -> Value {
    items.iter().map(to_template_value).collect()
}
