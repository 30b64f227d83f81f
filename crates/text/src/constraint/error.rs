//! Errors of constraints.

use std::time::Duration;

/// Reason why a specification was refused. Each message is a sentence that its author can act on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The text of the specification is too long.
    #[error("the specification has {bytes} bytes; at most {limit} are allowed")]
    TooLong {
        /// Length in bytes.
        bytes: usize,
        /// Limit.
        limit: usize,
    },
    /// Brackets, groups or schemas are nested too deeply.
    #[error("the {what} is nested more than {limit} levels deep")]
    TooDeep {
        /// Kind of the nested parts.
        what: &'static str,
        /// Limit.
        limit: usize,
    },
    /// The specification has too many parts after references and repetitions are expanded.
    #[error("the {what} is too complex: references and repetitions expand to more than {limit} parts; simplify it")]
    TooLarge {
        /// Kind of the parts.
        what: &'static str,
        /// Limit.
        limit: usize,
    },
    /// Patterns that must match the same text have too many combinations.
    #[error(
        "the {what} has patterns that must all match the same text, and they can match it in too many combinations (more \
         than {limit} for the next character); use fewer or simpler patterns"
    )]
    Intersection {
        /// Kind of the specification.
        what: &'static str,
        /// Limit.
        limit: u64,
    },
    /// There are too many patterns of property names.
    #[error(
        "the JSON schema has too many patternProperties: more than {limit} pairs of them would have to be compared; \
         combine patterns whose properties have the same schema"
    )]
    NamePatterns {
        /// Limit.
        limit: usize,
    },
    /// Compilation exceeded the time limit.
    #[error("compiling the grammar took longer than {0:?}; simplify it")]
    TooSlow(Duration),
    /// All compiler threads stayed busy for this time.
    #[error("the grammar could not be compiled within {0:?} because too many others are being compiled; try again")]
    Busy(Duration),
    /// The system has no thread for the compiler.
    #[error("the grammar could not be compiled because no thread could be started ({0}); try again")]
    Thread(String),
    /// The compiler panicked.
    #[error("the compiler failed on the grammar")]
    Panicked,
    /// A keyword cannot be enforced during generation.
    #[error("the JSON Schema keyword \"{keyword}\" at {path} is not supported by structured output{hint}")]
    Keyword {
        /// The keyword.
        keyword: String,
        /// JSON pointer of the schema that has it.
        path: String,
        /// Alternative: empty, or starts with a semicolon.
        hint: &'static str,
    },
    /// A `$ref` points to nothing or outside the document.
    #[error("the reference \"{reference}\" at {path} cannot be followed: {reason}")]
    Reference {
        /// The reference.
        reference: String,
        /// JSON pointer of the schema that has it.
        path: String,
        /// Reason.
        reason: &'static str,
    },
    /// A schema refers to itself for the same value.
    #[error(
        "the JSON schema is circular: the reference \"{0}\" leads back to itself, so it describes no value; refer to it \
         from inside a property or an item instead"
    )]
    Circular(String),
    /// A JSON Schema is invalid or cannot be satisfied.
    #[error("invalid JSON schema: {0}")]
    Schema(String),
    /// A regular expression cannot be used.
    #[error("invalid regex: {0}")]
    Regex(String),
    /// A grammar cannot be used.
    #[error("invalid grammar: {0}")]
    Grammar(String),
    /// A list of choices cannot be used.
    #[error("invalid choice: {0}")]
    Choice(String),
    /// A structural tag cannot be used.
    #[error("invalid structural tag: {0}")]
    StructuralTag(String),
    /// The tools cannot be used.
    #[error("invalid tools: {0}")]
    Tools(String),
    /// A list of tokens or words cannot be used.
    #[error("{0}")]
    Tokens(String),
    /// The vocabulary does not support grammars.
    #[error("structured output is not possible with this model's vocabulary: {0}")]
    Vocabulary(String),
}
