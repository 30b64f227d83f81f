//! The restrictions on a request's tokens, combined from its fields.

use std::sync::Arc;

use octavo_engine::Constraint;
use octavo_text::{AfterReasoning, AllowedTokens, BadWords, Grammar, ThinkingBudget, all_of};

/// Reasoning at the start of the output, which a grammar does not restrict.
#[derive(Clone)]
pub(crate) struct ReasoningSpan {
    /// Token that begins it; `None` if the prompt began it.
    pub(crate) start: Option<u32>,
    pub(crate) end: Arc<[u32]>,
    /// Whether any tokens may come before the last one of `end`.
    pub(crate) has_gap: bool,
    /// A token, and those of which one must follow it before the end.
    pub(crate) choice: Option<(u32, Arc<[u32]>)>,
    /// Size of the model's vocabulary.
    pub(crate) vocab_size: usize,
}

impl ReasoningSpan {
    fn precede(&self, grammar: Box<dyn Constraint>) -> Box<dyn Constraint> {
        let mut constraint = match self.start {
            Some(start) => AfterReasoning::optional(grammar, start, &self.end, self.vocab_size),
            None => AfterReasoning::new(grammar, &self.end, self.vocab_size),
        };
        if self.has_gap {
            constraint = constraint.with_gap();
        }
        if let Some((token, next)) = &self.choice {
            constraint = constraint.with_choice(*token, Arc::clone(next));
        }
        Box::new(constraint)
    }
}

/// The restrictions of one request; none by default.
#[derive(Clone, Default)]
pub(crate) struct Restrictions {
    /// The only allowed tokens.
    pub(crate) allowed: Option<AllowedTokens>,
    /// The forbidden token sequences.
    pub(crate) bad_words: Option<BadWords>,
    /// The grammar of the output.
    pub(crate) grammar: Option<Grammar>,
    /// The reasoning before the part that the grammar restricts.
    pub(crate) reasoning: Option<ReasoningSpan>,
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
            parts.push(match &self.reasoning {
                Some(span) => span.precede(grammar),
                None => grammar,
            });
        }
        all_of(parts)
    }
}
