//! Specifications and their translation to llguidance's language.

use llguidance::api::TopLevelGrammar;
use llguidance::regex_to_lark;
use serde_json::{Value, json};

use super::expansion::{embedded_schemas, largest_terminal};
use super::schema::{JsonStyle, Schemas, prepare};
use super::{GrammarError, GrammarLimits, gbnf, structural_tag};

/// Specification of an output.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that satisfies a schema. Properties appear in the order of the schema.
    JsonSchema {
        /// The schema, of any draft from 4 to 2020-12.
        schema: Value,
        /// Allows no whitespace outside strings.
        disable_any_whitespace: bool,
        /// Regex of the whitespace between JSON tokens, matched at most once in each place. By default one or two
        /// spaces, or a line break with up to 64 spaces or tabs: limited, so that a model cannot continue with
        /// whitespace forever.
        whitespace_pattern: Option<String>,
        /// Allows only the named properties in an object that names any, unless the schema says otherwise.
        disable_additional_properties: bool,
    },
    /// Text that matches a whole regex in Rust's syntax, where `\d` matches a digit of any script and there is no
    /// look-around.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar: Lark in llguidance's dialect, or EBNF with `root ::= ...`.
    Grammar(String),
    /// Text with parts that follow schemas: `{"structures": [...], "triggers": [...]}` or `{"format": {...}}`.
    StructuralTag(Value),
    /// A JSON array of `{"name", "parameters"}` objects, which are calls of these tools. Whitespace is single spaces.
    ToolCalls {
        /// Names and schemas of the parameters.
        tools: Vec<(String, Value)>,
        /// Allows one or more calls instead of exactly one.
        parallel: bool,
    },
    /// The arguments of one tool. Whitespace is single spaces.
    NamedTool {
        /// Schema of the parameters.
        parameters: Value,
    },
}

impl GrammarSpec {
    /// Returns a text that identifies the specification: the key in the cache, whose length counts as its size.
    pub(super) fn key(&self) -> String {
        match self {
            Self::JsonObject => "json_object".to_owned(),
            Self::JsonSchema { schema, disable_any_whitespace, whitespace_pattern, disable_additional_properties } => {
                let options = json!([disable_any_whitespace, whitespace_pattern, disable_additional_properties]);
                format!("json_schema {options} {schema}")
            }
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Choice(choices) => format!("choice {}", json!(choices)),
            Self::Grammar(grammar) => format!("grammar {grammar}"),
            Self::StructuralTag(tag) => format!("structural_tag {tag}"),
            Self::ToolCalls { tools, parallel } => format!("tools {parallel} {}", json!(tools)),
            Self::NamedTool { parameters } => format!("tool {parameters}"),
        }
    }

    /// Returns the noun for the specification in errors.
    pub(super) fn noun(&self) -> &'static str {
        match self {
            Self::JsonObject | Self::JsonSchema { .. } => "JSON schema",
            Self::Regex(_) => "regex",
            Self::Choice(_) => "list of choices",
            Self::Grammar(_) => "grammar",
            Self::StructuralTag(_) => "structural tag",
            Self::ToolCalls { .. } | Self::NamedTool { .. } => "schema of the tools",
        }
    }

    pub(super) fn error(&self, message: String) -> GrammarError {
        match self {
            Self::JsonObject | Self::JsonSchema { .. } => GrammarError::Schema(message),
            Self::Regex(_) => GrammarError::Regex(message),
            Self::Choice(_) => GrammarError::Choice(message),
            Self::Grammar(_) => GrammarError::Grammar(message),
            Self::StructuralTag(_) => GrammarError::StructuralTag(message),
            Self::ToolCalls { .. } | Self::NamedTool { .. } => GrammarError::Tools(message),
        }
    }

    /// Translates the specification to llguidance's language.
    pub(super) fn lower(&self, limits: &GrammarLimits) -> Result<TopLevelGrammar, GrammarError> {
        let from_schema =
            |schema: &Value, style: &JsonStyle| prepare(schema, style, limits).map(TopLevelGrammar::from_json_schema);
        match self {
            Self::JsonObject => from_schema(&json!({"type": "object"}), &JsonStyle::default()),
            Self::JsonSchema { schema, disable_any_whitespace, whitespace_pattern, disable_additional_properties } => {
                if let Some(pattern) = whitespace_pattern {
                    check_regex(pattern, limits)?;
                }
                let style = JsonStyle {
                    compact: *disable_any_whitespace,
                    whitespace: whitespace_pattern.clone(),
                    close_objects: *disable_additional_properties,
                };
                from_schema(schema, &style)
            }
            Self::NamedTool { parameters } => from_schema(parameters, &JsonStyle::call()),
            Self::ToolCalls { tools, parallel } => {
                tool_calls(tools, *parallel, limits).map(TopLevelGrammar::from_json_schema)
            }
            Self::Regex(regex) => Ok(TopLevelGrammar::from_lark(format!("start: {}", regex_term(regex, limits)?))),
            Self::Choice(choices) => choice(choices).map(TopLevelGrammar::from_lark),
            Self::Grammar(grammar) => lark(grammar, limits).map(TopLevelGrammar::from_lark),
            Self::StructuralTag(tag) => structural_tag::to_lark(tag, limits).map(TopLevelGrammar::from_lark),
        }
    }
}

/// Returns the schema of an array of calls.
fn tool_calls(tools: &[(String, Value)], parallel: bool, limits: &GrammarLimits) -> Result<Value, GrammarError> {
    if tools.is_empty() {
        return Err(GrammarError::Tools("there are none".to_owned()));
    }
    let style = JsonStyle::call();
    let mut schemas = Schemas::new(&style, limits);
    let mut calls = Vec::with_capacity(tools.len());
    for (name, parameters) in tools {
        let parameters = schemas.add(parameters)?;
        calls.push(json!({
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": false,
        }));
    }
    let mut array = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}});
    if !parallel {
        array["maxItems"] = json!(1);
    }
    schemas.finish(array)
}

/// Returns the choices as one terminal, so that a choice and its own prefix both stay possible.
fn choice(choices: &[String]) -> Result<String, GrammarError> {
    if choices.is_empty() {
        return Err(GrammarError::Choice("there are none".to_owned()));
    }
    let empty = choices.iter().any(String::is_empty);
    let choices: Vec<String> = choices.iter().filter(|choice| !choice.is_empty()).map(|text| quoted(text)).collect();
    Ok(match (choices.is_empty(), empty) {
        (true, _) => "start: \"\"".to_owned(),
        (false, false) => format!("start: CHOICE\nCHOICE: {}", choices.join(" | ")),
        (false, true) => format!("start: CHOICE?\nCHOICE: {}", choices.join(" | ")),
    })
}

/// Returns a Lark grammar, translated from EBNF if necessary.
pub(super) fn lark(grammar: &str, limits: &GrammarLimits) -> Result<String, GrammarError> {
    if grammar.trim().is_empty() {
        return Err(GrammarError::Grammar("it is empty".to_owned()));
    }
    let lark = if gbnf::is_ebnf(grammar) { gbnf::to_lark(grammar, limits)? } else { grammar.to_owned() };
    if largest_terminal(&lark) > limits.grammar_symbols as u64 {
        return Err(GrammarError::TooLarge { what: "grammar", limit: limits.grammar_symbols });
    }
    // llguidance reduces these schemas itself, but with fewer limits.
    for schema in embedded_schemas(&lark) {
        prepare(&schema, &JsonStyle::default(), limits)?;
    }
    Ok(lark)
}

/// Returns a text as a Lark string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns a regex for a whole text as a Lark term.
pub(super) fn regex_term(regex: &str, limits: &GrammarLimits) -> Result<String, GrammarError> {
    check_regex(regex, limits)?;
    let body = without_anchors(regex);
    if body.is_empty() {
        return Ok("\"\"".to_owned());
    }
    Ok(format!("/{}/", regex_to_lark(body, "")))
}

/// Removes the anchors at the ends, where users often write them. Matching the whole text needs none.
fn without_anchors(regex: &str) -> &str {
    let body = regex.strip_prefix('^').unwrap_or(regex);
    match body.strip_suffix('$') {
        Some(rest) if trailing_backslashes(rest).is_multiple_of(2) => rest,
        _ => body,
    }
}

fn trailing_backslashes(text: &str) -> usize {
    text.bytes().rev().take_while(|&byte| byte == b'\\').count()
}

/// Refuses a regex on which the regex compiler would recurse too deeply, or which it would misread.
pub(super) fn check_regex(regex: &str, limits: &GrammarLimits) -> Result<(), GrammarError> {
    if !trailing_backslashes(regex).is_multiple_of(2) {
        return Err(GrammarError::Regex("it ends with a lone backslash".to_owned()));
    }
    let (mut depth, mut escaped) = (0_usize, false);
    for byte in regex.bytes() {
        match byte {
            _ if escaped => {}
            b'(' => depth += 1,
            b')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        escaped = byte == b'\\' && !escaped;
        if depth > limits.depth {
            return Err(GrammarError::TooDeep { what: "regex", limit: limits.depth });
        }
    }
    Ok(())
}
