//! Long words are encoded in windows.
//!
//! Byte-pair encoding merges the neighbours of the best rank, and the leftmost of equal ones, so what happens on one side
//! of a place does not depend on the other side unless a merge crosses it. Two tokens therefore stay what they are in
//! every text in which they are neighbours and each begins and ends where it does here: the merges inside them happen
//! among themselves in the same order, and would have crossed the place in the one text if they did in the other. If the
//! encoding of a window has a token boundary, and the encoding of the text from there on begins with the token that
//! follows it in the window, the tokens before the boundary and those after it are the tokens of the whole.

use tokenizers::Model as _;

use super::lazy::{Encoding, LazyEncoder, Stop};
use super::model::Model;
use super::{Entry, TokenizerError};

/// Bytes of a window: a few milliseconds of work.
const WINDOW: usize = 16 << 10;

/// Encodes words that are longer than a window.
#[derive(Debug)]
pub(super) struct LongWords {
    pub(super) window: usize,
    /// Bytes of the longest entry of the vocabulary.
    longest: usize,
}

impl LongWords {
    /// `None` for a model other than byte-pair encoding, or one that treats the ends of a word differently.
    pub(super) fn new(model: &Model, entries: &[Entry<'_>]) -> Option<Self> {
        let Model::Bpe(bpe) = model else { return None };
        if bpe.moves_unknown() {
            return None;
        }
        let longest = entries.iter().flatten().map(|entry| entry.len()).max().unwrap_or(0);
        Some(Self { window: WINDOW, longest })
    }

    /// Whether a word is longer than a window.
    pub(super) fn applies_to(&self, word: &str) -> bool {
        word.len() > self.window.max(self.longest)
    }

    /// Adds the tokens of a word.
    pub(super) fn encode<E: From<TokenizerError>>(
        &self,
        encoder: &LazyEncoder,
        encoding: &mut Encoding<'_, E>,
        word: &str,
    ) -> Result<(), Stop<E>> {
        let before = encoding.ids.len();
        // A window that is as long as the word always succeeds.
        let mut window = self.window.max(4 * (self.longest + 1));
        while !self.encode_in_windows(encoder, encoding, (word, window))? {
            encoding.ids.truncate(before);
            window *= 2;
        }
        Ok(())
    }

    /// Adds the tokens of a word, with windows of this length. Returns whether they are those of the whole word.
    fn encode_in_windows<E: From<TokenizerError>>(
        &self,
        encoder: &LazyEncoder,
        encoding: &mut Encoding<'_, E>,
        (word, window): (&str, usize),
    ) -> Result<bool, Stop<E>> {
        // A window that is not longer than an entry might be one, which is not merged.
        let overlap = (self.longest + 1).max(window / 16);
        let certain = encoding.ids.len();
        let (mut start, mut expected) = (0, None);
        loop {
            encoding.wait(certain)?;
            let end = encoder.floor(word, start + window);
            let spelling = encoder.spell(&word.as_bytes()[start..end]);
            let tokens = encoding.model.tokenize(&spelling)?;
            if expected.is_some() && tokens.first().map(|token| token.id) != expected {
                return Ok(false);
            }
            if end == word.len() {
                encoding.ids.extend(tokens.iter().map(|token| token.id));
                return Ok(true);
            }
            // Characters without a token shift the places of the others.
            if tokens.last().is_none_or(|token| token.offsets.1 != spelling.len()) {
                return Ok(false);
            }
            let (mut kept, mut length, mut next) = (0, 0, 0);
            for (count, token) in (1..).zip(&tokens) {
                next += encoder.spelled_bytes(&spelling, token.offsets);
                if next + overlap > end - start {
                    break;
                }
                if encoder.floor(word, start + next) == start + next {
                    (kept, length) = (count, next);
                }
            }
            let (keep, rest) = tokens.split_at(kept);
            if keep.is_empty() {
                return Ok(false);
            }
            encoding.ids.extend(keep.iter().map(|token| token.id));
            (start, expected) = (start + length, rest.first().map(|token| token.id));
        }
    }
}
