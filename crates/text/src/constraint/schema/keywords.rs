//! What each keyword of JSON Schema asks of the walk.

use serde_json::{Map, Value};

/// How a keyword is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Says nothing about what is valid: dropped, as is every keyword that nobody knows. What is only referred to
    /// (`$defs`) is reached by its references.
    Annotation,
    /// A reference to another schema.
    Reference,
    /// A schema, or in drafts before 2020-12 a list of them.
    Schema,
    /// A list of schemas.
    Schemas,
    /// `oneOf`.
    Alternatives,
    /// Schemas by property name or by pattern.
    Named,
    /// A number of items, properties or characters.
    Size,
    /// A number that values are not below.
    Lower,
    /// A number that values are not above.
    Upper,
    /// Enforced as it stands.
    Data,
    /// `multipleOf`.
    Divisor,
    /// A name of a kind of string.
    Format,
    /// A regular expression.
    Pattern,
    /// Depends on what the other keywords looked at.
    Unevaluated,
    /// Cannot be enforced while text is generated.
    Unsupported,
}

pub(super) fn kind(keyword: &str) -> Kind {
    match keyword {
        "$ref" => Kind::Reference,
        "items" | "additionalItems" | "additionalProperties" => Kind::Schema,
        "allOf" | "anyOf" | "prefixItems" => Kind::Schemas,
        "oneOf" => Kind::Alternatives,
        "properties" | "patternProperties" => Kind::Named,
        "minItems" | "maxItems" | "minLength" | "maxLength" | "minProperties" | "maxProperties" => Kind::Size,
        "minimum" | "exclusiveMinimum" => Kind::Lower,
        "maximum" | "exclusiveMaximum" => Kind::Upper,
        "type" | "required" | "const" | "enum" => Kind::Data,
        "multipleOf" => Kind::Divisor,
        "format" => Kind::Format,
        "pattern" => Kind::Pattern,
        "unevaluatedProperties" | "unevaluatedItems" => Kind::Unevaluated,
        "$dynamicRef" | "$recursiveRef" | "contains" | "dependencies" | "dependentRequired" | "dependentSchemas"
        | "if" | "not" | "propertyNames" | "uniqueItems" => Kind::Unsupported,
        _ => Kind::Annotation,
    }
}

/// A divisor in units of its last digit (0.25 is 25): as many remainders are followed. `None` of what divides nothing.
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

/// Whether an unsupported keyword, as it stands in `object`, excludes no value.
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

/// Formats that llguidance has a regex for. JSON Schema 2020-12 lets others be ignored.
pub(super) fn is_enforced_format(format: &Value) -> bool {
    const ENFORCED: [&str; 10] =
        ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
    format.as_str().is_some_and(|format| ENFORCED.contains(&format))
}

/// A count written as 2.0, as the integer it is.
pub(super) fn whole_number(value: &Value) -> Value {
    match value.as_f64() {
        Some(number) if !value.is_u64() && number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number) => {
            Value::from(number as u64)
        }
        _ => value.clone(),
    }
}

/// Integers up to this are exact in f64, in which llguidance keeps numbers.
const EXACT: u64 = 1 << 53;

fn is_exact(value: &Value) -> bool {
    match (value.as_u64(), value.as_i64()) {
        (Some(number), _) => number <= EXACT,
        (None, Some(number)) => number.unsigned_abs() <= EXACT,
        (None, None) => true,
    }
}

/// A bound that is no wider once it is an f64: an unsigned maximum of 64 bits would otherwise allow one more.
pub(super) fn bound(value: &Value, upper: bool) -> Value {
    match value.as_f64() {
        Some(number) if !is_exact(value) => Value::from(if upper { number.next_down() } else { number.next_up() }),
        _ => value.clone(),
    }
}

/// Fails with a hint if a constant has a number that an f64 would change.
pub(super) fn exact(value: &Value) -> Result<(), &'static str> {
    match value {
        Value::Number(_) if !is_exact(value) => Err(" with an integer beyond 2^53"),
        Value::Array(list) => list.iter().try_for_each(exact),
        Value::Object(map) => map.values().try_for_each(exact),
        _ => Ok(()),
    }
}
