//! Log-probabilities in the formats of the API. All formats list the token itself first, then the most likely tokens.

use std::sync::Arc;

use octavo_engine::{Logprobs, TokenOutput};
use octavo_text::Tokenizer;

use crate::api::shared::response::{
    ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, RankedLogprob, TokenMap, TopLogprob,
};

/// The value that stands for −∞, since JSON has no infinity.
const LOWEST: f32 = -9999.0;

/// The spelling of tokens in log-probabilities.
#[derive(Clone)]
pub(crate) struct Spelling {
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// As `token_id:N`, not as text.
    pub(crate) as_ids: bool,
}

impl Spelling {
    fn text(&self, id: u32) -> String {
        if self.as_ids { format!("token_id:{id}") } else { self.tokenizer.token_text(id) }
    }

    /// The chat format, with `alternatives` entries per token.
    pub(crate) fn chat(&self, tokens: &[TokenOutput], alternatives: u32) -> ChatLogprobs {
        let entry = |token: &TokenOutput| ChatLogprob {
            token: self.text(token.id),
            logprob: own(token.logprobs.as_ref()),
            bytes: self.tokenizer.token_bytes(token.id),
            top_logprobs: ranked(token.id, token.logprobs.as_ref())
                .take(alternatives as usize)
                .map(|(id, logprob)| TopLogprob {
                    token: self.text(id),
                    logprob,
                    bytes: self.tokenizer.token_bytes(id),
                })
                .collect(),
        };
        ChatLogprobs { content: tokens.iter().map(entry).collect() }
    }

    /// Adds tokens in the completions format, with up to `alternatives` + 1 entries each. The first token starts at
    /// character `offset` of the choice's text; the return value is the start of the next one. A token without
    /// log-probabilities is the first of a prompt.
    pub(crate) fn completion<'a>(
        &self,
        out: &mut CompletionLogprobs,
        tokens: impl Iterator<Item = (u32, Option<&'a Logprobs>)>,
        alternatives: u32,
        mut offset: usize,
    ) -> usize {
        for (id, logprobs) in tokens {
            let text = self.text(id);
            out.text_offset.push(offset);
            offset += if self.as_ids { self.tokenizer.token_text(id).chars().count() } else { text.chars().count() };
            out.token_logprobs.push(logprobs.map(|l| l.logprob.max(LOWEST)));
            out.top_logprobs.push(logprobs.map(|logprobs| self.token_map(id, logprobs, alternatives)));
            out.tokens.push(text);
        }
        offset
    }

    fn token_map(&self, id: u32, logprobs: &Logprobs, alternatives: u32) -> TokenMap {
        let mut map: Vec<(String, f32)> = Vec::new();
        for (id, logprob) in ranked(id, Some(logprobs)).take(alternatives as usize + 1) {
            let text = self.text(id);
            if map.iter().all(|(known, _)| *known != text) {
                map.push((text, logprob));
            }
        }
        TokenMap(map)
    }

    /// vLLM's `prompt_logprobs`: one entry per prompt token, null for the first.
    pub(crate) fn prompt(&self, prompt: &[u32], logprobs: &[Logprobs]) -> PromptLogprobs {
        let entry = |(&id, logprobs): (&u32, &Logprobs)| {
            let mut entries = vec![(id, self.ranked_entry(id, logprobs.logprob, logprobs.rank))];
            let others = (1..).zip(&logprobs.top).filter(|(_, (other, _))| *other != id);
            entries.extend(others.map(|(rank, &(id, logprob))| (id, self.ranked_entry(id, logprob, rank))));
            Some(PromptLogprob(entries))
        };
        std::iter::once(None).chain(prompt.iter().skip(1).zip(logprobs).map(entry)).collect()
    }

    fn ranked_entry(&self, id: u32, logprob: f32, rank: u32) -> RankedLogprob {
        RankedLogprob { logprob: logprob.max(LOWEST), rank, decoded_token: self.tokenizer.token_text(id) }
    }
}

fn own(logprobs: Option<&Logprobs>) -> f32 {
    logprobs.map_or(LOWEST, |l| l.logprob.max(LOWEST))
}

/// The token itself, then the other tokens by rank.
fn ranked(id: u32, logprobs: Option<&Logprobs>) -> impl Iterator<Item = (u32, f32)> + '_ {
    let own = logprobs.map(|l| (id, l.logprob));
    let others = logprobs.into_iter().flat_map(|l| &l.top).copied().filter(move |&(other, _)| other != id);
    own.into_iter().chain(others).map(|(id, logprob)| (id, logprob.max(LOWEST)))
}
