//! Escaping of text in a JSON string.

use std::fmt::Write;

/// Appends `text` escaped for a JSON string, without quotes, as `json.dumps(text, ensure_ascii=False)` does.
pub(crate) fn escape_json(text: &str, out: &mut String) {
    text.chars().for_each(|character| escape_json_char(character, out));
}

/// Appends one escaped character.
pub(crate) fn escape_json_char(character: char, out: &mut String) {
    match character {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        '\0'..='\u{1f}' => {
            let _ = write!(out, "\\u{:04x}", u32::from(character));
        }
        _ => out.push(character),
    }
}
