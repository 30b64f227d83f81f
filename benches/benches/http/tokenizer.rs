//! A byte-level tokenizer generated at run time, with a vocabulary similar to common ones.

use octavo_text::{SpecialTokens, Tokenizer, TokenizerError};
use serde_json::{Map, Value, json};

/// First id of the tokens that are plain text by themselves, after the 256 bytes.
pub(crate) const TEXT_TOKENS_START: u32 = 256;

/// Creates a tokenizer with every pair of letters, every letter and pair after a space, and the single bytes.
pub(crate) fn tokenizer() -> Result<Tokenizer, TokenizerError> {
    let mut vocab: Vec<String> = (0..=255u8).map(|byte| symbol(byte).to_string()).collect();
    let mut merges: Vec<[String; 2]> = Vec::new();
    let mut merge = |a: &str, b: &str, vocab: &mut Vec<String>| {
        vocab.push(format!("{a}{b}"));
        merges.push([a.to_owned(), b.to_owned()]);
    };
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let space = symbol(b' ').to_string();
    for a in &letters {
        for b in &letters {
            merge(a, b, &mut vocab);
        }
    }
    for end in vocab[256..].iter().cloned().chain(letters).collect::<Vec<_>>() {
        merge(&space, &end, &mut vocab);
    }
    let ids: Map<String, Value> = vocab.into_iter().zip(0..).map(|(token, id)| (token, Value::from(id))).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "vocab": ids,
            "merges": merges,
        },
    });
    Tokenizer::from_json(json.to_string().as_bytes(), SpecialTokens::default())
}

/// Returns the character that represents a byte: itself if it is printable, else one from U+0100 on.
fn symbol(byte: u8) -> char {
    let prints = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return char::from(byte);
    }
    let unprintable_before = (0..byte).filter(|&b| !prints(b)).count() as u32;
    char::from_u32(256 + unprintable_before).unwrap_or(char::REPLACEMENT_CHARACTER)
}
