//! `response_format` and `structured_outputs`: grammars of the output.

use octavo_text::GrammarSpec;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::api::shared::fields::{JsonFields, Limited, check_values};
use crate::error::FieldErrors;

/// Maximum nesting of a specification.
const MAX_DEPTH: usize = 64;

/// Maximum number of choices.
const MAX_CHOICES: usize = 16 << 10;

/// The fields of `structured_outputs`, of which exactly one must be set.
const KINDS: [&str; 6] = ["json", "regex", "choice", "grammar", "json_object", "structural_tag"];

/// Reads both fields, of which at most one may restrict the output.
pub(crate) fn grammar(fields: &mut JsonFields<'_>) -> Option<GrammarSpec> {
    let format = response_format(fields);
    let outputs = structured_outputs(fields);
    if format.is_some() && outputs.is_some() {
        fields.value_error("structured_outputs", "set either `response_format` or `structured_outputs`, not both.");
    }
    format.or(outputs)
}

/// Reads `response_format`, or `text.format` of the responses route, which has its schema inline.
pub(crate) fn response_format(fields: &mut JsonFields<'_>) -> Option<GrammarSpec> {
    let raw = fields.raw("response_format")?;
    match format_of(raw, "response_format") {
        Ok(spec) => spec,
        Err(errors) => {
            fields.absorb(errors);
            None
        }
    }
}

/// The grammar of a format object at the field `name`.
pub(crate) fn format_of(raw: &RawValue, name: &str) -> Result<Option<GrammarSpec>, FieldErrors> {
    let mut format = JsonFields::object(raw, vec![name.to_owned()])?;
    let kind: Option<String> = format.get("type");
    let spec = match kind.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(GrammarSpec::JsonObject),
        Some("json_schema") => json_schema(&mut format),
        Some("structural_tag") => value_within(raw)
            .map(GrammarSpec::StructuralTag)
            .map_err(|message| format.value_error("type", message))
            .ok(),
        Some(_) => {
            let message = "Input should be 'text', 'json_object', 'json_schema' or 'structural_tag'";
            format.error("type", "literal_error", message);
            None
        }
        None => {
            if format.raw("type").is_none() {
                format.missing("type");
            }
            None
        }
    };
    let errors = format.into_errors();
    if errors.is_empty() { Ok(spec) } else { Err(errors) }
}

/// The schema is under `json_schema` or, in the form of the responses route, beside `type`.
fn json_schema(format: &mut JsonFields<'_>) -> Option<GrammarSpec> {
    if format.raw("json_schema").is_none() {
        if format.raw("schema").is_some() {
            return schema(format);
        }
        format.missing("json_schema");
        return None;
    }
    let mut inner = format.nested("json_schema")?;
    let spec = schema(&mut inner);
    format.absorb(inner.into_errors());
    spec
}

fn schema(fields: &mut JsonFields<'_>) -> Option<GrammarSpec> {
    let Some(raw) = fields.raw("schema") else {
        fields.missing("schema");
        return None;
    };
    match value_within(raw) {
        Ok(schema @ (Value::Object(_) | Value::Bool(_))) => Some(json_spec(schema)),
        Ok(_) => {
            fields.error("schema", "dict_type", "Input should be a valid dictionary");
            None
        }
        Err(message) => {
            fields.value_error("schema", message);
            None
        }
    }
}

/// A grammar for a JSON schema, with defaults for all other settings.
pub(crate) fn json_spec(schema: Value) -> GrammarSpec {
    GrammarSpec::JsonSchema {
        schema,
        disable_any_whitespace: false,
        whitespace_pattern: None,
        disable_additional_properties: false,
    }
}

fn structured_outputs(fields: &mut JsonFields<'_>) -> Option<GrammarSpec> {
    let mut inner = fields.nested("structured_outputs")?;
    let set: Vec<&str> = KINDS.into_iter().filter(|kind| is_set(&mut inner, kind)).collect();
    let spec = match set[..] {
        [kind] => structured(&mut inner, kind),
        _ => {
            let message = format!(
                "You can only use one kind of structured outputs constraint but {} are specified: use exactly one of {}.",
                set.len(),
                KINDS.join(", ")
            );
            fields.value_error("structured_outputs", message);
            None
        }
    };
    fields.absorb(inner.into_errors());
    spec
}

fn is_set(fields: &mut JsonFields<'_>, kind: &str) -> bool {
    match kind {
        "json_object" => fields.get(kind).unwrap_or(false),
        _ => fields.raw(kind).is_some(),
    }
}

fn structured(fields: &mut JsonFields<'_>, kind: &str) -> Option<GrammarSpec> {
    match kind {
        "json" => structured_json(fields),
        "regex" => fields.get("regex").map(GrammarSpec::Regex),
        "choice" => {
            let choices: Limited<String, MAX_CHOICES> = fields.get("choice")?;
            let choices = fields.within("choice", choices);
            if choices.is_empty() {
                fields.value_error("choice", "at least one choice is needed.");
                return None;
            }
            Some(GrammarSpec::Choice(choices))
        }
        "grammar" => fields.get("grammar").map(GrammarSpec::Grammar),
        "json_object" => Some(GrammarSpec::JsonObject),
        _ => text_or_value(fields, "structural_tag").map(GrammarSpec::StructuralTag),
    }
}

fn structured_json(fields: &mut JsonFields<'_>) -> Option<GrammarSpec> {
    let schema = text_or_value(fields, "json")?;
    Some(GrammarSpec::JsonSchema {
        schema,
        disable_any_whitespace: fields.get("disable_any_whitespace").unwrap_or(false),
        whitespace_pattern: fields.get("whitespace_pattern"),
        disable_additional_properties: fields.get("disable_additional_properties").unwrap_or(false),
    })
}

/// A JSON value, or a string that contains one.
fn text_or_value(fields: &mut JsonFields<'_>, name: &str) -> Option<Value> {
    let raw = fields.raw(name)?;
    let text: Option<String> = raw.get().starts_with('"').then(|| fields.get(name)).flatten();
    let value = match &text {
        Some(text) => serde_json::from_str::<&RawValue>(text).map_err(|_| too_deep()).and_then(value_within),
        None => value_within(raw),
    };
    match value {
        Ok(value @ (Value::Object(_) | Value::Bool(_))) => Some(value),
        Ok(_) => {
            fields.value_error(name, too_deep());
            None
        }
        Err(message) => {
            fields.value_error(name, message);
            None
        }
    }
}

/// A value that is not too deep and has few values for its length.
fn value_within(raw: &RawValue) -> Result<Value, String> {
    check_values(raw)?;
    let value: Value = serde_json::from_str(raw.get()).map_err(|_| too_deep())?;
    if depth(&value) <= MAX_DEPTH { Ok(value) } else { Err(too_deep()) }
}

/// The nesting of a value, which the parser limits.
pub(crate) fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

fn too_deep() -> String {
    format!("must be a JSON object of at most {MAX_DEPTH} levels.")
}
