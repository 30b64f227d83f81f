//! Calls with a marker and JSON arguments.

use super::calls::{Body, Step};
use super::json::{Envelope, Extent, Reach};
use super::markers::Markers;
use super::sink::Sink;
use super::xml::Xml;

/// Arguments that follow the name, passed on unchanged.
#[derive(Debug, Default)]
pub(super) struct Arguments(Extent);

impl Arguments {
    /// Begins a call whose arguments start with `brace`.
    fn begin(name: String, brace: char, sink: &mut Sink) -> Self {
        sink.begin(name);
        let mut arguments = Self::default();
        arguments.step(brace, sink);
        arguments
    }

    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        sink.argument(character);
        if self.0.step(character) == Reach::Inside {
            return Step::More;
        }
        sink.end();
        Step::Done
    }
}

/// Parser of the text after `[TOOL_CALLS]`: `[{"name": "f", "arguments": {…}}, …]`, and from version 11 of the
/// tokenizer on `f{…}`, `f[ARGS]{…}` or `f[CALL_ID]…[ARGS]{…}`.
#[derive(Debug)]
pub(super) enum Mistral {
    Start,
    /// Before a list or an object, in the syntaxes that have nothing else: Granite, Jamba, Phi-4-mini.
    List,
    Name(String),
    /// Between the name and the arguments, with the text in between.
    Tags(String, String),
    Arguments(Arguments),
    /// An object without a list around it.
    Single(Envelope),
    /// Before a call in a list, or the end of the list.
    Item,
    Listed(Envelope),
    /// After a call in a list.
    Comma,
}

impl Body for Mistral {
    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        let blank = character.is_whitespace();
        match self {
            Self::Start | Self::List | Self::Item | Self::Comma if blank => {}
            Self::Start | Self::List if character == '[' => *self = Self::Item,
            Self::Start | Self::List if character == '{' => {
                *self = Self::Single(Envelope::opened(character, sink));
            }
            Self::Start if !"]}\"<".contains(character) => *self = Self::Name(character.into()),
            Self::Name(name) if character == '{' => {
                *self = Self::Arguments(Arguments::begin(std::mem::take(name), character, sink));
            }
            Self::Name(name) if blank || character == '[' => {
                let tags = if blank { String::new() } else { character.into() };
                *self = Self::Tags(std::mem::take(name), tags);
            }
            Self::Name(name) if !"]}\"<".contains(character) => name.push(character),
            Self::Tags(name, tags) if character == '{' && (tags.is_empty() || tags.ends_with("[ARGS]")) => {
                *self = Self::Arguments(Arguments::begin(std::mem::take(name), character, sink));
            }
            Self::Tags(_, tags) if blank && (tags.is_empty() || tags.ends_with("[ARGS]")) => {}
            Self::Tags(_, tags) if !blank && !"{}\"".contains(character) && (character == '[' || !tags.is_empty()) => {
                tags.push(character);
            }
            Self::Arguments(arguments) => return arguments.step(character, sink),
            Self::Single(call) => return call.step(character, sink),
            Self::Item if character == '{' => *self = Self::Listed(Envelope::opened(character, sink)),
            Self::Listed(call) => match call.step(character, sink) {
                Step::Done => *self = Self::Comma,
                step => return step,
            },
            Self::Comma if character == ',' => *self = Self::Item,
            Self::Item | Self::Comma if character == ']' => return Step::Done,
            _ => return Step::Broken,
        }
        Step::More
    }
}

/// Parser of the text after `<｜tool▁call▁begin｜>`:
/// ``function<｜tool▁sep｜>f\n```json\n{…}\n``` ``, and from version 3.1 on `f<｜tool▁sep｜>{…}`.
#[derive(Debug)]
pub(super) enum DeepSeek {
    /// Before the separator: in the kind of the call or the name of the function.
    Kind(Markers, String),
    /// In the name, or before the arguments if the name has come already.
    Name {
        kind: String,
        name: String,
    },
    /// Before the arguments, in a code fence.
    Fence(String),
    Arguments(Arguments),
}

impl DeepSeek {
    pub(super) fn new() -> Self {
        Self::Kind(Markers::new(&["<｜tool▁sep｜>"]), String::new())
    }
}

impl Body for DeepSeek {
    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        match self {
            Self::Kind(..) if character.is_whitespace() => return Step::Broken,
            Self::Kind(separator, kind) => {
                if separator.step(character, kind).is_some() {
                    *self = Self::Name { kind: std::mem::take(kind), name: String::new() };
                }
            }
            Self::Name { kind, name } if character == '{' => {
                let name = std::mem::take(if name.is_empty() { kind } else { name });
                if name.is_empty() {
                    return Step::Broken;
                }
                *self = Self::Arguments(Arguments::begin(name, character, sink));
            }
            Self::Name { name, .. } if character.is_whitespace() => {
                if !name.is_empty() {
                    *self = Self::Fence(std::mem::take(name));
                }
            }
            Self::Name { .. } if character == '<' => return Step::Broken,
            Self::Name { name, .. } => name.push(character),
            Self::Fence(name) if character == '{' => {
                *self = Self::Arguments(Arguments::begin(std::mem::take(name), character, sink));
            }
            Self::Fence(_) if character.is_whitespace() || "`json".contains(character) => {}
            Self::Fence(_) => return Step::Broken,
            Self::Arguments(arguments) => return arguments.step(character, sink),
        }
        Step::More
    }
}

/// Parser of the text after `<|tool_call_begin|>`:
/// `functions.f:0<|tool_call_argument_begin|>{…}`.
#[derive(Debug)]
pub(super) enum Kimi {
    /// In the call's id, which contains the name of the function.
    Id(Markers, String),
    /// Before the arguments of this function.
    Ready(String),
    Arguments(Arguments),
}

impl Kimi {
    pub(super) fn new() -> Self {
        Self::Id(Markers::new(&["<|tool_call_argument_begin|>"]), String::new())
    }

    /// Returns the name in `functions.name:index`.
    fn name(id: &str) -> &str {
        let id = id.trim();
        let name = id.strip_prefix("functions.").unwrap_or(id);
        match name.rsplit_once(':') {
            Some((name, index)) if index.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => name,
        }
    }
}

impl Body for Kimi {
    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        match self {
            Self::Id(separator, id) => {
                let before = id.len();
                if separator.step(character, id).is_some() {
                    let name = Self::name(id);
                    if name.is_empty() {
                        return Step::Broken;
                    }
                    *self = Self::Ready(name.to_owned());
                } else if id[before..].contains(['<', '{', '\n']) {
                    return Step::Broken;
                }
            }
            Self::Ready(name) if character == '{' => {
                *self = Self::Arguments(Arguments::begin(std::mem::take(name), character, sink));
            }
            Self::Ready(_) if character.is_whitespace() => {}
            Self::Ready(_) => return Step::Broken,
            Self::Arguments(arguments) => return arguments.step(character, sink),
        }
        Step::More
    }
}

/// Parser of the text after `<longcat_tool_call>`: an object in the first models, tags in the later ones.
#[derive(Debug)]
pub(super) struct LongCat {
    begun: bool,
    object: Option<Envelope>,
    tags: Xml,
}

impl LongCat {
    pub(super) fn new(tags: Xml) -> Self {
        Self { begun: false, object: None, tags }
    }
}

impl Body for LongCat {
    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        if !self.begun {
            if character.is_whitespace() {
                return Step::More;
            }
            self.begun = true;
            self.object = (character == '{').then(Envelope::marked);
        }
        match &mut self.object {
            Some(call) => call.step(character, sink),
            None => self.tags.step(character, sink),
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        self.tags.finish(sink);
    }

    fn abandon(&mut self, sink: &mut Sink) {
        self.tags.abandon(sink);
    }
}
