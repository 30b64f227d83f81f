//! Translation of structural tags, free text with parts that follow schemas, to Lark.
//!
//! Two shapes are supported, as in vLLM: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and
//! `{"format": {...}}` with nested formats.

use std::fmt::Write;

use serde_json::Value;

use super::lower::{lark, quoted, regex_term};
use super::schema::{JsonStyle, prepare};
use super::{GrammarError, GrammarLimits};

/// Rule of any text.
const ANY_TEXT: &str = "/(?s:.*)/";

/// Translates a structural tag to Lark.
///
/// # Errors
/// Returns an error if it has neither shape, an unsupported format, or a schema that cannot be enforced.
pub(super) fn to_lark(tag: &Value, limits: &GrammarLimits) -> Result<String, GrammarError> {
    let mut writer = Writer { rules: String::new(), count: 0, depth: 0, limits };
    let start = match (tag.get("format"), tag.get("structures")) {
        (Some(format), _) => writer.format(format)?,
        (None, Some(_)) => writer.legacy(tag)?,
        (None, None) => return Err(invalid("it needs \"format\", or \"structures\" and \"triggers\"")),
    };
    Ok(format!("start: {start}\n{}", writer.rules))
}

fn invalid(message: impl Into<String>) -> GrammarError {
    GrammarError::StructuralTag(message.into())
}

struct Writer<'a> {
    rules: String,
    count: usize,
    depth: usize,
    limits: &'a GrammarLimits,
}

/// A tag: the trigger, the rest of its beginning, its content and its end.
struct Tag<'v> {
    begin: &'v str,
    content: String,
    end: String,
}

impl Writer<'_> {
    /// Writes a rule and returns its name.
    fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.count);
        self.count += 1;
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.rules, "{name}{attributes}: {body}");
        name
    }

    fn schema(&self, schema: &Value) -> Result<String, GrammarError> {
        Ok(format!("%json {}", prepare(schema, &JsonStyle::default(), self.limits)?))
    }

    /// Returns a term for one format.
    fn format(&mut self, format: &Value) -> Result<String, GrammarError> {
        self.depth += 1;
        // One level of Lark's own parser corresponds to two of these levels.
        if self.depth > self.limits.depth {
            return Err(GrammarError::TooDeep { what: "structural tag", limit: self.limits.depth });
        }
        let body = match text(format, "type")? {
            "const_string" => quoted(text(format, "value")?),
            "json_schema" => self.schema(part(format, "json_schema")?)?,
            "regex" => regex_term(text(format, "pattern")?, self.limits)?,
            "grammar" => format!("%lark {{\n{}\n}}", lark(text(format, "grammar")?, self.limits)?),
            "any_text" => ANY_TEXT.to_owned(),
            "sequence" => self.formats(list(format, "elements")?)?.join(" "),
            "or" => self.formats(list(format, "elements")?)?.join(" | "),
            "tag" => {
                let tag = self.tag(format)?;
                format!("{} {} {}", quoted(tag.begin), tag.content, tag.end)
            }
            "triggered_tags" => self.triggered_tags(format)?,
            "tags_with_separator" => self.separated_tags(format)?,
            other => return Err(invalid(format!("the format \"{other}\" is not supported"))),
        };
        self.depth -= 1;
        Ok(self.rule("", &body))
    }

    fn formats(&mut self, formats: &[Value]) -> Result<Vec<String>, GrammarError> {
        formats.iter().map(|format| self.format(format)).collect()
    }

    fn tag<'v>(&mut self, tag: &'v Value) -> Result<Tag<'v>, GrammarError> {
        let content = part(tag, "content")?;
        let ends = match part(tag, "end")? {
            Value::Array(ends) => ends.iter().map(Value::as_str).collect::<Option<Vec<_>>>(),
            end => end.as_str().map(|end| vec![end]),
        };
        let ends = ends.filter(|ends| !ends.is_empty()).ok_or_else(|| invalid("\"end\" must be text"))?;
        let end = format!("({})", ends.into_iter().map(quoted).collect::<Vec<_>>().join(" | "));
        let begin = text(tag, "begin")?;
        if content["type"] == "any_text" {
            // Free text ends at its first end marker; otherwise the marker would become part of the text.
            let content = self.rule("[lazy]", &format!("{ANY_TEXT} {end}"));
            return Ok(Tag { begin, content, end: "\"\"".to_owned() });
        }
        Ok(Tag { begin, content: self.format(content)?, end })
    }

    fn triggered_tags(&mut self, format: &Value) -> Result<String, GrammarError> {
        let triggers = texts(format, "triggers")?;
        let tags = list(format, "tags")?.iter().map(|tag| self.tag(tag)).collect::<Result<Vec<_>, _>>()?;
        self.triggered(&triggers, &tags, flag(format, "at_least_one"), flag(format, "stop_after_first"))
    }

    fn legacy(&mut self, tag: &Value) -> Result<String, GrammarError> {
        let mut tags = Vec::new();
        for structure in list(tag, "structures")? {
            let schema = self.schema(part(structure, "schema")?)?;
            let content = self.rule("", &schema);
            tags.push(Tag { begin: text(structure, "begin")?, content, end: quoted(text(structure, "end")?) });
        }
        self.triggered(&texts(tag, "triggers")?, &tags, false, false)
    }

    /// Writes free text in which each trigger starts one of its tags.
    fn triggered(
        &mut self,
        triggers: &[&str],
        tags: &[Tag],
        at_least_one: bool,
        stop_after_first: bool,
    ) -> Result<String, GrammarError> {
        let mut rests: Vec<Vec<String>> = vec![Vec::new(); triggers.len()];
        for tag in tags {
            let found =
                triggers.iter().enumerate().find_map(|(at, trigger)| Some((at, tag.begin.strip_prefix(trigger)?)));
            let (at, rest) = found.ok_or_else(|| invalid(format!("no trigger begins \"{}\"", tag.begin)))?;
            rests[at].push(format!("{} {} {}", quoted(rest), tag.content, tag.end));
        }
        let mut announced = Vec::new();
        for (trigger, rests) in triggers.iter().zip(rests) {
            if trigger.is_empty() || rests.is_empty() {
                return Err(invalid(format!("the trigger \"{trigger}\" begins no tag")));
            }
            let lead = self.rule("[lazy]", &format!("{ANY_TEXT} {}", quoted(trigger)));
            let rest = self.rule("", &rests.join(" | "));
            announced.push(format!("{lead} {rest}"));
        }
        if announced.is_empty() {
            return Err(invalid("there are no triggers"));
        }
        let announced = self.rule("", &announced.join(" | "));
        let tail = self.rule("", ANY_TEXT);
        let bare: Vec<String> =
            tags.iter().map(|tag| format!("{} {} {}", quoted(tag.begin), tag.content, tag.end)).collect();
        Ok(match (at_least_one, stop_after_first) {
            (false, false) => format!("{announced}* {tail}"),
            (false, true) => format!("{announced} | {tail}"),
            (true, false) => format!("({}) {announced}* {tail}", bare.join(" | ")),
            (true, true) => bare.join(" | "),
        })
    }

    fn separated_tags(&mut self, format: &Value) -> Result<String, GrammarError> {
        let tags = list(format, "tags")?.iter().map(|tag| self.tag(tag)).collect::<Result<Vec<_>, _>>()?;
        let one: Vec<String> =
            tags.iter().map(|tag| format!("{} {} {}", quoted(tag.begin), tag.content, tag.end)).collect();
        if one.is_empty() {
            return Err(invalid("there are no tags"));
        }
        let one = self.rule("", &one.join(" | "));
        let separator = quoted(text(format, "separator")?);
        let some = match flag(format, "stop_after_first") {
            true => one,
            false => format!("{one} ({separator} {one})*"),
        };
        Ok(if flag(format, "at_least_one") { some } else { format!("({some})?") })
    }
}

fn part<'v>(value: &'v Value, key: &str) -> Result<&'v Value, GrammarError> {
    value.get(key).ok_or_else(|| invalid(format!("\"{key}\" is missing")))
}

fn text<'v>(value: &'v Value, key: &str) -> Result<&'v str, GrammarError> {
    part(value, key)?.as_str().ok_or_else(|| invalid(format!("\"{key}\" must be text")))
}

fn list<'v>(value: &'v Value, key: &str) -> Result<&'v [Value], GrammarError> {
    match part(value, key)? {
        Value::Array(list) if !list.is_empty() => Ok(list),
        _ => Err(invalid(format!("\"{key}\" must be a list that is not empty"))),
    }
}

fn texts<'v>(value: &'v Value, key: &str) -> Result<Vec<&'v str>, GrammarError> {
    let texts: Option<Vec<&str>> = list(value, key)?.iter().map(Value::as_str).collect();
    texts.ok_or_else(|| invalid(format!("\"{key}\" must be a list of texts")))
}

fn flag(value: &Value, key: &str) -> bool {
    value.get(key).and_then(Value::as_bool).unwrap_or(false)
}
