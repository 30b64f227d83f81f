//! A sequence's tokens without a copy: the prompt as the caller shared it, then the generated tokens.

use std::ops::Range;
use std::sync::Arc;

/// Prompt and generated tokens. Positions count over both.
#[derive(Clone, Debug)]
pub(crate) struct TokenHistory {
    pub(crate) prompt: Arc<[u32]>,
    pub(crate) output: Vec<u32>,
}

impl TokenHistory {
    pub(crate) fn new(prompt: Arc<[u32]>) -> Self {
        Self { prompt, output: Vec::new() }
    }

    /// Returns the number of tokens whose ids are known.
    pub(crate) fn len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// Returns the token at a position.
    pub(crate) fn token(&self, position: usize) -> u32 {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt[position],
            Some(index) => self.output[index],
        }
    }

    /// Returns the tokens at `positions`, which may span the prompt's end.
    pub(crate) fn span(&self, positions: Range<usize>) -> TokenSpan<'_> {
        let border = self.prompt.len();
        let head = &self.prompt[positions.start.min(border)..positions.end.min(border)];
        let tail = &self.output[positions.start.max(border) - border..positions.end.max(border) - border];
        TokenSpan { head, tail }
    }
}

/// Consecutive tokens in two slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenSpan<'a> {
    pub(crate) head: &'a [u32],
    pub(crate) tail: &'a [u32],
}

impl TokenSpan<'_> {
    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.tail.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        self.head.iter().chain(self.tail).copied()
    }
}

impl PartialEq<[u32]> for TokenSpan<'_> {
    fn eq(&self, other: &[u32]) -> bool {
        other.len() == self.len() && other[..self.head.len()] == *self.head && other[self.head.len()..] == *self.tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cross_the_end_of_the_prompt() {
        let history = TokenHistory { prompt: [1, 2, 3].into(), output: vec![4, 5] };
        assert_eq!(history.len(), 5);
        for start in 0..=5 {
            for end in start..=5 {
                let expected: Vec<u32> = (start as u32 + 1..=end as u32).collect();
                let span = history.span(start..end);
                assert_eq!(span.iter().collect::<Vec<_>>(), expected);
                assert!(span == *expected);
            }
        }
        assert!(history.span(1..4) != *[2, 3, 5].as_slice());
    }
}
