//! The key-value part of a GGUF header. Values stay in the file; only their positions are stored.

use std::collections::HashMap;
use std::ops::Range;

use super::GgufError;
use super::cursor::Cursor;
use crate::config::ConfigError;

/// Maximum length of a key in the format's specification.
const MAX_KEY_BYTES: usize = 65_535;
/// Maximum number of keys accepted; real files have a few dozen.
const MAX_KEYS: usize = 65_536;
/// Minimum size of a key-value pair: length of an empty key, type, one-byte value.
const MIN_PAIR_BYTES: usize = 8 + 4 + 1;
/// Maximum number of array elements copied out of the file; no vocabulary is larger.
const MAX_ELEMENTS: usize = 1 << 22;

/// Value types of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, GgufError> {
        use ValueType::*;
        const ALL: [ValueType; 13] = [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        let id = cursor.u32()?;
        ALL.get(id as usize).copied().ok_or_else(|| GgufError::ValueType { key: key.into(), id })
    }

    /// Returns the size in bytes of a value of fixed size.
    const fn size(self) -> Option<usize> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::String | ValueType::Array => None,
        }
    }
}

/// A value: scalars as read, strings and arrays by position.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(Range<usize>),
    Array { element: ValueType, len: usize, range: Range<usize> },
}

impl Value {
    fn read(cursor: &mut Cursor<'_>, kind: ValueType, key: &str) -> Result<Self, GgufError> {
        Ok(match kind {
            ValueType::U8 => Value::Unsigned(cursor.u8()?.into()),
            ValueType::I8 => Value::Signed((cursor.u8()? as i8).into()),
            ValueType::U16 => Value::Unsigned(cursor.u16()?.into()),
            ValueType::I16 => Value::Signed((cursor.u16()? as i16).into()),
            ValueType::U32 => Value::Unsigned(cursor.u32()?.into()),
            ValueType::I32 => Value::Signed((cursor.u32()? as i32).into()),
            ValueType::U64 => Value::Unsigned(cursor.u64()?),
            ValueType::I64 => Value::Signed(cursor.u64()? as i64),
            ValueType::F32 => Value::Float(f32::from_bits(cursor.u32()?).into()),
            ValueType::F64 => Value::Float(f64::from_bits(cursor.u64()?)),
            ValueType::Bool => Value::Bool(cursor.u8()? != 0),
            ValueType::String => Value::String(cursor.string()?),
            ValueType::Array => Self::read_array(cursor, key)?,
        })
    }

    fn read_array(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, GgufError> {
        let element = ValueType::read(cursor, key)?;
        let len = cursor.length()?;
        let start = cursor.position();
        match element.size() {
            Some(size) => {
                // A product that overflows exceeds any file, so `skip` refuses it.
                cursor.skip(len.saturating_mul(size))?;
            }
            // Every string takes up at least its length, so a false count reaches the end of the file.
            None if element == ValueType::String => {
                for _ in 0..len {
                    cursor.string()?;
                }
            }
            None => return Err(GgufError::NestedArray { key: key.into() }),
        }
        Ok(Value::Array { element, len, range: start..cursor.position() })
    }
}

/// Key-value pairs of a file.
#[derive(Debug, Default)]
pub(crate) struct Metadata {
    values: HashMap<String, Value>,
}

impl Metadata {
    /// Reads `count` pairs.
    pub(super) fn read(cursor: &mut Cursor<'_>, count: u64) -> Result<Self, GgufError> {
        let room = (cursor.remaining() / MIN_PAIR_BYTES).min(MAX_KEYS) as u64;
        if count > room {
            return Err(GgufError::TooMany { what: "metadata keys", found: count, room });
        }
        let mut values = HashMap::new();
        for _ in 0..count {
            let key = cursor.name(MAX_KEY_BYTES)?;
            let kind = ValueType::read(cursor, key)?;
            let value = Value::read(cursor, kind, key)?;
            if values.insert(key.to_owned(), value).is_some() {
                return Err(GgufError::DuplicateKey { key: key.into() });
            }
        }
        Ok(Self { values })
    }

    /// Returns access to the values in the file they came from.
    pub(crate) const fn view<'a>(&'a self, bytes: &'a [u8]) -> MetadataView<'a> {
        MetadataView { values: &self.values, bytes }
    }
}

/// Typed access to [`Metadata`]. A missing key is `None`; a key of another type is an error that names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetadataView<'a> {
    values: &'a HashMap<String, Value>,
    bytes: &'a [u8],
}

impl<'a> MetadataView<'a> {
    /// Returns a non-negative integer of any width.
    pub(crate) fn u64(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(*n)),
            Some(Value::Signed(n)) if *n >= 0 => Ok(Some(n.unsigned_abs())),
            Some(_) => Err(ConfigError::wrong_type(key, "a non-negative integer")),
        }
    }

    /// Returns a token id.
    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        self.u64(key)?
            .map(|n| u32::try_from(n).map_err(|_| ConfigError::wrong_type(key, "a 32-bit integer")))
            .transpose()
    }

    /// Returns a number of any width.
    pub(crate) fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) => Ok(Some(*x)),
            Some(Value::Unsigned(n)) => Ok(Some(*n as f64)),
            Some(Value::Signed(n)) => Ok(Some(*n as f64)),
            Some(_) => Err(ConfigError::wrong_type(key, "a number")),
        }
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(ConfigError::wrong_type(key, "a boolean")),
        }
    }

    pub(crate) fn str(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::String(range)) => std::str::from_utf8(&self.bytes[range.clone()])
                .map(Some)
                .map_err(|_| ConfigError::wrong_type(key, "UTF-8 text")),
            Some(_) => Err(ConfigError::wrong_type(key, "a string")),
        }
    }

    /// Returns the number of elements of an array of any type.
    pub(crate) fn array_len(&self, key: &str) -> Option<usize> {
        match self.values.get(key) {
            Some(Value::Array { len, .. }) => Some(*len),
            _ => None,
        }
    }

    /// Returns the strings of an array, borrowed from the file.
    pub(crate) fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some((element, len, range)) = self.array(key, "an array of strings")? else { return Ok(None) };
        if element != ValueType::String {
            return Err(ConfigError::wrong_type(key, "an array of strings"));
        }
        let bytes = &self.bytes[range];
        let mut cursor = Cursor::new(bytes);
        let mut out = Vec::with_capacity(len);
        for _ in 0..len {
            let text = cursor.string().ok().and_then(|range| std::str::from_utf8(&bytes[range]).ok());
            out.push(text.ok_or_else(|| ConfigError::wrong_type(key, "an array of UTF-8 strings"))?);
        }
        Ok(Some(out))
    }

    /// Returns an array of booleans.
    pub(crate) fn bools(&self, key: &str) -> Result<Option<Vec<bool>>, ConfigError> {
        const EXPECTED: &str = "an array of booleans";
        match self.array(key, EXPECTED)? {
            None => Ok(None),
            Some((ValueType::Bool, _, range)) => Ok(Some(self.bytes[range].iter().map(|&byte| byte != 0).collect())),
            Some(_) => Err(ConfigError::wrong_type(key, EXPECTED)),
        }
    }

    /// Returns an array of `f32`.
    pub(crate) fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, ConfigError> {
        self.words(key, &[ValueType::F32], "an array of 32-bit floats", f32::from_le_bytes)
    }

    /// Returns an array of `i32`, which some writers store as `u32`.
    pub(crate) fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, ConfigError> {
        self.words(key, &[ValueType::I32, ValueType::U32], "an array of 32-bit integers", i32::from_le_bytes)
    }

    fn words<T>(
        &self,
        key: &str,
        kinds: &[ValueType],
        expected: &'static str,
        convert: impl Fn([u8; 4]) -> T,
    ) -> Result<Option<Vec<T>>, ConfigError> {
        let Some((element, _, range)) = self.array(key, expected)? else { return Ok(None) };
        if !kinds.contains(&element) {
            return Err(ConfigError::wrong_type(key, expected));
        }
        let words = self.bytes[range].chunks_exact(4);
        Ok(Some(words.map(|w| convert([w[0], w[1], w[2], w[3]])).collect()))
    }

    fn array(
        &self,
        key: &str,
        expected: &'static str,
    ) -> Result<Option<(ValueType, usize, Range<usize>)>, ConfigError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array { element, len, range }) if *len <= MAX_ELEMENTS => {
                Ok(Some((*element, *len, range.clone())))
            }
            Some(Value::Array { len, .. }) => {
                Err(ConfigError::Range { key: key.into(), found: *len as u64, low: 0, high: MAX_ELEMENTS as u64 })
            }
            Some(_) => Err(ConfigError::wrong_type(key, expected)),
        }
    }
}
