//! Calls as tags around untyped text: `<function=f><parameter=a>\n…\n</parameter></function>`.

use std::sync::Arc;

use super::calls::{Body, Step};
use super::markers::{Expect, Markers};
use super::sink::Sink;
use super::tools::{Kind, Tools};
use crate::escape::escape_json;

/// Markers that may follow a function's name or a parameter.
const IN_FUNCTION: &[&str] = &["<parameter=", "</function>", "</tool_call>"];
const PARAMETER: usize = 0;

/// Markers that end a value. One line break before them belongs to the markup, as does the one after the parameter's
/// name. A model that omits the closing tag begins the next tag on a new line.
const AFTER_VALUE: &[&str] = &["\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>"];
const NEXT_PARAMETER: usize = 2;
const END_OF_FUNCTION: usize = 3;

/// Parses one function and writes its parameters as a JSON object in the layout of `json.dumps`. A parameter of any
/// text is passed on as it arrives, one of another type when it is complete.
#[derive(Debug)]
pub(super) struct Xml {
    at: At,
    tools: Arc<Tools>,
    function: String,
    parameter: String,
    kind: Kind,
    /// Part of a parameter's value that has not been passed on.
    value: String,
}

#[derive(Debug)]
enum At {
    Tag(Expect),
    Function,
    Between(Markers),
    Parameter,
    /// Before the first character of a value.
    Line,
    Value(Markers),
}

impl Xml {
    /// Creates the parser after `<tool_call>`.
    pub(super) fn call(tools: Arc<Tools>) -> Self {
        let kind = tools.kind("", "");
        let at = At::Tag(Expect::new("<function="));
        let [function, parameter, value] = [const { String::new() }; 3];
        Self { at, tools, function, parameter, kind, value }
    }

    /// Creates the parser after `<function=`.
    pub(super) fn function(tools: Arc<Tools>) -> Self {
        Self { at: At::Function, ..Self::call(tools) }
    }

    fn begin_parameter(&mut self, sink: &mut Sink) {
        let mut json = String::from(if sink.has_arguments() { ", \"" } else { "{\"" });
        escape_json(&self.parameter, &mut json);
        json.push_str("\": ");
        self.kind = self.tools.kind(&self.function, &self.parameter);
        if self.kind.is_text() {
            json.push('"');
        }
        sink.arguments(&json);
        self.parameter.clear();
        self.at = At::Line;
    }

    /// Passes on the part of a value that is certain.
    fn stream_value(&mut self, sink: &mut Sink) {
        if self.kind.is_text() && !self.value.is_empty() {
            let mut json = String::new();
            escape_json(&self.value, &mut json);
            sink.arguments(&json);
            self.value.clear();
        }
    }

    fn end_value(&mut self, marker: usize, sink: &mut Sink) -> Step {
        if self.kind.is_text() {
            sink.argument('"');
        } else {
            sink.arguments(&self.kind.json(&self.value));
            self.value.clear();
        }
        self.at = match marker {
            NEXT_PARAMETER => At::Parameter,
            END_OF_FUNCTION => return self.end(sink),
            _ => At::Between(Markers::new(IN_FUNCTION)),
        };
        Step::More
    }

    fn end(&mut self, sink: &mut Sink) -> Step {
        if sink.has_arguments() {
            sink.argument('}');
        }
        sink.end();
        Step::Done
    }
}

impl Body for Xml {
    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        match &mut self.at {
            At::Tag(expect) => match expect.step(character) {
                None => return Step::Broken,
                Some(false) => {}
                Some(true) => self.at = At::Function,
            },
            At::Function if character == '>' && !self.function.is_empty() => {
                sink.begin(self.function.clone());
                self.at = At::Between(Markers::new(IN_FUNCTION));
            }
            At::Parameter if character == '>' => self.begin_parameter(sink),
            At::Function | At::Parameter if "<>\n".contains(character) => return Step::Broken,
            At::Function => self.function.push(character),
            At::Parameter => self.parameter.push(character),
            At::Between(markers) => {
                // Text in this place has no meaning; it is collected in `value` and dropped.
                match markers.step(character, &mut self.value) {
                    Some(PARAMETER) => self.at = At::Parameter,
                    Some(_) => return self.end(sink),
                    None => {}
                }
                self.value.clear();
            }
            At::Line => {
                self.at = At::Value(Markers::new(AFTER_VALUE));
                if character != '\n' {
                    return self.step(character, sink);
                }
            }
            At::Value(markers) => {
                let marker = markers.step(character, &mut self.value);
                self.stream_value(sink);
                if let Some(marker) = marker {
                    return self.end_value(marker, sink);
                }
            }
        }
        Step::More
    }
}
