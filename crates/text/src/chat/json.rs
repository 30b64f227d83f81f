//! The filter `tojson` as Hugging Face templates expect it: `json.dumps`, not Jinja's own filter, which escapes HTML.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python::{MAX_DEPTH, float_repr};
use crate::escape::escape_json_char;

/// Layout of `json.dumps`.
struct Style {
    ensure_ascii: bool,
    /// One level of indentation; `None` keeps everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let argument = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        let positional = args.get(position).cloned();
        let named: Option<Value> = kwargs.get(name)?;
        Ok(positional.or(named).filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = argument(1, "indent")?.map(indent_of).transpose()?;
    let separators = argument(2, "separators")?.map(separators_of).transpose()?;
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    let (item_separator, key_separator) = separators.unwrap_or_else(|| {
        let item = if indent.is_some() { "," } else { ", " };
        (item.to_owned(), ": ".to_owned())
    });
    let style = Style { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

/// Returns the margin of a level: a text, or a number of spaces.
pub(super) fn indent_of(value: Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let width = i64::try_from(value)?;
    // Wider indentation is useless, and nested values would multiply it.
    usize::try_from(width.max(0))
        .ok()
        .filter(|&width| width <= 64)
        .map(|width| " ".repeat(width))
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "an indentation is at most 64 spaces"))
}

fn separators_of(value: Value) -> Result<(String, String), Error> {
    let mut parts = Vec::new();
    for part in value.try_iter()?.checked() {
        parts.push(part?.as_str().map(str::to_owned));
    }
    match <[Option<String>; 2]>::try_from(parts) {
        Ok([Some(item), Some(key)]) => Ok((item, key)),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are two strings")),
    }
}

impl Style {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "tojson: the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.write_number(out, value)?,
            ValueKind::String => self.write_str(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let items = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                self.write_container(out, ['[', ']'], items, depth, |out, item| self.write(out, &item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()?.checked() {
                    let key = key?;
                    entries.push((key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.write_container(out, ['{', '}'], entries, depth, |out, (key, value)| {
                    self.write_str(out, &key);
                    out.push_str(&self.key_separator);
                    self.write(out, &value, depth + 1)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("tojson: a value of kind {kind} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn write_container<T>(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        items: Vec<T>,
        depth: usize,
        mut write_item: impl FnMut(&mut String, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        let empty = items.is_empty();
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(out, depth + 1);
            write_item(out, item)?;
        }
        if !empty {
            self.new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write_number(&self, out: &mut String, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            let _ = write!(out, "{value}");
            return Ok(());
        }
        match f64::try_from(value.clone())? {
            number if number.is_nan() => out.push_str("NaN"),
            f64::INFINITY => out.push_str("Infinity"),
            f64::NEG_INFINITY => out.push_str("-Infinity"),
            number => out.push_str(&float_repr(number)),
        }
        Ok(())
    }

    fn write_str(&self, out: &mut String, text: &str) {
        out.push('"');
        for character in text.chars() {
            if self.ensure_ascii && !character.is_ascii() {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            } else {
                escape_json_char(character, out);
            }
        }
        out.push('"');
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(float_repr(f64::try_from(key.clone())?)),
        kind => Err(Error::new(ErrorKind::BadSerialization, format!("tojson: a key of kind {kind} is not allowed"))),
    }
}
