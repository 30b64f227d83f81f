//! Constraints on the tokens that a request may sample: grammars, allowed tokens, bad words and a thinking budget.
//!
//! A [`GrammarSpec`] specifies the text. [`GrammarCompiler`] compiles it to a [`Grammar`] on a worker thread, with
//! limits on time and memory, and caches the result for later requests. A grammar gives each sequence its own matcher,
//! from which the engine thread requests a mask before every token.
//!
//! Every specification is first translated to one language: JSON Schemas are resolved and reduced to the keywords that
//! can be enforced (`schema`), EBNF and structural tags are translated to Lark (`gbnf`, `structural_tag`). llguidance
//! does the rest.

mod compiler;
mod error;
mod expansion;
mod gbnf;
mod intersection;
mod limits;
mod lower;
mod matcher;
mod reasoning;
mod schema;
mod structural_tag;
mod tokens;
mod vocabulary;

pub use compiler::GrammarCompiler;
pub use error::GrammarError;
pub use limits::GrammarLimits;
pub use lower::GrammarSpec;
pub use matcher::Grammar;
pub use reasoning::{AfterReasoning, ThinkingBudget};
pub use tokens::{AllowedTokens, BadWords, all_of};

#[cfg(test)]
mod tests;
