//! Limits on the cost of a grammar.

use std::time::Duration;

use llguidance::api::ParserLimits;

/// Limits on the cost of one grammar, to compile and to use. All of them apply to specifications from clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarLimits {
    /// Size of a specification in bytes: JSON text, regex, grammar or choices.
    pub spec_bytes: usize,
    /// Nesting depth of schemas, tags or groups.
    pub depth: usize,
    /// Number of JSON values of a schema after references are followed.
    pub schema_nodes: usize,
    /// Product of a schema's different `multipleOf` values, each in units of its last digit. It is the number of
    /// remainders to track.
    pub divisors: u64,
    /// Number of symbols in the productions of a compiled grammar.
    pub grammar_symbols: usize,
    /// Work to build the first lexer, in derivre's units; about 50 000 per millisecond.
    pub compile_fuel: u64,
    /// Number of combinations of intersected patterns by which one character can be matched. The fuel for the lexer is
    /// divided by it, because a step of the lexer that has begun does not end for want of fuel.
    pub pattern_branches: u64,
    /// Size in bytes of a pattern of property names that has others beside it, with which it is intersected.
    pub name_pattern_bytes: usize,
    /// Number of pairs of patterns of property names that are compared, up to 0.2 ms each.
    pub name_pattern_pairs: usize,
    /// Wall time of one compilation. Specifications within the other limits compile much faster.
    pub compile_time: Duration,
    /// Number of concurrent compilations, apart from those that have taken long.
    pub compile_threads: usize,
    /// Time after which a compilation has taken long, so that it does not keep others from beginning.
    pub slow_after: Duration,
    /// Number of compilations that have taken long. Further ones do keep others from beginning.
    pub slow_threads: usize,
    /// Lexer work for one mask, in derivre's units; about 14 000 per millisecond.
    pub mask_fuel: u64,
    /// Number of parser items for one mask; about 20 000 per millisecond.
    pub mask_items: usize,
    /// Number of lexer states of one sequence, one to two kilobytes each.
    pub lexer_states: usize,
    /// Number of cached grammars.
    pub cached_grammars: usize,
    /// Total size of the specifications of the cached grammars, in bytes.
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
            pattern_branches: 100,
            name_pattern_bytes: 1000,
            name_pattern_pairs: 50_000,
            compile_time: Duration::from_secs(10),
            compile_threads: 2,
            slow_after: Duration::from_millis(200),
            slow_threads: 2,
            mask_fuel: 200_000,
            mask_items: 50_000,
            lexer_states: 32_768,
            cached_grammars: 128,
            cached_spec_bytes: 2 << 20,
        }
    }
}

impl GrammarLimits {
    /// Returns the limits that llguidance enforces on a grammar whose intersected patterns have `branches` combinations.
    pub(super) fn parser(&self, branches: u64) -> ParserLimits {
        let branches = branches.max(1);
        ParserLimits {
            initial_lexer_fuel: self.compile_fuel / branches,
            step_lexer_fuel: self.mask_fuel / branches,
            step_max_items: self.mask_items,
            max_lexer_states: self.lexer_states,
            max_grammar_size: self.grammar_symbols,
            // Errors go to clients, who know their own input; the parser state would make them pages long.
            verbose_errors: false,
            ..ParserLimits::default()
        }
    }
}
