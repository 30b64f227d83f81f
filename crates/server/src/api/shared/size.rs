//! The size of a response, estimated before anything is computed. A prompt of a few kilobytes can be repeated for each
//! of many choices, with twenty alternatives for each of its tokens.

use crate::app::AppState;
use crate::error::ApiError;

/// Bytes of a token id in a list.
const TOKEN_ID: usize = 8;

/// Bytes of an alternative in the log-probabilities of a completion.
const COMPLETION_ENTRY: usize = 24;

/// Bytes of an alternative in the log-probabilities of a chat, which has the token as text and as bytes.
const CHAT_ENTRY: usize = 80;

/// Bytes of an alternative in `prompt_logprobs`.
const PROMPT_ENTRY: usize = 64;

/// The parts of a response whose size the request determines, in bytes by field.
pub(crate) struct ResponseSize {
    /// Choices of each prompt; `None` if the route has no choices.
    n: Option<usize>,
    parts: Vec<(&'static str, usize)>,
}

impl ResponseSize {
    /// An empty response with `n` choices for each prompt.
    pub(crate) fn new(n: u32) -> Self {
        Self { n: Some(n as usize), parts: vec![] }
    }

    /// An empty response of a route without choices.
    pub(crate) fn without_choices() -> Self {
        Self { n: None, parts: vec![] }
    }

    fn choices(&self) -> usize {
        self.n.unwrap_or(1)
    }

    /// Texts that each choice repeats.
    pub(crate) fn texts<'a>(mut self, field: &'static str, texts: impl IntoIterator<Item = &'a str>) -> Self {
        let bytes = texts.into_iter().map(json_bytes).fold(0, usize::saturating_add);
        self.parts.push((field, bytes.saturating_mul(self.choices())));
        self
    }

    /// The ids of `tokens` tokens of each choice.
    pub(crate) fn token_ids(self, field: &'static str, tokens: usize) -> Self {
        self.tokens(field, tokens, TOKEN_ID)
    }

    /// The log-probabilities of `tokens` tokens of each choice of a completion, with `top` alternatives each.
    pub(crate) fn completion_logprobs(self, field: &'static str, tokens: usize, top: u32) -> Self {
        // Beside the alternatives: the token, its own log-probability and its offset.
        self.tokens(field, tokens, COMPLETION_ENTRY * (top as usize + 3))
    }

    /// The log-probabilities of `tokens` tokens of each choice of a chat, with `top` alternatives each.
    pub(crate) fn chat_logprobs(self, field: &'static str, tokens: usize, top: u32) -> Self {
        self.tokens(field, tokens, CHAT_ENTRY * (top as usize + 1))
    }

    /// `prompt_logprobs` of `tokens` tokens of each choice, with `top` alternatives each.
    pub(crate) fn prompt_logprobs(self, tokens: usize, top: u32) -> Self {
        self.tokens("prompt_logprobs", tokens, PROMPT_ENTRY * (top as usize + 1))
    }

    fn tokens(mut self, field: &'static str, tokens: usize, bytes: usize) -> Self {
        self.parts.push((field, tokens.saturating_mul(bytes).saturating_mul(self.choices())));
        self
    }

    /// Bytes that were estimated before.
    pub(crate) fn bytes(mut self, field: &'static str, bytes: usize) -> Self {
        self.parts.push((field, bytes));
        self
    }

    /// Refuses a response that is too large, by the field that contributes most. Returns the estimated bytes.
    pub(crate) fn check(self, state: &AppState) -> Result<usize, ApiError> {
        let limit = state.config.connection.max_response_bytes;
        let total = self.parts.iter().fold(0_usize, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let Some((field, bytes)) = self.parts.into_iter().max_by_key(|(_, bytes)| *bytes).filter(|_| total > limit)
        else {
            return Ok(total);
        };
        let (with_n, n) = self.n.map_or_else(Default::default, |n| (format!(" with n={n}"), ", n"));
        let message = format!(
            "The response would have about {total} bytes, {bytes} of them for {field}{with_n}, but at most {limit} are \
             allowed. Please reduce {field}{n} or the length of the prompt."
        );
        Err(ApiError::bad_request(message).with_param(field))
    }
}

/// The length of a text in JSON.
fn json_bytes(text: &str) -> usize {
    let bytes = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 8 | 12 => 2,
        0..32 => 6,
        _ => 1,
    };
    text.bytes().map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_counts_as_it_is_written() {
        for text in ["", "plain", "\"quoted\" \\ \n\t\u{8}\u{c}", "\u{1}\u{1f}\u{7f}", "äöü 😀"] {
            assert_eq!(json_bytes(text) + 2, serde_json::to_string(text).unwrap().len(), "{text}");
        }
    }
}
