//! The restrictions on a request's tokens, combined from its fields.

use std::sync::Arc;

use octavo_engine::Constraint;
use octavo_text::{AfterReasoning, AllowedTokens, BadWords, Grammar, ThinkingBudget, all_of};

/// The restrictions of one request; none by default.
#[derive(Clone, Default)]
pub(crate) struct Restrictions {
    /// The only allowed tokens.
    pub(crate) allowed: Option<AllowedTokens>,
    /// The forbidden token sequences.
    pub(crate) bad_words: Option<BadWords>,
    /// The grammar of the output.
    pub(crate) grammar: Option<Grammar>,
    /// The end of the reasoning before the part that the grammar restricts, and the size of the model's vocabulary.
    pub(crate) reasoning_end: Option<(Arc<[u32]>, usize)>,
    /// Maximum number of reasoning tokens.
    pub(crate) thinking: Option<ThinkingBudget>,
}

impl Restrictions {
    /// The constraint of one sequence, if there are restrictions.
    pub(crate) fn constraint(&self) -> Option<Box<dyn Constraint>> {
        let mut parts: Vec<Box<dyn Constraint>> = Vec::new();
        if let Some(allowed) = &self.allowed {
            parts.push(Box::new(allowed.clone()));
        }
        if let Some(bad_words) = &self.bad_words {
            parts.push(Box::new(bad_words.clone()));
        }
        if let Some(thinking) = &self.thinking {
            parts.push(Box::new(thinking.clone()));
        }
        if let Some(grammar) = &self.grammar {
            let grammar = grammar.constraint();
            parts.push(match &self.reasoning_end {
                Some((end, vocab_size)) => Box::new(AfterReasoning::new(grammar, end, *vocab_size)),
                None => grammar,
            });
        }
        all_of(parts)
    }
}
