//! Prompts: tokens of texts, truncated, and within the context.

use octavo_text::{TokenizerError, Wanted};

use crate::api::shared::common::{CommonFields, Truncation};
use crate::api::shared::sampling::Sampling;
use crate::app::AppState;
use crate::choices::PreparedPrompt;
use crate::error::ApiError;
use crate::images::WithImages;
use crate::workers::take_turns;

/// Tokenizes a text. A text that is too long for the context by its length alone is refused at once, unless it is to be
/// truncated; then only the tokens that truncation keeps are computed. If the length says nothing, no more tokens than one
/// too many are computed.
pub(crate) fn tokenise(
    state: &AppState,
    text: &str,
    add_special_tokens: bool,
    truncation: Option<Truncation>,
) -> Result<Vec<u32>, ApiError> {
    let max_model_len = state.config.max_model_len;
    if truncation.is_none() && state.is_too_long(text.len()) {
        return Err(ApiError::prompt_too_long(max_model_len + 1, true, max_model_len));
    }
    let wanted = match truncation {
        None if state.bounds_texts() => Wanted::All,
        None => Wanted::First(max_model_len.saturating_add(1)),
        Some(truncation) => {
            let most = truncation.tokens.map_or(max_model_len, |tokens| (tokens as usize).min(max_model_len));
            if truncation.keeps_end() { Wanted::Last(most) } else { Wanted::First(most) }
        }
    };
    let tokens = tokenise_in_turns(state, text, add_special_tokens, wanted)?;
    if wanted != Wanted::All && tokens.len() > max_model_len {
        return Err(ApiError::prompt_too_long(tokens.len(), true, max_model_len));
    }
    Ok(tokens)
}

/// Tokenizes a text of any length, in turns with other requests.
pub(crate) fn tokenise_in_turns(
    state: &AppState,
    text: &str,
    add_special_tokens: bool,
    wanted: Wanted,
) -> Result<Vec<u32>, ApiError> {
    state
        .text
        .tokenizer
        .encode_in_parts(text, (add_special_tokens, wanted), || take_turns().map_err(Interrupted::Cancelled))
        .map_err(|error| match error {
            Interrupted::Cancelled(error) => error,
            Interrupted::Failed(error @ (TokenizerError::TooLong { .. } | TokenizerError::LongRun { .. })) => {
                ApiError::bad_request(format!("The prompt cannot be tokenised: {error}.")).with_param("prompt")
            }
            Interrupted::Failed(error) => {
                tracing::error!(%error, "a prompt could not be tokenised");
                ApiError::bad_request("The prompt could not be tokenised.").with_param("prompt")
            }
        })
}

/// The reason why a text was not tokenised.
enum Interrupted {
    Cancelled(ApiError),
    Failed(TokenizerError),
}

impl From<TokenizerError> for Interrupted {
    fn from(error: TokenizerError) -> Self {
        Self::Failed(error)
    }
}

/// Truncates a prompt as requested; `reserved` tokens are kept for the output if the request sets no length.
pub(crate) fn truncate(
    tokens: &mut Vec<u32>,
    truncation: Truncation,
    reserved: usize,
    max_model_len: usize,
) -> Result<(), ApiError> {
    let keep = match truncation.tokens {
        Some(keep) if keep as usize > max_model_len => {
            let message = format!(
                "truncate_prompt_tokens value ({keep}) is greater than max_model_len ({max_model_len}). Please, select \
                 a smaller truncation size."
            );
            return Err(ApiError::invalid_value("truncate_prompt_tokens", keep, message));
        }
        Some(keep) => keep as usize,
        None => max_model_len.saturating_sub(reserved).max(1),
    };
    if truncation.keeps_end() {
        tokens.drain(..tokens.len().saturating_sub(keep));
    } else {
        tokens.truncate(keep);
    }
    Ok(())
}

/// Checks that a prompt fits the context, and limits the number of generated tokens.
pub(crate) fn fit(
    state: &AppState,
    WithImages { mut tokens, images }: WithImages,
    common: &CommonFields,
    sampling: &Sampling,
) -> Result<PreparedPrompt, ApiError> {
    let max_model_len = state.config.max_model_len;
    if let Some(truncation) = common.truncation {
        let reserved = sampling.max_tokens().map_or(1, |tokens| tokens as usize);
        truncate(&mut tokens, truncation, reserved, max_model_len)?;
    }
    if tokens.is_empty() {
        return Err(ApiError::bad_request("The decoder prompt cannot be empty").with_param("prompt"));
    }
    if tokens.len() > max_model_len {
        return Err(ApiError::prompt_too_long(tokens.len(), false, max_model_len));
    }
    if tokens.len() == max_model_len && !sampling.generates_nothing() {
        return Err(ApiError::no_room_for_output(tokens.len(), max_model_len));
    }
    let max_tokens = sampling.max_tokens_after(tokens.len(), max_model_len)?;
    Ok(PreparedPrompt { tokens: tokens.into(), images, max_tokens })
}
