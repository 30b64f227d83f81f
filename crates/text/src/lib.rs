//! Tokens to text and back: tokenizer, incremental detokeniser with stop strings, chat templates, tool calls and
//! reasoning in the output.
//!
//! This crate knows no HTTP, no scheduler and no tensor. The front end calls it on both sides of the engine:
//! [`ChatTemplate`] and [`Tokenizer`] turn a request into token ids, and one [`TextStream`] a sequence turns drawn
//! tokens back into text as they arrive, in which one [`OutputParser`] a sequence finds reasoning and tool calls.
//!
//! Everything here is fed by clients or by checkpoints, so everything is bounded: rendering has an instruction and an
//! output budget, encoding is linear in the text up to a logarithm, and a stream does constant work for each byte.

mod chat;
mod constraint;
mod escape;
mod output;
mod stream;
mod tokenizer;

pub use chat::{ChatTemplate, ContentFormat, TemplateError, TemplateInput, normalize_messages};
pub use constraint::{
    AfterReasoning, AllowedTokens, BadWords, Grammar, GrammarCompiler, GrammarError, GrammarLimits, GrammarSpec,
    ThinkingBudget, all_of,
};
pub use output::{OutputDelta, OutputParser, ReasoningSyntax, ToolSyntax, UnknownParser};
pub use stream::{TextDelta, TextOptions, TextStream};
pub use tokenizer::{GgufVocabulary, SpecialTokens, Tokenizer, TokenizerError};
