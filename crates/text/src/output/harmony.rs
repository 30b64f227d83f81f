//! Harmony, the format of gpt-oss: a sequence of messages, each of which names its channel and its recipient.
//!
//! `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
//! <|message|>{…}<|call|>`. The recipient may also come before the channel, as `assistant to=functions.f<|channel|>…`,
//! and the prompt ends in `<|start|>assistant`.

use super::markers::Markers;
use super::sink::Sink;
use super::tools::Tools;

const START: usize = 0;
const CHANNEL: usize = 1;
const CONSTRAIN: usize = 2;
const MESSAGE: usize = 3;

/// The first begins a header, and the last three end a message.
const MARKERS: &[&str] =
    &["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];

/// Length of the longest header, in bytes. Longer text is content.
const MAX_HEADER: usize = 512;

/// Separates the messages of gpt-oss by channel.
///
/// Analysis and calls of built-in tools are reasoning, calls of functions are calls, and the final channel and
/// commentary without a recipient are content. Messages of one kind are separated by a line break, as vLLM joins them.
/// Text outside messages is content.
#[derive(Debug)]
pub(super) struct Harmony {
    at: At,
    markers: Markers,
    /// Whether reasoning is passed on as such; otherwise it is content.
    reasons: bool,
    /// Functions of the request; without them a call is content, with its header.
    tools: Option<Tools>,
    /// Text of the current header, which becomes content if it is none.
    raw: String,
    header: Header,
    /// Whether reasoning and content were passed on, and whether the next of it belongs to another message.
    reasoning: Flow,
    content: Flow,
    scratch: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// At the start or after a message, before anything but the start of a header.
    Between,
    Header,
    Body(ChannelKind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChannelKind {
    Reasoning,
    Content,
    Call,
}

#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    begun: bool,
    separate: bool,
}

impl Flow {
    /// Begins another message.
    fn message(&mut self) {
        self.separate = self.begun;
    }

    /// Returns whether a line break comes before the next character.
    fn takes_break(&mut self) -> bool {
        self.begun = true;
        std::mem::take(&mut self.separate)
    }
}

/// Parts of a header.
#[derive(Debug, Default)]
struct Header {
    role: String,
    /// Channel and recipient, after the marker.
    channel: Option<String>,
    /// Whether the type of the content has begun, which is ignored.
    typed: bool,
}

impl Header {
    fn push(&mut self, character: char) {
        match &mut self.channel {
            _ if self.typed => {}
            Some(channel) => channel.push(character),
            None => self.role.push(character),
        }
    }

    fn words(&self) -> impl Iterator<Item = &str> {
        self.role.split_whitespace().chain(self.channel.iter().flat_map(|channel| channel.split_whitespace()))
    }

    fn recipient(&self) -> Option<&str> {
        self.words().find_map(|word| word.strip_prefix("to="))
    }

    fn is_analysis(&self) -> bool {
        self.channel.iter().flat_map(|channel| channel.split_whitespace()).next() == Some("analysis")
    }

    /// Returns whether this may be the start of a header before its channel. The role is `assistant`, or empty if it is
    /// in the prompt.
    fn may_open(&self, role: &str) -> bool {
        self.words().all(|word| word.starts_with("to=") || "to=".starts_with(word) || role.starts_with(word))
    }
}

/// Returns whether a header may contain this character.
fn in_header(character: char) -> bool {
    character.is_alphanumeric() || character == ' ' || (character.is_ascii_punctuation() && !"{}\"".contains(character))
}

impl Harmony {
    /// Creates the parser of the text that follows `prompt`, which may end within a message.
    pub(super) fn new(reasons: bool, tools: Option<&[serde_json::Value]>, prompt: &str) -> Self {
        let mut harmony = Self {
            at: At::Between,
            markers: Markers::new(MARKERS),
            reasons,
            tools: tools.map(Tools::new),
            raw: String::new(),
            header: Header::default(),
            reasoning: Flow::default(),
            content: Flow::default(),
            scratch: String::new(),
        };
        if let Some(kind) = continued(prompt) {
            harmony.at = At::Body(kind);
        }
        harmony
    }

    /// Returns whether the text so far ends in reasoning.
    pub(super) fn is_open(&self) -> bool {
        self.reasons && self.at == At::Body(ChannelKind::Reasoning)
    }

    /// Takes the next character and appends content to `content`.
    pub(super) fn step(&mut self, character: char, sink: &mut Sink, content: &mut String) {
        let mut text = std::mem::take(&mut self.scratch);
        let marker = self.markers.step(character, &mut text);
        text.drain(..).for_each(|character| self.text(character, sink, content));
        self.scratch = text;
        if let Some(marker) = marker {
            self.marker(marker, sink, content);
        }
    }

    /// Ends the text. A header that is cut off is markup.
    pub(super) fn finish(&mut self, sink: &mut Sink, content: &mut String) {
        let held = self.markers.take();
        let within_header = self.at == At::Header;
        if within_header && (self.header.channel.is_some() || self.header.may_open("assistant")) {
            return;
        }
        held.chars().for_each(|character| self.text(character, sink, content));
        let said = self.reasoning.begun || self.content.begun || sink.calls() > 0;
        if self.at == At::Between && said && self.raw.trim().is_empty() {
            return;
        }
        self.give_back(content);
        sink.abandon();
    }

    /// Handles a character that belongs to no marker.
    fn text(&mut self, character: char, sink: &mut Sink, content: &mut String) {
        match self.at {
            At::Body(kind) => self.body(kind, character, sink, content),
            At::Between | At::Header => {
                self.raw.push(character);
                self.header.push(character);
                let opening = self.at == At::Header || self.header.may_open("");
                let blank = self.at == At::Between && character.is_whitespace();
                if !opening || !(blank || in_header(character)) || self.raw.len() > MAX_HEADER {
                    self.give_back(content);
                }
            }
        }
    }

    fn body(&mut self, kind: ChannelKind, character: char, sink: &mut Sink, content: &mut String) {
        match kind {
            ChannelKind::Call => sink.argument(character),
            ChannelKind::Reasoning if self.reasons => {
                if self.reasoning.takes_break() {
                    sink.reasoning('\n');
                }
                sink.reasoning(character);
            }
            ChannelKind::Reasoning | ChannelKind::Content => {
                if self.content.takes_break() {
                    content.push('\n');
                }
                content.push(character);
            }
        }
    }

    fn marker(&mut self, marker: usize, sink: &mut Sink, content: &mut String) {
        match (self.at, marker) {
            (At::Header, CHANNEL) => {
                self.header.channel.get_or_insert_default();
                self.header.push(' ');
                self.raw.push_str(MARKERS[marker]);
            }
            (At::Header, CONSTRAIN) => {
                self.header.typed = true;
                self.raw.push_str(MARKERS[marker]);
            }
            (At::Header, MESSAGE) => {
                self.raw.push_str(MARKERS[marker]);
                self.begin(sink, content);
            }
            (At::Body(_), CONSTRAIN | MESSAGE) => {
                MARKERS[marker].chars().for_each(|character| self.text(character, sink, content));
            }
            (_, START | CHANNEL) => self.open(marker, sink, content),
            // Markers that end a message, or that mean nothing here.
            _ => {
                self.end(sink, content);
                self.at = At::Between;
            }
        }
    }

    /// Begins a header.
    fn open(&mut self, marker: usize, sink: &mut Sink, content: &mut String) {
        // The recipient may come before the channel.
        let addressed = self.at == At::Between && marker == CHANNEL && self.header.recipient().is_some();
        if !addressed {
            self.end(sink, content);
        }
        self.at = At::Header;
        if marker == CHANNEL {
            self.header.channel = Some(String::new());
        }
        self.raw.push_str(MARKERS[marker]);
    }

    /// Ends a message or what looked like a header.
    fn end(&mut self, sink: &mut Sink, content: &mut String) {
        match self.at {
            At::Body(ChannelKind::Call) => sink.end(),
            At::Body(_) => {}
            At::Between if self.raw.trim().is_empty() => {}
            At::Between | At::Header => self.give_back(content),
        }
        self.raw.clear();
        self.header = Header::default();
    }

    /// Begins the message of a complete header.
    fn begin(&mut self, sink: &mut Sink, content: &mut String) {
        let recipient = self.header.recipient();
        let function = recipient.and_then(|to| match to.strip_prefix("functions.") {
            None if self.tools.as_ref().is_some_and(|tools| tools.contains(to)) => Some(to),
            function => function,
        });
        let kind = match (function, &self.tools) {
            (Some(name), Some(_)) if !name.is_empty() => {
                sink.begin(name.to_owned());
                ChannelKind::Call
            }
            (Some(_), _) => return self.give_back(content),
            (None, _) if recipient.is_some() || self.header.is_analysis() => ChannelKind::Reasoning,
            _ => ChannelKind::Content,
        };
        self.at = At::Body(kind);
        self.reasoning.message();
        self.content.message();
        self.raw.clear();
        self.header = Header::default();
    }

    /// Passes on the held text as content, because it is no header, and continues with content.
    fn give_back(&mut self, content: &mut String) {
        if !self.raw.is_empty() {
            self.content.begun = true;
            content.push_str(&std::mem::take(&mut self.raw));
        }
        self.at = At::Body(ChannelKind::Content);
        self.header = Header::default();
    }
}

/// Returns the kind of the message in which the prompt ends, which the model continues.
fn continued(prompt: &str) -> Option<ChannelKind> {
    let turn = &prompt[prompt.rfind(MARKERS[START])?..];
    let (header, body) = turn.split_once(MARKERS[MESSAGE])?;
    let ended = MARKERS[MESSAGE + 1..].iter().any(|end| body.contains(end));
    let kind = if header.contains("analysis") { ChannelKind::Reasoning } else { ChannelKind::Content };
    (!ended).then_some(kind)
}

/// Returns whether the prompt ends in the answer, so that no reasoning follows.
pub(super) fn is_answering(prompt: &str) -> bool {
    continued(prompt) == Some(ChannelKind::Content)
}
