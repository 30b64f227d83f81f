//! Separation of calls from content, common to all syntaxes.

use std::fmt::Debug;
use std::sync::Arc;

use super::markers::{Expect, Markers};
use super::sink::Sink;
use super::tool_syntax::{Row, ToolSyntax};
use super::tools::Tools;
use super::xml::{Dialect, Xml};

/// Parses the text of a call or a list of calls after its opening marker.
pub(super) trait Body: Debug + Send {
    /// Takes the next character. A character that breaks the call is not passed on.
    fn step(&mut self, character: char, sink: &mut Sink) -> Step;

    /// Ends the text within the call, and passes on text that is part of it.
    fn finish(&mut self, _sink: &mut Sink) {}

    /// Gives up a broken call, and passes on text that it skipped before the last part that was passed on.
    fn abandon(&mut self, _sink: &mut Sink) {}
}

/// Result of parsing one more character of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The character ends the call.
    Done,
    /// The character is invalid: the text is no call, or a broken one.
    Broken,
}

/// A call that begins with a second marker after the opening one.
#[derive(Debug)]
struct Inner<B> {
    marker: Expect,
    /// Whether the marker is complete.
    begun: bool,
    body: B,
}

impl<B: Body> Body for Inner<B> {
    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        if self.begun {
            return self.body.step(character, sink);
        }
        match self.marker.step(character) {
            Some(complete) => self.begun = complete,
            None => return Step::Broken,
        }
        Step::More
    }

    fn finish(&mut self, sink: &mut Sink) {
        self.body.finish(sink);
    }

    fn abandon(&mut self, sink: &mut Sink) {
        self.body.abandon(sink);
    }
}

/// Separates content from calls.
///
/// Text that proves not to be a call before its name is known becomes content again, including the marker. A call that
/// breaks later keeps the parts already passed on, and the text after them is content.
///
/// [`ToolSyntax::JsonArray`] is different at the end of the text: a grammar enforces it, so the start of a call is never
/// content, and is dropped.
#[derive(Debug)]
pub(super) struct ToolParser {
    syntax: ToolSyntax,
    row: &'static Row,
    tools: Arc<Tools>,
    markers: Markers,
    /// Call that is being parsed.
    body: Option<Box<dyn Body>>,
    /// Text of a possible call since something of it was passed on.
    raw: String,
    /// Whether only the `gap` has come since the start or the last call.
    quiet: bool,
    /// Text that is content only if more content follows: whitespace, and after a call separators.
    gap: String,
    scratch: String,
}

impl ToolParser {
    pub(super) fn new(syntax: ToolSyntax, tools: &[serde_json::Value]) -> Self {
        let row = syntax.row();
        Self {
            syntax,
            tools: Arc::new(Tools::new(tools)),
            markers: Markers::new(row.markers),
            row,
            body: None,
            raw: String::new(),
            quiet: true,
            gap: String::new(),
            scratch: String::new(),
        }
    }

    /// Takes the next character.
    pub(super) fn step(&mut self, character: char, sink: &mut Sink) {
        if self.body.is_some() { self.call(character, sink) } else { self.text(character, sink) }
    }

    /// Ends the text.
    pub(super) fn finish(&mut self, sink: &mut Sink) {
        if let Some(mut body) = self.body.take() {
            body.finish(sink);
        }
        let raw = std::mem::take(&mut self.raw);
        // The rest of an unfinished call is markup.
        let dropped = sink.in_call() || self.syntax == ToolSyntax::JsonArray;
        sink.abandon();
        if !dropped {
            raw.chars().for_each(|character| self.content(character, sink));
        }
        let held = self.markers.take();
        let after_call = self.quiet && sink.calls() > 0;
        // The text may end within the marker that ends a call.
        if !(after_call && self.row.markers[self.row.opening..].iter().any(|marker| marker.starts_with(&held))) {
            held.chars().for_each(|character| self.content(character, sink));
        }
        if sink.calls() == 0 {
            std::mem::take(&mut self.gap).chars().for_each(|character| sink.content(character));
        }
    }

    /// Searches for the beginning of a call.
    fn text(&mut self, character: char, sink: &mut Sink) {
        let mut text = std::mem::take(&mut self.scratch);
        let marker = self.markers.step(character, &mut text);
        for character in text.drain(..) {
            if let Some((first, bare)) = self.row.bare
                && self.quiet
                && character == first
                && self.body.is_none()
            {
                self.body = Some(bare(self));
            }
            // No marker starts with the character that began this call, so no text is held back.
            match self.body {
                Some(_) => self.call(character, sink),
                None => self.content(character, sink),
            }
        }
        self.scratch = text;
        let Some(index) = marker else { return };
        let marker = self.row.markers[index];
        if index < self.row.opening {
            self.body = Some((self.row.body)(self, index));
            self.raw.push_str(marker);
        } else if self.quiet && sink.calls() > 0 {
            // The text before it belongs to the markup too.
            self.gap.clear();
        } else {
            marker.chars().for_each(|character| self.content(character, sink));
        }
    }

    /// Continues a call.
    fn call(&mut self, character: char, sink: &mut Sink) {
        let Some(body) = &mut self.body else { return };
        let (passed_on, in_call) = (sink.passed_on(), sink.in_call());
        let step = body.step(character, sink);
        if step == Step::Broken {
            sink.abandon();
            if let Some(mut body) = self.body.take() {
                body.abandon(sink);
            }
            let raw = std::mem::take(&mut self.raw);
            raw.chars().for_each(|character| self.content(character, sink));
            // The character may begin a call itself, in which case it does not break it.
            self.text(character, sink);
            return;
        }
        if sink.passed_on() > passed_on || (in_call && !sink.in_call()) {
            self.raw.clear();
            self.gap.clear();
            self.quiet = true;
        } else {
            self.raw.push(character);
        }
        if step == Step::Done {
            self.body = None;
            self.raw.clear();
        }
    }

    /// Passes on content, except a gap that may be the end of it.
    fn content(&mut self, character: char, sink: &mut Sink) {
        let separator = character.is_whitespace() || (sink.calls() > 0 && self.row.separators.contains(character));
        if self.quiet && separator {
            self.gap.push(character);
            return;
        }
        self.quiet = false;
        std::mem::take(&mut self.gap).chars().for_each(|character| sink.content(character));
        sink.content(character);
    }

    /// The tools of the request.
    pub(super) fn tools(&self) -> Arc<Tools> {
        Arc::clone(&self.tools)
    }

    /// Returns the parser of a call in this dialect.
    pub(super) fn xml(&self, dialect: &'static Dialect, marker: usize) -> Box<dyn Body> {
        self.inner(Xml::new(dialect, self.tools()), marker)
    }

    /// Returns the parser of a call after the last opening marker. The markers before it only announce it.
    pub(super) fn inner(&self, body: impl Body + 'static, marker: usize) -> Box<dyn Body> {
        let last = self.row.opening - 1;
        if marker == last {
            return Box::new(body);
        }
        Box::new(Inner { marker: Expect::new(self.row.markers[last]), begun: false, body })
    }
}
