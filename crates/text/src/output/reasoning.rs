//! Separation of reasoning from the answer that follows it.

use super::markers::Markers;
use super::sink::Sink;
use super::syntax::{EndMarkers, ReasoningSyntax};
use super::tool_syntax::ToolSyntax;

/// Separates reasoning from the text that follows it.
///
/// Line breaks directly after the start marker and around the end marker belong to neither part: the models' own
/// templates write them there and strip them when the message comes back. (vLLM keeps them.) A second block of
/// reasoning is content, as is a marker in a place where it has no meaning.
#[derive(Debug)]
pub(super) struct Reasoning {
    at: At,
    /// Whether the text is reasoning even without the start marker.
    by_default: bool,
    /// Number of line breaks that may be the end of the reasoning.
    line_breaks: usize,
    /// Whether some reasoning was passed on.
    started: bool,
    ends: EndMarkers,
    /// Text after the start marker that belongs to the markup.
    label: &'static str,
    scratch: String,
}

#[derive(Debug)]
enum At {
    /// Before any text but whitespace, which is held back.
    Start(Markers, String),
    /// After the start marker, in what may be the label.
    Label(String),
    Reasoning(Markers),
    /// After the end marker, before any text but line breaks.
    Ended,
    Content,
}

impl Reasoning {
    pub(super) fn new(syntax: ReasoningSyntax, tools: Option<ToolSyntax>, prompt: &str) -> Self {
        let start = || At::Start(Markers::new(syntax.start_markers()), String::new());
        let (at, by_default) = match syntax.opened_by(prompt) {
            Some(true) => (start(), true),
            Some(false) => (At::Content, false),
            None => (start(), syntax.is_default()),
        };
        let (ends, label) = (syntax.end_markers(tools), syntax.label());
        Self { at, by_default, line_breaks: 0, started: false, ends, label, scratch: String::new() }
    }

    /// Returns whether the text so far ends in reasoning.
    pub(super) fn is_open(&self) -> bool {
        match self.at {
            At::Start(..) => self.by_default,
            At::Label(_) | At::Reasoning(_) => true,
            At::Ended | At::Content => false,
        }
    }

    /// Takes the next character and appends text outside reasoning to `content`.
    pub(super) fn step(&mut self, character: char, sink: &mut Sink, content: &mut String) {
        match &mut self.at {
            At::Start(marker, text) => {
                let blank = text.len();
                if marker.step(character, text).is_some() {
                    self.at = At::Label(String::new());
                } else if text[blank..].contains(|character: char| !character.is_whitespace()) {
                    let text = std::mem::take(text) + &marker.take();
                    self.start_without_marker(&text, sink, content);
                }
            }
            At::Label(text) => {
                text.push(character);
                if !self.label.starts_with(text.as_str()) {
                    let text = std::mem::take(text);
                    self.begin(&text, sink, content);
                } else if text.len() == self.label.len() {
                    self.begin("", sink, content);
                }
            }
            At::Reasoning(ends) => {
                let end = ends.step(character, &mut self.scratch);
                self.give_out(sink);
                if let Some(index) = end {
                    let own = index < self.ends.own;
                    self.at = if own { At::Ended } else { At::Content };
                    content.push_str(if own { "" } else { self.ends.markers[index] });
                }
            }
            At::Ended if character == '\n' => {}
            At::Ended | At::Content => {
                self.at = At::Content;
                content.push(character);
            }
        }
    }

    /// Ends the text and passes on the held-back text.
    pub(super) fn finish(&mut self, sink: &mut Sink, content: &mut String) {
        if let At::Start(marker, text) = &mut self.at {
            let text = std::mem::take(text) + &marker.take();
            self.start_without_marker(&text, sink, content);
        }
        if let At::Label(text) = &mut self.at {
            let text = std::mem::take(text);
            self.begin(&text, sink, content);
        }
        if let At::Reasoning(ends) = &mut self.at {
            self.scratch.push_str(&ends.take());
            self.give_out(sink);
            (0..std::mem::take(&mut self.line_breaks)).for_each(|_| sink.reasoning('\n'));
        }
    }

    /// Handles `text`, the first of the text, which is not the start marker.
    fn start_without_marker(&mut self, text: &str, sink: &mut Sink, content: &mut String) {
        if self.by_default {
            self.begin(text, sink, content);
        } else {
            self.at = At::Content;
            content.push_str(text);
        }
    }

    /// Begins the reasoning with `text`.
    fn begin(&mut self, text: &str, sink: &mut Sink, content: &mut String) {
        self.at = At::Reasoning(Markers::new(self.ends.markers));
        text.chars().for_each(|character| self.step(character, sink, content));
    }

    /// Passes on the part of the reasoning that is certain.
    fn give_out(&mut self, sink: &mut Sink) {
        for character in self.scratch.drain(..) {
            if character == '\n' {
                self.line_breaks += usize::from(self.started);
                continue;
            }
            (0..std::mem::take(&mut self.line_breaks)).for_each(|_| sink.reasoning('\n'));
            self.started = true;
            sink.reasoning(character);
        }
    }
}
