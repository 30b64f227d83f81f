//! Collection of the parsers' results.

use super::OutputDelta;

/// Collects deltas, joins neighbours of the same kind and tracks the current call.
#[derive(Debug, Default)]
pub(super) struct Sink {
    deltas: Vec<OutputDelta>,
    /// Number of calls that have begun.
    calls: u32,
    in_call: bool,
    /// Whether the current call has arguments.
    has_arguments: bool,
    /// Number of names and characters of arguments so far.
    passed_on: usize,
}

impl Sink {
    /// Moves the collected deltas to the end of `out`.
    pub(super) fn drain_into(&mut self, out: &mut Vec<OutputDelta>) {
        out.append(&mut self.deltas);
    }

    /// Returns the number of calls that have begun.
    pub(super) fn calls(&self) -> u32 {
        self.calls
    }

    /// Returns whether a call has begun and not ended.
    pub(super) fn in_call(&self) -> bool {
        self.in_call
    }

    /// Returns a number that grows whenever a part of a call is passed on.
    pub(super) fn passed_on(&self) -> usize {
        self.passed_on
    }

    /// Returns whether the current call has arguments so far.
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
        self.passed_on += 1;
    }

    /// Appends a character to the current call's arguments. Whitespace before them is dropped.
    pub(super) fn argument(&mut self, character: char) {
        if !self.has_arguments && character.is_whitespace() {
            return;
        }
        self.has_arguments = true;
        self.passed_on += 1;
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

    /// Ends the current call. Without arguments it gets an empty object.
    pub(super) fn end(&mut self) {
        if self.in_call && !self.has_arguments {
            self.arguments("{}");
        }
        self.in_call = false;
    }

    /// Leaves the current call incomplete: arguments that the model did not write are not invented.
    pub(super) fn abandon(&mut self) {
        self.in_call = false;
    }
}
