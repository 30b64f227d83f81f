//! Constraints that are lists: allowed tokens and forbidden words; and combinations of constraints.

use std::sync::Arc;

use octavo_engine::Constraint;

use super::GrammarError;
use crate::Tokenizer;

/// Maximum number of bad words of one request, counting their spellings, as in vLLM.
const MAX_BAD_SEQUENCES: usize = 128;

/// Maximum length of a bad word, in bytes.
const MAX_BAD_WORD_BYTES: usize = 1024;

/// Sets the bits of the ids below `vocab_size` and clears all others.
pub(super) fn allow_all(mask: &mut [u32], vocab_size: usize) {
    let whole = (vocab_size / 32).min(mask.len());
    mask[..whole].fill(u32::MAX);
    mask[whole..].fill(0);
    if let Some(word) = mask.get_mut(whole) {
        *word = (1 << (vocab_size % 32)) - 1;
    }
}

/// Sets the bits of `ids` and clears all others.
pub(super) fn allow_only(mask: &mut [u32], ids: &[u32]) {
    mask.fill(0);
    ids.iter().for_each(|&id| allow_also(mask, id));
}

/// Sets the bit of `id`.
pub(super) fn allow_also(mask: &mut [u32], id: u32) {
    if let Some(word) = mask.get_mut(id as usize / 32) {
        *word |= 1 << (id % 32);
    }
}

fn forbid(mask: &mut [u32], id: u32) {
    if let Some(word) = mask.get_mut(id as usize / 32) {
        *word &= !(1 << (id % 32));
    }
}

/// Allows only the tokens of a list (`allowed_token_ids`).
#[derive(Clone, Debug)]
pub struct AllowedTokens {
    /// Shared by the sequences of a request.
    mask: Arc<[u32]>,
}

impl AllowedTokens {
    /// Allows `ids` of a vocabulary of `vocab_size` tokens.
    ///
    /// # Errors
    /// Returns an error if the list is empty or names a token beyond the vocabulary.
    pub fn new(ids: &[u32], vocab_size: usize) -> Result<Self, GrammarError> {
        if ids.is_empty() {
            return Err(GrammarError::Tokens("allowed_token_ids must not be empty".to_owned()));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(GrammarError::Tokens(format!(
                "allowed_token_ids has {id}, which is not one of the vocabulary's {vocab_size} tokens"
            )));
        }
        let mut mask = vec![0; vocab_size.div_ceil(32)];
        allow_only(&mut mask, ids);
        Ok(Self { mask: mask.into() })
    }
}

impl Constraint for AllowedTokens {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(0);
        mask.iter_mut().zip(&*self.mask).for_each(|(word, allowed)| *word = *allowed);
    }

    fn accept(&mut self, token: u32) -> bool {
        self.mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    fn rollback(&mut self, _tokens: usize) {}
}

/// Keeps words out of the output (`bad_words`): the token that would complete one is not allowed.
#[derive(Clone, Debug)]
pub struct BadWords {
    /// Token sequences of the words, none empty. Shared by the sequences of a request.
    sequences: Arc<[Vec<u32>]>,
    vocab_size: usize,
    accepted: Vec<u32>,
}

impl BadWords {
    /// Forbids `words`, each as tokenized at the start of a text and after a space, as in vLLM. `vocab_size` is that of
    /// the model's head.
    ///
    /// # Errors
    /// Returns an error if a word is empty or cannot be tokenized, or if there are too many.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize, words: &[String]) -> Result<Self, GrammarError> {
        let invalid = |message: String| GrammarError::Tokens(message);
        let too_many = || invalid(format!("bad_words makes more than {MAX_BAD_SEQUENCES} token sequences"));
        if words.len() > MAX_BAD_SEQUENCES {
            return Err(too_many());
        }
        let encode = |text: &str| tokenizer.encode(text, false).map_err(|error| invalid(error.to_string()));
        let mut sequences = Vec::with_capacity(2 * words.len());
        for word in words {
            if word.len() > MAX_BAD_WORD_BYTES {
                let bytes = word.len();
                return Err(invalid(format!(
                    "bad_words has a word of {bytes} bytes; at most {MAX_BAD_WORD_BYTES} are allowed"
                )));
            }
            let bare = encode(word.trim_start())?;
            if bare.is_empty() {
                return Err(invalid("bad_words has an empty word".to_owned()));
            }
            // A spelling after a space with more tokens is the spelling without a space, preceded by a token for the
            // space.
            let spaced = encode(&format!(" {}", word.trim_start()))?;
            let differs = spaced.first() != bare.first() && spaced.len() == bare.len();
            sequences.push(bare);
            if differs {
                sequences.push(spaced);
            }
        }
        if sequences.len() > MAX_BAD_SEQUENCES {
            return Err(too_many());
        }
        if let Some(id) = sequences.iter().flatten().find(|&&id| id as usize >= vocab_size) {
            return Err(invalid(format!("bad_words has the token {id}, which the model does not have")));
        }
        Ok(Self { sequences: sequences.into(), vocab_size, accepted: Vec::new() })
    }

    /// Returns the tokens that would complete a word now.
    fn forbidden(&self) -> impl Iterator<Item = u32> {
        self.sequences.iter().filter_map(|sequence| {
            let (&last, before) = sequence.split_last()?;
            self.accepted.ends_with(before).then_some(last)
        })
    }
}

impl Constraint for BadWords {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        allow_all(mask, self.vocab_size);
        self.forbidden().for_each(|id| forbid(mask, id));
    }

    fn accept(&mut self, token: u32) -> bool {
        let allowed = !self.forbidden().any(|id| id == token);
        self.accepted.push(token);
        allowed
    }

    fn rollback(&mut self, tokens: usize) {
        self.accepted.truncate(self.accepted.len().saturating_sub(tokens));
    }
}

/// Combines several constraints and allows the tokens that all of them allow. Returns `None` if there are none. If they
/// have no token in common, nothing is allowed, and the sampled token then ends the request with an error.
pub fn all_of(mut constraints: Vec<Box<dyn Constraint>>) -> Option<Box<dyn Constraint>> {
    if constraints.len() > 1 {
        return Some(Box::new(AllOf { constraints, scratch: Vec::new() }));
    }
    constraints.pop()
}

struct AllOf {
    constraints: Vec<Box<dyn Constraint>>,
    /// Mask of one constraint.
    scratch: Vec<u32>,
}

impl Constraint for AllOf {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(u32::MAX);
        self.scratch.resize(mask.len(), 0);
        for constraint in &mut self.constraints {
            constraint.fill_mask(&mut self.scratch);
            mask.iter_mut().zip(&self.scratch).for_each(|(word, allowed)| *word &= allowed);
        }
    }

    fn accept(&mut self, token: u32) -> bool {
        // All of them accept the token, so that a rollback affects them equally.
        let refusals = self.constraints.iter_mut().filter_map(|constraint| (!constraint.accept(token)).then_some(()));
        refusals.count() == 0
    }

    fn rollback(&mut self, tokens: usize) {
        self.constraints.iter_mut().for_each(|constraint| constraint.rollback(tokens));
    }
}
