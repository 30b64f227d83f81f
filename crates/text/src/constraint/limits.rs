//! What a grammar may cost.

use std::time::Duration;

use llguidance::api::ParserLimits;

/// Bounds on what one grammar may cost, to compile and to use. What a client sends is held to all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarLimits {
    /// Bytes of a specification: JSON text, regex, grammar or choices.
    pub spec_bytes: usize,
    /// Schemas, tags or groups within each other.
    pub depth: usize,
    /// JSON values of a schema once references are followed.
    pub schema_nodes: usize,
    /// Product of a schema's different `multipleOf`, each in units of its last digit: so many remainders are followed.
    pub divisors: u64,
    /// Symbols in the productions of a compiled grammar.
    pub grammar_symbols: usize,
    /// Work to build the first lexer, in derivre's units; about 50 000 a millisecond.
    pub compile_fuel: u64,
    /// Wall time of one compilation. What the other limits let through ends well before it.
    pub compile_time: Duration,
    /// Compilations at a time.
    pub compile_threads: usize,
    /// Lexer work for one mask, in derivre's units; about 14 000 a millisecond.
    pub mask_fuel: u64,
    /// Parser items for one mask; about 20 000 a millisecond.
    pub mask_items: usize,
    /// Lexer states of one sequence; one to two kilobytes each.
    pub lexer_states: usize,
    /// Compiled grammars that are kept.
    pub cached_grammars: usize,
    /// Bytes of the specifications of the kept grammars.
    pub cached_spec_bytes: usize,
}

impl Default for GrammarLimits {
    fn default() -> Self {
        Self {
            spec_bytes: 256 << 10,
            depth: 64,
            schema_nodes: 50_000,
            divisors: 10_000,
            grammar_symbols: 200_000,
            compile_fuel: 1_000_000,
            compile_time: Duration::from_secs(10),
            compile_threads: 2,
            mask_fuel: 200_000,
            mask_items: 50_000,
            lexer_states: 32_768,
            cached_grammars: 128,
            cached_spec_bytes: 2 << 20,
        }
    }
}

impl GrammarLimits {
    /// The part that llguidance keeps.
    pub(super) fn parser(&self) -> ParserLimits {
        ParserLimits {
            initial_lexer_fuel: self.compile_fuel,
            step_lexer_fuel: self.mask_fuel,
            step_max_items: self.mask_items,
            max_lexer_states: self.lexer_states,
            max_grammar_size: self.grammar_symbols,
            // Errors go to clients, who know what they sent; the state would make them pages long.
            verbose_errors: false,
            ..ParserLimits::default()
        }
    }
}
