//! The escaping and the length of everything that a log line takes from outside.
//!
//! A value may come from a client: a request id, a path, a text. No value can end a line, colour a terminal or hide the
//! text around it. Lengths are bounded: of strings by [`MAX_STRING_BYTES`], of everything else by [`MAX_VALUE_BYTES`].

use std::fmt::{self, Write};

/// Maximum length of a string in bytes, before it is escaped. A longer one is cut and ends with [`CUT`]. Only strings
/// hold the prompts and answers that an operator asks to see.
pub(super) const MAX_STRING_BYTES: usize = 64 << 10;

/// Maximum length of a message or of a value that is displayed or debugged, such as the parameters of a request.
pub(super) const MAX_VALUE_BYTES: usize = 8 << 10;

/// The end of a value that was cut.
pub(super) const CUT: &str = "...";

/// The spelling of a character that may not occur in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// As in a string literal: `\n`, `\u{1b}`.
    Text,
    /// As in a JSON string, with quotes and backslashes escaped too.
    Json,
}

impl Spelling {
    fn write(self, character: char, out: &mut impl Write) -> fmt::Result {
        match self {
            Self::Text if is_unsafe(character) => write!(out, "{}", character.escape_default()),
            Self::Json if matches!(character, '"' | '\\') => write!(out, "\\{character}"),
            // All of them lie in the basic plane.
            Self::Json if is_unsafe(character) => write!(out, "\\u{:04x}", u32::from(character)),
            Self::Text | Self::Json => out.write_char(character),
        }
    }
}

/// Whether a character ends a line, controls a terminal or reorders the characters around it: control characters, the
/// separators of lines and paragraphs, and the marks of direction.
fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Writes a value, escaped and cut to `limit` bytes.
pub(super) fn write_value(
    out: &mut impl Write,
    spelling: Spelling,
    (value, limit): (impl fmt::Display, usize),
) -> fmt::Result {
    let mut escaped = Escaped { out, spelling, left: limit, cut: false };
    match write!(escaped, "{value}") {
        Err(fmt::Error) if escaped.cut => escaped.out.write_str(CUT),
        result => result,
    }
}

/// Escapes what is written, and fails at the maximum length, so that no more of the value is formatted.
struct Escaped<'a, W> {
    out: &'a mut W,
    spelling: Spelling,
    left: usize,
    cut: bool,
}

impl<W: Write> Write for Escaped<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            let Some(left) = self.left.checked_sub(character.len_utf8()) else {
                self.cut = true;
                return Err(fmt::Error);
            };
            self.left = left;
            self.spelling.write(character, self.out)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(spelling: Spelling, value: &str) -> String {
        let mut out = String::new();
        write_value(&mut out, spelling, (value, 100)).unwrap();
        out
    }

    #[test]
    fn unsafe_characters_are_spelled_out() {
        let value = "a\n\u{1b}[31m\u{7f}\u{9b}\u{2028}\u{202e}\"\\\u{11f}";
        assert_eq!(spelled(Spelling::Text, value), r#"a\n\u{1b}[31m\u{7f}\u{9b}\u{2028}\u{202e}"\ğ"#);
        assert_eq!(spelled(Spelling::Json, value), r#"a\u000a\u001b[31m\u007f\u009b\u2028\u202e\"\\ğ"#);
    }

    #[test]
    fn a_long_value_is_cut_between_characters() {
        assert_eq!(spelled(Spelling::Text, &"x".repeat(100)), "x".repeat(100));
        let long = spelled(Spelling::Text, &format!("x{}", "ğ".repeat(100)));
        assert_eq!(long.len(), 99 + CUT.len());
        assert!(long.ends_with("ğ..."));
    }
}
