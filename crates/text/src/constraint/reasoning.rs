//! Constraints for models that reason before they answer.

use std::sync::Arc;

use octavo_engine::Constraint;

use super::tokens::{allow_all, allow_also, allow_only};

/// Finds a sequence of tokens in a stream, with the Knuth-Morris-Pratt table.
#[derive(Clone, Debug)]
struct Marker {
    tokens: Vec<u32>,
    /// Whether any tokens may come before the last one.
    has_gap: bool,
    /// Length of the longest proper prefix that is also a suffix, for each prefix.
    borders: Vec<usize>,
}

impl Marker {
    fn new(tokens: &[u32]) -> Self {
        let mut marker = Self { tokens: tokens.to_vec(), has_gap: false, borders: Vec::with_capacity(tokens.len()) };
        let mut border = 0;
        for (index, &token) in tokens.iter().enumerate() {
            border = if index == 0 { 0 } else { marker.advance(border, token) };
            marker.borders.push(border);
        }
        marker
    }

    /// Returns the number of tokens of the sequence at the end of the stream after `token`, if it was `matched` before;
    /// less than the whole sequence.
    fn advance(&self, mut matched: usize, token: u32) -> usize {
        loop {
            if self.tokens.get(matched) == Some(&token) {
                return matched + 1;
            }
            if self.has_gap && matched + 1 == self.tokens.len() {
                return matched;
            }
            if matched == 0 {
                return 0;
            }
            matched = self.borders[matched - 1];
        }
    }

    fn is_whole(&self, matched: usize) -> bool {
        matched == self.tokens.len()
    }
}

/// A constraint that applies only to the answer: everything is allowed inside the reasoning, until the end-of-thinking
/// sequence has been sampled.
pub struct AfterReasoning {
    inner: Box<dyn Constraint>,
    /// Token that begins reasoning at the start of the output; `None` if the output starts inside the reasoning.
    start: Option<u32>,
    end: Marker,
    /// A token, and those of which one must follow it in the reasoning.
    choice: Option<(u32, Arc<[u32]>)>,
    vocab_size: usize,
    /// State after each token of the reasoning.
    states: Vec<Reasoned>,
    /// Number of tokens passed to `inner`.
    answered: usize,
}

/// State after a token of the reasoning.
#[derive(Clone, Copy, Debug, Default)]
struct Reasoned {
    /// Matched length of the end sequence.
    matched: usize,
    /// Whether the next token is one of the choice.
    chooses: bool,
}

impl AfterReasoning {
    /// Applies `inner` after the tokens of `end`, or at once if `end` is empty. `vocab_size` is that of the model's
    /// head.
    pub fn new(inner: Box<dyn Constraint>, end: &[u32], vocab_size: usize) -> Self {
        let end = Marker::new(end);
        Self { inner, start: None, end, choice: None, vocab_size, states: Vec::new(), answered: 0 }
    }

    /// Lets the end sequence have any tokens before its last one, as a header that may name the type of the answer.
    #[must_use]
    pub fn with_gap(mut self) -> Self {
        self.end.has_gap = true;
        self
    }

    /// Allows only the tokens of `next` after `token` in the reasoning, so that it leads to an answer.
    #[must_use]
    pub fn with_choice(mut self, token: u32, next: Arc<[u32]>) -> Self {
        self.choice = Some((token, next));
        self
    }

    /// Lets the first token decide: after `start`, everything is allowed up to `end`; any other token is part of the
    /// answer. A model that does not reason is thus constrained from its first token on.
    pub fn optional(inner: Box<dyn Constraint>, start: u32, end: &[u32], vocab_size: usize) -> Self {
        Self { start: Some(start), ..Self::new(inner, end, vocab_size) }
    }

    /// Returns whether `inner` decides about the next token.
    fn has_ended(&self) -> bool {
        match self.states.last() {
            Some(state) => self.end.is_whole(state.matched),
            None => self.start.is_some() || self.end.is_whole(0),
        }
    }

    /// Returns the token that may begin reasoning now.
    fn possible_start(&self) -> Option<u32> {
        self.start.filter(|_| self.states.is_empty() && self.answered == 0)
    }

    /// Returns the only tokens that may come next in the reasoning; `None` if all may.
    fn chosen(&self) -> Option<&[u32]> {
        let (_, next) = self.choice.as_ref().filter(|_| self.states.last().is_some_and(|state| state.chooses))?;
        Some(next)
    }
}

impl Constraint for AfterReasoning {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        if !self.has_ended() {
            match self.chosen() {
                Some(next) => allow_only(mask, next),
                None => allow_all(mask, self.vocab_size),
            }
            return;
        }
        self.inner.fill_mask(mask);
        if let Some(start) = self.possible_start() {
            allow_also(mask, start);
        }
    }

    fn accept(&mut self, token: u32) -> bool {
        if self.possible_start() == Some(token) {
            self.states.push(Reasoned::default());
            return true;
        }
        if self.has_ended() {
            self.answered += 1;
            return self.inner.accept(token);
        }
        let allowed = self.chosen().is_none_or(|next| next.contains(&token));
        let matched = self.end.advance(self.states.last().map_or(0, |state| state.matched), token);
        let chooses = self.choice.as_ref().is_some_and(|&(before, _)| before == token);
        self.states.push(Reasoned { matched, chooses });
        allowed
    }

    fn rollback(&mut self, tokens: usize) {
        let answered = tokens.min(self.answered);
        if answered > 0 {
            self.inner.rollback(answered);
            self.answered -= answered;
        }
        self.states.truncate(self.states.len().saturating_sub(tokens - answered));
    }
}

/// Ends reasoning after a number of tokens: from then on only the tokens of the end-of-thinking sequence are allowed.
#[derive(Clone, Debug)]
pub struct ThinkingBudget {
    budget: usize,
    /// Start sequence. If it is empty, the output starts inside the reasoning, which occurs once.
    start: Marker,
    end: Marker,
    vocab_size: usize,
    /// State after each accepted token.
    states: Vec<Thinking>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thinking {
    /// Outside the reasoning, with the matched length of the start sequence.
    Out { matched: usize },
    /// Inside the reasoning, with its number of tokens and the matched length of the end sequence.
    In { tokens: usize, matched: usize },
}

impl ThinkingBudget {
    /// Allows `budget` tokens between the tokens of `start` and those of `end`. With an empty `start` the output starts
    /// inside the reasoning, as after a chat template that opens it. `vocab_size` is that of the model's head.
    pub fn new(budget: usize, start: &[u32], end: &[u32], vocab_size: usize) -> Self {
        Self { budget, start: Marker::new(start), end: Marker::new(end), vocab_size, states: Vec::new() }
    }

    fn state(&self) -> Thinking {
        match self.states.last() {
            Some(&state) => state,
            None if self.start.tokens.is_empty() => Thinking::In { tokens: 0, matched: 0 },
            None => Thinking::Out { matched: 0 },
        }
    }

    /// Returns the token that must come next once the budget is spent. Tokens at the end of the reasoning that already
    /// match the end sequence count as part of it.
    fn forced(&self) -> Option<u32> {
        match self.state() {
            Thinking::In { tokens, matched } if tokens - matched >= self.budget => {
                self.end.tokens.get(matched).copied()
            }
            _ => None,
        }
    }
}

impl Constraint for ThinkingBudget {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        match self.forced() {
            Some(token) => allow_only(mask, &[token]),
            None => allow_all(mask, self.vocab_size),
        }
    }

    fn accept(&mut self, token: u32) -> bool {
        let allowed = self.forced().is_none_or(|forced| forced == token);
        self.states.push(match self.state() {
            Thinking::In { tokens, matched } => match self.end.advance(matched, token) {
                matched if self.end.is_whole(matched) => Thinking::Out { matched: 0 },
                matched => Thinking::In { tokens: tokens + 1, matched },
            },
            Thinking::Out { .. } if self.start.tokens.is_empty() => Thinking::Out { matched: 0 },
            Thinking::Out { matched } => match self.start.advance(matched, token) {
                matched if self.start.is_whole(matched) => Thinking::In { tokens: 0, matched: 0 },
                matched => Thinking::Out { matched },
            },
        });
        allowed
    }

    fn rollback(&mut self, tokens: usize) {
        self.states.truncate(self.states.len().saturating_sub(tokens));
    }
}
