//! A tokenizer and a chat template for tests.

use octavo_text::{SpecialTokens, Tokenizer, byte_character};
use serde_json::{Map, Value, json};

/// Tokens beside the 256 bytes, from id 256 on.
pub const WORDS: [&str; 8] = ["Hello", " world", "!", " one", " two", " three", "STOP", "Ğ"];

/// Specials, after the words.
pub const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

pub const IM_END: u32 = 256 + WORDS.len() as u32 + 2;
pub const VOCAB: usize = IM_END as usize + 1;

/// A template with a header for each message.
pub const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}\
    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The id of a word, or of a special token.
pub fn id(token: &str) -> u32 {
    let place = WORDS.iter().chain(&SPECIALS).position(|known| *known == token);
    256 + place.unwrap_or_else(|| panic!("no token {token}")) as u32
}

/// A byte-level tokenizer: text becomes bytes, words come only from the script. The ids of `more` tokens start at
/// [`VOCAB`].
pub fn tokenizer(more: &[&str]) -> Tokenizer {
    build(more, &Value::Null, SpecialTokens { eos: Some("<|im_end|>".into()), ..SpecialTokens::default() })
}

/// Builds the tokenizer with a post-processor, which may be null.
pub fn build(more: &[&str], post_processor: &Value, special: SpecialTokens) -> Tokenizer {
    let words = WORDS.iter().map(|word| word.bytes().map(byte_character).collect());
    let added = SPECIALS.iter().chain(more).copied();
    let tokens: Vec<String> = (0..=255)
        .map(|byte| byte_character(byte).to_string())
        .chain(words)
        .chain(added.clone().map(String::from))
        .collect();
    let vocab: Map<String, Value> = tokens.into_iter().zip(0..).map(|(token, id)| (token, Value::from(id))).collect();
    let added: Vec<Value> = added
        .map(|token| {
            json!({"id": vocab[token], "content": token, "special": !more.contains(&token), "single_word": false,
                   "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": post_processor, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(json.to_string().as_bytes(), special).unwrap()
}
