//! Where the parsers put what they find.

use super::OutputDelta;

/// Collects deltas, joining neighbours of a kind, and knows the call that is being made.
#[derive(Debug, Default)]
pub(super) struct Sink {
    deltas: Vec<OutputDelta>,
    /// How many calls have begun.
    calls: u32,
    in_call: bool,
    /// The current call has arguments.
    has_arguments: bool,
}

impl Sink {
    /// Moves what was collected to the end of `out`.
    pub(super) fn drain_into(&mut self, out: &mut Vec<OutputDelta>) {
        out.append(&mut self.deltas);
    }

    /// How many calls have begun.
    pub(super) fn calls(&self) -> u32 {
        self.calls
    }

    /// Whether a call has begun and not ended.
    pub(super) fn in_call(&self) -> bool {
        self.in_call
    }

    /// Whether the current call has arguments so far.
    pub(super) fn has_arguments(&self) -> bool {
        self.has_arguments
    }

    pub(super) fn reasoning(&mut self, character: char) {
        match self.deltas.last_mut() {
            Some(OutputDelta::Reasoning(text)) => text.push(character),
            _ => self.deltas.push(OutputDelta::Reasoning(character.into())),
        }
    }

    pub(super) fn content(&mut self, character: char) {
        match self.deltas.last_mut() {
            Some(OutputDelta::Content(text)) => text.push(character),
            _ => self.deltas.push(OutputDelta::Content(character.into())),
        }
    }

    /// Begins a call. `name` is not empty.
    pub(super) fn begin(&mut self, name: String) {
        self.deltas.push(OutputDelta::ToolCall { index: self.calls, name });
        self.calls = self.calls.saturating_add(1);
        self.in_call = true;
        self.has_arguments = false;
    }

    /// The next character of the current call's arguments. Whitespace before them is not part of them.
    pub(super) fn argument(&mut self, character: char) {
        if !self.has_arguments && character.is_whitespace() {
            return;
        }
        self.has_arguments = true;
        match self.deltas.last_mut() {
            Some(OutputDelta::Arguments { fragment, .. }) => fragment.push(character),
            _ => {
                let index = self.calls.saturating_sub(1);
                self.deltas.push(OutputDelta::Arguments { index, fragment: character.into() });
            }
        }
    }

    pub(super) fn arguments(&mut self, text: &str) {
        text.chars().for_each(|character| self.argument(character));
    }

    /// Ends the current call: without arguments it gets an empty object.
    pub(super) fn end(&mut self) {
        if self.in_call && !self.has_arguments {
            self.arguments("{}");
        }
        self.in_call = false;
    }

    /// Leaves the current call as far as it came: an argument that the model did not write is not made up.
    pub(super) fn abandon(&mut self) {
        self.in_call = false;
    }
}
