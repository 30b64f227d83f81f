//! Python's string conversion, which templates rely on.

use std::fmt::Write;

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value, filters};

use super::json::indent_of;

/// Maximum depth of values; deeper ones are an error rather than a stack overflow. JSON itself is limited to 128.
pub(super) const MAX_DEPTH: usize = 200;

/// Implements `str(value)`.
pub(super) fn to_str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => repr(value),
    }
}

/// Returns whether Python's output differs from minijinja's, which abbreviates containers.
pub(super) fn prints_differently(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Number => !value.is_integer(),
        _ => false,
    }
}

/// Implements Jinja's `is sequence`: whether a value has a length and items, as strings and dictionaries have.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

/// Implements Jinja's `is iterable`, which is false for `none`.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Implements Jinja's `length`, which is 0 for a variable that is not defined.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// Implements Jinja's filter `replace`, which may replace only the first occurrences.
pub(super) fn replace(text: &Value, old: &str, new: &str, count: Option<usize>) -> Result<String, Error> {
    let text = to_str(text)?;
    Ok(count.map_or_else(|| text.replace(old, new), |count| text.replacen(old, new, count)))
}

/// Characters at which Python's `splitlines` cuts, other than `\r\n`.
const LINE_ENDS: [char; 10] =
    ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];

/// Implements Jinja's filter `indent(width=4, first=False, blank=False)`.
pub(super) fn indent(text: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        Ok(args.get(position).cloned().or(named))
    };
    let flag = |position, name| argument(position, name).map(|value| value.is_some_and(|value| value.is_true()));
    let margin = indent_of(argument(0, "width")?.unwrap_or_else(|| Value::from(4)))?;
    let (first, blank) = (flag(1, "first")?, flag(2, "blank")?);
    kwargs.assert_all_used()?;
    let text = to_str(text)?.replace("\r\n", "\n");
    let mut out = String::new();
    for (index, line) in text.split(LINE_ENDS).enumerate() {
        out.push_str(if index > 0 { "\n" } else { "" });
        let has_margin = if index == 0 { first } else { blank || !line.is_empty() };
        out.push_str(if has_margin { &margin } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// Implements the operator `%` of strings.
pub(super) fn percent(template: &str, operand: &Value) -> Result<String, Error> {
    let values = if operand.is_tuple() { operand.try_iter()?.collect() } else { vec![operand.clone()] };
    let (text, used) = printf(template, &values)?;
    if used < values.len() && operand.kind() != ValueKind::Map {
        return Err(invalid_format("not all arguments converted during string formatting"));
    }
    Ok(text)
}

/// Implements Jinja's filter `format`.
pub(super) fn format(template: &str, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let named = kwargs.args().next().is_some();
    percent(template, &if named { Value::from(kwargs) } else { Value::from(Tuple::from(args.0)) })
}

/// Formats values as Python does. Also returns the number of values that were used in their order.
fn printf(template: &str, values: &[Value]) -> Result<(String, usize), Error> {
    let incomplete = || invalid_format("incomplete format");
    let missing = || invalid_format("not enough arguments for format string");
    let (mut out, mut used, mut rest) = (String::new(), 0, template);
    while let Some((before, field)) = rest.split_once('%') {
        out.push_str(before);
        let (key, field) = match field.strip_prefix('(') {
            Some(inner) => inner.split_once(')').map(|(key, field)| (Some(key), field)).ok_or_else(incomplete)?,
            None => (None, field),
        };
        let options = field.trim_start_matches(|c: char| c.is_ascii_digit() || "#-+ .hlL".contains(c));
        let conversion = options.chars().next().ok_or_else(incomplete)?;
        rest = &options[conversion.len_utf8()..];
        let options = &field[..field.len() - options.len()];
        if conversion == '%' {
            out.push('%');
            continue;
        }
        let value = match key {
            Some(key) => values.first().ok_or_else(missing)?.get_item(&Value::from(key))?,
            None => values.get(used).cloned().ok_or_else(missing)?,
        };
        used += usize::from(key.is_none());
        let (conversion, value) = match conversion {
            's' => ('s', Value::from(to_str(&value)?)),
            'r' => ('s', Value::from(repr(&value)?)),
            'd' | 'i' if value.is_number() && !value.is_integer() => {
                ('d', Value::from(f64::try_from(value)?.trunc() as i128))
            }
            other => (other, value),
        };
        out.push_str(&formatting::format(FormatStyle::Printf, &format!("%{options}{conversion}"), &[value])?);
    }
    out.push_str(rest);
    Ok((out, used))
}

fn invalid_format(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Implements `repr(value)`.
fn repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(&mut out, value, 0)?;
    Ok(out)
}

fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply to be printed"));
    }
    match value.kind() {
        ValueKind::String => write_str_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => out.push_str(&float_repr(f64::try_from(value.clone())?)),
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            let mut len = 0;
            for item in value.try_iter()?.checked() {
                if len > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &item?, depth + 1)?;
                len += 1;
            }
            match (tuple, len) {
                (true, 1) => out.push_str(",)"),
                (true, _) => out.push(')'),
                (false, _) => out.push(']'),
            }
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.checked().enumerate() {
                let key = key?;
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn write_str_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if character == quote => out.extend(['\\', quote]),
            _ if !is_printable(character) => {
                let _ = match u32::from(character) {
                    code @ 0..=0xFF => write!(out, "\\x{code:02x}"),
                    code @ 0x100..=0xFFFF => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                };
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
}

/// Implements Python's `isprintable`, except for code points that Unicode has not assigned.
fn is_printable(character: char) -> bool {
    !(character.is_control()
        || (character.is_whitespace() && character != ' ')
        || matches!(character,
            '\u{AD}' | '\u{61C}' | '\u{6DD}' | '\u{180E}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}'
            | '\u{2060}'..='\u{206F}' | '\u{E000}'..='\u{F8FF}' | '\u{FEFF}' | '\u{FFF0}'..='\u{FFFB}'
            | '\u{FFFE}'..='\u{FFFF}' | '\u{E0000}'..='\u{E0FFF}' | '\u{F0000}'..))
}

/// Formats a number with the fewest digits that round-trip, in Python's layout.
pub(super) fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = number.to_string();
        if plain.contains('.') { plain } else { plain + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
    }
}

/// Implements methods of Python's types: those of minijinja's compatibility layer and a few that it lacks.
pub(super) fn method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match method {
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)));
            }
            "partition" | "rpartition" => {
                let (separator,): (&str,) = from_args(args)?;
                return Ok(partition(text, separator, method == "rpartition"));
            }
            "rsplit" => {
                let (separator, limit): (&str, Option<usize>) = from_args(args)?;
                let mut parts: Vec<&str> = text.rsplitn(limit.map_or(usize::MAX, |n| n + 1), separator).collect();
                parts.reverse();
                return Ok(parts.into_iter().map(Value::from).collect());
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn partition(text: &str, separator: &str, from_end: bool) -> Value {
    let split = if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match split {
        Some((before, after)) => [before, separator, after],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Value::from(Tuple::from(parts.map(Value::from)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_look_as_in_python() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (123456789.125, "123456789.125"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(float_repr(number), text);
        }
    }

    #[test]
    fn containers_look_as_in_python() {
        let value = serde_json::json!({
            "a": [1, 2.0, null, true], "it's": "say \"hi\"", "n": "l\n\u{e9}\u{200b}\u{7f}", "e": {}, "l": []
        });
        assert_eq!(
            to_str(&super::super::context::to_template_value(&value)).unwrap(),
            r#"{'a': [1, 2.0, None, True], "it's": 'say "hi"', 'n': 'l\né\u200b\x7f', 'e': {}, 'l': []}"#
        );
    }
}
