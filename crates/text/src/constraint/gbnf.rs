//! Translation of the EBNF grammars of llama.cpp and XGrammar (`root ::= ...`) to Lark.
//!
//! Lark has rules, and terminals, which are regular and matched greedily. Regular parts become one terminal that is as
//! large as possible: a grammar without recursion is a single terminal, and its language is exact. In a recursive
//! grammar a terminal is matched greedily even if only a shorter match would let the rest fit; vLLM's own conversion
//! has the same limitation. A rule that repeats itself only at its end (`ws ::= [ \n] ws | ""`) is first converted to a
//! repetition, because that is regular.

mod parse;
mod write;

use super::{GrammarError, GrammarLimits};

/// Part of a rule.
#[derive(Clone, Debug, PartialEq)]
enum Expr {
    /// Literal text; may be empty.
    Literal(String),
    /// One character, as a regex.
    Class(String),
    /// A rule, by index.
    Rule(usize),
    /// Expressions in sequence.
    Sequence(Vec<Expr>),
    /// Alternatives.
    Choice(Vec<Expr>),
    /// Repetition with a minimum and a maximum; `None` means unlimited.
    Repeat(Box<Expr>, u32, Option<u32>),
}

/// Returns whether a grammar is EBNF rather than Lark: it has `::=` outside strings, character classes and comments.
pub(super) fn is_ebnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        let line = line.trim_start();
        let name = line.trim_start_matches(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-'));
        name.len() < line.len() && name.trim_start().starts_with("::=")
    })
}

/// Translates an EBNF grammar to Lark.
///
/// # Errors
/// Returns an error if the grammar cannot be parsed, has no `root`, refers to an undefined rule or exceeds the limits.
pub(super) fn to_lark(grammar: &str, limits: &GrammarLimits) -> Result<String, GrammarError> {
    let rules = parse::parse(grammar, limits.depth)?;
    write::write(rules, limits)
}
