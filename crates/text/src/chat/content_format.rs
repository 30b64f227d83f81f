//! The forms of message content that templates expect, and the detection of templates that loop over parts.

/// Form of `content` that a template expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// One string.
    String,
    /// A list of parts as in OpenAI's API, over which the template loops.
    OpenAi,
    /// One string or a list of parts: the template has a case for each.
    Either,
}

/// Detects whether a template loops over parts, like vLLM: searches for a loop over the `content` of the items of a loop over `messages`. Names
/// assigned from `messages` (a slice of it, a filter on it) count as messages. A loop over a variable named `content`
/// counts, too: macros (Qwen3.5's) take the content under that name.
pub(super) fn detect(source: &str) -> ContentFormat {
    let statements: Vec<Statement> = blocks(source).filter_map(Statement::parse).collect();
    let mut messages = vec!["messages"];
    for statement in &statements {
        if let Statement::Set { name, value } = statement
            && messages.iter().any(|&list| value.is(list, None))
        {
            messages.push(name);
        }
    }
    let loops = || {
        statements.iter().filter_map(|statement| match statement {
            Statement::For { name, over } => Some((*name, over)),
            Statement::Set { .. } => None,
        })
    };
    let items: Vec<&str> =
        loops().filter(|(_, over)| messages.iter().any(|&list| over.is(list, None))).map(|(name, _)| name).collect();
    let over_content = loops().any(|(_, over)| {
        (over.whole && over.is("content", None)) || items.iter().any(|&item| over.is(item, Some("content")))
    });
    if over_content { ContentFormat::OpenAi } else { ContentFormat::String }
}

/// Returns the content of every `{% ... %}`, without comments and raw text.
fn blocks(source: &str) -> impl Iterator<Item = &str> {
    let mut rest = source;
    std::iter::from_fn(move || {
        loop {
            let start = rest.find("{%").into_iter().chain(rest.find("{#")).min()?;
            let comment = rest[start..].starts_with("{#");
            let inner = &rest[start + 2..];
            let end = inner.find(if comment { "#}" } else { "%}" })?;
            rest = &inner[end + 2..];
            let block = inner[..end].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
            if block == "raw" {
                rest = rest.find("endraw").map_or("", |end| &rest[end..]);
            } else if !comment {
                return Some(block);
            }
        }
    })
}

#[derive(Debug, PartialEq)]
enum Statement<'a> {
    For { name: &'a str, over: Path<'a> },
    Set { name: &'a str, value: Path<'a> },
}

/// A variable or an attribute of one, possibly sliced, filtered or tested.
#[derive(Debug, PartialEq)]
struct Path<'a> {
    variable: &'a str,
    attribute: Option<&'a str>,
    /// Whether it is neither sliced nor filtered nor tested.
    whole: bool,
}

impl Path<'_> {
    fn is(&self, variable: &str, attribute: Option<&str>) -> bool {
        self.variable == variable && self.attribute == attribute
    }
}

impl<'a> Statement<'a> {
    fn parse(block: &'a str) -> Option<Self> {
        let mut tokens = Tokens { rest: block };
        let keyword = tokens.name()?;
        let name = tokens.name()?;
        match keyword {
            "for" => {
                (tokens.name()? == "in").then_some(())?;
                Some(Self::For { name, over: tokens.path()? })
            }
            "set" => {
                tokens.take("=")?;
                Some(Self::Set { name, value: tokens.path()? })
            }
            _ => None,
        }
    }
}

struct Tokens<'a> {
    rest: &'a str,
}

impl<'a> Tokens<'a> {
    fn take(&mut self, token: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(token)?;
        Some(())
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest.trim_start();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    /// Returns the text between the bracket just taken and its counterpart.
    fn bracketed(&mut self) -> Option<&'a str> {
        let mut depth = 1;
        for (at, character) in self.rest.char_indices() {
            match character {
                '[' => depth += 1,
                ']' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                let inner = &self.rest[..at];
                self.rest = &self.rest[at + 1..];
                return Some(inner.trim());
            }
        }
        None
    }

    /// Parses a path. Returns `None` for anything else: a call, an operator, a literal.
    fn path(&mut self) -> Option<Path<'a>> {
        let parenthesised = self.take("(").is_some();
        let variable = self.name()?;
        let (mut attribute, mut whole) = (None, true);
        loop {
            if self.take(".").is_some() {
                // A path has at most one attribute.
                if attribute.replace(self.name()?).is_some() {
                    return None;
                }
            } else if self.take("[").is_some() {
                let inner = self.bracketed()?;
                let key = inner.strip_prefix(['\'', '"']).and_then(|key| key.strip_suffix(['\'', '"']));
                match key {
                    Some(key) if attribute.is_none() => attribute = Some(key),
                    None if inner.contains(':') => whole = false,
                    _ => return None,
                }
            } else {
                break;
            }
        }
        if parenthesised {
            self.take(")")?;
        }
        let rest = self.rest.trim_start();
        let follows = |word: &str| rest.strip_prefix(word).is_some_and(|rest| rest.starts_with(char::is_whitespace));
        // `for x in y if z` filters. `set x = y if z` is conditional, but its value is still y.
        let ends = rest.is_empty() || rest == "recursive" || follows("if");
        let changed = rest.starts_with('|') || follows("is");
        (ends || changed).then_some(Path { variable, attribute, whole: whole && !changed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn string_templates() {
        for source in [
            "",
            "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            "{% for m in messages %}{% for c in m.tool_calls %}{{ c.content }}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% for t in tools %}{% endfor %}{% endfor %}",
            "{# {% for m in messages %}{% for c in m.content %} #}{{ messages }}",
            "{% raw %}{% for m in messages %}{% for c in m.content %}{% endraw %}",
            "{% for m in messages %}{% for c in m.content.split('x') %}{% endfor %}{% endfor %}",
            "{% for m in other %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "{% macro text(content) %}{% for c in content[:9] %}{% endfor %}{% for c in content | list %}{% endfor %}{% endmacro %}",
            "{% macro text(content) %}{% for c in content.parts %}{% endfor %}{% endmacro %}",
        ] {
            assert_eq!(detect(source), ContentFormat::String, "{source}");
        }
    }

    #[test]
    fn part_templates() {
        for source in [
            "{% for message in messages %}{% for content in message['content'] %}{% endfor %}{% endfor %}",
            "{%- for m in messages -%}{%- for c in m.content -%}{% endfor %}{% endfor %}",
            "{% for m in messages[1:] if m.role %}{% for c in m[\"content\"] if c.type == 'text' %}{% endfor %}{% endfor %}",
            "{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{% for c in m.content | reverse %}{% endfor %}{% endfor %}",
            "{% set rest = messages | selectattr('role') | list %}{% for m in rest %}{% for c in m.content[:2] %}{% endfor %}{% endfor %}",
            "{% macro text(content, n=0) %}{% for item in content %}{{ item.text }}{% endfor %}{% endmacro %}\
             {% for m in messages %}{{ text(m.content) }}{% endfor %}",
            "{%+ for m in (messages) %}{% for c in m.content recursive %}{% endfor %}{% endfor %}",
        ] {
            assert_eq!(detect(source), ContentFormat::OpenAi, "{source}");
        }
    }
}
