//! The vocabulary in llguidance's form: the bytes of every token in a trie.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use super::GrammarError;
use crate::Tokenizer;

/// Maximum size of the vocabulary: the trie stores a token id in 24 bits, with one value for "no token".
const MAX_VOCAB: usize = (1 << 24) - 1;

/// Maximum length of a token: the trie stores a depth in 10 bits. A longer token (GLM-4 has 1024 spaces) is never
/// allowed under a grammar; shorter tokens can replace it.
const MAX_TOKEN_BYTES: usize = 1000;

struct Vocabulary(TokTrie);

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(bytes)
    }

    /// Greedy tokenization differs from the model's training. If a grammar leaves only one text, the model therefore
    /// still chooses its tokens.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// Creates the trie of `tokenizer` with `vocab_size` ids (the model's head may have more rows than the tokenizer has
/// tokens). Ids without text occur in masks only as `eos_token_ids`.
///
/// # Errors
/// Returns an error if the vocabulary is too large, an end-of-sequence id is beyond it, or there is none.
pub(super) fn token_env(
    tokenizer: &Tokenizer,
    vocab_size: usize,
    eos_token_ids: &[u32],
) -> Result<TokEnv, GrammarError> {
    let invalid = |message: String| GrammarError::Vocabulary(message);
    if vocab_size == 0 || vocab_size > MAX_VOCAB {
        return Err(invalid(format!("it has {vocab_size} tokens, and 1 to {MAX_VOCAB} are possible")));
    }
    let Some(&eos) = eos_token_ids.first() else {
        return Err(invalid("it has no end-of-sequence token".to_owned()));
    };
    if let Some(id) = eos_token_ids.iter().find(|&&id| id as usize >= vocab_size) {
        return Err(invalid(format!("the end-of-sequence token {id} is not among its {vocab_size} tokens")));
    }
    let words: Vec<Vec<u8>> =
        (0..vocab_size as u32).map(|id| token_bytes(tokenizer, id, eos_token_ids.contains(&id))).collect();
    catch_unwind(AssertUnwindSafe(|| {
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, eos), &words).with_eos_tokens(eos_token_ids);
        Ok(Arc::new(Vocabulary(trie)) as TokEnv)
    }))
    .map_err(|error| invalid(error.to_string()))
}

/// Returns the bytes of a token inside a text. Special tokens are not text: toktrie marks them with a byte that never
/// occurs in UTF-8, so that only a grammar which names one can allow it.
fn token_bytes(tokenizer: &Tokenizer, id: u32, is_eos: bool) -> Vec<u8> {
    if id as usize >= tokenizer.vocab_size() {
        return Vec::new();
    }
    let mut bytes = match tokenizer.pieces() {
        Some(pieces) => pieces.get(id).to_vec(),
        None => tokenizer.token_bytes(id),
    };
    let marker = TokTrie::SPECIAL_TOKEN_MARKER;
    if bytes.is_empty() || bytes.len() > MAX_TOKEN_BYTES || bytes.contains(&marker) {
        return Vec::new();
    }
    if is_eos || tokenizer.is_special(id) {
        if !(bytes.starts_with(b"<") && bytes.ends_with(b">")) {
            bytes = format!("[{id}]").into_bytes();
        }
        bytes.insert(0, marker);
    }
    bytes
}
