//! Parts of requests that are ready to run.

use std::sync::Arc;

use octavo_text::{AllowedTokens, BadWords, GrammarSpec};

use crate::api::shared::common::{CommonFields, StreamOptions};
use crate::api::shared::logprobs::Spelling;
use crate::api::shared::model::ResolvedModel;
use crate::api::shared::response::{Envelope, UsageDetails};
use crate::api::shared::restrictions::Restrictions;
use crate::api::shared::sampling::known_token;
use crate::app::AppState;
use crate::choices::Submission;
use crate::error::ApiError;

/// A request that is ready to run except for its grammar, which is not compiled yet.
pub(crate) struct Prepared<W> {
    pub(crate) submission: Submission,
    pub(crate) format: W,
    pub(crate) stream: Option<StreamOptions>,
    /// The grammar of the output.
    pub(crate) grammar: Option<GrammarSpec>,
}

/// The fields that every body of the response repeats. The usage has the reasoning tokens if the output `may_reason`.
pub(crate) fn envelope(state: &AppState, model: &ResolvedModel, id: String, may_reason: bool) -> Envelope {
    let api = &state.config.api;
    Envelope {
        id,
        created: crate::app::unix_time(),
        model: Arc::clone(model.name()),
        fingerprint: state.fingerprint.clone(),
        details: UsageDetails {
            prompt: api.prompt_tokens_details,
            completion: may_reason,
            metrics: api.request_metrics,
        },
    }
}

pub(crate) fn spelling(state: &AppState, common: &CommonFields) -> Spelling {
    Spelling { tokenizer: Arc::clone(&state.text.tokenizer), as_ids: common.return_tokens_as_token_ids }
}

/// The stream options, from the request or the server's configuration.
pub(crate) fn stream_options(state: &AppState, common: &CommonFields) -> Option<StreamOptions> {
    let forced = StreamOptions { include_usage: true, continuous_usage: true };
    common.stream.map(|options| if state.config.api.force_include_usage { forced } else { options })
}

/// Tokens per output of a request.
pub(crate) fn stream_interval(state: &AppState, common: &CommonFields) -> u32 {
    let interval = common.stream_interval.unwrap_or(state.config.api.stream_interval).max(1);
    if common.stream.is_some() { interval } else { 1 }
}

/// The restrictions other than grammars.
pub(crate) fn restrictions(state: &AppState, common: &CommonFields) -> Result<Restrictions, ApiError> {
    let allowed = match &common.allowed_token_ids {
        None => None,
        Some(ids) => {
            let (count, vocab_size) = (ids.len(), state.config.vocab_size);
            if count > vocab_size {
                let message = format!("allowed_token_ids accepts at most {vocab_size} ids, got {count}.");
                return Err(ApiError::bad_request(message).with_param("allowed_token_ids"));
            }
            let known = |&id: &i64| known_token("allowed_token_ids", id, &state.config);
            let ids = ids.iter().map(known).collect::<Result<Vec<_>, _>>()?;
            let allowed = AllowedTokens::new(&ids, state.config.vocab_size);
            Some(allowed.map_err(|error| ApiError::bad_request(error.to_string()).with_param("allowed_token_ids"))?)
        }
    };
    let bad_words = match &common.bad_words[..] {
        [] => None,
        words => {
            let words = BadWords::new(&state.text.tokenizer, state.config.vocab_size, words);
            Some(words.map_err(|error| ApiError::bad_request(error.to_string()).with_param("bad_words"))?)
        }
    };
    Ok(Restrictions { allowed, bad_words, ..Restrictions::default() })
}
