//! Calls of Gemma 4: `call:f{a:<|"|>x<|"|>,b:[1,true]}`, with keys that are not quoted and strings between delimiters.

use super::calls::{Body, Step};
use super::json::{Extent, Reach};
use super::markers::{Expect, Markers};
use super::sink::Sink;
use super::tools::is_number;
use crate::escape::escape_json;

/// Maximum depth of values; JSON parsers stop at about the same depth.
const MAX_DEPTH: usize = 128;

/// Delimiter of strings.
const QUOTE: &[&str] = &["<|\"|>"];

/// Parses one call after its marker and writes its arguments in the layout of `json.dumps`. Strings are passed on as
/// they arrive.
#[derive(Debug)]
pub(super) struct Gemma {
    at: At,
    open: Vec<Container>,
    /// Whether a comma was read. A comma at the end of a container is not written.
    comma: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    List,
}

#[derive(Debug)]
enum At {
    /// Before the name.
    Tag(Expect),
    Name(String),
    /// Before or in a key, or before the end of an object.
    Key(String),
    /// In the opening delimiter of a string.
    Quote {
        rest: Expect,
        is_key: bool,
    },
    Text {
        end: Markers,
        text: String,
        is_key: bool,
    },
    /// After a key in quotes.
    Colon,
    /// Before a value of an object.
    Value,
    /// Before an item of a list, or its end.
    Item,
    /// In a number, a constant or a string without delimiters.
    Word(String),
    /// After a value.
    After,
    /// In an object in JSON within the braces of the call, passed on unchanged.
    Json(Extent),
    /// After that object.
    Closed,
}

impl Gemma {
    pub(super) fn new() -> Self {
        Self { at: At::Tag(Expect::new("call:")), open: Vec::new(), comma: false }
    }

    /// Writes the separator before a key or an item.
    fn separate(&mut self, sink: &mut Sink) {
        if std::mem::take(&mut self.comma) {
            sink.arguments(", ");
        }
    }

    /// Handles the first character of a value.
    fn start(&mut self, character: char, sink: &mut Sink) -> Step {
        if matches!(self.at, At::Item) {
            self.separate(sink);
        }
        match character {
            '<' => self.quote(false),
            '{' => self.nest(Container::Object, sink),
            '[' => self.nest(Container::List, sink),
            // A value is missing.
            ',' | '}' => {
                sink.arguments("\"\"");
                self.at = At::After;
                self.step(character, sink)
            }
            ']' => Step::Broken,
            _ => {
                self.at = At::Word(character.into());
                Step::More
            }
        }
    }

    fn quote(&mut self, is_key: bool) -> Step {
        self.at = At::Quote { rest: Expect::new("|\"|>"), is_key };
        Step::More
    }

    fn nest(&mut self, container: Container, sink: &mut Sink) -> Step {
        if self.open.len() >= MAX_DEPTH {
            return Step::Broken;
        }
        self.open.push(container);
        self.comma = false;
        let (bracket, at) = match container {
            Container::Object => ('{', At::Key(String::new())),
            Container::List => ('[', At::Item),
        };
        sink.argument(bracket);
        self.at = at;
        Step::More
    }

    /// Ends the innermost container.
    fn close(&mut self, bracket: char, sink: &mut Sink) -> Step {
        self.open.pop();
        self.comma = false;
        self.at = At::After;
        sink.argument(bracket);
        if self.open.is_empty() {
            sink.end();
            return Step::Done;
        }
        Step::More
    }

    /// Takes the next character of a string.
    fn text(&mut self, character: char, sink: &mut Sink) {
        let At::Text { end, text, is_key } = &mut self.at else { return };
        let ended = end.step(character, text).is_some();
        if !*is_key {
            escaped(&std::mem::take(text), sink);
            if ended {
                sink.argument('"');
                self.at = At::After;
            }
        } else if ended {
            let key = std::mem::take(text);
            self.key(&key, sink);
            self.at = At::Colon;
        }
    }

    fn key(&mut self, key: &str, sink: &mut Sink) {
        self.separate(sink);
        string(key, sink);
        sink.arguments(": ");
        self.at = At::Value;
    }
}

/// Writes a string.
fn string(text: &str, sink: &mut Sink) {
    sink.argument('"');
    escaped(text, sink);
    sink.argument('"');
}

fn escaped(text: &str, sink: &mut Sink) {
    let mut json = String::new();
    escape_json(text, &mut json);
    sink.arguments(&json);
}

/// Writes a value without delimiters: a number, a constant or else a string.
fn word(text: &str, sink: &mut Sink) {
    let text = text.trim();
    match text {
        "true" | "false" => sink.arguments(text),
        _ if ["null", "none", "nil"].iter().any(|null| text.eq_ignore_ascii_case(null)) => sink.arguments("null"),
        _ if is_number(text) => sink.arguments(text),
        _ => string(text, sink),
    }
}

/// Returns whether a key without quotes may contain this character.
fn in_key(character: char) -> bool {
    character.is_alphanumeric() || " _-.$@/".contains(character)
}

impl Body for Gemma {
    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.at {
            At::Word(text) => word(text, sink),
            // A key whose end is missing holds all that followed it.
            At::Text { text, is_key: true, .. } => {
                let key = std::mem::take(text);
                self.separate(sink);
                string(&key, sink);
            }
            _ => {}
        }
    }

    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        let blank = character.is_whitespace();
        match &mut self.at {
            At::Tag(expect) => match expect.step(character) {
                None => return Step::Broken,
                Some(false) => {}
                Some(true) => self.at = At::Name(String::new()),
            },
            At::Name(name) if character == '{' && !name.is_empty() => {
                sink.begin(std::mem::take(name));
                return self.nest(Container::Object, sink);
            }
            At::Name(name) if in_key(character) && !blank => name.push(character),
            At::Colon | At::Value | At::Item | At::After if blank => {}
            At::Key(key) if blank && key.is_empty() => {}
            At::Key(key) if key.is_empty() && character == '<' => return self.quote(true),
            At::Key(key) if key.is_empty() && character == '}' => return self.close('}', sink),
            // Models that have seen such calls in their history write `f{{"a": 1}}`. The first brace is passed on already.
            At::Key(key) if key.is_empty() && character == '{' && self.open.len() == 1 && !self.comma => {
                let mut json = Extent::default();
                json.step(character);
                self.at = At::Json(json);
            }
            At::Key(key) if character == ':' && !key.is_empty() => {
                let key = std::mem::take(key);
                self.key(key.trim_end(), sink);
            }
            At::Key(key) if in_key(character) => key.push(character),
            At::Quote { rest, is_key } => match rest.step(character) {
                None => return Step::Broken,
                Some(false) => {}
                Some(true) => {
                    let is_key = *is_key;
                    if !is_key {
                        sink.argument('"');
                    }
                    self.at = At::Text { end: Markers::new(QUOTE), text: String::new(), is_key };
                }
            },
            At::Text { .. } => self.text(character, sink),
            At::Json(json) => {
                sink.argument(character);
                if json.step(character) == Reach::Last {
                    sink.end();
                    self.at = At::Closed;
                }
            }
            At::Closed if blank => {}
            At::Closed if character == '}' => return Step::Done,
            At::Colon if character == ':' => self.at = At::Value,
            At::Item if character == ']' => return self.close(']', sink),
            At::Value | At::Item => return self.start(character, sink),
            At::Word(text) if ",}]".contains(character) => {
                let text = std::mem::take(text);
                word(&text, sink);
                self.at = At::After;
                return self.step(character, sink);
            }
            At::Word(text) if !"<{[".contains(character) => text.push(character),
            At::After => match (character, self.open.last()) {
                (',', Some(container)) => {
                    self.comma = true;
                    self.at = if *container == Container::List { At::Item } else { At::Key(String::new()) };
                }
                ('}', Some(Container::Object)) | (']', Some(Container::List)) => return self.close(character, sink),
                _ => return Step::Broken,
            },
            At::Name(_) | At::Key(_) | At::Colon | At::Word(_) | At::Closed => return Step::Broken,
        }
        Step::More
    }
}
