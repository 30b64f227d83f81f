//! Words for prompts of an exact length.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use octavo_text::{SpecialTokens, Tokenizer};

/// Maximum number of words to choose from.
const MOST: usize = 512;

/// Minimum number of words with which prompts are distinguishable.
const FEWEST: usize = 32;

/// Returns common words that are one token each, alone and after a space: a prompt of them has as many tokens as words,
/// on every server.
pub(super) fn one_token_words(tokenizer_json: &Path) -> Result<Arc<[String]>, Box<dyn Error>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", tokenizer_json.display());
    let json = fs::read(tokenizer_json).map_err(|error| named(&error))?;
    let tokenizer = Tokenizer::from_json(&json, SpecialTokens::default()).map_err(|error| named(&error))?;
    let words = words_of(&tokenizer);
    if words.len() < FEWEST {
        return Err(named(&format!("only {} words are one token each, too few for prompts", words.len())).into());
    }
    Ok(words)
}

fn words_of(tokenizer: &Tokenizer) -> Arc<[String]> {
    let one = |text: &str| tokenizer.encode(text, false).is_ok_and(|ids| ids.len() == 1);
    // Byte-level vocabularies write a space as `Ġ`, and frequent tokens come first.
    let entries = (0..tokenizer.vocab_size() as u32).filter_map(|id| tokenizer.id_to_token(id));
    let words = entries.filter_map(|entry| Some(entry.strip_prefix('Ġ')?.to_owned()));
    words.filter(|word| is_word(word) && one(word) && one(&format!(" {word}"))).take(MOST).collect()
}

fn is_word(text: &str) -> bool {
    (3..=8).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use octavo_bench::load::random_words;
    use serde_json::{Map, Value, json};

    use super::*;

    /// Returns a tokenizer whose words have three letters from a to d; words for which pairs are merged differently
    /// have more than one token.
    fn tokenizer() -> Tokenizer {
        let letters = ["a", "b", "c", "d"];
        let mut vocab = letters.map(str::to_owned).to_vec();
        vocab.push("Ġ".into());
        let mut merges = Vec::new();
        let mut merge = |a: &str, b: &str| {
            merges.push([a.to_owned(), b.to_owned()]);
            vocab.push(format!("{a}{b}"));
            format!("{a}{b}")
        };
        let pairs: Vec<String> =
            letters.iter().flat_map(|a| letters.map(|b| (a, b))).map(|(a, b)| merge(a, b)).collect();
        let words: Vec<String> = pairs.iter().flat_map(|a| letters.map(|b| (a, b))).map(|(a, b)| merge(a, b)).collect();
        for word in words {
            merge("Ġ", &word);
        }
        let vocab: Map<String, Value> =
            vocab.into_iter().zip(0..).map(|(token, id)| (token, Value::from(id))).collect();
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
        });
        Tokenizer::from_json(json.to_string().as_bytes(), SpecialTokens::default()).unwrap()
    }

    #[test]
    fn prompts_have_as_many_tokens_as_words() {
        let tokenizer = tokenizer();
        let words = words_of(&tokenizer);
        let has = |word: &str| words.iter().any(|known| known == word);
        assert!(words.len() == 34 && has("abc") && !has("bab"), "{words:?}");
        for (index, count) in [1, 9, 128, 1500].into_iter().enumerate() {
            let prompt = random_words(&words, 7, index, count);
            assert_eq!(tokenizer.encode(&prompt, false).unwrap().len(), count, "{prompt}");
        }
    }

    #[test]
    fn a_missing_tokenizer_is_named() {
        let error = one_token_words(Path::new("/nowhere/tokenizer.json")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/tokenizer.json: "), "{error}");
    }
}
