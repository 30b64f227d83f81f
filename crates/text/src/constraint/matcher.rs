//! A compiled grammar, and the matcher that follows one sequence through it.

use std::sync::Arc;

use llguidance::Matcher;
use octavo_engine::Constraint;

use super::tokens::allow_only;

/// A compiled grammar. Cheap to clone.
#[derive(Clone)]
pub struct Grammar {
    /// Initial matcher, never advanced. Each matcher is a deep copy of it: they share no lexer, so none can use up
    /// another's states or wait for another's lock.
    start: Arc<Matcher>,
    eos: Arc<[u32]>,
    /// Number of ids known to the matcher.
    vocab_size: usize,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    pub(super) fn new(start: Matcher, eos: Arc<[u32]>, vocab_size: usize) -> Self {
        Self { start: Arc::new(start), eos, vocab_size }
    }

    /// Creates a matcher for one sequence, at the start of its output.
    pub fn constraint(&self) -> Box<dyn Constraint> {
        Box::new(GrammarMatcher {
            matcher: self.start.deep_clone(),
            grammar: self.clone(),
            accepted: Vec::new(),
            ended: 0,
        })
    }
}

/// Follows one sequence. If llguidance gives up (a limit is reached), the mask allows only the end of the sequence and
/// no token is accepted any more, so that the request ends with an error.
struct GrammarMatcher {
    matcher: Matcher,
    grammar: Grammar,
    /// Accepted tokens of the text.
    accepted: Vec<u32>,
    /// Number of end-of-sequence tokens after the text. The matcher does not see them.
    ended: usize,
}

impl Constraint for GrammarMatcher {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        let allowed = if self.ended > 0 { None } else { self.matcher.compute_mask_or_eos().ok() };
        match allowed {
            Some(allowed) => {
                mask.fill(0);
                mask.iter_mut().zip(allowed.as_slice()).for_each(|(word, allowed)| *word = *allowed);
            }
            None => allow_only(mask, &self.grammar.eos),
        }
    }

    fn accept(&mut self, token: u32) -> bool {
        if self.grammar.eos.contains(&token) {
            let allowed = self.ended > 0 || self.matcher.is_accepting().unwrap_or(false);
            self.ended += usize::from(allowed);
            return allowed;
        }
        // The matcher would stop permanently at an id that it does not know.
        let known = (token as usize) < self.grammar.vocab_size;
        let allowed = known && self.ended == 0 && matches!(self.matcher.try_consume_tokens(&[token]), Ok(1));
        if allowed {
            self.accepted.push(token);
        }
        allowed
    }

    fn rollback(&mut self, tokens: usize) {
        let ended = tokens.min(self.ended);
        self.ended -= ended;
        let tokens = (tokens - ended).min(self.accepted.len());
        if tokens == 0 {
            return;
        }
        self.accepted.truncate(self.accepted.len() - tokens);
        if self.matcher.rollback(tokens).is_err() {
            // The matcher gave up after these tokens, so it starts again and replays the remaining ones.
            self.matcher = self.grammar.start.deep_clone();
            let replayed = self.matcher.try_consume_tokens(&self.accepted);
            debug_assert!(replayed.is_ok(), "accepted tokens are accepted again");
        }
    }
}
