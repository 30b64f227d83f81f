//! Calls as tags around untyped text: `<function=f><parameter=a>\n…\n</parameter></function>`.

use std::sync::Arc;

use super::calls::{Body, Step};
use super::markers::{Expect, Markers};
use super::sink::Sink;
use super::tools::{ArgumentKind, Tools};
use crate::escape::escape_json;

/// Tags of one syntax.
#[derive(Debug)]
pub(super) struct Dialect {
    /// Whether the name of the function follows the marker of the call directly, without a tag or quotes.
    bare_name: bool,
    /// Ends of the function's name: the first is part of the opening tag, the others are as in `between`.
    name_ends: &'static [&'static str],
    /// Markers that may follow a function's name or a parameter: the first begins a parameter, the others end the call.
    between: &'static [&'static str],
    /// End of the parameter's name.
    parameter_end: &'static [&'static str],
    /// Text between the parameter's name and its value.
    value_start: Option<&'static str>,
    /// Whether one line break at the start of a value belongs to the markup.
    lines: bool,
    /// Ends of a value: the first `closers` end only the value, the next also begins a parameter and the last also ends
    /// the call, for models that omit the closing tag.
    value_ends: &'static [&'static str],
    closers: usize,
}

/// Qwen3-Coder and Seed-OSS. One line break before the end of a value belongs to the markup.
pub(super) const QWEN: Dialect = Dialect {
    bare_name: false,
    name_ends: &[">"],
    between: &["<parameter=", "</function>", "</tool_call>", "</seed:tool_call>"],
    parameter_end: &[">"],
    value_start: None,
    lines: true,
    value_ends: &["\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>"],
    closers: 2,
};

/// MiniMax-M2. Names are in quotes.
pub(super) const MINIMAX: Dialect = Dialect {
    between: &["<parameter name=", "</invoke>", "</minimax:tool_call>"],
    lines: false,
    value_ends: &["</parameter>", "\n<parameter name=", "\n</invoke>"],
    closers: 1,
    ..QWEN
};

/// DeepSeek-V3.2. Names are in quotes, and an attribute of a parameter tells text from JSON.
pub(super) const DSML: Dialect = Dialect {
    between: &["<｜DSML｜parameter name=", "</｜DSML｜invoke>", "</｜DSML｜function_calls>"],
    value_ends: &["</｜DSML｜parameter>", "\n<｜DSML｜parameter name=", "\n</｜DSML｜invoke>"],
    ..MINIMAX
};

/// GLM. The name of the function has no tag, and the name and the value of a parameter have one each.
pub(super) const GLM: Dialect = Dialect {
    bare_name: true,
    name_ends: &["\n", "<arg_key>", "</tool_call>"],
    between: &["<arg_key>", "</tool_call>"],
    parameter_end: &["</arg_key>"],
    value_start: Some("<arg_value>"),
    value_ends: &["</arg_value>", "\n<arg_key>", "\n</tool_call>"],
    ..MINIMAX
};

/// LongCat: GLM's tags under names of its own.
pub(super) const LONGCAT: Dialect = Dialect {
    name_ends: &["\n", "<longcat_arg_key>", "</longcat_tool_call>"],
    between: &["<longcat_arg_key>", "</longcat_tool_call>"],
    parameter_end: &["</longcat_arg_key>"],
    value_start: Some("<longcat_arg_value>"),
    value_ends: &["</longcat_arg_value>", "\n<longcat_arg_key>", "\n</longcat_tool_call>"],
    ..GLM
};

/// Parses one function and writes its parameters as a JSON object in the layout of `json.dumps`. A parameter of any
/// text is passed on as it arrives, one of another type when it is complete.
#[derive(Debug)]
pub(super) struct Xml {
    dialect: &'static Dialect,
    at: At,
    tools: Arc<Tools>,
    function: String,
    /// Opening tag that is being read: of the function, or of a parameter.
    header: String,
    kind: ArgumentKind,
    /// Part of a parameter's value that has not been passed on.
    value: String,
    /// Text between parameters, which becomes content after the call.
    stray: String,
    /// Length of the part of it that comes before the last parameter.
    before_parameter: usize,
}

#[derive(Debug)]
enum At {
    Function(Markers),
    Between(Markers),
    Parameter(Markers),
    /// Before the tag of a value.
    ValueTag(Expect),
    /// Before the first character of a value.
    Line,
    Value(Markers),
}

impl Xml {
    /// Creates the parser after the marker that the name of the function follows.
    pub(super) fn new(dialect: &'static Dialect, tools: Arc<Tools>) -> Self {
        let kind = tools.kind("", "");
        let at = At::Function(Markers::new(dialect.name_ends));
        let [function, header, value, stray] = [const { String::new() }; 4];
        Self { dialect, at, tools, function, header, kind, value, stray, before_parameter: 0 }
    }

    /// Handles the end of the function's name.
    fn begin(&mut self, end: usize, sink: &mut Sink) -> Step {
        let (name, attributes) = unquoted(&self.header);
        if name.is_empty() || !attributes.is_empty() {
            return Step::Broken;
        }
        name.clone_into(&mut self.function);
        self.header.clear();
        sink.begin(self.function.clone());
        match end {
            0 => self.at = At::Between(Markers::new(self.dialect.between)),
            1 => self.at = At::Parameter(Markers::new(self.dialect.parameter_end)),
            _ => return self.end(sink),
        }
        Step::More
    }

    fn begin_parameter(&mut self, sink: &mut Sink) -> Step {
        let (name, attributes) = unquoted(&self.header);
        let mut json = String::from(if sink.has_arguments() { ", \"" } else { "{\"" });
        escape_json(name, &mut json);
        json.push_str("\": ");
        self.kind = match attributes.trim() {
            "string=\"true\"" => ArgumentKind::TEXT,
            "string=\"false\"" => ArgumentKind::JSON,
            "" => self.tools.kind(&self.function, name),
            // The value, if the end of the tag is missing.
            _ => return Step::Broken,
        };
        if self.kind.is_text() {
            json.push('"');
        }
        sink.arguments(&json);
        self.before_parameter = self.stray.len();
        self.header.clear();
        self.at = match self.dialect.value_start {
            Some(tag) => At::ValueTag(Expect::new(tag)),
            None => At::Line,
        };
        Step::More
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
        self.at = match marker.checked_sub(self.dialect.closers) {
            None => At::Between(Markers::new(self.dialect.between)),
            Some(0) => At::Parameter(Markers::new(self.dialect.parameter_end)),
            Some(_) => return self.end(sink),
        };
        Step::More
    }

    fn end(&mut self, sink: &mut Sink) -> Step {
        if sink.has_arguments() {
            sink.argument('}');
        }
        sink.end();
        self.give_out_stray(sink);
        Step::Done
    }

    /// Passes on the text between parameters. Separators belong to the markup.
    fn give_out_stray(&mut self, sink: &mut Sink) {
        if self.stray.contains(char::is_alphanumeric) {
            self.stray.trim().chars().for_each(|character| sink.content(character));
        }
    }

    /// Reads on in an opening tag. Returns the index of the marker that ends it.
    fn header(&mut self, character: char) -> Result<Option<usize>, Step> {
        let (At::Function(ends) | At::Parameter(ends)) = &mut self.at else { return Err(Step::Broken) };
        let before = self.header.len();
        let end = ends.step(character, &mut self.header);
        let invalid = match self.dialect.value_start {
            // Names without a tag around them must look like names.
            Some(_) => &['<', '>', '\n', '{', '}', '"', '[', ']'][..],
            None => &['<', '>', '\n'],
        };
        if self.header[before..].contains(invalid) { Err(Step::Broken) } else { Ok(end) }
    }
}

/// Returns the name in an opening tag, which may be in quotes, and the attributes after it.
fn unquoted(header: &str) -> (&str, &str) {
    let header = header.trim();
    let quoted = header.strip_prefix('"').and_then(|rest| rest.split_once('"'));
    quoted.unwrap_or((header, ""))
}

impl Body for Xml {
    fn finish(&mut self, sink: &mut Sink) {
        if matches!(self.at, At::Value(_)) {
            sink.arguments(&self.value);
        }
        self.give_out_stray(sink);
    }

    fn abandon(&mut self, sink: &mut Sink) {
        // The rest of it is in the text of the broken call, which becomes content itself.
        self.stray.truncate(self.before_parameter);
        self.give_out_stray(sink);
    }

    fn step(&mut self, character: char, sink: &mut Sink) -> Step {
        match &mut self.at {
            // The name may be on a line of its own.
            At::Function(_) if character.is_whitespace() && self.dialect.bare_name && self.header.is_empty() => {}
            At::Function(_) => match self.header(character) {
                Ok(Some(end)) => return self.begin(end, sink),
                Ok(None) => {}
                Err(step) => return step,
            },
            At::Parameter(_) => match self.header(character) {
                Ok(Some(_)) => return self.begin_parameter(sink),
                Ok(None) => {}
                Err(step) => return step,
            },
            At::Between(markers) => match markers.step(character, &mut self.stray) {
                Some(0) => self.at = At::Parameter(Markers::new(self.dialect.parameter_end)),
                Some(_) => return self.end(sink),
                None => {}
            },
            At::ValueTag(expect) => match expect.step(character) {
                None => return Step::Broken,
                Some(false) => {}
                Some(true) => self.at = At::Line,
            },
            At::Line => {
                self.at = At::Value(Markers::new(self.dialect.value_ends));
                if character != '\n' || !self.dialect.lines {
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
