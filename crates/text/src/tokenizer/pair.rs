//! Prompts of one or two texts whose tokens are known: special tokens and truncation.

use tokenizers::{Encoding, Token};

use super::{Tokenizer, TokenizerError, Wanted};

/// The tokens of a prompt that are kept if it is too long. Its special tokens count and are kept first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimit {
    /// Most tokens of the prompt.
    pub most: usize,
    /// Whether the ends of the texts are kept rather than their beginnings.
    pub keep_end: bool,
}

impl TokenLimit {
    /// No limit.
    pub const NONE: Self = Self { most: usize::MAX, keep_end: false };

    /// The tokens of a text that a prompt within the limit can have.
    pub fn wanted(self) -> Wanted {
        if self.keep_end { Wanted::Last(self.most) } else { Wanted::First(self.most) }
    }

    /// Returns `keep` of the tokens.
    fn cut(self, ids: &[u32], keep: usize) -> &[u32] {
        let keep = keep.min(ids.len());
        if self.keep_end { &ids[ids.len() - keep..] } else { &ids[..keep] }
    }
}

/// The tokens of a pair of texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PairTokens {
    /// The token ids.
    pub ids: Vec<u32>,
    /// Index of the first token whose type is 1; `None` if all are of type 0. The types are `token_type_ids` of BERT.
    pub second: Option<usize>,
}

impl Tokenizer {
    /// Returns a prompt of one text, whose tokens without special tokens are `text`, with the special tokens that
    /// tokenizer.json adds.
    ///
    /// # Errors
    /// Returns an error if the library rejects the tokens, which it never does for the supported post-processors.
    pub fn assemble(&self, text: &[u32], limit: TokenLimit) -> Result<Vec<u32>, TokenizerError> {
        let room = limit.most.saturating_sub(self.post_process(&[], None)?.ids.len());
        let assembled = self.post_process(limit.cut(text, room), None)?;
        Ok(assembled.cut(limit).ids)
    }

    /// Returns a prompt of two texts, whose tokens without special tokens are `first` and `second`, with the special
    /// tokens that tokenizer.json adds to pairs. If they are too many, the longer text is truncated first, as
    /// `longest_first` of the tokenizers library does it.
    ///
    /// # Errors
    /// Returns an error if tokenizer.json gives pairs token types other than a run of 0 and then a run of 1.
    pub fn assemble_pair(
        &self,
        first: &[u32],
        second: &[u32],
        limit: TokenLimit,
    ) -> Result<PairTokens, TokenizerError> {
        let room = limit.most.saturating_sub(self.post_process(&[], Some(&[]))?.ids.len());
        let (keep_first, keep_second) = longest_first(first.len(), second.len(), room);
        let pair = self.post_process(limit.cut(first, keep_first), Some(limit.cut(second, keep_second)))?;
        Ok(pair.cut(limit))
    }

    /// Adds the special tokens to the tokens of one or two texts.
    fn post_process(&self, first: &[u32], second: Option<&[u32]>) -> Result<PairTokens, TokenizerError> {
        let encoding = |ids: &[u32], kind: u32| {
            // Post-processors use the spellings of tokens only to correct offsets, which nobody reads.
            let tokens = ids.iter().map(|&id| Token::new(id, String::new(), (0, 0))).collect();
            Encoding::from_tokens(tokens, kind)
        };
        let processed = self
            .inner
            .post_process(encoding(first, 0), second.map(|second| encoding(second, 1)), true)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        let types = processed.get_type_ids();
        let position = types.iter().position(|&kind| kind != 0);
        if position.is_some_and(|position| types[position..].iter().any(|&kind| kind != 1)) {
            return Err(TokenizerError::TokenTypes);
        }
        let mut ids = processed.get_ids().to_vec();
        let moved = self.edges.apply(&mut ids);
        Ok(PairTokens { second: position.map(|position| position.saturating_add_signed(moved)), ids })
    }
}

impl PairTokens {
    /// Removes tokens if the special tokens alone are too many.
    fn cut(self, limit: TokenLimit) -> Self {
        let kept = limit.cut(&self.ids, limit.most);
        let removed = if limit.keep_end { self.ids.len() - kept.len() } else { 0 };
        let second = self.second.map(|second| second.saturating_sub(removed)).filter(|&second| second < kept.len());
        Self { ids: kept.to_vec(), second }
    }
}

/// The numbers of tokens that two texts keep of theirs if both together have `room`, as the tokenizers library computes
/// them: the shorter one is truncated only if the longer one then has about as many tokens.
fn longest_first(first: usize, second: usize, room: usize) -> (usize, usize) {
    if first.saturating_add(second) <= room {
        return (first, second);
    }
    let short = first.min(second);
    let (short, long) = if short > room / 2 { (room / 2, room - room / 2) } else { (short, room - short) };
    if first <= second { (short, long) } else { (long, short) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::utils::truncation::{TruncationParams, truncate_encodings};

    use super::*;

    proptest! {
        #[test]
        fn lengths_are_those_of_the_library(first in 0..40_usize, second in 0..40_usize, room in 0..60_usize) {
            let encoding = |length| Encoding::from_tokens(vec![Token::new(1, String::new(), (0, 0)); length], 0);
            let params = TruncationParams { max_length: room, ..TruncationParams::default() };
            let (a, b) = truncate_encodings(encoding(first), Some(encoding(second)), &params).unwrap();
            prop_assert_eq!(longest_first(first, second, room), (a.len(), b.unwrap().len()));
        }
    }
}
