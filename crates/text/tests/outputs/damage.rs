//! Damage to the markup of calls.

use proptest::prelude::*;

/// Generates a value that contains private characters, among them JSON within a string.
pub(crate) fn marked_text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z ]{0,4}\u{e010}[a-z \n]{0,4}", r#"\{"k": "\u{e011}[a-z]{0,3}"\}"#, "\u{e012}é\u{1f600}"]
}

pub(crate) fn is_private(character: char) -> bool {
    ('\u{e000}'..'\u{f8ff}').contains(&character)
}

/// Damage to markup. There are no additional closing braces: they end the arguments, and fields of a call that follow
/// its arguments are ignored. A position is a number of characters, modulo the length of the text.
#[derive(Clone, Debug)]
pub(crate) enum Damage {
    /// Deletes the next character that is one of these.
    Delete(usize, &'static str),
    /// Writes the marker at this position again.
    Repeat(usize),
    /// Writes the next letter of a string as a Unicode escape.
    Escape(usize),
    /// Inserts a structural character beside another one.
    Insert(usize, &'static str),
}

pub(crate) fn damage() -> impl Strategy<Value = Damage> {
    let at = 0_usize..1 << 16;
    prop_oneof![
        (at.clone(), prop::sample::select(&["{}", "[]", "}", "]", "()", ",:;", "<>", "\n"][..]))
            .prop_map(|(at, which)| Damage::Delete(at, which)),
        at.clone().prop_map(Damage::Repeat),
        at.clone().prop_map(Damage::Escape),
        (at, prop::sample::select(&["{", "[", "<", ",", "\n"][..])).prop_map(|(at, text)| Damage::Insert(at, text)),
    ]
}

impl Damage {
    pub(crate) fn apply(&self, text: &mut String) {
        let (Self::Delete(at, _) | Self::Repeat(at) | Self::Escape(at) | Self::Insert(at, _)) = *self;
        let starts: Vec<usize> = text.char_indices().map(|(start, _)| start).collect();
        let at = starts[at % starts.len()];
        match *self {
            Self::Delete(_, which) => {
                if let Some(found) = text[at..].find(|character: char| which.contains(character)) {
                    text.remove(at + found);
                }
            }
            Self::Repeat(_) => {
                let marker = text[at..].find('<').and_then(|start| {
                    let end = text[at + start..].find('>')?;
                    Some((at + start, text[at + start..=at + start + end].to_owned()))
                });
                // A marker with text in it would double the text.
                if let Some((start, marker)) = marker.filter(|(_, marker)| !marker.contains(is_private)) {
                    text.insert_str(start, &marker);
                }
            }
            Self::Escape(_) => {
                let mut letters = text[at..].char_indices().map(|(found, character)| (at + found, character));
                // A letter of an escape, escaped again, would make the key another one, whose value is ignored.
                let escaped = |start: usize| text[..start].chars().rev().take(5).any(|character| character == '\\');
                let letter = letters.find(|&(start, character)| character.is_ascii_lowercase() && !escaped(start));
                if let Some((start, letter)) = letter {
                    text.remove(start);
                    text.insert_str(start, &format!("\\u{:04x}", u32::from(letter)));
                }
            }
            Self::Insert(_, inserted) => {
                if let Some(found) = text[at..].find(['{', '}', '[', ']', ':', ',', '<', '>']) {
                    text.insert_str(at + found, inserted);
                }
            }
        }
    }
}
