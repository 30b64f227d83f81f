//! What restricts the tokens a request may draw: grammars, lists of tokens, bad words, a budget for thinking.
//!
//! A [`GrammarSpec`] says what the text must be. [`GrammarCompiler`] turns it into a [`Grammar`] on a worker thread,
//! in bounded time and memory, and keeps the result for the next request that asks the same. A grammar gives each
//! sequence a matcher of its own, which the engine thread asks for a mask before every draw.
//!
//! Every specification is first put into one language: JSON Schemas are resolved and reduced to what can be enforced
//! (`schema`), EBNF and structural tags are written in Lark (`gbnf`, `structural_tag`). llguidance does the rest.

mod compiler;
mod error;
mod expansion;
mod gbnf;
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
