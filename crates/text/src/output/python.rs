//! Python: calls as `[f(a=1, b='x'), g()]`, and conversion of literals to JSON.

use super::calls::{Body, Step};
use super::json::Reach;
use super::sink::Sink;
use super::strings::StringReader;
use super::tools::is_number;
use crate::escape::escape_json;

/// Maximum depth of literals; JSON parsers stop at about the same depth.
const MAX_DEPTH: usize = 128;

/// Converts one Python literal to JSON while it is read: strings, numbers, `True`, `False`, `None`, lists and
/// dictionaries, in the layout of `json.dumps(value, ensure_ascii=False)`.
#[derive(Debug)]
struct Literal {
    open: Vec<Container>,
    at: Place,
    /// Whether a comma was read. A comma at the end of a container is not written.
    comma: bool,
    scratch: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    List,
    Dictionary,
}

#[derive(Debug)]
enum Place {
    /// Before a value.
    Value,
    /// Before a list's value or its end.
    Item,
    /// Before a dictionary's key or its end.
    Key,
    Text {
        reader: StringReader,
        is_key: bool,
    },
    Word {
        word: String,
        is_key: bool,
    },
    Colon,
    /// After a value in a container.
    After,
}

/// Error of text that is not a literal.
struct NotLiteral;

impl Literal {
    fn new() -> Self {
        Self { open: Vec::new(), at: Place::Value, comma: false, scratch: String::new() }
    }

    /// Takes the next character and appends JSON to `out`.
    fn step(&mut self, character: char, out: &mut String) -> Result<Reach, NotLiteral> {
        match &mut self.at {
            Place::Text { reader, is_key } => {
                let ended = reader.step(character, &mut self.scratch);
                escape_json(&self.scratch, out);
                self.scratch.clear();
                if ended {
                    let is_key = *is_key;
                    out.push('"');
                    return Ok(self.ended(is_key));
                }
            }
            Place::Word { word, .. } if character.is_alphanumeric() || "_.+-".contains(character) => {
                word.push(character);
            }
            Place::Word { word, is_key } => {
                let is_key = *is_key;
                let json = word_to_json(word).ok_or(NotLiteral)?;
                let quote = if is_key { "\"" } else { "" };
                out.extend([quote, &json, quote]);
                return match self.ended(is_key) {
                    Reach::Last => Ok(Reach::Past),
                    _ => self.step(character, out),
                };
            }
            _ if character.is_whitespace() => {}
            Place::Item if character == ']' => return Ok(self.close(']', out)),
            Place::Key if character == '}' => return Ok(self.close('}', out)),
            Place::Value | Place::Item | Place::Key => self.start(character, out)?,
            Place::Colon if character == ':' => {
                out.push_str(": ");
                self.at = Place::Value;
            }
            Place::After => match (character, self.open.last()) {
                (',', Some(container)) => {
                    self.comma = true;
                    self.at = if *container == Container::List { Place::Item } else { Place::Key };
                }
                (']', Some(Container::List)) | ('}', Some(Container::Dictionary)) => {
                    return Ok(self.close(character, out));
                }
                _ => return Err(NotLiteral),
            },
            Place::Colon => return Err(NotLiteral),
        }
        Ok(Reach::Inside)
    }

    /// Handles the first character of a value or key.
    fn start(&mut self, character: char, out: &mut String) -> Result<(), NotLiteral> {
        let is_key = matches!(self.at, Place::Key);
        let container = matches!(character, '[' | '{');
        let word = character.is_ascii_alphanumeric() || "_.+-".contains(character);
        if (container && (is_key || self.open.len() >= MAX_DEPTH)) || !(container || word || "'\"".contains(character))
        {
            return Err(NotLiteral);
        }
        if std::mem::take(&mut self.comma) {
            out.push_str(", ");
        }
        self.at = match character {
            '[' => {
                self.open.push(Container::List);
                Place::Item
            }
            '{' => {
                self.open.push(Container::Dictionary);
                Place::Key
            }
            '\'' | '"' => Place::Text { reader: StringReader::python(character), is_key },
            _ => Place::Word { word: character.into(), is_key },
        };
        match character {
            '\'' => out.push('"'),
            '[' | '{' | '"' => out.push(character),
            _ => {}
        }
        Ok(())
    }

    fn close(&mut self, bracket: char, out: &mut String) -> Reach {
        self.comma = false;
        self.open.pop();
        out.push(bracket);
        self.ended(false)
    }

    /// Continues after a value or key.
    fn ended(&mut self, is_key: bool) -> Reach {
        self.at = if is_key { Place::Colon } else { Place::After };
        if self.open.is_empty() { Reach::Last } else { Reach::Inside }
    }
}

/// Converts a Python number or constant to JSON.
fn word_to_json(word: &str) -> Option<String> {
    match word {
        "True" | "true" => return Some("true".to_owned()),
        "False" | "false" => return Some("false".to_owned()),
        "None" | "null" => return Some("null".to_owned()),
        _ => {}
    }
    let digits = word.replace('_', "");
    let unsigned = digits.strip_prefix('+').unwrap_or(&digits);
    let (sign, magnitude) = unsigned.strip_prefix('-').map_or(("", unsigned), |rest| ("-", rest));
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(digits) = magnitude.strip_prefix(prefix).filter(|digits| !digits.starts_with(['+', '-'])) {
            return Some(format!("{sign}{}", u128::from_str_radix(digits, radix).ok()?));
        }
    }
    let (mantissa, exponent) = match magnitude.find(['e', 'E']) {
        Some(at) => magnitude.split_at(at),
        None => (magnitude, ""),
    };
    let leading = if mantissa.starts_with('.') { "0" } else { "" };
    let trailing = if mantissa.ends_with('.') { "0" } else { "" };
    let json = format!("{sign}{leading}{mantissa}{trailing}{exponent}");
    (mantissa != "." && is_number(&json)).then_some(json)
}

/// Converts a Python list or dictionary to JSON.
pub(super) fn to_json(text: &str) -> Option<String> {
    let mut literal = Literal::new();
    let mut out = String::new();
    let mut characters = text.chars();
    loop {
        match literal.step(characters.next()?, &mut out) {
            Ok(Reach::Inside) => {}
            Ok(Reach::Last) => return characters.next().is_none().then_some(out),
            Ok(Reach::Past) | Err(NotLiteral) => return None,
        }
    }
}

/// Parses a list of calls with keyword arguments.
#[derive(Debug)]
pub(super) struct PythonCalls {
    at: At,
    /// Whether the calls are on lines of their own, without a list around them.
    lines: bool,
    /// Name of the function, until the call begins.
    name: String,
    /// Whether a call is complete.
    called: bool,
    scratch: String,
}

#[derive(Debug)]
enum At {
    /// Before the list.
    Start,
    /// Before or in a function's name.
    Name,
    /// Before or in an argument's name.
    Argument(String),
    Equals(String),
    Value(Literal),
    /// After an argument.
    Comma,
    /// After a call.
    NextCall,
}

impl PythonCalls {
    pub(super) fn list() -> Self {
        Self { at: At::Start, lines: false, name: String::new(), called: false, scratch: String::new() }
    }

    /// Creates the parser of calls on lines of their own, which end where no other call follows.
    pub(super) fn lines() -> Self {
        Self { at: At::Name, lines: true, ..Self::list() }
    }

    fn begin(&mut self, sink: &mut Sink) {
        if !self.name.is_empty() {
            sink.begin(std::mem::take(&mut self.name));
        }
    }

    /// Continues with the value of an argument.
    fn value(&mut self, argument: &str, sink: &mut Sink) {
        self.begin(sink);
        sink.arguments(if sink.has_arguments() { ", \"" } else { "{\"" });
        sink.arguments(argument);
        sink.arguments("\": ");
        self.at = At::Value(Literal::new());
    }

    fn close(&mut self, sink: &mut Sink) {
        self.begin(sink);
        if sink.has_arguments() {
            sink.argument('}');
        }
        sink.end();
        self.called = true;
        self.at = At::NextCall;
    }
}

/// Returns whether `character` may continue `name`.
fn in_name(name: &str, character: char) -> bool {
    character.is_alphabetic() || character == '_' || (!name.is_empty() && character.is_alphanumeric())
}

impl Body for PythonCalls {
    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        let blank = character.is_whitespace();
        match &mut self.at {
            At::Start | At::Comma | At::NextCall | At::Equals(_) if blank => {}
            At::Start if character == '[' => self.at = At::Name,
            At::Name if blank && self.name.is_empty() => {}
            At::Name if character == '(' && !self.name.is_empty() => self.at = At::Argument(String::new()),
            At::Name if in_name(&self.name, character) || (character == '.' && !self.name.is_empty()) => {
                self.name.push(character);
            }
            At::Argument(name) if blank && name.is_empty() => {}
            At::Argument(name) if in_name(name, character) => name.push(character),
            At::Argument(name) if character == ')' && name.is_empty() => self.close(sink),
            At::Argument(name) if blank => self.at = At::Equals(std::mem::take(name)),
            At::Argument(name) | At::Equals(name) if character == '=' && !name.is_empty() => {
                let name = std::mem::take(name);
                self.value(&name, sink);
            }
            At::Value(literal) => {
                let mut json = std::mem::take(&mut self.scratch);
                let reach = literal.step(character, &mut json);
                sink.arguments(&json);
                json.clear();
                self.scratch = json;
                match reach {
                    Err(NotLiteral) => return Step::Broken,
                    Ok(Reach::Inside) => {}
                    Ok(Reach::Last) => self.at = At::Comma,
                    Ok(Reach::Past) => {
                        self.at = At::Comma;
                        return self.step(character, sink);
                    }
                }
            }
            At::Comma if character == ',' => self.at = At::Argument(String::new()),
            At::Comma if character == ')' => self.close(sink),
            At::NextCall if character == ',' => self.at = At::Name,
            At::NextCall if character == ']' && !self.lines => return Step::Done,
            At::NextCall if self.lines && in_name("", character) => {
                self.name.push(character);
                self.at = At::Name;
            }
            // A list may end with a comma.
            At::Name if character == ']' && self.name.is_empty() && self.called && !self.lines => return Step::Done,
            _ => return Step::Broken,
        }
        Step::More
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_become_json() {
        for (python, json) in [
            ("[]", "[]"),
            ("[1, 2,]", "[1, 2]"),
            ("{ 'a' : 1 , \"b\":[True,None] ,}", r#"{"a": 1, "b": [true, null]}"#),
            ("{1: 'x', None: {}}", r#"{"1": "x", "null": {}}"#),
            ("['it\\'s', \"\\n\", '\"']", r#"["it's", "\n", "\""]"#),
            ("[1_000, .5, 5., +3, -0x1F, 1e5, -2.5E-3]", "[1000, 0.5, 5.0, 3, -31, 1e5, -2.5E-3]"),
        ] {
            assert_eq!(to_json(python).as_deref(), Some(json), "{python}");
        }
    }

    #[test]
    fn what_is_no_literal_is_refused() {
        for python in [
            "",
            "[",
            "[1",
            "[,]",
            "[1,,2]",
            "[1 2]",
            "['a' 'b']",
            "{1, 2}",
            "{'a'}",
            "{'a': }",
            "{[1]: 2}",
            "[f()]",
            "[x]",
            "[1+2]",
            "[.]",
            "[1] 2",
            "[1]]",
            "[1}",
            "{'a': 1]",
            "[0x]",
            "[0x+1]",
            "[--1]",
            "(1, 2)",
            "[b'x']",
        ] {
            assert_eq!(to_json(python), None, "{python}");
        }
    }

    #[test]
    fn depth_is_limited() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert_eq!(to_json(&nested(MAX_DEPTH)), Some(nested(MAX_DEPTH)));
        assert_eq!(to_json(&nested(MAX_DEPTH + 1)), None);
        assert_eq!(to_json(&"[".repeat(1_000_000)), None);
    }
}
