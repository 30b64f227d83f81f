//! Normalisers of the library that work in parts, because what they do to a character depends on few others.

use std::borrow::Cow;

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};
use unicode_categories::UnicodeCategories;
use unicode_normalization_alignments::char::{canonical_combining_class, decompose_canonical, decompose_compatible};
use unicode_normalization_alignments::{IsNormalized, is_nfkc_quick};

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
    /// It removes control characters, after which their neighbours may affect each other.
    removes_controls: bool,
}

impl LocalNormalizer {
    /// `None` for normalisers that are not known to be local.
    pub(super) fn parse(step: &Value) -> Option<Self> {
        let kind = step["type"].as_str()?;
        if !matches!(kind, "NFC" | "NFD" | "NFKC" | "NFKD" | "StripAccents" | "Lowercase" | "BertNormalizer") {
            return None;
        }
        Some(Self {
            normalizer: Box::new(serde_json::from_value(step.clone()).ok()?),
            keeps_ascii: !matches!(kind, "Lowercase" | "BertNormalizer"),
            removes_controls: kind == "BertNormalizer",
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
        let end = text.char_indices().find(|&(at, c)| at >= PAUSE_BYTES && self.begins_part(c));
        let end = end.map_or(text.len(), |(at, _)| at);
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

    /// Whether this character is not joined to those before it, moved before one of them or removed.
    ///
    /// The first character of its decompositions is then a starter that composes with nothing before it (Unicode Standard
    /// Annex #15, section 9).
    fn begins_part(&self, c: char) -> bool {
        if matches!(c, ' '..='~' | '\t' | '\n' | '\r') {
            return true;
        }
        let is_removed = self.removes_controls && (c == char::REPLACEMENT_CHARACTER || c.is_other());
        let (mut canonical, mut compatible) = (None, None);
        decompose_canonical(c, |part| _ = canonical.get_or_insert(part));
        decompose_compatible(c, |part| _ = compatible.get_or_insert(part));
        !is_removed && [canonical, compatible].into_iter().flatten().all(is_stable)
    }
}

/// Whether a character that has no decomposition is a starter that composes with nothing before it.
fn is_stable(c: char) -> bool {
    canonical_combining_class(c) == 0 && matches!(is_nfkc_quick(std::iter::once(c)), IsNormalized::Yes)
}
