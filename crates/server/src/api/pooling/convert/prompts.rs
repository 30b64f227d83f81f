//! The prompts of requests for vectors and scores.

use std::borrow::Cow;
use std::sync::Arc;

use octavo_text::{Modality, TokenLimit, TokenizerError, Wanted, image_parts};

use crate::api::chat::request::ChatRequest;
use crate::api::completions::convert::prompt_tokens;
use crate::api::completions::request::Prompt;
use crate::api::pooling::request::Input;
use crate::api::shared::common::{Side, Truncation};
use crate::api::shared::conversation::prompt_of;
use crate::api::shared::prompt::{tokenise, tokenise_in_turns, truncate};
use crate::app::AppState;
use crate::error::ApiError;

/// A prompt that fits the context.
#[derive(Clone, Debug)]
pub(crate) struct PoolingPrompt {
    pub(crate) tokens: Arc<[u32]>,
    /// Position of the first token of the second text, if the model distinguishes the texts of a pair.
    pub(crate) second_text: Option<u32>,
}

/// Makes the prompts of a request.
pub(crate) struct Prompts<'a> {
    pub(crate) state: &'a AppState,
    truncation: Option<Truncation>,
    /// The name of the field with the texts, for errors.
    field: &'static str,
}

impl<'a> Prompts<'a> {
    pub(crate) fn new(
        state: &'a AppState,
        truncation: Option<Truncation>,
        field: &'static str,
    ) -> Result<Self, ApiError> {
        // Pooling models cut off the end, as transformers does it, unless the client says otherwise.
        let side = if state.config.pooling.is_some() { Side::Right } else { Side::Left };
        let truncation = truncation.map(|given| Truncation { side: given.side.or(Some(side)), ..given });
        if let Some(truncation) = truncation {
            // Refuses a length beyond the context, before anything is tokenized.
            truncate(&mut vec![], truncation, 0, state.config.max_model_len)?;
        }
        Ok(Self { state, truncation, field })
    }

    /// The prompts of the texts, tokens or messages of a request.
    pub(crate) fn input(&self, input: &mut Input) -> Result<Vec<PoolingPrompt>, ApiError> {
        match input {
            Input::Prompts { prompts, add_special_tokens } => {
                prompts.iter().map(|prompt| self.prompt(prompt, *add_special_tokens)).collect()
            }
            Input::Conversation(request) => Ok(vec![self.conversation(request)?]),
        }
    }

    /// The prompt rendered from messages.
    pub(crate) fn conversation(&self, request: &mut ChatRequest) -> Result<PoolingPrompt, ApiError> {
        if !image_parts(&request.messages)?.is_empty() {
            return Err(ApiError::too_many(Modality::Image, 0));
        }
        request.common.truncation = self.truncation;
        self.fit(prompt_of(self.state, request, &[])?.1.tokens)
    }

    fn prompt(&self, prompt: &Prompt, add_special_tokens: bool) -> Result<PoolingPrompt, ApiError> {
        match prompt {
            Prompt::Text(text) => self.text(text, add_special_tokens),
            Prompt::Tokens(_) => self.fit(prompt_tokens(self.state, prompt, false, self.truncation)?),
        }
    }

    /// The prompt of a text.
    pub(crate) fn text(&self, text: &str, add_special_tokens: bool) -> Result<PoolingPrompt, ApiError> {
        self.rendered(&self.spelled(text), add_special_tokens)
    }

    /// The prompt of a text as the tokenizer gets it. Truncation keeps its special tokens.
    pub(crate) fn rendered(&self, text: &str, add_special_tokens: bool) -> Result<PoolingPrompt, ApiError> {
        let Some(truncation) = self.truncation.filter(|_| add_special_tokens) else {
            return self.fit(tokenise(self.state, text, add_special_tokens, self.truncation)?);
        };
        self.assembled(&tokenise(self.state, text, false, Some(truncation))?)
    }

    /// The prompt of a text whose tokens without special tokens are known.
    pub(crate) fn assembled(&self, tokens: &[u32]) -> Result<PoolingPrompt, ApiError> {
        self.fit(self.state.text.tokenizer.assemble(tokens, self.limit()).map_err(unusable)?)
    }

    /// The prompt of a pair of texts whose tokens without special tokens are known.
    pub(crate) fn pair(&self, first: &[u32], second: &[u32], token_types: bool) -> Result<PoolingPrompt, ApiError> {
        let pair = self.state.text.tokenizer.assemble_pair(first, second, self.limit()).map_err(unusable)?;
        let second_text = pair.second.filter(|_| token_types).and_then(|second| u32::try_from(second).ok());
        Ok(PoolingPrompt { second_text, ..self.fit(pair.ids)? })
    }

    /// The first tokens of a text without special tokens: at most `most`, and no more than a prompt can need. A text that
    /// makes its prompt too long has enough of them for that.
    pub(crate) fn tokens(&self, text: &str, most: Option<usize>) -> Result<Vec<u32>, ApiError> {
        let text = self.spelled(text);
        if most.is_none() && self.truncation.is_none() && self.state.is_too_long(text.len()) {
            let max_model_len = self.state.config.max_model_len;
            return Err(ApiError::prompt_too_long(max_model_len + 1, true, max_model_len));
        }
        let wanted = most.map_or_else(|| self.limit().wanted(), |most| Wanted::First(most.min(self.limit().most)));
        tokenise_in_turns(self.state, &text, false, wanted)
    }

    /// A text as the tokenizer gets it.
    pub(crate) fn spelled<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.state.pooling.lowercase { Cow::Owned(text.to_lowercase()) } else { Cow::Borrowed(text) }
    }

    /// The tokens of a prompt that are kept. If prompts are not truncated, they are refused when they have one too many.
    fn limit(&self) -> TokenLimit {
        let max_model_len = self.state.config.max_model_len;
        match self.truncation {
            None => TokenLimit { most: max_model_len.saturating_add(1), keep_end: false },
            Some(truncation) => TokenLimit {
                most: truncation.tokens.map_or(max_model_len, |tokens| (tokens as usize).min(max_model_len)),
                keep_end: truncation.keeps_end(),
            },
        }
    }

    fn fit(&self, mut tokens: Vec<u32>) -> Result<PoolingPrompt, ApiError> {
        let max_model_len = self.state.config.max_model_len;
        if let Some(truncation) = self.truncation {
            truncate(&mut tokens, truncation, 0, max_model_len)?;
        }
        if tokens.is_empty() {
            return Err(ApiError::bad_request("The input cannot be empty.").with_param(self.field));
        }
        if tokens.len() > max_model_len {
            return Err(ApiError::prompt_too_long(tokens.len(), false, max_model_len));
        }
        Ok(PoolingPrompt { tokens: tokens.into(), second_text: None })
    }
}

fn unusable(error: TokenizerError) -> ApiError {
    tracing::error!(%error, "the tokenizer cannot be used for this request");
    ApiError::internal()
}
