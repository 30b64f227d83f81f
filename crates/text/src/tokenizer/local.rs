//! Normalisers of the library that work in parts, because what they do to a character depends on few others.

use std::borrow::Cow;

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};
use unicode_categories::UnicodeCategories;
use unicode_normalization_alignments::char::{canonical_combining_class, decompose_canonical, decompose_compatible};
use unicode_normalization_alignments::{IsNormalized, is_nfkc_quick};
use unicode_segmentation::GraphemeCursor;

use super::TokenizerError;
use super::lazy::PAUSE_BYTES;

/// The most bytes of a part. The library takes more than a hundred bytes of memory for each of them.
const MOST_BYTES: usize = 256 << 10;

/// A normaliser in which no character affects those behind one that begins a part.
#[derive(Debug)]
pub(super) struct LocalNormalizer {
    normalizer: Box<NormalizerWrapper>,
    /// It does not change ASCII.
    keeps_ascii: bool,
    parts: Parts,
}

/// The places where a part may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parts {
    /// At a character that is not joined to those before it.
    Characters {
        /// Control characters are removed, after which their neighbours may affect each other.
        removes_controls: bool,
    },
    /// At a character as a reader sees it: SentencePiece's table of replacements is applied to each.
    Graphemes,
}

impl LocalNormalizer {
    /// `None` for normalisers that are not known to be local.
    pub(super) fn parse(step: &Value) -> Option<Self> {
        let kind = step["type"].as_str()?;
        let parts = match kind {
            "NFC" | "NFD" | "NFKC" | "NFKD" | "StripAccents" | "Lowercase" => {
                Parts::Characters { removes_controls: false }
            }
            "BertNormalizer" => Parts::Characters { removes_controls: true },
            "Precompiled" => Parts::Graphemes,
            _ => return None,
        };
        Some(Self {
            normalizer: Box::new(serde_json::from_value(step.clone()).ok()?),
            keeps_ascii: !matches!(kind, "Lowercase" | "BertNormalizer" | "Precompiled"),
            parts,
        })
    }

    /// Whether a text remains as it is.
    pub(super) fn keeps(&self, text: &str) -> bool {
        self.keeps_ascii && text.is_ascii()
    }

    /// Splits the first part from a text that is not empty.
    ///
    /// # Errors
    /// Returns an error if the part is too long.
    pub(super) fn split_part<'t>(&self, text: &'t str) -> Result<(&'t str, &'t str), TokenizerError> {
        let begins_part = |&(at, c): &(usize, char)| match self.parts {
            Parts::Characters { removes_controls } => begins_part(c, removes_controls),
            Parts::Graphemes => GraphemeCursor::new(at, text.len(), true).is_boundary(text, 0).unwrap_or(false),
        };
        let mut starts = text.char_indices().skip_while(|&(at, _)| at < PAUSE_BYTES);
        let end = starts.find(begins_part).map_or(text.len(), |(at, _)| at);
        if end > MOST_BYTES { Err(TokenizerError::LongRun { limit: MOST_BYTES }) } else { Ok(text.split_at(end)) }
    }

    /// Normalises a part.
    pub(super) fn normalise<'t>(&self, part: &'t str) -> tokenizers::Result<Cow<'t, str>> {
        if self.keeps(part) {
            return Ok(Cow::Borrowed(part));
        }
        let mut part = NormalizedString::from(part);
        self.normalizer.normalize(&mut part)?;
        Ok(Cow::Owned(part.get().to_owned()))
    }
}

/// Whether this character is not joined to those before it, moved before one of them or removed.
///
/// The first character of its decompositions is then a starter that composes with nothing before it (Unicode Standard
/// Annex #15, section 9).
fn begins_part(c: char, removes_controls: bool) -> bool {
    if matches!(c, ' '..='~' | '\t' | '\n' | '\r') {
        return true;
    }
    let is_removed = removes_controls && (c == char::REPLACEMENT_CHARACTER || c.is_other());
    let (mut canonical, mut compatible) = (None, None);
    decompose_canonical(c, |part| _ = canonical.get_or_insert(part));
    decompose_compatible(c, |part| _ = compatible.get_or_insert(part));
    !is_removed && [canonical, compatible].into_iter().flatten().all(is_stable)
}

/// Whether a character that has no decomposition is a starter that composes with nothing before it.
fn is_stable(c: char) -> bool {
    canonical_combining_class(c) == 0 && matches!(is_nfkc_quick(std::iter::once(c)), IsNormalized::Yes)
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use unicode_segmentation::UnicodeSegmentation;

    use super::*;
    use crate::tokenizer::tests::{text, xlm_roberta_normalizer};

    fn table() -> &'static LocalNormalizer {
        static TABLE: LazyLock<LocalNormalizer> =
            LazyLock::new(|| LocalNormalizer::parse(&xlm_roberta_normalizer()["normalizers"][0]).unwrap());
        &TABLE
    }

    proptest! {
        #[test]
        fn graphemes_are_replaced_one_by_one(text in text()) {
            let table = table();
            let whole = table.normalise(&text).unwrap();
            for (at, _) in text.grapheme_indices(true) {
                let (before, after) = text.split_at(at);
                let parts = [table.normalise(before).unwrap(), table.normalise(after).unwrap()].concat();
                prop_assert_eq!(&parts, &whole, "cut at {}", at);
            }
        }
    }

    #[test]
    fn a_part_ends_between_graphemes() {
        let table = table();
        let text = "n\u{303}".repeat(PAUSE_BYTES);
        let (part, rest) = table.split_part(&text).unwrap();
        assert!(part.len() >= PAUSE_BYTES && part.len() < PAUSE_BYTES + 4);
        assert!(rest.starts_with('n'));
        let marks = "\u{303}".repeat(MOST_BYTES);
        assert!(matches!(table.split_part(&marks), Err(TokenizerError::LongRun { .. })));
    }
}
