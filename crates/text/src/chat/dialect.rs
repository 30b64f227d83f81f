//! What transformers' Jinja has and the template engine lacks: blocks for training, formatting with `%`, and macros that
//! take any arguments. Templates are translated before they are compiled.

use std::sync::Arc;

use minijinja::value::{Kwargs, Object, Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// The filter that takes the place of `%` after a string.
pub(super) const FORMAT: &str = "python_format";
/// The filter that makes a macro take any arguments.
pub(super) const CATCH: &str = "python_catch";

/// The names under which a macro finds the arguments that it does not declare, and their defaults.
const CAUGHT: [(&str, &str); 2] = [("varargs", "()"), ("kwargs", "{}")];

/// Translates a template. Lines keep their numbers.
/// - `{% generation %}` marks the assistant's tokens for training, and only creates a scope here.
/// - `"%s" % x` becomes a filter. The format must be a literal.
/// - A macro that mentions `varargs` or `kwargs` declares them as parameters and is wrapped in [`Catching`].
pub(super) fn translate(source: &str) -> String {
    let pieces = pieces(source);
    let mut out = String::with_capacity(source.len());
    // The open macros: the names of those that are wrapped.
    let mut open = Vec::new();
    for (index, piece) in pieces.iter().enumerate() {
        let Piece::Tag(tag) = *piece else {
            out.push_str(piece.text());
            continue;
        };
        match keyword(tag) {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            "macro" => {
                let (declaration, name) = declaration(tag, body(&pieces[index + 1..]));
                out.push_str(&with_formats(&declaration));
                open.push(name);
            }
            "endmacro" => match open.pop().flatten() {
                Some(name) => {
                    // The end of the tag decides on the white space after it.
                    let end = tag.len() - if tag.ends_with("-%}") || tag.ends_with("+%}") { 3 } else { 2 };
                    out.push_str(&format!("{}%}}{{% set {name} = {name}|{CATCH} {}", &tag[..end], &tag[end..]));
                }
                None => out.push_str(tag),
            },
            _ => out.push_str(&with_formats(tag)),
        }
    }
    out
}

/// A part of a template.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Piece<'a> {
    /// Text, a comment or a raw block.
    Text(&'a str),
    /// A block or an expression with its delimiters.
    Tag(&'a str),
}

impl<'a> Piece<'a> {
    fn text(self) -> &'a str {
        match self {
            Self::Text(text) | Self::Tag(text) => text,
        }
    }
}

/// Splits a template. What is incomplete is text.
fn pieces(source: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = source;
    while let Some(start) = ["{{", "{%", "{#"].iter().filter_map(|open| rest.find(open)).min() {
        let (text, tag) = rest.split_at(start);
        let end = match tag.as_bytes()[1] {
            b'#' => tag.find("#}").map(|at| at + 2),
            b'%' => tag_end(tag, "%}"),
            _ => tag_end(tag, "}}"),
        };
        let Some(end) = end else { break };
        pieces.push(Piece::Text(text));
        let (tag, after) = tag.split_at(end);
        rest = after;
        if keyword(tag) == "raw" {
            let (raw, after) = rest.split_at(rest.find("endraw").unwrap_or(rest.len()));
            pieces.extend([Piece::Text(tag), Piece::Text(raw)]);
            rest = after;
        } else {
            pieces.push(if tag.starts_with("{#") { Piece::Text(tag) } else { Piece::Tag(tag) });
        }
    }
    pieces.push(Piece::Text(rest));
    pieces
}

/// The first word of a block.
fn keyword(tag: &str) -> &str {
    let inner = tag.strip_prefix("{%").unwrap_or_default();
    words(inner.trim_start_matches(['-', '+']).trim_start()).next().unwrap_or_default()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character: char| !is_word(character))
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// The length of a tag up to its delimiter, which is neither in a string nor in brackets.
fn tag_end(tag: &str, delimiter: &str) -> Option<usize> {
    let mut at = 2;
    let mut depth = 0_usize;
    loop {
        let rest = tag.get(at..)?;
        if depth == 0 && rest.starts_with(delimiter) {
            return Some(at + delimiter.len());
        }
        let character = rest.chars().next()?;
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += literal(rest).unwrap_or(character.len_utf8());
    }
}

/// The length of the string literal at the beginning of a text.
fn literal(text: &str) -> Option<usize> {
    let quote = text.chars().next().filter(|character| matches!(character, '\'' | '"'))?;
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// The length of the text in brackets, and of the brackets, at the beginning of a text.
fn bracketed(text: &str) -> Option<usize> {
    let mut at = 0;
    let mut depth = 0_usize;
    loop {
        let rest = &text[at..];
        let character = rest.chars().next()?;
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        at += literal(rest).unwrap_or(character.len_utf8());
        if depth == 0 {
            return Some(at);
        }
    }
}

/// The pieces of a macro's body.
fn body<'p, 'a>(after: &'p [Piece<'a>]) -> &'p [Piece<'a>] {
    let mut depth = 1;
    let end = after.iter().position(|piece| {
        match *piece {
            Piece::Tag(tag) if keyword(tag) == "macro" => depth += 1,
            Piece::Tag(tag) if keyword(tag) == "endmacro" => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    &after[..end.unwrap_or(after.len())]
}

/// The tag of a macro with the parameters that its body mentions and it does not declare. If there are any, the name of
/// the macro is returned too.
fn declaration<'a>(tag: &'a str, body: &[Piece<'_>]) -> (String, Option<&'a str>) {
    let tags = || body.iter().filter(|piece| matches!(piece, Piece::Tag(_))).map(|piece| piece.text());
    let caught = CAUGHT.iter().filter(|(name, _)| {
        tags().any(|tag| words(tag).any(|word| word == *name)) && words(tag).all(|word| word != *name)
    });
    let parameters: Vec<String> = caught.map(|(name, default)| format!("{name}={default}")).collect();
    let parts = tag.find('(').zip(tag.rfind(')')).filter(|(open, close)| open < close);
    let (Some((open, close)), false) = (parts, parameters.is_empty()) else { return (tag.to_owned(), None) };
    let separator = if tag[open + 1..close].trim().is_empty() { "" } else { ", " };
    let (before, after) = tag.split_at(close);
    let name = words(tag[..open].trim_end()).last();
    (format!("{before}{separator}{}{after}", parameters.join(", ")), name)
}

/// Replaces `%` after string literals by a filter.
fn with_formats(tag: &str) -> String {
    let mut out = String::with_capacity(tag.len());
    let mut rest = tag;
    while let Some(start) = rest.find(['\'', '"']) {
        let Some(length) = literal(&rest[start..]) else { break };
        let (before, after) = rest.split_at(start + length);
        out.push_str(before);
        rest = after;
        while let Some((space, operand)) = formatted(rest) {
            rest = &rest[space.len() + 1 + operand.len()..];
            out.push_str(&format!("{space}|{FORMAT}({})", with_formats(operand)));
        }
    }
    out.push_str(rest);
    out
}

/// The space before a `%` and the operand after it, if a text begins with them.
fn formatted(text: &str) -> Option<(&str, &str)> {
    let (space, after) = text.split_at(text.len() - text.trim_start().len());
    let operand = after.strip_prefix('%').filter(|operand| !operand.starts_with('}'))?;
    Some((space, &operand[..operand_length(operand)?]))
}

/// The length of an operand with its signs, attributes, items, calls and filters.
fn operand_length(text: &str) -> Option<usize> {
    let after_space = |at: usize| text.len() - text[at..].trim_start_matches(char::is_whitespace).len();
    let word = |at: usize| text[at..].find(|character| !is_word(character)).map_or(text.len(), |length| at + length);
    let mut end = text.len() - text.trim_start_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+')).len();
    end = match text[end..].chars().next()? {
        '(' | '[' | '{' => end + bracketed(&text[end..])?,
        '\'' | '"' => end + literal(&text[end..])?,
        _ => Some(word(end)).filter(|&after| after > end)?,
    };
    loop {
        let next = after_space(end);
        end = match text[next..].chars().next() {
            Some('(' | '[') => next + bracketed(&text[next..])?,
            Some('.' | '|') => word(after_space(next + 1)),
            _ => return Some(end),
        };
    }
}

/// A macro that takes any arguments: those that it does not declare become its parameters `varargs` and `kwargs`.
#[derive(Debug)]
struct Catching {
    declared: Value,
    /// The names of the parameters other than these two.
    parameters: Vec<String>,
    catches: [bool; 2],
}

/// The filter [`CATCH`].
pub(super) fn catching(declared: Value) -> Result<Value, Error> {
    let names = declared.get_attr("arguments")?.try_iter()?.map(|name| name.to_string()).collect::<Vec<_>>();
    let catches = CAUGHT.map(|(caught, _)| names.iter().any(|name| name == caught));
    let parameters = names.into_iter().filter(|name| CAUGHT.iter().all(|(caught, _)| caught != name)).collect();
    Ok(Value::from_object(Catching { declared, parameters, catches }))
}

impl Object for Catching {
    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (positional, named): (&[Value], Kwargs) = from_args(args)?;
        let (declared, others) = positional.split_at(positional.len().min(self.parameters.len()));
        let [varargs, kwargs] = self.catches;
        if !varargs && !others.is_empty() {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        let mut passed = Vec::new();
        let mut caught = Vec::new();
        for name in named.args() {
            let own = name == "caller" || self.parameters.iter().any(|parameter| parameter == name);
            let value: Value = named.get(name)?;
            if own || !kwargs { &mut passed } else { &mut caught }.push((name.to_owned(), value));
        }
        if varargs {
            passed.push(("varargs".to_owned(), Value::from(Tuple::from(others))));
        }
        if kwargs {
            passed.push(("kwargs".to_owned(), Value::from_pairs(caught)));
        }
        let mut args = declared.to_vec();
        args.push(Value::from(Kwargs::from_iter(passed)));
        self.declared.call(state, &args)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_cut_and_translated(
            parts in prop::collection::vec(prop::sample::select(vec![
                "{{", "}}", "{%", "%}", "{#", "#}", "-", "'", "\"", "\\", "%", "(", ")", "[", "{", "}", "é", " ", "\n", "f", "|", ".",
                "macro f(", "endmacro", "varargs", "raw", "endraw", "generation",
            ]), 0..40)
        ) {
            let source = parts.concat();
            let whole: String = pieces(&source).into_iter().map(Piece::text).collect();
            prop_assert_eq!(&whole, &source);
            let lines = |text: &str| text.matches('\n').count();
            prop_assert_eq!(lines(&translate(&source)), lines(&source));
        }
    }

    #[test]
    fn only_formats_are_translated() {
        for same in [
            "",
            "{{ 7 % 4 }} {{ 'a' }}% {{ \"b\"}}",
            "{% if a == '%s' %}x{% endif %}",
            "'%s' % x {# {{ '%s' % x }} #}{% raw %}{{ '%s' % x }}{% endraw %}",
            "{{ '%s",
            "{{ ('a' % ",
            "{{ 'a' % }}",
            "{{ x['a'] % 2 }}",
            "{% generate %}",
        ] {
            assert_eq!(translate(same), same);
        }
        for (source, translated) in [
            ("{{ '%s' % x }}", "{{ '%s' |python_format( x) }}"),
            ("{{'a%%}}'%x.y[0](1)|upper ~ 'b'}}", "{{'a%%}}'|python_format(x.y[0](1)|upper) ~ 'b'}}"),
            ("{{ '%s' % ('%s' % x,) }}", "{{ '%s' |python_format( ('%s' |python_format( x),)) }}"),
            ("{{ '\\'%s' %\n -x }}", "{{ '\\'%s' |python_format(\n -x) }}"),
            ("{{ {'a': {'b': '%s' % 1}} }}", "{{ {'a': {'b': '%s' |python_format( 1)}} }}"),
            ("{%- generation -%}x{%endgeneration%}", "{%- with -%}x{%endwith%}"),
        ] {
            assert_eq!(translate(source), translated);
        }
    }

    #[test]
    fn macros_declare_what_they_mention() {
        for same in [
            "{% macro f(a) %}varargs{% endmacro %}",
            "{% macro f(varargs) %}{{ varargs }}{% endmacro %}",
            "{% macro f(a) %}{{ a }}{% endmacro %}{{ kwargs }}",
        ] {
            assert_eq!(translate(same), same);
        }
        for (source, translated) in [
            (
                "{% macro f(a=')') %}{{ varargs }}{% endmacro -%}\n",
                "{% macro f(a=')', varargs=()) %}{{ varargs }}{% endmacro %}{% set f = f|python_catch -%}\n",
            ),
            (
                "{%- macro f() -%}{{ kwargs.x }}{{ varargs[0] }}{%- endmacro %}",
                "{%- macro f(varargs=(), kwargs={}) -%}{{ kwargs.x }}{{ varargs[0] }}{%- endmacro %}{% set f = f|python_catch %}",
            ),
        ] {
            assert_eq!(translate(source), translated);
        }
    }
}
