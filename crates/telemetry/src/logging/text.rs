//! The fields of log lines in text: `message name=value name="a value"`.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;

use super::escape::{MAX_STRING_BYTES, MAX_VALUE_BYTES, Spelling, write_value};

/// Formats the fields of an event or a span on one line.
pub(super) struct TextFields;

impl<'a> FormatFields<'a> for TextFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'a>, fields: R) -> fmt::Result {
        let mut visitor = Fields { writer, first: true, result: Ok(()) };
        fields.record(&mut visitor);
        visitor.result
    }
}

/// Writes each field with a space before it, except the first.
struct Fields<'a> {
    writer: Writer<'a>,
    first: bool,
    result: fmt::Result,
}

impl Fields<'_> {
    fn field(&mut self, field: &Field, value: (impl fmt::Display, usize)) {
        if self.result.is_ok() {
            self.result = self.write(field, value);
        }
    }

    fn write(&mut self, field: &Field, value: (impl fmt::Display, usize)) -> fmt::Result {
        if !std::mem::take(&mut self.first) {
            self.writer.write_char(' ')?;
        }
        match field.name() {
            "message" => {}
            name if self.writer.has_ansi_escapes() => write!(self.writer, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?,
            name => write!(self.writer, "{name}=")?,
        }
        write_value(&mut self.writer, Spelling::Text, value)
    }
}

impl Visit for Fields<'_> {
    /// A string that could be read as more than one field is quoted.
    fn record_str(&mut self, field: &Field, value: &str) {
        let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'=' | b'\\');
        if field.name() == "message" || (!value.is_empty() && value.bytes().all(plain)) {
            self.field(field, (value, MAX_STRING_BYTES));
        } else {
            self.field(field, (format_args!("{value:?}"), MAX_STRING_BYTES));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.field(field, (format_args!("{value:?}"), MAX_VALUE_BYTES));
    }
}
