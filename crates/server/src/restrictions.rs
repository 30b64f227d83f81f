//! What a request's tokens are restricted by, put together from its fields.

use std::sync::Arc;

use octavo_engine::Constraint;
use octavo_text::{AfterReasoning, AllowedTokens, BadWords, Grammar, ThinkingBudget, all_of};

/// The restrictions of one request; the default is none.
#[derive(Clone, Default)]
pub(crate) struct Restrictions {
    /// The only tokens that may come.
    pub(crate) allowed: Option<AllowedTokens>,
    /// What must not come.
    pub(crate) bad_words: Option<BadWords>,
    /// What the output must look like.
    pub(crate) grammar: Option<Grammar>,
    /// What ends the reasoning that comes before what the grammar is about, and the size of the model's vocabulary.
    pub(crate) reasoning_end: Option<(Arc<[u32]>, usize)>,
    /// Most tokens of reasoning.
    pub(crate) thinking: Option<ThinkingBudget>,
}

impl Restrictions {
    /// What restricts one sequence, if anything does.
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
