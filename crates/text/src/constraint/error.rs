//! Why a constraint cannot be had.

use std::time::Duration;

/// Why a specification was refused. Each is a sentence that its author can act on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The specification's text is longer than allowed.
    #[error("the specification has {bytes} bytes; at most {limit} are allowed")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Brackets, groups or schemas within each other, deeper than allowed.
    #[error("the {what} is nested more than {limit} levels deep")]
    TooDeep {
        /// What is nested.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// More parts than allowed once references and repetitions are expanded.
    #[error("the {what} is too complex: references and repetitions expand to more than {limit} parts; simplify it")]
    TooLarge {
        /// What is large.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// Compiling took longer than allowed.
    #[error("compiling the grammar took longer than {0:?}; simplify it")]
    TooSlow(Duration),
    /// All compiler threads stayed busy.
    #[error("the grammar could not be compiled within {0:?} because too many others are being compiled; try again")]
    Busy(Duration),
    /// A keyword that cannot be enforced while text is generated.
    #[error("the JSON Schema keyword \"{keyword}\" at {path} is not supported by structured output{hint}")]
    Keyword {
        /// The keyword.
        keyword: String,
        /// JSON pointer of the schema that has it.
        path: String,
        /// What to do instead: empty, or starts with a semicolon.
        hint: &'static str,
    },
    /// A `$ref` that leads nowhere, or out of the document.
    #[error("the reference \"{reference}\" at {path} cannot be followed: {reason}")]
    Reference {
        /// The reference.
        reference: String,
        /// JSON pointer of the schema that has it.
        path: String,
        /// Why.
        reason: &'static str,
    },
    /// A JSON Schema that is not one, or that nothing satisfies.
    #[error("invalid JSON schema: {0}")]
    Schema(String),
    /// A regular expression that cannot be used.
    #[error("invalid regex: {0}")]
    Regex(String),
    /// A grammar that cannot be used.
    #[error("invalid grammar: {0}")]
    Grammar(String),
    /// A list of choices that cannot be used.
    #[error("invalid choice: {0}")]
    Choice(String),
    /// A structural tag that cannot be used.
    #[error("invalid structural tag: {0}")]
    StructuralTag(String),
    /// Tools that cannot be used.
    #[error("invalid tools: {0}")]
    Tools(String),
    /// A list of tokens or words that cannot be used.
    #[error("{0}")]
    Tokens(String),
    /// The vocabulary cannot be used for grammars at all.
    #[error("structured output is not possible with this model's vocabulary: {0}")]
    Vocabulary(String),
}
