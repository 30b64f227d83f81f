//! A stand-in tokenizer for models with random weights that have none.

use anyhow::{Result, bail};
use octavo_bench::load::WORDS;
use octavo_text::{GgufVocabulary, Tokenizer, byte_character};
use tracing::warn;

/// A space in byte-level vocabularies.
const SPACE: char = '\u{120}';

/// Builds the tokenizer. Its tokens are all bytes, the words of the load generator, so that its prompts have as many
/// tokens as words, and generated names. Every id has a text, which answers of random ids need.
pub(super) fn tokenizer(vocab_size: usize) -> Result<Tokenizer> {
    if vocab_size < 256 {
        bail!(
            "the model has no tokenizer.json, and a stand-in needs a vocabulary of at least 256 tokens, not {vocab_size}"
        );
    }
    warn!(
        "the model has no tokenizer.json; a stand-in of bytes and a few words is used, so token counts differ from other servers'"
    );
    let words = WORDS.iter().map(|word| format!("{SPACE}{word}"));
    let names = (0..vocab_size).map(|number| format!("{SPACE}t{number}"));
    let bytes = (0..=u8::MAX).map(|byte| byte_character(byte).to_string());
    let tokens: Vec<String> = bytes.chain(words).chain(names).take(vocab_size).collect();
    Ok(Tokenizer::from_gguf(&GgufVocabulary {
        model: "gpt2".into(),
        // This pre-tokenizer looks up whole words before it splits them.
        pre: Some("llama-bpe".into()),
        tokens: tokens.iter().map(String::as_str).collect(),
        add_bos: Some(false),
        ..GgufVocabulary::default()
    })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_tokens_and_every_token_a_text() {
        let tokenizer = tokenizer(1000).unwrap();
        assert_eq!(tokenizer.vocab_size(), 1000);
        for text in ["Hello, world!\n", "\u{e9}\u{20ac}\u{1f600} \u{0} tab\t", " time year people"] {
            let ids = tokenizer.encode(text, true).unwrap();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        }
        assert_eq!(tokenizer.encode(" time year people", true).unwrap().len(), 3, "words are tokens");
        assert!((0..1000).all(|id| !tokenizer.decode(&[id], true).unwrap().is_empty()));
        assert!(super::tokenizer(255).is_err());
    }
}
