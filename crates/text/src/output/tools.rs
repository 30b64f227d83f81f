//! The request's tool definitions, as far as parsing their calls needs them.

use std::collections::HashMap;

use serde_json::Value;

use super::python;
use crate::escape::escape_json;

/// Functions of a request.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// Parameters of each function by its name.
    functions: HashMap<String, HashMap<String, ArgumentKind>>,
}

/// Type of a parameter according to the schema, for syntaxes without types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArgumentKind {
    shape: Shape,
    nullable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Text,
    Number,
    Boolean,
    Container,
    /// Any type.
    Json,
}

impl ArgumentKind {
    /// Type of a parameter that the schema does not describe.
    pub(super) const TEXT: Self = Self { shape: Shape::Text, nullable: false };

    /// Type of a parameter that the model marks as JSON.
    pub(super) const JSON: Self = Self { shape: Shape::Json, nullable: false };

    /// Returns the first type in the schema other than `null`.
    fn from_schema(schema: &Value) -> Self {
        let options = ["anyOf", "oneOf"].into_iter().filter_map(|key| schema.get(key)?.as_array()).flatten();
        let mut kind = None;
        let mut nullable = false;
        for types in std::iter::once(schema).chain(options).filter_map(|schema| schema.get("type")) {
            let list = types.as_array().map_or(std::slice::from_ref(types), Vec::as_slice);
            for name in list.iter().filter_map(Value::as_str) {
                let shape = match name {
                    "null" => {
                        nullable = true;
                        continue;
                    }
                    "integer" | "number" => Shape::Number,
                    "boolean" => Shape::Boolean,
                    "object" | "array" => Shape::Container,
                    _ => Shape::Text,
                };
                kind.get_or_insert(shape);
            }
        }
        Self { shape: kind.unwrap_or(Shape::Text), nullable }
    }

    /// Returns whether any text is a valid value, so that an incomplete one can be passed on.
    pub(super) fn is_text(self) -> bool {
        self == Self::TEXT
    }

    /// Converts a parameter's text to JSON. Text that does not match the type becomes a string, so that nothing is lost
    /// and the client's validation sees the model's own text.
    pub(super) fn json(self, text: &str) -> String {
        let trimmed = text.trim();
        let nothing = trimmed.eq_ignore_ascii_case("null") || trimmed.eq_ignore_ascii_case("none");
        if nothing && (self.nullable || self.shape != Shape::Text) {
            return "null".to_owned();
        }
        let json = match self.shape {
            Shape::Text => None,
            Shape::Number => is_number(trimmed).then(|| trimmed.to_owned()),
            Shape::Boolean => Some(trimmed.to_ascii_lowercase()).filter(|text| text == "true" || text == "false"),
            Shape::Container => container(trimmed),
            Shape::Json => serde_json::from_str::<Value>(trimmed).ok().map(|_| trimmed.to_owned()),
        };
        json.unwrap_or_else(|| {
            let mut json = String::from("\"");
            escape_json(text, &mut json);
            json.push('"');
            json
        })
    }
}

/// Returns whether this is a JSON number, even one too large for a float.
pub(super) fn is_number(text: &str) -> bool {
    let text = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) = text.split_once(['e', 'E']).map_or((text, None), |(m, e)| (m, Some(e)));
    let (integer, fraction) = mantissa.split_once('.').map_or((mantissa, None), |(i, f)| (i, Some(f)));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits(integer)
        && (integer.len() == 1 || !integer.starts_with('0'))
        && fraction.is_none_or(digits)
        && exponent.is_none_or(|exponent| digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent)))
}

/// Returns an object or an array, written in JSON (unchanged) or in Python.
fn container(text: &str) -> Option<String> {
    if !text.starts_with(['{', '[']) {
        return None;
    }
    match serde_json::from_str::<Value>(text) {
        Ok(_) => Some(text.to_owned()),
        Err(_) => python::to_json(text),
    }
}

impl Tools {
    /// Reads `{"type": "function", "function": {"name", "parameters"}}`; others are ignored.
    pub(super) fn new(definitions: &[Value]) -> Self {
        let functions = definitions.iter().filter_map(|definition| {
            let function = definition.get("function")?;
            let properties = function.get("parameters").and_then(|schema| schema.get("properties"));
            let kinds = properties.and_then(Value::as_object).into_iter().flatten();
            let kinds = kinds.map(|(name, schema)| (name.clone(), ArgumentKind::from_schema(schema))).collect();
            Some((function.get("name")?.as_str()?.to_owned(), kinds))
        });
        Self { functions: functions.collect() }
    }

    pub(super) fn contains(&self, function: &str) -> bool {
        self.functions.contains_key(function)
    }

    pub(super) fn kind(&self, function: &str, parameter: &str) -> ArgumentKind {
        self.functions.get(function).and_then(|kinds| kinds.get(parameter)).copied().unwrap_or(ArgumentKind::TEXT)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_typed_by_the_schema() {
        for (schema, text, value) in [
            (json!({"type": "string"}), "12", json!("12")),
            (json!({"type": "string"}), "null", json!("null")),
            (json!({"type": ["string", "null"]}), "None", json!(null)),
            (json!({"type": "integer"}), " 12 ", json!(12)),
            (json!({"type": "integer"}), "a dozen", json!("a dozen")),
            (json!({"type": "number"}), "-1.5e3", json!(-1.5e3)),
            (json!({"type": "boolean"}), "True", json!(true)),
            (json!({"type": "boolean"}), "yes", json!("yes")),
            (json!({"anyOf": [{"type": "null"}, {"type": "integer"}, {"type": "string"}]}), "null", json!(null)),
            (json!({"anyOf": [{"type": "null"}, {"type": "integer"}, {"type": "string"}]}), "5", json!(5)),
            (json!({"type": "array"}), "[1, \"a\"]", json!([1, "a"])),
            (json!({"type": "object"}), "{'k': [True, None, 'v']}", json!({"k": [true, null, "v"]})),
            (json!({"type": "object"}), "{'k': open()}", json!("{'k': open()}")),
            (json!({"type": "object"}), "5", json!("5")),
            (json!({"enum": ["a", "b"]}), "a", json!("a")),
            (json!({}), "{}", json!("{}")),
        ] {
            let json = ArgumentKind::from_schema(&schema).json(text);
            assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), value, "{schema} {text}");
        }
    }

    #[test]
    fn numbers_are_told_from_what_looks_like_them() {
        for text in ["0", "-0", "12", "1.50", "1e5", "-1E-5", "123456789012345678901234567890", "1e999"] {
            assert!(is_number(text), "{text}");
        }
        for text in ["", "-", "01", "1.", ".5", "+1", "1e", "1_0", "NaN", "0x1", "1e1.5", "1-2", "--1"] {
            assert!(!is_number(text), "{text}");
        }
    }

    #[test]
    fn deep_values_stay_text() {
        let deep = "[".repeat(100_000);
        let json = ArgumentKind::from_schema(&json!({"type": "array"})).json(&deep);
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), json!(deep));
    }

    #[test]
    fn odd_definitions_are_ignored() {
        let tools = Tools::new(&[
            json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}),
            json!({"type": "function", "function": {"name": "g"}}),
            json!({"type": "web_search"}),
            json!({"type": "function", "function": {"name": 5}}),
            json!(null),
        ]);
        assert!(tools.contains("f") && tools.contains("g") && !tools.contains("web_search"));
        assert_eq!(tools.kind("f", "n"), ArgumentKind { shape: Shape::Number, nullable: false });
        assert!(tools.kind("f", "x").is_text() && tools.kind("g", "n").is_text() && tools.kind("h", "n").is_text());
    }
}
