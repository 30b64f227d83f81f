//! String literals of JSON and Python, parsed character by character.

/// Language whose escapes a literal uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Json,
    Python,
}

/// Parses a string literal after its opening quote.
///
/// Models write escapes that do not exist, so nothing is an error: an unknown escape stands for itself, including the
/// backslash, as in Python. An unpaired surrogate and an invalid code become U+FFFD.
#[derive(Debug)]
pub(super) struct StringReader {
    dialect: Dialect,
    quote: char,
    state: State,
    /// First half of a surrogate pair.
    high: Option<u32>,
}

#[derive(Debug)]
enum State {
    Plain,
    Backslash,
    /// In a code of this base, with this many remaining digits.
    Code {
        base: u32,
        left: u8,
        value: u32,
    },
}

impl StringReader {
    /// Creates the parser of a string in double quotes.
    pub(super) fn json() -> Self {
        Self { dialect: Dialect::Json, quote: '"', state: State::Plain, high: None }
    }

    pub(super) fn python(quote: char) -> Self {
        Self { dialect: Dialect::Python, quote, state: State::Plain, high: None }
    }

    /// Takes the next character and appends the decoded text to `text`. Returns whether it is the closing quote.
    pub(super) fn step(&mut self, character: char, text: &mut String) -> bool {
        match self.state {
            State::Plain if character == '\\' => self.state = State::Backslash,
            State::Plain => {
                self.flush(text);
                if character == self.quote {
                    return true;
                }
                text.push(character);
            }
            State::Backslash => self.escape(character, text),
            State::Code { base, left, value } => match character.to_digit(base) {
                Some(digit) if left > 0 => {
                    let value = value * base + digit;
                    self.state = State::Code { base, left: left - 1, value };
                    if left == 1 {
                        self.code(value, text);
                    }
                }
                _ => {
                    // Octal codes may have fewer than three digits; hexadecimal codes have a fixed length.
                    self.code(if base == 8 { value } else { u32::MAX }, text);
                    return self.step(character, text);
                }
            },
        }
        false
    }

    fn escape(&mut self, character: char, text: &mut String) {
        let python = self.dialect == Dialect::Python;
        let code = |base, left, value| State::Code { base, left, value };
        self.state = match character {
            'u' => code(16, 4, 0),
            'x' if python => code(16, 2, 0),
            'U' if python => code(16, 8, 0),
            '0'..='7' if python => code(8, 2, character.to_digit(8).unwrap_or(0)),
            _ => State::Plain,
        };
        if !matches!(self.state, State::Plain) {
            return;
        }
        self.flush(text);
        match character {
            'n' => text.push('\n'),
            't' => text.push('\t'),
            'r' => text.push('\r'),
            'b' => text.push('\u{8}'),
            'f' => text.push('\u{c}'),
            '\\' | '\'' | '"' => text.push(character),
            '/' if !python => text.push('/'),
            'a' if python => text.push('\u{7}'),
            'v' if python => text.push('\u{b}'),
            '\n' if python => {}
            _ => text.extend(['\\', character]),
        }
    }

    fn code(&mut self, value: u32, text: &mut String) {
        self.state = State::Plain;
        if let (Some(high), 0xDC00..=0xDFFF) = (self.high, value) {
            self.high = None;
            text.extend(char::from_u32(0x1_0000 + ((high - 0xD800) << 10) + (value - 0xDC00)));
            return;
        }
        self.flush(text);
        match value {
            0xD800..=0xDBFF => self.high = Some(value),
            _ => text.push(char::from_u32(value).unwrap_or(char::REPLACEMENT_CHARACTER)),
        }
    }

    /// Replaces an unpaired surrogate.
    fn flush(&mut self, text: &mut String) {
        if self.high.take().is_some() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::escape::escape_json;

    fn read(mut reader: StringReader, literal: &str) -> Option<String> {
        let mut text = String::new();
        let end = literal.char_indices().find(|&(_, character)| reader.step(character, &mut text))?;
        (end.0 + 1 == literal.len()).then_some(text)
    }

    #[test]
    fn python_strings_are_read_as_python_does() {
        for (literal, text) in [
            (r"it\'s'", "it's"),
            (r#"a "b"'"#, r#"a "b""#),
            (r"\d+\/\n\x41\u00e9\U0001F600'", "\\d+\\/\nA\u{e9}\u{1f600}"),
            (r"\0\12\1013\8'", "\0\nA3\\8"),
            ("a\\\nb'", "ab"),
            (r"\xg1'", "\u{fffd}g1"),
            (r"\U99999999'", "\u{fffd}"),
        ] {
            assert_eq!(read(StringReader::python('\''), literal).as_deref(), Some(text), "{literal}");
        }
    }

    #[test]
    fn broken_json_escapes_do_not_end_the_string() {
        for (literal, text) in [
            (r#"\ud83d\ude00""#, "\u{1f600}"),
            (r#"\ud83dx\ude00\ud83d""#, "\u{fffd}x\u{fffd}\u{fffd}"),
            (r#"\ud83d\ud83d\ude00""#, "\u{fffd}\u{1f600}"),
            (r#"\u12""#, "\u{fffd}"),
            (r#"\d\/\ud83d\n""#, "\\d/\u{fffd}\n"),
        ] {
            assert_eq!(read(StringReader::json(), literal).as_deref(), Some(text), "{literal}");
        }
    }

    proptest! {
        #[test]
        fn json_strings_are_read_as_serde_does(text in any::<String>()) {
            let literal = serde_json::to_string(&text).unwrap();
            prop_assert_eq!(read(StringReader::json(), &literal[1..]), Some(text.clone()));
            let mut escaped = String::new();
            escape_json(&text, &mut escaped);
            prop_assert_eq!(serde_json::from_str::<String>(&format!("\"{escaped}\"")).unwrap(), text);
        }

        #[test]
        fn no_literal_panics(literal in r#"[\\uUx0-9a-fdDbnt'"]{0,40}"#) {
            let _ = read(StringReader::python('\''), &literal);
            let _ = read(StringReader::json(), &literal);
        }
    }
}
