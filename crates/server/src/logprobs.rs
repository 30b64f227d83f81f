//! Log-probabilities in the two shapes of the API. Both list the drawn token first, then the most likely ones.

use octavo_engine::TokenOutput;
use octavo_text::Tokenizer;

use crate::types::response::{ChatLogprob, ChatLogprobs, CompletionLogprobs, TokenMap, TopLogprob};

/// What −∞ is reported as: JSON has no infinity.
const LOWEST: f32 = -9999.0;

/// The chat shape, with `alternatives` entries a token.
pub(crate) fn chat(tokens: &[TokenOutput], alternatives: u32, tokenizer: &Tokenizer) -> ChatLogprobs {
    let entry = |token: &TokenOutput| ChatLogprob {
        token: tokenizer.token_text(token.id),
        logprob: token.logprobs.as_ref().map_or(LOWEST, |l| l.logprob.max(LOWEST)),
        bytes: tokenizer.token_bytes(token.id),
        top_logprobs: ranked(token)
            .take(alternatives as usize)
            .map(|(id, logprob)| TopLogprob {
                token: tokenizer.token_text(id),
                logprob,
                bytes: tokenizer.token_bytes(id),
            })
            .collect(),
    };
    ChatLogprobs { content: tokens.iter().map(entry).collect() }
}

/// The completions shape, with up to `alternatives` + 1 entries a token, of a text that starts at character `offset`.
pub(crate) fn completion(
    tokens: &[TokenOutput],
    alternatives: u32,
    mut offset: usize,
    tokenizer: &Tokenizer,
) -> CompletionLogprobs {
    let mut out = CompletionLogprobs::default();
    for token in tokens {
        let text = tokenizer.token_text(token.id);
        out.text_offset.push(offset);
        offset += text.chars().count();
        out.token_logprobs.push(token.logprobs.as_ref().map_or(LOWEST, |l| l.logprob.max(LOWEST)));
        out.top_logprobs.push(token_map(token, alternatives, tokenizer));
        out.tokens.push(text);
    }
    out
}

fn token_map(token: &TokenOutput, alternatives: u32, tokenizer: &Tokenizer) -> TokenMap {
    let mut map: Vec<(String, f32)> = Vec::new();
    for (id, logprob) in ranked(token).take(alternatives as usize + 1) {
        let text = tokenizer.token_text(id);
        if map.iter().all(|(known, _)| *known != text) {
            map.push((text, logprob));
        }
    }
    TokenMap(map)
}

/// The drawn token, then the others by rank.
fn ranked(token: &TokenOutput) -> impl Iterator<Item = (u32, f32)> + '_ {
    let logprobs = token.logprobs.as_ref();
    let drawn = logprobs.map(|l| (token.id, l.logprob));
    let others = logprobs.into_iter().flat_map(|l| &l.top).copied().filter(|&(id, _)| id != token.id);
    drawn.into_iter().chain(others).map(|(id, logprob)| (id, logprob.max(LOWEST)))
}
