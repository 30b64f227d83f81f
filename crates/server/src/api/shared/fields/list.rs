//! Lists of which the first elements are kept.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{IgnoredAny, SeqAccess, Visitor};

use super::FieldValue;

/// The first `MAX` elements of a list, and the number of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limited<T, const MAX: usize> {
    pub(crate) items: Vec<T>,
    pub(crate) count: usize,
}

impl<T, const MAX: usize> Default for Limited<T, MAX> {
    /// An empty list.
    fn default() -> Self {
        Self { items: vec![], count: 0 }
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Limited<T, MAX> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Elements<T, MAX> {
            type Value = Limited<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut items = Vec::new();
                while items.len() < MAX {
                    let Some(item) = list.next_element()? else { break };
                    items.push(item);
                }
                let mut count = items.len();
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Limited { items, count })
            }
        }

        deserializer.deserialize_seq(Elements(PhantomData))
    }
}

impl<const MAX: usize> FieldValue for Limited<i64, MAX> {
    const ERROR: &'static str = "list_type";
    const MESSAGE: &'static str = "Input should be a valid list of integers";
    const SCHEMA: &'static str = r#"{"type": "array", "items": {"type": "integer"}}"#;
}

impl<const MAX: usize> FieldValue for Limited<String, MAX> {
    const ERROR: &'static str = "list_type";
    const MESSAGE: &'static str = "Input should be a valid list of strings";
    const SCHEMA: &'static str = r#"{"type": "array", "items": {"type": "string"}}"#;
}
