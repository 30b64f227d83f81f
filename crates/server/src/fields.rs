//! A JSON body as named fields, which are read one by one into Rust types. Errors are collected, so that a client receives
//! all of them at once, each with its location.
//!
//! Fields stay raw text until they are read: an unknown field costs only its bytes, and a list of a million token ids
//! never becomes a million JSON values.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::error::{ApiError, FieldError};

/// The fields of one JSON object.
pub(crate) struct Fields<'a> {
    values: HashMap<String, &'a RawValue>,
    path: Vec<String>,
    errors: Vec<FieldError>,
}

/// A type that a field may have.
pub(crate) trait FieldValue: Sized {
    /// pydantic's error type for a value of another type.
    const ERROR: &'static str;
    /// pydantic's message for a value of another type.
    const MESSAGE: &'static str;

    /// Reads the JSON text; `None` if it is of another type.
    fn read(raw: &RawValue) -> Option<Self>;
}

impl<'a> Fields<'a> {
    /// Reads a request body, which must be a JSON object.
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let raw: &RawValue = serde_json::from_slice(body).map_err(|e| {
            ApiError::schema(&[FieldError {
                kind: "json_invalid",
                location: vec![],
                message: format!("JSON decode error: {e}"),
                input: "{}".into(),
            }])
        })?;
        Self::object(raw, vec![]).map_err(|e| ApiError::schema(&[e]))
    }

    /// Reads the object at `path`.
    pub(crate) fn object(raw: &'a RawValue, path: Vec<String>) -> Result<Self, FieldError> {
        match serde_json::from_str(raw.get()) {
            Ok(values) => Ok(Self { values, path, errors: vec![] }),
            Err(_) => Err(FieldError {
                kind: "model_attributes_type",
                location: path,
                message: "Input should be a valid dictionary or object to extract fields from".into(),
                input: raw.get().into(),
            }),
        }
    }

    /// The raw text of a field; `None` if it is absent or null.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.values.get(name).copied().filter(|raw| raw.get() != "null")
    }

    /// The value of a field; `None` if it is absent, null or of a wrong type, which adds an error.
    pub(crate) fn get<T: FieldValue>(&mut self, name: &str) -> Option<T> {
        let raw = self.raw(name)?;
        let value = T::read(raw);
        if value.is_none() {
            self.error(name, T::ERROR, T::MESSAGE);
        }
        value
    }

    /// Adds an error for a missing field.
    pub(crate) fn missing(&mut self, name: &str) {
        self.error(name, "missing", "Field required");
    }

    /// Adds an error for a field.
    pub(crate) fn error(&mut self, name: &str, kind: &'static str, message: impl Into<String>) {
        let mut location = self.path.clone();
        location.push(name.to_owned());
        let input = self.values.get(name).map_or("null", |raw| raw.get()).to_owned();
        self.errors.push(FieldError { kind, location, message: message.into(), input });
    }

    /// Adds an error for the value of a field.
    pub(crate) fn value_error(&mut self, name: &str, message: impl std::fmt::Display) {
        self.error(name, "value_error", format!("Value error, {message}"));
    }

    /// Adds the errors of a nested object.
    pub(crate) fn absorb(&mut self, errors: impl IntoIterator<Item = FieldError>) {
        self.errors.extend(errors);
    }

    /// The errors so far.
    pub(crate) fn into_errors(self) -> Vec<FieldError> {
        self.errors
    }

    /// Fails if there are errors.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        if self.errors.is_empty() { Ok(()) } else { Err(ApiError::schema(&self.errors)) }
    }
}

fn json<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Option<T> {
    serde_json::from_str(raw.get()).ok()
}

impl FieldValue for bool {
    const ERROR: &'static str = "bool_type";
    const MESSAGE: &'static str = "Input should be a valid boolean";

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw)
    }
}

impl FieldValue for i64 {
    const ERROR: &'static str = "int_type";
    const MESSAGE: &'static str = "Input should be a valid integer";

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

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw).filter(|value: &f64| value.is_finite())
    }
}

impl FieldValue for String {
    const ERROR: &'static str = "string_type";
    const MESSAGE: &'static str = "Input should be a valid string";

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw)
    }
}

impl FieldValue for Vec<i64> {
    const ERROR: &'static str = "list_type";
    const MESSAGE: &'static str = "Input should be a valid list of integers";

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw)
    }
}

impl FieldValue for Vec<String> {
    const ERROR: &'static str = "list_type";
    const MESSAGE: &'static str = "Input should be a valid list of strings";

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw)
    }
}

impl FieldValue for Vec<Value> {
    const ERROR: &'static str = "list_type";
    const MESSAGE: &'static str = "Input should be a valid list";

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw)
    }
}

impl FieldValue for Map<String, Value> {
    const ERROR: &'static str = "dict_type";
    const MESSAGE: &'static str = "Input should be a valid dictionary";

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw)
    }
}

/// Either one string or a list of strings.
#[derive(Default)]
pub(crate) struct Strings(pub(crate) Vec<String>);

impl FieldValue for Strings {
    const ERROR: &'static str = "string_type";
    const MESSAGE: &'static str = "Input should be a valid string or a list of strings";

    fn read(raw: &RawValue) -> Option<Self> {
        json(raw).map(|one| Self(vec![one])).or_else(|| json(raw).map(Self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> Fields<'_> {
        Fields::parse(body.as_bytes()).unwrap()
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
            let error = Fields::parse(body).err().unwrap();
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
        assert_eq!(f.get::<Strings>("a").unwrap().0, ["x"]);
        assert_eq!(f.get::<Strings>("b").unwrap().0, ["x", "y"]);
        assert!(f.get::<Strings>("c").is_none());
        assert!(f.get::<Strings>("d").unwrap().0.is_empty());
    }
}
