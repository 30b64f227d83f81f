//! EBNF grammars as llama.cpp and XGrammar write them (`root ::= ...`), put into Lark.
//!
//! Lark has terminals, which are regular and matched as long as they go, and rules. What is regular becomes one
//! terminal, as large as possible: a grammar without recursion is a single one, and its language is exact. In a
//! recursive grammar a terminal is matched as long as it goes even where a shorter match would have let the rest fit;
//! vLLM's own conversion is the same there. A rule that only repeats itself at its end (`ws ::= [ \n] ws | ""`) is made
//! a repetition first, since that is regular.

mod parse;
mod write;

use super::{GrammarError, GrammarLimits};

/// Part of a rule.
#[derive(Clone, Debug, PartialEq)]
enum Expr {
    /// Text; may be empty.
    Literal(String),
    /// One character, as a regex.
    Class(String),
    /// A rule, by index.
    Rule(usize),
    /// One after the other.
    Sequence(Vec<Expr>),
    /// One of them.
    Choice(Vec<Expr>),
    /// So many times; `None`: any number.
    Repeat(Box<Expr>, u32, Option<u32>),
}

/// Whether a grammar is EBNF rather than Lark: `::=` outside texts, character classes and comments.
pub(super) fn is_ebnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        let line = line.trim_start();
        let name = line.trim_start_matches(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-'));
        name.len() < line.len() && name.trim_start().starts_with("::=")
    })
}

/// Writes an EBNF grammar in Lark.
///
/// # Errors
/// It does not parse, has no `root`, refers to a rule that is not there, or is beyond the limits.
pub(super) fn to_lark(grammar: &str, limits: &GrammarLimits) -> Result<String, GrammarError> {
    let rules = parse::parse(grammar, limits.depth)?;
    write::write(rules, limits)
}
