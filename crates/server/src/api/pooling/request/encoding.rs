//! The encoding of vectors in an answer.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use half::{bf16, f16};
use serde_json::value::RawValue;

use crate::api::shared::fields::{JsonFields, request_fields, words};

request_fields! {
    /// The encoding of vectors. The type and the order of bytes apply to all formats but lists of numbers.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(crate) struct Encoding |fields| {
        VectorEncoding {
            format: Format => (one_of(fields, "encoding_format", FORMATS)) {
                /// Numbers, base64, or a body of bytes with or without a description in the header `metadata`.
                encoding_format: Option<String> {"enum": words(names(FORMATS)), "default": "float"},
            },
            element: ElementType => (element_type(fields)) {
                /// The elements, unless they are numbers.
                embed_dtype: Option<String> {"enum": words(names(ELEMENT_TYPES)), "default": "float32"},
            },
            order: ByteOrder => (one_of(fields, "endianness", BYTE_ORDERS)) {
                /// The order of their bytes.
                endianness: Option<String> {"enum": words(names(BYTE_ORDERS)), "default": "native"},
            },
        }
    }
}

/// The form of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Format {
    /// Lists of numbers.
    #[default]
    Numbers,
    /// Texts in Base64.
    Base64,
    /// A body of all vectors, which a header describes.
    Bytes,
    /// A body of all vectors, without a description.
    BytesOnly,
}

/// The type of an element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ElementType {
    #[default]
    Float32,
    Float16,
    BFloat16,
}

/// The order of the bytes of an element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ByteOrder {
    #[default]
    Native,
    Little,
    Big,
}

const FORMATS: &[(&str, Format)] = &[
    ("float", Format::Numbers),
    ("base64", Format::Base64),
    ("bytes", Format::Bytes),
    ("bytes_only", Format::BytesOnly),
];

const ELEMENT_TYPES: &[(&str, ElementType)] =
    &[("float32", ElementType::Float32), ("float16", ElementType::Float16), ("bfloat16", ElementType::BFloat16)];

/// Types of vLLM that are not supported, because nothing else here computes in them.
const UNSUPPORTED_TYPES: [&str; 2] = ["fp8_e4m3", "fp8_e5m2"];

const BYTE_ORDERS: &[(&str, ByteOrder)] =
    &[("native", ByteOrder::Native), ("little", ByteOrder::Little), ("big", ByteOrder::Big)];

fn element_type(fields: &mut JsonFields<'_>) -> ElementType {
    let quoted = fields.raw("embed_dtype").map(RawValue::get);
    let unsupported = UNSUPPORTED_TYPES.into_iter().find(|name| quoted == Some(&format!("\"{name}\"")));
    let Some(name) = unsupported else { return one_of(fields, "embed_dtype", ELEMENT_TYPES) };
    let message = format_args!("embed_dtype '{name}' is not supported; use float32, float16 or bfloat16.");
    fields.value_error("embed_dtype", message);
    ElementType::default()
}

impl Encoding {
    /// Estimated bytes of an element in an answer.
    pub(crate) fn bytes_per_element(self) -> usize {
        match self.format {
            // Digits, sign, point, comma, and sometimes an exponent.
            Format::Numbers => 13,
            Format::Base64 => (self.element.bytes() * 4).div_ceil(3),
            Format::Bytes | Format::BytesOnly => self.element.bytes(),
        }
    }

    /// Appends the bytes of a vector.
    pub(crate) fn append(self, vector: &[f32], out: &mut Vec<u8>) {
        out.reserve(vector.len() * self.element.bytes());
        let big = match self.order {
            ByteOrder::Native => cfg!(target_endian = "big"),
            ByteOrder::Little => false,
            ByteOrder::Big => true,
        };
        for &x in vector {
            match (self.element, big) {
                (ElementType::Float32, false) => out.extend(x.to_le_bytes()),
                (ElementType::Float32, true) => out.extend(x.to_be_bytes()),
                (ElementType::Float16, false) => out.extend(f16::from_f32(x).to_le_bytes()),
                (ElementType::Float16, true) => out.extend(f16::from_f32(x).to_be_bytes()),
                (ElementType::BFloat16, false) => out.extend(bf16::from_f32(x).to_le_bytes()),
                (ElementType::BFloat16, true) => out.extend(bf16::from_f32(x).to_be_bytes()),
            }
        }
    }

    /// A vector in Base64.
    pub(crate) fn base64(self, vector: &[f32]) -> String {
        let mut bytes = Vec::new();
        self.append(vector, &mut bytes);
        BASE64_STANDARD.encode(bytes)
    }
}

impl ElementType {
    /// Bytes of an element.
    fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Float16 | Self::BFloat16 => 2,
        }
    }

    /// The name in requests.
    pub(crate) fn name(self) -> &'static str {
        name_of(self, ELEMENT_TYPES)
    }
}

impl ByteOrder {
    /// The name in requests.
    pub(crate) fn name(self) -> &'static str {
        name_of(self, BYTE_ORDERS)
    }
}

fn names<T>(names: &[(&'static str, T)]) -> impl Iterator<Item = &'static str> {
    names.iter().map(|(name, _)| *name)
}

fn name_of<T: Copy + PartialEq>(value: T, names: &[(&'static str, T)]) -> &'static str {
    names.iter().find(|(_, known)| *known == value).map_or("", |(name, _)| name)
}

/// The value of a field that is one of these names; the default if it is absent.
pub(crate) fn one_of<T: Copy + Default>(fields: &mut JsonFields<'_>, field: &str, names: &[(&str, T)]) -> T {
    let Some(raw) = fields.raw(field) else { return T::default() };
    let given: Option<String> = serde_json::from_str(raw.get()).ok();
    let found = names.iter().find(|(name, _)| given.as_deref() == Some(name));
    if found.is_none() {
        let names: Vec<String> = names.iter().map(|(name, _)| format!("'{name}'")).collect();
        fields.error(field, "literal_error", format!("Input should be {}", alternatives(&names)));
    }
    found.map(|(_, value)| *value).unwrap_or_default()
}

/// `a, b or c`
pub(crate) fn alternatives(names: &[String]) -> String {
    match names {
        [names @ .., last] if !names.is_empty() => format!("{} or {last}", names.join(", ")),
        _ => names.join(""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Encoding, String> {
        let mut fields = JsonFields::parse(body.as_bytes()).unwrap();
        let encoding = Encoding::read(&mut fields);
        fields.finish().map(|()| encoding).map_err(|error| error.to_string())
    }

    #[test]
    fn names_are_those_of_vllm() {
        assert_eq!(read("{}").unwrap(), Encoding::default());
        let body = r#"{"encoding_format": "bytes", "embed_dtype": "bfloat16", "endianness": "big"}"#;
        let encoding = Encoding { format: Format::Bytes, element: ElementType::BFloat16, order: ByteOrder::Big };
        assert_eq!(read(body).unwrap(), encoding);
        assert_eq!((encoding.element.name(), encoding.order.name()), ("bfloat16", "big"));
        for (body, message) in [
            (r#"{"encoding_format": "hex"}"#, "Input should be 'float', 'base64', 'bytes' or 'bytes_only'"),
            (
                r#"{"embed_dtype": "fp8_e4m3"}"#,
                "embed_dtype 'fp8_e4m3' is not supported; use float32, float16 or bfloat16.",
            ),
            (r#"{"embed_dtype": "int8"}"#, "Input should be 'float32', 'float16' or 'bfloat16'"),
            (r#"{"endianness": 1}"#, "Input should be 'native', 'little' or 'big'"),
        ] {
            let error = read(body).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn elements_have_their_type_and_order() {
        let bytes = |element, order| {
            let mut out = vec![];
            Encoding { format: Format::Bytes, element, order }.append(&[1.0, -2.0], &mut out);
            out
        };
        assert_eq!(bytes(ElementType::Float32, ByteOrder::Big), [0x3f, 0x80, 0, 0, 0xc0, 0, 0, 0]);
        assert_eq!(bytes(ElementType::Float32, ByteOrder::Little), [0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]);
        assert_eq!(bytes(ElementType::Float16, ByteOrder::Big), [0x3c, 0, 0xc0, 0]);
        assert_eq!(bytes(ElementType::BFloat16, ByteOrder::Little), [0x80, 0x3f, 0, 0xc0]);
    }
}
