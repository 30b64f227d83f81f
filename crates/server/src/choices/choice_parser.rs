//! Parses the text of a sequence into reasoning, content and tool calls.

use std::sync::Arc;

use octavo_text::{OutputDelta, OutputParser, ReasoningSyntax, ToolSyntax};
use serde::de::IgnoredAny;
use serde_json::Value;

/// The settings for parsing the text of a request's sequences; by default, all text is content.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parsing {
    pub(crate) reasoning: Option<ReasoningSyntax>,
    pub(crate) calls: Calls,
    /// The end of the rendered prompt.
    pub(crate) prompt_tail: String,
    /// Whether reasoning is counted but not returned.
    pub(crate) hide_reasoning: bool,
    /// Whether only the first tool call is returned.
    pub(crate) first_call_only: bool,
    /// Whether a call that is cut off is left out.
    pub(crate) complete_calls_only: bool,
}

/// The source of tool calls.
#[derive(Clone, Debug, Default)]
pub(crate) enum Calls {
    /// There are no tool calls.
    #[default]
    None,
    /// The model chooses to call tools, whose definitions are in its prompt.
    Written(ToolSyntax, Arc<[Value]>),
    /// All content is the arguments of a call of this function.
    Named(String),
}

/// The parser of one sequence.
pub(crate) struct ChoiceParser {
    parser: Option<Box<OutputParser>>,
    /// The function that the content is the arguments of.
    named: Option<String>,
    hide_reasoning: bool,
    first_call_only: bool,
    complete_calls_only: bool,
    /// The current call, held back until it is complete.
    held: Vec<OutputDelta>,
    /// Whether at least one call has begun.
    called: bool,
    scratch: Vec<OutputDelta>,
}

impl ChoiceParser {
    pub(crate) fn new(parsing: &Parsing) -> Self {
        let (tools, named) = match &parsing.calls {
            Calls::None => (None, None),
            Calls::Written(syntax, tools) => (Some((*syntax, &tools[..])), None),
            Calls::Named(name) => (None, Some(name.clone())),
        };
        let parses = parsing.reasoning.is_some() || tools.is_some();
        Self {
            parser: parses.then(|| Box::new(OutputParser::new(parsing.reasoning, tools, &parsing.prompt_tail))),
            named,
            hide_reasoning: parsing.hide_reasoning,
            first_call_only: parsing.first_call_only,
            complete_calls_only: parsing.complete_calls_only,
            held: Vec::new(),
            called: false,
            scratch: Vec::new(),
        }
    }

    /// Parses more text and adds the parts to `out`.
    pub(crate) fn push(&mut self, text: &str, out: &mut Vec<OutputDelta>) {
        match &mut self.parser {
            Some(parser) => parser.push(text, &mut self.scratch),
            None if text.is_empty() => return,
            None => self.scratch.push(OutputDelta::Content(text.to_owned())),
        }
        self.sort_out(out);
    }

    /// Ends the text.
    pub(crate) fn finish(&mut self, out: &mut Vec<OutputDelta>) {
        if let Some(parser) = &mut self.parser {
            parser.finish(&mut self.scratch);
        }
        self.sort_out(out);
        self.release(out);
    }

    /// Whether the text so far ends in reasoning.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(|parser| parser.is_reasoning())
    }

    /// Whether the model chose to call a function.
    pub(crate) fn has_called(&self) -> bool {
        self.called && self.named.is_none()
    }

    fn sort_out(&mut self, out: &mut Vec<OutputDelta>) {
        for delta in std::mem::take(&mut self.scratch) {
            match delta {
                OutputDelta::Reasoning(_) if self.hide_reasoning => {}
                OutputDelta::ToolCall { index, .. } | OutputDelta::Arguments { index, .. }
                    if self.first_call_only && index > 0 => {}
                OutputDelta::Content(fragment) if self.named.is_some() => {
                    if !std::mem::replace(&mut self.called, true)
                        && let Some(name) = self.named.clone()
                    {
                        self.add(OutputDelta::ToolCall { index: 0, name }, out);
                    }
                    self.add(OutputDelta::Arguments { index: 0, fragment }, out);
                }
                delta => {
                    self.called |= matches!(delta, OutputDelta::ToolCall { .. });
                    self.add(delta, out);
                }
            }
        }
    }

    /// Adds a delta to `out`, or to the held call.
    fn add(&mut self, delta: OutputDelta, out: &mut Vec<OutputDelta>) {
        match delta {
            OutputDelta::ToolCall { .. } if self.complete_calls_only => {
                self.release(out);
                self.held.push(delta);
            }
            OutputDelta::Arguments { .. } if self.complete_calls_only => append(&mut self.held, delta),
            delta => append(out, delta),
        }
    }

    /// Adds the held call to `out`, or drops it if its arguments are cut off.
    fn release(&mut self, out: &mut Vec<OutputDelta>) {
        let complete = match self.held.last() {
            Some(OutputDelta::Arguments { fragment, .. }) => {
                // Arguments that nest too deeply for serde_json are not cut off.
                !serde_json::from_str::<IgnoredAny>(fragment).is_err_and(|error| error.is_eof())
            }
            _ => false,
        };
        if complete {
            out.append(&mut self.held);
        } else if let Some(OutputDelta::ToolCall { index: 0, .. }) = self.held.first() {
            self.called = false;
        }
        self.held.clear();
    }
}

/// Adds a delta, which is merged into the last one of the same kind.
pub(crate) fn append(out: &mut Vec<OutputDelta>, delta: OutputDelta) {
    match (out.last_mut(), &delta) {
        (Some(OutputDelta::Content(last)), OutputDelta::Content(text))
        | (Some(OutputDelta::Reasoning(last)), OutputDelta::Reasoning(text)) => last.push_str(text),
        (Some(OutputDelta::Arguments { index: open, fragment: last }), OutputDelta::Arguments { index, fragment })
            if open == index =>
        {
            last.push_str(fragment)
        }
        _ => out.push(delta),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(parsing: &Parsing, texts: &[&str]) -> (Vec<OutputDelta>, bool) {
        let (mut parts, mut out) = (ChoiceParser::new(parsing), Vec::new());
        texts.iter().for_each(|text| parts.push(text, &mut out));
        parts.finish(&mut out);
        (out, parts.has_called())
    }

    #[test]
    fn without_a_syntax_text_is_content() {
        let (out, called) = parts(&Parsing::default(), &["a", "", "<think>b"]);
        assert_eq!(out, [OutputDelta::Content("a<think>b".into())]);
        assert!(!called);
    }

    #[test]
    fn the_content_of_a_named_call_is_its_arguments() {
        let parsing = Parsing { calls: Calls::Named("f".into()), ..Parsing::default() };
        let (out, called) = parts(&parsing, &["{\"a\"", ": 1}"]);
        let fragment = "{\"a\": 1}".to_owned();
        let call = OutputDelta::ToolCall { index: 0, name: "f".into() };
        assert_eq!(out, [call, OutputDelta::Arguments { index: 0, fragment }]);
        assert!(!called, "a forced call ends with stop");
    }

    #[test]
    fn forced_calls_that_are_cut_off_are_left_out() {
        let required = Calls::Written(ToolSyntax::JsonArray, Arc::default());
        let complete = [
            OutputDelta::ToolCall { index: 0, name: "f".into() },
            OutputDelta::Arguments { index: 0, fragment: "{\"a\": 1}".into() },
        ];
        let text = r#"[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": 2}}]"#;
        for cut in 0..text.len() - 2 {
            let parsing = Parsing { calls: required.clone(), complete_calls_only: true, ..Parsing::default() };
            let (out, called) = parts(&parsing, &[&text[..cut]]);
            let count = if cut > text.find('}').unwrap() { 2 } else { 0 };
            assert_eq!(out, complete[..count], "{cut}");
            assert_eq!(called, count > 0);
        }
        for cut in 0..8 {
            let parsing = Parsing { calls: Calls::Named("f".into()), complete_calls_only: true, ..Parsing::default() };
            assert_eq!(parts(&parsing, &[&"{\"a\": 1}"[..cut]]), (vec![], false), "{cut}");
        }
    }

    #[test]
    fn deltas_of_a_kind_are_joined() {
        let arguments = |index, fragment: &str| OutputDelta::Arguments { index, fragment: fragment.into() };
        let mut out = vec![];
        for delta in [arguments(0, "{"), arguments(0, "}"), arguments(1, "{}")] {
            append(&mut out, delta);
        }
        assert_eq!(out, [arguments(0, "{}"), arguments(1, "{}")]);
    }
}
