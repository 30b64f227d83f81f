//! Converts a body into prompts and parameters that are valid. It renders and tokenizes, so it runs on the blocking pool.

mod chat;
mod completion;
mod messages;
mod pooling;
mod render;
mod responses;
mod size;
mod staged;
mod untrusted_template;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::Request;
use octavo_text::{AllowedTokens, BadWords, GrammarSpec, TokenizerError, Wanted};
use uuid::Uuid;

use crate::app::AppState;
use crate::caller::{Caller, Origin};
use crate::choices::{Parsing, PreparedPrompt, Submission};
use crate::error::ApiError;
use crate::images::WithImages;
use crate::logprobs::Spelling;
use crate::params::{Sampling, known_token};
use crate::request_id::RequestId;
use crate::restrictions::Restrictions;
use crate::trace::RequestTrace;
use crate::types::common::{CommonFields, MAX_REQUEST_ID, StreamOptions, Truncation};
use crate::wire::Envelope;
use crate::workers::take_turns;

pub(crate) use chat::{batch, chat, prompt_of};
pub(crate) use completion::{completion, legacy, prompt_tokens};
pub(crate) use messages::messages;
pub(crate) use pooling::{
    PreparePooling, PreparedPooling, classification, cohere_embeddings, embeddings, pooling, ranking, scores,
};
pub(crate) use render::{rendered_chat, rendered_completions};
pub(crate) use responses::responses;
pub(crate) use staged::{Staged, images_of};

/// A request that is ready to run except for its grammar, which is not compiled yet.
pub(crate) struct Prepared<W> {
    pub(crate) submission: Submission,
    pub(crate) wire: W,
    pub(crate) stream: Option<StreamOptions>,
    /// The grammar of the output.
    pub(crate) grammar: Option<GrammarSpec>,
}

/// The data of a request's headers.
#[derive(Clone, Debug)]
pub(crate) struct Headers {
    request_id: Option<String>,
    /// The id of the response's header, if it has one.
    assigned: Option<String>,
    priority: Option<i64>,
    caller: Caller,
    arrival: Instant,
    trace: RequestTrace,
}

impl Headers {
    /// Reads the headers of a request that has just arrived.
    pub(crate) fn read(request: &Request) -> Result<Self, ApiError> {
        let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
        let priority = text("x-vllm-priority").map(|value| {
            let message = "The X-Vllm-Priority header must be an integer.";
            value.trim().parse().map_err(|_| ApiError::bad_request(message).with_param("priority"))
        });
        // Every chunk of a stream repeats it.
        let usable = |id: &&str| (1..=MAX_REQUEST_ID).contains(&id.len());
        let request_id = text("x-request-id").filter(usable).map(str::to_owned);
        let assigned = request.extensions().get::<RequestId>().map(|id| id.as_str().to_owned());
        let trace = RequestTrace::of(request);
        trace.begin();
        let caller = Caller::of(request.headers(), request.extensions());
        Ok(Self { request_id, assigned, priority: priority.transpose()?, caller, arrival: Instant::now(), trace })
    }

    /// The priority of a request: the header's or the body's, but no smaller than the server and the key allow.
    fn priority(&self, state: &AppState, body: i64) -> i64 {
        let least = self.caller.min_priority().unwrap_or(i64::MIN);
        clamped(self.priority, body, least.max(state.config.min_priority))
    }

    /// The salt of a request's entries in the prefix cache; `own` is the body's.
    fn salt(&self, state: &AppState, own: Option<&str>) -> Option<Arc<str>> {
        self.caller.salt(own, state.config.share_prefix_cache)
    }

    /// Where a request comes from; `priority` and `salt` are the body's.
    fn origin(&self, state: &AppState, priority: i64, salt: Option<&str>) -> Origin {
        Origin {
            priority: self.priority(state, priority),
            client: self.caller.id(),
            meter: self.caller.meter().clone(),
            cache_salt: self.salt(state, salt),
            arrival: self.arrival,
            trace: self.trace.clone(),
        }
    }

    /// These headers with a request id, for requests that share one.
    fn with_id(&self, id: &str) -> Self {
        Self { request_id: Some(id.to_owned()), ..self.clone() }
    }

    /// The id of a request: the header's, the body's, or a new one.
    fn id(&self, body: Option<&String>) -> String {
        let given = self.request_id.as_ref().or(body).or(self.assigned.as_ref());
        let id = given.cloned().unwrap_or_else(|| Uuid::new_v4().simple().to_string());
        self.trace.identify(&id);
        id
    }
}

/// The header's priority or the body's, raised to `least` if it is smaller.
fn clamped(header: Option<i64>, body: i64, least: i64) -> i64 {
    header.unwrap_or(body).max(least)
}

/// Refuses a model name that is not served.
pub(crate) fn check_model(state: &AppState, model: Option<&str>) -> Result<(), ApiError> {
    let names = &state.config.served_model_names;
    match model {
        Some(model) if !names.iter().any(|name| name == model) => Err(ApiError::model_not_found(model, names)),
        _ => Ok(()),
    }
}

/// The fields that every body of the response repeats.
pub(crate) fn envelope(state: &AppState, id: String) -> Envelope {
    Envelope {
        id,
        created: crate::app::unix_time(),
        model: Arc::clone(&state.model),
        fingerprint: state.fingerprint.clone(),
    }
}

fn spelling(state: &AppState, common: &CommonFields) -> Spelling {
    Spelling { tokenizer: Arc::clone(&state.text.tokenizer), as_ids: common.return_tokens_as_token_ids }
}

/// The stream options, from the request or the server's configuration.
fn stream_options(state: &AppState, common: &CommonFields) -> Option<StreamOptions> {
    let forced = StreamOptions { include_usage: true, continuous_usage: true };
    common.stream.map(|options| if state.config.api.force_include_usage { forced } else { options })
}

fn submission(
    state: &AppState,
    (common, headers): (&CommonFields, &Headers),
    (request_id, prompts, sampling): (String, Vec<PreparedPrompt>, Sampling),
    (restrictions, parsing): (Restrictions, Parsing),
) -> Submission {
    let interval = common.stream_interval.unwrap_or(state.config.api.stream_interval).max(1);
    Submission {
        request_id,
        prompts,
        sampling,
        restrictions,
        parsing,
        origin: headers.origin(state, common.priority, common.cache_salt.as_deref()),
        interval: if common.stream.is_some() { interval } else { 1 },
    }
}

/// The restrictions other than grammars.
fn restrictions(state: &AppState, common: &CommonFields) -> Result<Restrictions, ApiError> {
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
    let tokens = tokenise_in_turns(state, text, (add_special_tokens, wanted))?;
    if wanted != Wanted::All && tokens.len() > max_model_len {
        return Err(ApiError::prompt_too_long(tokens.len(), true, max_model_len));
    }
    Ok(tokens)
}

/// Tokenizes a text of any length, in turns with other requests.
pub(crate) fn tokenise_in_turns(state: &AppState, text: &str, how: (bool, Wanted)) -> Result<Vec<u32>, ApiError> {
    state.text.tokenizer.encode_in_parts(text, how, || take_turns().map_err(Interrupted::Cancelled)).map_err(|error| {
        match error {
            Interrupted::Cancelled(error) => error,
            Interrupted::Failed(error @ (TokenizerError::TooLong { .. } | TokenizerError::LongRun { .. })) => {
                ApiError::bad_request(format!("The prompt cannot be tokenised: {error}.")).with_param("prompt")
            }
            Interrupted::Failed(error) => {
                tracing::error!(%error, "a prompt could not be tokenised");
                ApiError::bad_request("The prompt could not be tokenised.").with_param("prompt")
            }
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
fn fit(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_priority_is_raised_to_the_smallest_that_is_allowed() {
        assert_eq!(clamped(None, -7, -3), -3);
        assert_eq!(clamped(Some(-7), 5, 0), 0);
        assert_eq!(clamped(Some(4), -7, 0), 4);
        assert_eq!(clamped(None, i64::MIN, i64::MIN), i64::MIN);
    }
}
