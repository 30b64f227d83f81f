//! Search for fixed markers in text that arrives in pieces.

/// Separates text from the markers in it and holds back only text that may become a marker.
///
/// The markers are few, short and fixed, so held text is compared with each; the automaton of stop strings serves the
/// many that a client may send. Work is linear in the text: a character is held once and passed on once.
#[derive(Debug)]
pub(super) struct Markers {
    /// Markers, none empty and none a prefix of another.
    markers: &'static [&'static str],
    /// Prefix of a marker at the end of the text.
    held: String,
}

impl Markers {
    pub(super) fn new(markers: &'static [&'static str]) -> Self {
        Self { markers, held: String::new() }
    }

    /// Takes the next character and appends to `text` everything that can no longer be part of a marker. Returns the
    /// index of the marker that the character completes.
    pub(super) fn step(&mut self, character: char, text: &mut String) -> Option<usize> {
        self.held.push(character);
        loop {
            if let Some(index) = self.markers.iter().position(|&marker| marker == self.held) {
                self.held.clear();
                return Some(index);
            }
            if self.held.is_empty() || self.markers.iter().any(|marker| marker.starts_with(&self.held)) {
                return None;
            }
            text.push(self.held.remove(0));
        }
    }

    /// Returns the held text, because the text has ended or is parsed differently from here.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// A text that must come next, after optional whitespace.
#[derive(Debug)]
pub(super) struct Expect {
    rest: &'static str,
    started: bool,
}

impl Expect {
    pub(super) fn new(text: &'static str) -> Self {
        Self { rest: text, started: false }
    }

    /// Takes the next character. Returns whether it completes the text, or `None` if this is not the text.
    pub(super) fn step(&mut self, character: char) -> Option<bool> {
        if !self.started && character.is_whitespace() {
            return Some(false);
        }
        self.started = true;
        self.rest = self.rest.strip_prefix(character)?;
        Some(self.rest.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(markers: &'static [&'static str], text: &str) -> (String, String) {
        let mut matcher = Markers::new(markers);
        let mut out = String::new();
        for character in text.chars() {
            if let Some(index) = matcher.step(character, &mut out) {
                out.push_str(&format!("({index})"));
            }
        }
        (out, matcher.take())
    }

    #[test]
    fn markers_are_found_among_their_own_beginnings() {
        let markers = &["<call>", "</call>", "\n</call>"];
        assert_eq!(split(markers, "a<call>b\n</call>c</call>"), ("a(0)b(2)c(1)".to_owned(), String::new()));
        assert_eq!(split(markers, "<<cal<call><ca"), ("<<cal(0)".to_owned(), "<ca".to_owned()));
        assert_eq!(split(markers, "\n\n</call>\n</"), ("\n(2)".to_owned(), "\n</".to_owned()));
        assert_eq!(split(&["ä｜b", "｜c"], "ä｜c"), ("ä(1)".to_owned(), String::new()));
    }

    #[test]
    fn expected_text_may_follow_whitespace_but_has_none_inside() {
        let run = |text: &str| {
            let mut expect = Expect::new("<f=");
            text.chars().map(|character| expect.step(character)).collect::<Vec<_>>()
        };
        assert_eq!(run("\n <f="), [Some(false), Some(false), Some(false), Some(false), Some(true)]);
        assert_eq!(run("< "), [Some(false), None]);
    }
}
