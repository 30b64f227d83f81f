//! Treatment of each keyword of JSON Schema.

use serde_json::{Map, Value};

/// The kind of a keyword.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeywordKind {
    /// Does not affect validity and is dropped, as is every unknown keyword. Definitions (`$defs`) are reached through
    /// their references.
    Annotation,
    /// A reference to another schema.
    Reference,
    /// A schema, or in drafts before 2020-12 a list of schemas.
    Schema,
    /// A list of schemas.
    Schemas,
    /// `oneOf`.
    Alternatives,
    /// Schemas by property name or by pattern.
    Named,
    /// A number of items, properties or characters.
    Size,
    /// A lower bound of numbers.
    Lower,
    /// An upper bound of numbers.
    Upper,
    /// Enforced unchanged.
    Data,
    /// `multipleOf`.
    Divisor,
    /// Name of a string format.
    Format,
    /// A regular expression.
    Pattern,
    /// Depends on the values to which other keywords apply.
    Unevaluated,
    /// Cannot be enforced during generation.
    Unsupported,
}

pub(super) fn kind(keyword: &str) -> KeywordKind {
    match keyword {
        "$ref" => KeywordKind::Reference,
        "items" | "additionalItems" | "additionalProperties" => KeywordKind::Schema,
        "allOf" | "anyOf" | "prefixItems" => KeywordKind::Schemas,
        "oneOf" => KeywordKind::Alternatives,
        "properties" | "patternProperties" => KeywordKind::Named,
        "minItems" | "maxItems" | "minLength" | "maxLength" | "minProperties" | "maxProperties" => KeywordKind::Size,
        "minimum" | "exclusiveMinimum" => KeywordKind::Lower,
        "maximum" | "exclusiveMaximum" => KeywordKind::Upper,
        "type" | "required" | "const" | "enum" => KeywordKind::Data,
        "multipleOf" => KeywordKind::Divisor,
        "format" => KeywordKind::Format,
        "pattern" => KeywordKind::Pattern,
        "unevaluatedProperties" | "unevaluatedItems" => KeywordKind::Unevaluated,
        "$dynamicRef" | "$recursiveRef" | "contains" | "dependencies" | "dependentRequired" | "dependentSchemas"
        | "if" | "not" | "propertyNames" | "uniqueItems" => KeywordKind::Unsupported,
        _ => KeywordKind::Annotation,
    }
}

/// Returns a divisor in units of its last digit (0.25 is 25), which is the number of remainders to track; `None` if it
/// divides nothing.
pub(super) fn divisor(value: &Value) -> Option<u64> {
    let text = value.as_number()?.to_string();
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((&text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}");
    let zeros = exponent.parse().unwrap_or(0_i64).saturating_sub(fraction.len() as i64).max(0);
    let digits = digits.trim_start_matches(['-', '0']);
    let zeros = 10_u64.saturating_pow(zeros.try_into().unwrap_or(u32::MAX));
    (!digits.is_empty()).then(|| digits.parse().unwrap_or(u64::MAX).saturating_mul(zeros))
}

/// Returns whether an unsupported keyword excludes no value in `object`.
pub(super) fn demands_nothing(keyword: &str, object: &Map<String, Value>) -> bool {
    let value = &object[keyword];
    let is_empty = |value: &Value| value.as_object().is_some_and(Map::is_empty);
    match keyword {
        "uniqueItems" => {
            *value == false || object.get("maxItems").and_then(Value::as_f64).is_some_and(|max| max <= 1.0)
        }
        "if" => !object.contains_key("then") && !object.contains_key("else"),
        "not" => *value == false,
        "contains" => {
            object.get("minContains").and_then(Value::as_u64) == Some(0) && !object.contains_key("maxContains")
        }
        "propertyNames" => *value == true || is_empty(value),
        "dependencies" | "dependentRequired" | "dependentSchemas" => is_empty(value),
        _ => false,
    }
}

/// Returns whether llguidance has a regex for a format. JSON Schema 2020-12 allows others to be ignored.
pub(super) fn is_enforced_format(format: &Value) -> bool {
    const ENFORCED: [&str; 10] =
        ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
    format.as_str().is_some_and(|format| ENFORCED.contains(&format))
}

/// Returns a count written as 2.0 as an integer.
pub(super) fn whole_number(value: &Value) -> Value {
    match value.as_f64() {
        Some(number) if !value.is_u64() && number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number) => {
            Value::from(number as u64)
        }
        _ => value.clone(),
    }
}

/// Largest integer up to which all are exact in f64, in which llguidance stores numbers.
const EXACT: u64 = 1 << 53;

fn is_exact(value: &Value) -> bool {
    match (value.as_u64(), value.as_i64()) {
        (Some(number), _) => number <= EXACT,
        (None, Some(number)) => number.unsigned_abs() <= EXACT,
        (None, None) => true,
    }
}

/// Returns a bound that is not wider after conversion to f64; otherwise a 64-bit unsigned maximum would allow one more
/// value.
pub(super) fn bound(value: &Value, upper: bool) -> Value {
    match value.as_f64() {
        Some(number) if !is_exact(value) => Value::from(if upper { number.next_down() } else { number.next_up() }),
        _ => value.clone(),
    }
}

/// Returns an error with a hint if a constant has a number that f64 cannot represent exactly.
pub(super) fn exact(value: &Value) -> Result<(), &'static str> {
    match value {
        Value::Number(_) if !is_exact(value) => Err(" with an integer beyond 2^53"),
        Value::Array(list) => list.iter().try_for_each(exact),
        Value::Object(map) => map.values().try_for_each(exact),
        _ => Ok(()),
    }
}
