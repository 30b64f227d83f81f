//! Declarations of request fields. From one declaration follow the struct, its parser and the description of the API.

use serde_json::{Map, Value, json};

use super::{FieldValue, Limited};

/// A type of a declared field.
pub(crate) trait DeclaredType {
    /// The JSON schema of values that are not null.
    const SCHEMA: &'static str;
}

impl<T: FieldValue> DeclaredType for Option<T> {
    const SCHEMA: &'static str = T::SCHEMA;
}

impl DeclaredType for Option<u32> {
    const SCHEMA: &'static str = <i64 as FieldValue>::SCHEMA;
}

impl DeclaredType for bool {
    const SCHEMA: &'static str = <Self as FieldValue>::SCHEMA;
}

impl DeclaredType for i64 {
    const SCHEMA: &'static str = <Self as FieldValue>::SCHEMA;
}

impl<T> DeclaredType for Vec<T>
where
    Limited<T, 0>: FieldValue,
{
    const SCHEMA: &'static str = Limited::<T, 0>::SCHEMA;
}

/// Adds a property to a schema. `more` is added to the schema of its type, or replaces it
/// if it states what the values are.
pub(crate) fn describe<T: DeclaredType>(schema: &mut Value, name: &str, documentation: &[&str], more: Value) {
    let mut property: Map<String, Value> = serde_json::from_str(T::SCHEMA).expect("the schema of a type is JSON");
    match property.get_mut("type") {
        Some(Value::Array(types)) => types.push("null".into()),
        Some(one) => *one = json!([one, "null"]),
        None => {}
    }
    let more = more.as_object().cloned().unwrap_or_default();
    if more.contains_key("$ref") || more.contains_key("enum") || more.contains_key("anyOf") {
        property.clear();
    }
    property.extend(more);
    let lines: Vec<&str> = documentation.iter().map(|line| line.trim()).collect();
    if !lines.is_empty() {
        property.insert("description".into(), lines.join(" ").into());
    }
    schema["properties"][name] = property.into();
}

/// The values of a field that is one of these words or null.
pub(crate) fn words(words: impl IntoIterator<Item = &'static str>) -> Value {
    words.into_iter().map(Value::from).chain([Value::Null]).collect()
}

/// Declares a struct of request fields. Its function `read` reads them from the [`JsonFields`](super::JsonFields) that
/// `|fields|` names, in the order of the declaration, which is also that of their errors. Its function `describe` adds them
/// to the schemas of the API's description. The fields are grouped by schema:
///
/// ```text
/// request_fields! {
///     /// Documentation of the struct.
///     pub(crate) struct Name |fields| {
///         Schema {
///             /// Description of the field.
///             one: Option<f64> {"minimum": 0},
///             /// Description of a field with a default.
///             two: bool = false,
///             /// Description of a list of limited length.
///             three: Vec<i64> [MAX_THREE],
///             /// Description of a field that the function `read_four` reads.
///             four: Option<String> => read_four {"maxLength": 4},
///             five: Five => (Five::read(fields)) {
///                 /// Description of a field that the expression reads.
///                 six: Option<i64>,
///             },
///         }
///     }
/// }
/// ```
///
/// Braces add to the schema that follows from the type. A member that an expression reads is described as the fields in its
/// braces, of which there may be none.
macro_rules! request_fields {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $Name:ident |$fields:ident $(, $input:ident: $Input:ty)*| {
            $($Schema:ident {
                $(
                    $(#[doc = $doc:literal])*
                    $field:ident: $Type:ty $(= $default:literal)? $([$max:expr])? $(=> $read:tt)? $({$($more:tt)*})?,
                )*
            })*
        }
    ) => {
        $(#[$attribute])*
        $visibility struct $Name {
            $($(
                $(#[doc = $doc])*
                pub(crate) $field: $Type,
            )*)*
        }

        impl $Name {
            /// Reads the declared fields.
            pub(crate) fn read($fields: &mut $crate::api::shared::fields::JsonFields<'_> $(, $input: $Input)*) -> Self {
                Self {
                    $($($field: request_fields!(@read $fields $field $(= $default)? $([$max])? $(=> $read)?),)*)*
                }
            }

            /// Describes the declared fields in the schemas of the API.
            pub(crate) fn describe(schemas: &mut serde_json::Value) {
                $($(
                    request_fields!(@describe (&mut schemas[stringify!($Schema)]) [$($doc),*]
                        $field: $Type $(= $default)? $([$max])? $(=> $read)? {$($($more)*)?});
                )*)*
            }
        }
    };

    (@read $fields:ident $field:ident) => { $fields.get(stringify!($field)) };
    (@read $fields:ident $field:ident = $default:literal) => {
        $fields.get(stringify!($field)).unwrap_or($default)
    };
    (@read $fields:ident $field:ident [$max:expr]) => { $fields.list::<_, { $max }>(stringify!($field)) };
    (@read $fields:ident $field:ident $([$max:expr])? => $read:ident) => { $read($fields) };
    (@read $fields:ident $field:ident => ($read:expr)) => { $read };

    (@describe $schema:tt [$($doc:literal),*] $field:ident: $Type:ty => ($read:expr) {
        $(
            $(#[doc = $part_doc:literal])*
            $part:ident: $PartType:ty $(= $default:literal)? $([$max:expr])? $({$($more:tt)*})?,
        )*
    }) => {
        $(request_fields!(@describe $schema [$($part_doc),*]
            $part: $PartType $(= $default)? $([$max])? {$($($more)*)?});)*
    };
    (@describe $schema:tt [$($doc:literal),*]
        $field:ident: $Type:ty $(= $default:literal)? $([$max:expr])? $(=> $read:ident)? {$($more:tt)*}
    ) => {
        $crate::api::shared::fields::describe::<$Type>(
            $schema,
            stringify!($field),
            &[$($doc),*],
            serde_json::json!({$("default": $default,)? $("maxItems": $max,)? $($more)*}),
        );
    };
}

pub(crate) use request_fields;
