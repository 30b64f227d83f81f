//! A JSON body as named fields, which are read one by one into Rust types. Errors are collected, so that a client receives
//! all of them at once, each with its location.
//!
//! Fields stay raw text until they are read: an unknown field costs only its bytes, and a list of a million token ids
//! never becomes a million JSON values. The memory of a request is a small multiple of its body: errors beyond the first
//! are counted, lists have a limit, and a field becomes a tree of JSON values only if it has few of them for its length.

mod declared;
mod list;

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::error::{ApiError, FieldError, FieldErrors};

pub(crate) use declared::{describe, request_fields, words};
pub(crate) use list::Limited;

/// Maximum number of fields of an object.
const MAX_FIELDS: usize = 1024;

/// Number of JSON values that a field may always have.
const FREE_VALUES: usize = 16 << 10;

/// Bytes of a field for each further JSON value.
const BYTES_PER_VALUE: usize = 16;

/// The fields of one JSON object; by default there are none.
#[derive(Default)]
pub(crate) struct JsonFields<'a> {
    values: HashMap<String, &'a RawValue>,
    path: Vec<String>,
    errors: FieldErrors,
}

/// A type that a field may have.
pub(crate) trait FieldValue: DeserializeOwned {
    /// pydantic's error type for a value of another type.
    const ERROR: &'static str;
    /// pydantic's message for a value of another type.
    const MESSAGE: &'static str;
    /// The JSON schema of the values.
    const SCHEMA: &'static str;
    /// Whether the value is a tree of JSON values, whose number is limited.
    const TREE: bool = false;

    /// Reads the JSON text; `None` if it is of another type.
    fn read(raw: &RawValue) -> Option<Self> {
        json(raw)
    }
}

impl<'a> JsonFields<'a> {
    /// Reads a request body, which must be a JSON object.
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let raw: &RawValue = serde_json::from_slice(body).map_err(|e| {
            ApiError::schema(FieldError::new("json_invalid", vec![], &format!("JSON decode error: {e}"), "{}"))
        })?;
        Self::object(raw, vec![]).map_err(ApiError::schema)
    }

    /// Reads the object at `path`.
    pub(crate) fn object(raw: &'a RawValue, path: Vec<String>) -> Result<Self, FieldError> {
        let (kind, message) = match serde_json::from_str::<Object<'a>>(raw.get()) {
            Ok(Object { values, more: 0 }) => return Ok(Self { values, path, errors: FieldErrors::default() }),
            Ok(Object { values, more }) => {
                let count = values.len() + more;
                ("too_long", format!("Input has {count} fields, but at most {MAX_FIELDS} are allowed"))
            }
            Err(_) => (
                "model_attributes_type",
                "Input should be a valid dictionary or object to extract fields from".to_owned(),
            ),
        };
        Err(FieldError::new(kind, path, &message, raw.get()))
    }

    /// The raw text of a field; `None` if it is absent or null.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        #[cfg(test)]
        if self.path.is_empty() {
            recorded::add(name);
        }
        self.values.get(name).copied().filter(|raw| raw.get() != "null")
    }

    /// The value of a field; `None` if it is absent, null or of a wrong type, which adds an error.
    pub(crate) fn get<T: FieldValue>(&mut self, name: &str) -> Option<T> {
        let raw = self.raw(name)?;
        if T::TREE
            && let Err(message) = check_values(raw)
        {
            self.value_error(name, format_args!("{name} {message}"));
            return None;
        }
        let value = T::read(raw);
        if value.is_none() {
            self.error(name, T::ERROR, T::MESSAGE);
        }
        value
    }

    /// The fields of an object; `None` if it is absent, null or no object, which adds an error.
    pub(crate) fn nested(&mut self, name: &str) -> Option<JsonFields<'a>> {
        let path = self.path.iter().cloned().chain([name.to_owned()]).collect();
        Self::object(self.raw(name)?, path).map_err(|error| self.absorb(error)).ok()
    }

    /// The elements of a list field, empty if it is absent or null. An error is added if it has more than `MAX`.
    pub(crate) fn list<T, const MAX: usize>(&mut self, name: &str) -> Vec<T>
    where
        Limited<T, MAX>: FieldValue,
    {
        let list: Option<Limited<T, MAX>> = self.get(name);
        self.within(name, list.unwrap_or_default())
    }

    /// The elements of a list field, unless there are too many, which adds an error.
    pub(crate) fn within<T, const MAX: usize>(&mut self, name: &str, list: Limited<T, MAX>) -> Vec<T> {
        if list.count > MAX {
            self.value_error(name, format_args!("{name} accepts at most {MAX} elements, got {}.", list.count));
            return vec![];
        }
        list.items
    }

    /// Adds an error for a missing field.
    pub(crate) fn missing(&mut self, name: &str) {
        self.error(name, "missing", "Field required");
    }

    /// Adds an error for a field.
    pub(crate) fn error(&mut self, name: &str, kind: &'static str, message: impl Into<String>) {
        let mut location = self.path.clone();
        location.push(name.to_owned());
        let input = self.values.get(name).map_or("null", |raw| raw.get());
        self.errors.absorb(FieldError::new(kind, location, &message.into(), input).into());
    }

    /// Adds an error for the value of a field.
    pub(crate) fn value_error(&mut self, name: &str, message: impl std::fmt::Display) {
        self.error(name, "value_error", format!("Value error, {message}"));
    }

    /// Adds the errors of a nested object.
    pub(crate) fn absorb(&mut self, errors: impl Into<FieldErrors>) {
        self.errors.absorb(errors.into());
    }

    /// The errors so far.
    pub(crate) fn into_errors(self) -> FieldErrors {
        self.errors
    }

    /// Fails if there are errors.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        if self.errors.is_empty() { Ok(()) } else { Err(ApiError::schema(self.errors)) }
    }
}

/// The fields of an object, of which the first are kept.
struct Object<'a> {
    values: HashMap<String, &'a RawValue>,
    /// Number of the others.
    more: usize,
}

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JsonFields;

        impl<'de> Visitor<'de> for JsonFields {
            type Value = Object<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let (mut values, mut more) = (HashMap::new(), 0);
                while values.len() < MAX_FIELDS {
                    let Some((name, value)) = map.next_entry::<String, &RawValue>()? else { break };
                    values.insert(name, value);
                }
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    more += 1;
                }
                Ok(Object { values, more })
            }
        }

        deserializer.deserialize_map(JsonFields)
    }
}

/// Checks that a field has few JSON values for its length, because each takes many times the memory of its text.
///
/// # Errors
/// The end of a sentence that begins with the field.
pub(crate) fn check_values(raw: &RawValue) -> Result<(), String> {
    let text = raw.get();
    let limit = FREE_VALUES + text.len() / BYTES_PER_VALUE;
    let count = values_in(text);
    if count <= limit {
        return Ok(());
    }
    let bytes = text.len();
    Err(format!("has {count} JSON values in {bytes} bytes, but at most {limit} are allowed for this length."))
}

/// The number of JSON values in valid JSON text, where a field and its name count as one. An empty list or object counts
/// as two.
fn values_in(text: &str) -> usize {
    let (mut count, mut quoted, mut escaped) = (1, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => quoted = !quoted,
            b',' | b'[' | b'{' if !quoted => count += 1,
            _ => {}
        }
    }
    count
}

fn json<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Option<T> {
    serde_json::from_str(raw.get()).ok()
}

/// Types that are read as serde reads them: pydantic's error type and message, and the JSON schema.
macro_rules! field_values {
    ($($Type:ty: $error:literal, $message:literal, $schema:literal, tree: $tree:literal;)*) => {
        $(impl FieldValue for $Type {
            const ERROR: &'static str = $error;
            const MESSAGE: &'static str = $message;
            const SCHEMA: &'static str = $schema;
            const TREE: bool = $tree;
        })*
    };
}

field_values! {
    bool: "bool_type", "Input should be a valid boolean", r#"{"type": "boolean"}"#, tree: false;
    String: "string_type", "Input should be a valid string", r#"{"type": "string"}"#, tree: false;
    Vec<i64>: "list_type", "Input should be a valid list of integers",
        r#"{"type": "array", "items": {"type": "integer"}}"#, tree: false;
    Vec<Value>: "list_type", "Input should be a valid list", r#"{"type": "array"}"#, tree: true;
    Map<String, Value>: "dict_type", "Input should be a valid dictionary", r#"{"type": "object"}"#, tree: true;
    Value: "json_type", "Input should be JSON of at most 127 levels", "{}", tree: true;
}

impl FieldValue for i64 {
    const ERROR: &'static str = "int_type";
    const MESSAGE: &'static str = "Input should be a valid integer";
    const SCHEMA: &'static str = r#"{"type": "integer"}"#;

    /// Accepts `3.0` as 3, as JavaScript and pydantic do.
    fn read(raw: &RawValue) -> Option<Self> {
        json(raw).or_else(|| {
            let value = f64::read(raw)?;
            (value.fract() == 0.0 && value.abs() < 2f64.powi(53)).then_some(value as i64)
        })
    }
}

impl FieldValue for f64 {
    const ERROR: &'static str = "float_type";
    const MESSAGE: &'static str = "Input should be a valid number";
    const SCHEMA: &'static str = r#"{"type": "number"}"#;

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw).filter(|value: &f64| value.is_finite())
    }
}

/// Either one string or a list of strings.
#[derive(Default, Deserialize)]
pub(crate) struct Strings<const MAX: usize>(pub(crate) Limited<String, MAX>);

impl<const MAX: usize> FieldValue for Strings<MAX> {
    const ERROR: &'static str = "string_type";
    const MESSAGE: &'static str = "Input should be a valid string or a list of strings";
    const SCHEMA: &'static str = r#"{"type": ["string", "array"], "items": {"type": "string"}}"#;

    fn read(raw: &RawValue) -> Option<Self> {
        let one = || json(raw).map(|one| Limited { items: vec![one], count: 1 });
        one().or_else(|| Limited::read(raw)).map(Self)
    }
}

/// The names of the fields that a test has read, for a comparison with their description.
#[cfg(test)]
pub(crate) mod recorded {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    thread_local! {
        static NAMES: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
    }

    pub(super) fn add(name: &str) {
        NAMES.with_borrow_mut(|names| names.insert(name.to_owned()));
    }

    /// The names that this thread has read since the last call.
    pub(crate) fn take() -> BTreeSet<String> {
        NAMES.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> JsonFields<'_> {
        JsonFields::parse(body.as_bytes()).unwrap()
    }

    #[test]
    fn nulls_are_absent_and_integral_floats_are_integers() {
        let mut f = fields(r#"{"a": null, "b": 3.0, "c": 3.5, "d": "3", "e": 1e300}"#);
        assert_eq!(f.get::<i64>("a"), None);
        assert_eq!(f.get::<i64>("b"), Some(3));
        for name in ["c", "d", "e"] {
            assert_eq!(f.get::<i64>(name), None);
        }
        let errors = f.into_errors();
        let errors = errors.listed();
        assert_eq!(errors.iter().map(|e| e.location[0].as_str()).collect::<Vec<_>>(), ["c", "d", "e"]);
        assert!(errors.iter().all(|e| e.kind == "int_type"));
    }

    #[test]
    fn what_is_no_json_object_is_refused() {
        let bad: [&[u8]; 9] = [
            b"",
            b"{",
            b"[]",
            b"null",
            b"{\"a\": NaN}",
            b"{\"a\": Infinity}",
            b"{} {}",
            b"{\"a\": \"\xff\"}",
            b"\xef\xbb\xbf{}",
        ];
        for body in bad {
            let error = JsonFields::parse(body).err().unwrap();
            assert_eq!(error.status(), 400, "{body:?}");
            assert!(error.to_string().starts_with("1 validation error:\n  {'type': "), "{error}");
        }
    }

    #[test]
    fn a_lone_surrogate_is_no_string() {
        let mut f = fields(r#"{"a": "\ud800", "b": "\ud83d\ude00"}"#);
        assert_eq!(f.get::<String>("a"), None);
        assert_eq!(f.get::<String>("b").as_deref(), Some("😀"));
        assert!(f.finish().unwrap_err().to_string().contains("('body', 'a')"));
    }

    #[test]
    fn numbers_beyond_their_type_are_wrong() {
        let mut f = fields(r#"{"a": 1e999, "b": 99999999999999999999, "c": -9223372036854775808}"#);
        assert_eq!(f.get::<f64>("a"), None);
        assert_eq!(f.get::<i64>("b"), None);
        assert_eq!(f.get::<i64>("c"), Some(i64::MIN));
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_stack_overflow() {
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let mut f = fields(&deep);
        assert_eq!(f.get::<Vec<Value>>("a"), None);
        assert!(f.finish().is_err());
    }

    #[test]
    fn strings_are_one_or_many() {
        let mut f = fields(r#"{"a": "x", "b": ["x", "y"], "c": [1], "d": []}"#);
        assert_eq!(f.get::<Strings<4>>("a").unwrap().0.items, ["x"]);
        assert_eq!(f.get::<Strings<4>>("b").unwrap().0.items, ["x", "y"]);
        assert!(f.get::<Strings<4>>("c").is_none());
        assert!(f.get::<Strings<4>>("d").unwrap().0.items.is_empty());
    }

    #[test]
    fn a_list_is_counted_beyond_its_limit() {
        let body = format!("{{\"a\": [{}1]}}", "1,".repeat(1_000_000));
        let mut f = fields(&body);
        assert!(f.list::<i64, 10>("a").is_empty());
        let error = f.finish().unwrap_err().to_string();
        assert!(error.contains("a accepts at most 10 elements, got 1000001."), "{error}");
        assert_eq!(fields(r#"{"a": [1, 2]}"#).list::<i64, 2>("a"), [1, 2]);
    }

    #[test]
    fn an_object_has_a_bounded_number_of_fields() {
        let body =
            |count: usize| format!("{{{}}}", (0..count).map(|i| format!("\"{i}\":1")).collect::<Vec<_>>().join(","));
        assert!(JsonFields::parse(body(MAX_FIELDS).as_bytes()).is_ok());
        let error = JsonFields::parse(body(5000).as_bytes()).err().unwrap().to_string();
        assert!(error.contains("Input has 5000 fields, but at most 1024 are allowed"), "{error}");
    }

    #[test]
    fn a_tree_has_few_values_for_its_length() {
        let dense = format!("{{\"a\": [{}1]}}", "1,".repeat(100_000));
        let mut f = fields(&dense);
        assert_eq!(f.get::<Vec<Value>>("a"), None);
        let error = f.finish().unwrap_err().to_string();
        assert!(error.contains("a has 100002 JSON values in 200003 bytes, but at most 28884 are allowed"), "{error}");
        let sparse = format!("{{\"a\": [{}1]}}", "\"long enough, [all in all]\",".repeat(100_000));
        assert_eq!(fields(&sparse).get::<Vec<Value>>("a").map(|list| list.len()), Some(100_001));
    }
}
