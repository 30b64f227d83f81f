//! The subset of YAML for configurations: texts, lists and maps. Plain texts keep their spelling.

use std::path::Path;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use serde_json::{Map, Number, Value};

/// Maximum nesting of lists and maps.
const MAX_DEPTH: usize = 64;

/// Maximum size of a file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A document or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    /// The line on which it begins, from 1.
    pub(crate) line: usize,
    pub(crate) content: Content,
}

/// The content of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// A text. If it is `plain`, without quotes, it may be a number, a Boolean or null.
    Text {
        text: String,
        plain: bool,
    },
    List(Vec<Node>),
    /// A map in the order of the document, with unique keys.
    Map(Vec<(String, Node)>),
}

impl Node {
    /// Whether the node is null.
    pub(crate) fn is_null(&self) -> bool {
        let Content::Text { text, plain: true } = &self.content else { return false };
        matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL")
    }

    /// The text as written.
    pub(crate) fn text(&self) -> Option<&str> {
        match &self.content {
            Content::Text { text, .. } => Some(text),
            Content::List(_) | Content::Map(_) => None,
        }
    }

    /// The node as JSON, in which YAML 1.2's rules decide the type of plain texts.
    pub(crate) fn json(&self) -> Value {
        match &self.content {
            Content::Text { .. } if self.is_null() => Value::Null,
            Content::Text { text, plain: true } => plain(text),
            Content::Text { text, plain: false } => Value::String(text.clone()),
            Content::List(items) => Value::Array(items.iter().map(Self::json).collect()),
            Content::Map(entries) => {
                Value::Object(entries.iter().map(|(key, value)| (key.clone(), value.json())).collect::<Map<_, _>>())
            }
        }
    }
}

fn plain(text: &str) -> Value {
    match text {
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    let number = text.bytes().any(|b| b.is_ascii_digit())
        && text.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'+' | b'-' | b'.' | b'e' | b'E'));
    let number = number.then(|| {
        let whole = text.parse::<i64>().ok().map(Number::from).or_else(|| text.parse::<u64>().ok().map(Number::from));
        whole.or_else(|| Number::from_f64(text.parse().ok()?))
    });
    number.flatten().map_or_else(|| Value::String(text.to_owned()), Value::Number)
}

/// An incomplete list or map and the line on which it begins.
struct Open {
    line: usize,
    part: Part,
}

enum Part {
    List(Vec<Node>),
    Map { entries: Vec<(String, Node)>, key: Option<String> },
}

/// Reads a file; `None` if it is empty.
///
/// # Errors
/// The file cannot be read, is larger than 1 MiB, or is refused by [`read`]. The error begins with the path.
pub(crate) fn read_file(path: &Path) -> Result<Option<Node>, String> {
    let text = || {
        let size = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
        if size > MAX_FILE_BYTES {
            return Err(format!("{size} bytes are too many for a configuration"));
        }
        std::fs::read_to_string(path).map_err(|error| error.to_string())
    };
    text().and_then(|text| read(&text)).map_err(|why| format!("{}: {why}", path.display()))
}

/// Parses a document; `None` if it is empty.
///
/// # Errors
/// The text is not YAML, or uses aliases, tags, several documents or keys other than texts. The error names the line.
pub(crate) fn read(text: &str) -> Result<Option<Node>, String> {
    let (mut open, mut root) = (Vec::new(), None);
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| error.to_string())?;
        let closed = next(event, span.start.line(), &mut open).and_then(|node| match node {
            Some(node) => close(node, &mut open, &mut root),
            None => Ok(()),
        });
        closed.map_err(|why| at(&span, why))?;
    }
    Ok(root)
}

fn at(span: &Span, why: &str) -> String {
    format!("line {}: {why}", span.start.line())
}

/// Processes an event and returns the node that it completes, if any.
fn next(event: Event<'_>, line: usize, open: &mut Vec<Open>) -> Result<Option<Node>, &'static str> {
    match event {
        Event::Scalar(text, style, _, None) => {
            let content = Content::Text { text: text.into_owned(), plain: style == ScalarStyle::Plain };
            Ok(Some(Node { line, content }))
        }
        Event::SequenceStart(_, None) | Event::MappingStart(_, None) if open.len() >= MAX_DEPTH => {
            Err("lists and maps are too deep in one another")
        }
        Event::SequenceStart(_, None) => {
            open.push(Open { line, part: Part::List(vec![]) });
            Ok(None)
        }
        Event::MappingStart(_, None) => {
            open.push(Open { line, part: Part::Map { entries: vec![], key: None } });
            Ok(None)
        }
        Event::SequenceEnd | Event::MappingEnd => Ok(open.pop().map(|Open { line, part }| match part {
            Part::List(items) => Node { line, content: Content::List(items) },
            Part::Map { entries, .. } => Node { line, content: Content::Map(entries) },
        })),
        Event::Scalar(..) | Event::SequenceStart(..) | Event::MappingStart(..) => Err("tags are not understood here"),
        Event::Alias(_) => Err("aliases are not understood here"),
        _ => Ok(None),
    }
}

/// Adds a complete node to its parent.
fn close(node: Node, open: &mut [Open], root: &mut Option<Node>) -> Result<(), &'static str> {
    match open.last_mut().map(|open| &mut open.part) {
        None if root.is_some() => return Err("one document is expected"),
        None => *root = Some(node),
        Some(Part::List(items)) => items.push(node),
        Some(Part::Map { entries, key }) => match key.take() {
            Some(key) => entries.push((key, node)),
            None => {
                let Content::Text { text, .. } = node.content else { return Err("a key must be a text") };
                if entries.iter().any(|(known, _)| *known == text) {
                    return Err("the same key is there twice");
                }
                *key = Some(text);
            }
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn as_json(text: &str) -> Value {
        read(text).unwrap().unwrap().json()
    }

    #[test]
    fn what_a_configuration_has_is_read() {
        let text = "a: 1 # one\nb: [x, 'true', true, ~]\nc:\n  d: 0.5\n  e: {f: 4k}\ng: |\n  l1\n  l2\n";
        let expected =
            json!({"a": 1, "b": ["x", "true", true, null], "c": {"d": 0.5, "e": {"f": "4k"}}, "g": "l1\nl2\n"});
        assert_eq!(as_json(text), expected);
        assert_eq!(read("").unwrap(), None);
        assert_eq!(read("# nothing\n").unwrap(), None);
    }

    #[test]
    fn a_node_knows_its_line() {
        let Some(Node { line: 2, content: Content::List(items) }) = read("# one\n- a: 1\n  b: 2\n\n- [c]\n").unwrap()
        else {
            panic!("a list");
        };
        let Content::Map(entries) = &items[0].content else { panic!("a map") };
        assert_eq!((items[0].line, entries[0].1.line, entries[1].1.line, items[1].line), (2, 2, 3, 5));
    }

    #[test]
    fn plain_texts_are_what_yaml_says_and_keep_their_spelling() {
        for (text, expected) in [
            ("-3", json!(-3)),
            ("18446744073709551615", json!(u64::MAX)),
            ("1e3", json!(1000.0)),
            ("1.10", json!(1.1)),
            ("nan", json!("nan")),
            ("inf", json!("inf")),
            ("1e999", json!("1e999")),
            ("e", json!("e")),
            ("1-2", json!("1-2")),
            ("null", Value::Null),
            ("False", json!(false)),
        ] {
            let node = read(text).unwrap().unwrap();
            assert_eq!((node.json(), node.text()), (expected, Some(text)));
        }
    }

    #[test]
    fn what_is_not_understood_is_named_with_its_line() {
        let deep = "[".repeat(100);
        for (text, part) in [
            ("a: 1\na: 2", "line 2: the same key"),
            ("a: &x 1\nb: *x", "line 2: aliases"),
            ("a: !!int 1", "line 1: tags"),
            ("[1]: 2", "a key must be a text"),
            ("a\n---\nb", "one document"),
            (deep.as_str(), "too deep"),
            ("a: [", "line"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_document_or_an_error(text in "[a-c0-9:{}\\[\\],\\-&*!|>'\"#~ \n]{0,60}") {
            if let Ok(Some(node)) = read(&text) {
                node.json();
            }
        }
    }
}
