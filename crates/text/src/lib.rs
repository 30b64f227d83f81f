//! Tokens to text and back: tokenizer, detokenizer, stop strings, chat templates.
