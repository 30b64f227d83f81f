//! Size of the terminals of a Lark grammar after every name is replaced by its definition.
//!
//! llguidance expands terminals that way, so forty lines in which every terminal is twice its predecessor would become
//! a terminal of 2⁴⁰ parts. None of its limits detects that in advance.

use std::collections::HashMap;

use serde_json::Value;

/// Parts of one terminal, before expansion.
#[derive(Default)]
struct Terminal<'a> {
    /// Number of literals, regexes and names that are not terminals.
    leaves: u64,
    /// Names of terminals, each as often as it occurs.
    names: Vec<&'a str>,
}

/// Returns the largest number of parts to which any terminal of `grammar` expands, at most `u64::MAX`.
pub(super) fn largest_terminal(grammar: &str) -> u64 {
    let mut terminals: HashMap<&str, Terminal<'_>> = HashMap::new();
    let mut rest = grammar;
    let mut current = None;
    while let Some((word, after)) = next_word(rest) {
        rest = after;
        if let Some(body) = definition(rest).filter(|_| is_name(word)) {
            rest = body;
            current = is_terminal(word).then_some(word);
            if current.is_some() {
                terminals.entry(word).or_default();
            }
        } else if let Some(terminal) = current.and_then(|name| terminals.get_mut(name)) {
            if is_terminal(word) { terminal.names.push(word) } else { terminal.leaves += 1 }
        }
    }
    let mut sizes = HashMap::new();
    terminals.keys().map(|name| size(name, &terminals, &mut sizes)).max().unwrap_or(0)
}

/// Returns the values that follow `%json` in a grammar. llguidance reports those that are not JSON.
pub(super) fn embedded_schemas(grammar: &str) -> Vec<Value> {
    let (mut rest, mut schemas) = (grammar, Vec::new());
    while let Some((word, after)) = next_word(rest) {
        rest = after;
        if word == EMBEDDED {
            let mut values = serde_json::Deserializer::from_str(after).into_iter();
            if let Some(Ok(value)) = values.next() {
                schemas.push(value);
                rest = &after[values.byte_offset()..];
            }
        }
    }
    schemas
}

/// Counts the parts of one terminal. It is iterative, because a chain of names may be as long as the grammar.
fn size<'a>(name: &'a str, terminals: &HashMap<&'a str, Terminal<'a>>, sizes: &mut HashMap<&'a str, u64>) -> u64 {
    let mut stack = vec![(name, false)];
    while let Some((name, ready)) = stack.pop() {
        let Some(terminal) = terminals.get(name) else { continue };
        if ready {
            let named = terminal.names.iter().map(|name| sizes.get(name).copied().unwrap_or(1));
            let size = named.fold(terminal.leaves, u64::saturating_add);
            sizes.insert(name, size.max(1));
        } else if !sizes.contains_key(name) {
            // A cycle counts once: llguidance refuses it.
            sizes.insert(name, 1);
            stack.push((name, true));
            stack.extend(terminal.names.iter().map(|name| (*name, false)));
        }
    }
    sizes.get(name).copied().unwrap_or(0)
}

/// Directive that precedes a JSON Schema.
const EMBEDDED: &str = "%json";

/// Returns the next name, literal, regex or [`EMBEDDED`], and the rest. Everything between them is ignored.
fn next_word(text: &str) -> Option<(&str, &str)> {
    let mut rest = text;
    loop {
        let first = rest.chars().next()?;
        let end = match first {
            '"' => quoted(rest, '"'),
            '%' if rest.starts_with(EMBEDDED) => EMBEDDED.len(),
            '/' if rest.starts_with("//") => {
                rest = rest.split_once('\n')?.1;
                continue;
            }
            '/' => quoted(rest, '/'),
            '#' => {
                rest = rest.split_once('\n')?.1;
                continue;
            }
            c if c.is_ascii_alphabetic() || c == '_' => {
                rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len())
            }
            c => {
                rest = &rest[c.len_utf8()..];
                continue;
            }
        };
        return Some(rest.split_at(end));
    }
}

/// Returns the end of a literal that starts here.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    let end = text.char_indices().skip(1).find(|&(_, c)| {
        let ends = (c == quote && !escaped) || c == '\n';
        escaped = c == '\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |(at, c)| at + c.len_utf8())
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

/// Returns whether the word names a terminal, which Lark writes in capitals.
fn is_terminal(word: &str) -> bool {
    is_name(word) && word.trim_start_matches('_').starts_with(|c: char| c.is_ascii_uppercase())
}

/// Returns the definition that follows a name: `: ...`, with a priority or attributes before the colon.
fn definition(rest: &str) -> Option<&str> {
    let mut rest = rest.trim_start_matches([' ', '\t']);
    if let Some(priority) = rest.strip_prefix('.') {
        rest = priority.trim_start_matches(|c: char| c == '-' || c.is_ascii_digit()).trim_start_matches([' ', '\t']);
    }
    if let Some((_, after)) = rest.strip_prefix('[').and_then(|attributes| attributes.split_once(']')) {
        rest = after.trim_start_matches([' ', '\t']);
    }
    rest.strip_prefix(':')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_are_counted_through_names() {
        for (grammar, size) in [
            ("", 0),
            ("start: \"a\"", 0),
            ("start: A\nA: \"a\"", 1),
            ("A: \"a\" /b\\/B:/ \"C: D\"\n// B: A A\nB[lazy]: A A // A", 6),
            ("A.2: \"x\"\nB: A A\nstart: B B B\nC : B B | A", 5),
            ("A: B\nB: A A", 2),
        ] {
            assert_eq!(largest_terminal(grammar), size, "{grammar}");
        }
        let doubled: String = (1..80).map(|i| format!("T{i}: T{0} T{0}\n", i - 1)).collect();
        assert_eq!(largest_terminal(&format!("start: T79\nT0: \"a\"\n{doubled}")), u64::MAX);
        let chain: String = (1..100_000).map(|i| format!("T{i}: T{}\n", i - 1)).collect();
        assert!(largest_terminal(&format!("T0: \"a\"\n{chain}")) <= 100_000);
    }

    #[test]
    fn embedded_schemas_are_found_outside_of_literals() {
        let grammar =
            "start: %json{\"a\": \"%json 1\"} B %json [2] \"%json 3\" /%json 4/ // %json 5\nB: \"b\"\nc: %json";
        assert_eq!(embedded_schemas(grammar), [serde_json::json!({"a": "%json 1"}), serde_json::json!([2])]);
    }

    proptest! {
        #[test]
        fn any_text_has_a_size(text in r#"([ABab_:./"\\# \n\[\]|]|A: |B: A A\n){0,60}"#, other: String) {
            largest_terminal(&text);
            largest_terminal(&other);
        }
    }
}
