//! Conversion between tokens and text: tokenizer, incremental detokeniser with stop strings, chat templates, tool calls
//! and reasoning in the output.
//!
//! This crate knows no HTTP, no scheduler and no tensor. The front end calls it on both sides of the engine:
//! [`ChatTemplate`] and [`Tokenizer`] convert a request to token ids. One [`TextStream`] per sequence converts sampled
//! tokens to text as they arrive, and one [`OutputParser`] per sequence finds reasoning and tool calls in it.
//!
//! All input comes from clients or checkpoints, so everything is limited: rendering has an instruction and an output
//! budget, encoding is linear in the text up to a logarithm, and a stream does constant work per byte.

mod chat;
mod constraint;
mod escape;
mod output;
mod stream;
mod tokenizer;

pub use chat::{
    ChatTemplate, ContentFormat, ImagePart, Modality, Part, TemplateError, TemplateInput, answer_untrusted,
    image_parts, normalize_messages, read_untrusted, untrusted_request,
};
pub use constraint::{
    AfterReasoning, AllowedTokens, BadWords, Grammar, GrammarCompiler, GrammarError, GrammarLimits, GrammarSpec,
    ThinkingBudget, all_of,
};
pub use output::{OutputDelta, OutputParser, ReasoningSyntax, ToolSyntax, UnknownParser, without_written_turns};
pub use stream::{StopStrings, TextDelta, TextOptions, TextStream};
pub use tokenizer::{
    GgufVocabulary, PairTokens, SpecialTokens, TokenLimit, Tokenizer, TokenizerError, Wanted, byte_character,
};
