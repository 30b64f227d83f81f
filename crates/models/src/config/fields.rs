//! Typed access to a JSON object, with errors that name the key.

use serde_json::{Map, Value};

use super::ConfigError;

/// A JSON object in which `null` entries count as missing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(crate) const fn new(object: &'a Map<String, Value>) -> Self {
        Self(object)
    }

    /// Returns the number of keys.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the object with these values for keys that are missing.
    pub(crate) fn completed(&self, defaults: &[(&str, usize)]) -> Map<String, Value> {
        let mut object = self.0.clone();
        for (key, value) in defaults.iter().filter(|(key, _)| self.get(key).is_none()) {
            object.insert((*key).to_owned(), Value::from(*value));
        }
        object
    }

    /// Returns whether the key exists, even with `null`.
    pub(crate) fn contains(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Returns the `value` of a key for which `null` means none, or `default` if the key is missing.
    pub(crate) fn unless_missing<T>(&self, key: &str, value: Option<T>, default: T) -> Option<T> {
        if self.contains(key) { value } else { Some(default) }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        self.get(key).map(|value| convert(value).ok_or_else(|| ConfigError::wrong_type(key, expected))).transpose()
    }

    /// Returns the value of a key, if it is there.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.get(key)
    }

    /// Returns all keys with their values.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns the keys whose values are objects, with them.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&'a str, Fields<'a>)> + use<'a> {
        self.0.iter().filter_map(|(key, value)| Some((key.as_str(), Fields(value.as_object()?))))
    }

    /// Returns a size or count.
    pub(crate) fn usize(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.typed(key, "a non-negative integer", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// Returns a required size or count.
    pub(crate) fn required(&self, key: &str) -> Result<usize, ConfigError> {
        self.usize(key)?.ok_or_else(|| ConfigError::missing(key))
    }

    /// Returns an id or limit.
    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        self.typed(key, "a 32-bit integer", token_id)
    }

    /// Returns a number.
    pub(crate) fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "a boolean", Value::as_bool)
    }

    pub(crate) fn str(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// Returns a list of strings.
    pub(crate) fn strs(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        self.typed(key, "a list of strings", |v| v.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Returns a list of sizes.
    pub(crate) fn usizes(&self, key: &str) -> Result<Option<Vec<usize>>, ConfigError> {
        let size = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
        self.typed(key, "a list of non-negative integers", |v| v.as_array()?.iter().map(size).collect())
    }

    /// Returns a list of numbers.
    pub(crate) fn f64s(&self, key: &str) -> Result<Option<Vec<f64>>, ConfigError> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(Value::as_f64).collect())
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        self.typed(key, "an object", |v| v.as_object().map(Fields))
    }

    /// Returns one id or a list of ids; empty if the key is missing.
    pub(crate) fn ids(&self, key: &str) -> Result<Vec<u32>, ConfigError> {
        let ids = self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(token_id).collect(),
            id => Some(vec![token_id(id)?]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
