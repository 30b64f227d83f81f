//! Calls as JSON objects: `{"name": …, "arguments": …}`.

use std::sync::Arc;

use super::calls::{Body, Step};
use super::sink::Sink;
use super::strings::StringReader;
use super::tools::Tools;

/// Finds the end of a JSON value by its quotes and its depth only. The text of the model is passed on unchanged even if
/// it is not valid JSON, so that the client sees the model's intention.
#[derive(Debug, Default)]
pub(super) struct Extent {
    depth: usize,
    quoted: bool,
    escaped: bool,
}

/// Relation of the next character to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    Inside,
    /// The character ends the value.
    Last,
    /// The value ended before the character.
    Past,
}

impl Extent {
    /// Takes the next character. The first one belongs to the value.
    pub(super) fn step(&mut self, character: char) -> Reach {
        if self.quoted {
            match character {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.quoted = false,
                _ => {}
            }
            return if self.quoted || self.depth > 0 { Reach::Inside } else { Reach::Last };
        }
        match character {
            '"' => self.quoted = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Reach::Last;
                }
            }
            '}' | ']' | ',' if self.depth == 0 => return Reach::Past,
            _ if self.depth == 0 && character.is_whitespace() => return Reach::Past,
            _ => {}
        }
        Reach::Inside
    }
}

/// Returns whether a JSON value may start with this character.
fn starts_value(character: char) -> bool {
    matches!(character, '{' | '[' | '"' | '-') || character.is_ascii_alphanumeric()
}

/// Parses the object around the arguments. Its keys may come in any order: arguments before the name are held back.
/// Arguments are passed on as the raw text of the value, or decoded if it is a string; other keys are skipped.
#[derive(Debug)]
pub(super) struct Envelope {
    at: At,
    /// Without a marker, an object is a call only if it cannot be anything else; see [`Envelope::bare`].
    bare: Option<Arc<Tools>>,
    /// Name of the function, until the call begins.
    name: Option<String>,
    begun: bool,
    has_arguments: bool,
    /// Arguments that came before the name.
    early: String,
    scratch: String,
}

#[derive(Debug)]
enum At {
    Start,
    /// Before a key or the end.
    Key,
    InKey(StringReader, String),
    Colon(Field),
    Value(Field),
    Name(StringReader, String),
    /// In arguments that are passed on unchanged.
    Raw(Extent),
    /// In arguments written as a string.
    Encoded(StringReader),
    Skipped(Extent),
    /// After a value.
    Comma,
}

#[derive(Clone, Copy, Debug)]
enum Field {
    Name,
    Arguments,
    Other,
}

impl Envelope {
    /// Creates the parser of an object after a marker.
    pub(super) fn marked() -> Self {
        Self {
            at: At::Start,
            bare: None,
            name: None,
            begun: false,
            has_arguments: false,
            early: String::new(),
            scratch: String::new(),
        }
    }

    /// Creates the parser of an object without a marker, which may also be an answer in JSON. It is a call if it has a
    /// name and arguments, or the name of one of `tools`, and if only the keys `type` and `id` come before them.
    pub(super) fn bare(tools: Arc<Tools>) -> Self {
        Self { bare: Some(tools), ..Self::marked() }
    }

    /// Creates the parser of an object whose position makes it a call, from its first character on.
    pub(super) fn opened(brace: char, sink: &mut Sink) -> Self {
        let mut call = Self::marked();
        call.step(brace, sink);
        call
    }

    /// Returns the meaning of a key; `None` if a call has no such key. A second name or second arguments are those of
    /// another call, whose braces are missing.
    fn field(&self, key: &str) -> Option<Field> {
        match key {
            "name" => (self.name.is_none() && !self.begun).then_some(Field::Name),
            "arguments" | "parameters" => (!self.has_arguments).then_some(Field::Arguments),
            "type" | "id" => Some(Field::Other),
            _ => (self.bare.is_none() || self.begun).then_some(Field::Other),
        }
    }

    fn begin(&mut self, sink: &mut Sink) {
        if let Some(name) = self.name.take() {
            sink.begin(name);
            sink.arguments(&std::mem::take(&mut self.early));
            self.begun = true;
        }
    }

    fn argument(&mut self, character: char, sink: &mut Sink) {
        if self.begun { sink.argument(character) } else { self.early.push(character) }
    }

    /// Chooses the parser of a value by its first character.
    fn value(&mut self, field: Field, character: char, sink: &mut Sink) -> Step {
        if character.is_whitespace() {
            return Step::More;
        }
        self.at = match (field, character) {
            (Field::Name, '"') => At::Name(StringReader::json(), String::new()),
            (Field::Name, _) => return Step::Broken,
            // A bare object whose arguments are neither an object nor a string is not a call.
            (Field::Arguments, _) if self.bare.is_some() && !matches!(character, '{' | '"') => return Step::Broken,
            // `null` means no arguments.
            (Field::Arguments, 'n') | (Field::Other, _) if starts_value(character) => At::Skipped(Extent::default()),
            (Field::Arguments, '"') => At::Encoded(StringReader::json()),
            (Field::Arguments, _) if starts_value(character) => At::Raw(Extent::default()),
            _ => return Step::Broken,
        };
        if let Field::Arguments = field {
            self.has_arguments = true;
            self.begin(sink);
        }
        // Raw values are read from their first character on, strings from the character after the quote.
        match self.at {
            At::Raw(_) | At::Skipped(_) => self.step(character, sink),
            _ => Step::More,
        }
    }

    fn name_is(&mut self, name: String, sink: &mut Sink) -> Step {
        if name.trim().is_empty() {
            return Step::Broken;
        }
        self.name = Some(name);
        if self.bare.is_none() || self.has_arguments {
            self.begin(sink);
        }
        self.at = At::Comma;
        Step::More
    }

    fn close(&mut self, sink: &mut Sink) -> Step {
        let known = match (&self.bare, &self.name) {
            (Some(tools), Some(name)) => tools.contains(name),
            (None, name) => name.is_some(),
            (Some(_), None) => false,
        };
        if known {
            self.begin(sink);
        }
        if !self.begun {
            return Step::Broken;
        }
        sink.end();
        Step::Done
    }
}

impl Body for Envelope {
    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        match &mut self.at {
            At::Start | At::Key | At::Colon(_) | At::Comma if character.is_whitespace() => {}
            At::Start if character == '{' => self.at = At::Key,
            At::Key if character == '"' => self.at = At::InKey(StringReader::json(), String::new()),
            At::Key | At::Comma if character == '}' => return self.close(sink),
            At::Comma if character == ',' => self.at = At::Key,
            At::InKey(reader, key) => {
                if reader.step(character, key) {
                    let key = std::mem::take(key);
                    let Some(field) = self.field(&key) else { return Step::Broken };
                    self.at = At::Colon(field);
                }
            }
            At::Colon(field) if character == ':' => self.at = At::Value(*field),
            At::Value(field) => {
                let field = *field;
                return self.value(field, character, sink);
            }
            At::Name(reader, name) => {
                if reader.step(character, name) {
                    let name = std::mem::take(name);
                    return self.name_is(name, sink);
                }
            }
            At::Raw(extent) => {
                let reach = extent.step(character);
                if reach != Reach::Inside {
                    self.at = At::Comma;
                }
                match reach {
                    Reach::Past => return self.step(character, sink),
                    _ => self.argument(character, sink),
                }
            }
            At::Encoded(reader) => {
                let mut text = std::mem::take(&mut self.scratch);
                if reader.step(character, &mut text) {
                    self.at = At::Comma;
                }
                text.drain(..).for_each(|character| self.argument(character, sink));
                self.scratch = text;
            }
            At::Skipped(extent) => match extent.step(character) {
                Reach::Inside => {}
                Reach::Last => self.at = At::Comma,
                Reach::Past => {
                    self.at = At::Comma;
                    return self.step(character, sink);
                }
            },
            At::Start | At::Key | At::Colon(_) | At::Comma => return Step::Broken,
        }
        Step::More
    }
}
