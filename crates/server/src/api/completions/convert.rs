//! Completion requests.

use crate::api::completions::request::{CompletionRequest, Prompt};
use crate::api::completions::stream::CompletionFormat;
use crate::api::shared::common::Truncation;
use crate::api::shared::convert::{Prepared, envelope, restrictions, spelling, stream_interval, stream_options};
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::prompt::{fit, tokenise};
use crate::api::shared::sampling::{OutputLimit, Sampling};
use crate::api::shared::size::ResponseSize;
use crate::api::shared::staged::Staged;
use crate::app::AppState;
use crate::choices::{Parsing, PreparedPrompt, Submission};
use crate::error::ApiError;
use crate::images::WithImages;

/// Default number of tokens of a completion.
const DEFAULT_COMPLETION_TOKENS: i64 = 16;

/// Prepares a completion request.
pub(crate) fn completion(
    state: &AppState,
    body: &[u8],
    headers: &RequestHeaders,
) -> Result<Staged<Prepared<CompletionFormat>>, ApiError> {
    prepare(state, CompletionRequest::parse(body)?, headers).map(Staged::Ready)
}

pub(crate) fn prepare(
    state: &AppState,
    request: CompletionRequest,
    headers: &RequestHeaders,
) -> Result<Prepared<CompletionFormat>, ApiError> {
    let (common, config) = (&request.common, &state.config);
    let model = state.resolve_model(common.model.as_deref())?;
    let limit = OutputLimit {
        field: "max_tokens",
        max_tokens: common.max_tokens.or(Some(DEFAULT_COMPLETION_TOKENS.min(config.max_model_len as i64))),
        default: None,
        least: i64::from(!request.echo && common.prompt_logprobs.is_none()),
    };
    let mut sampling = Sampling::new(common, limit, request.logprobs.map(|count| ("logprobs", count)), config)?;
    if request.echo {
        sampling = sampling.with_echoed_logprobs();
    }
    check_sequences(request.prompts.len(), sampling.n, config.max_sequences)?;
    let truncated = common.truncation.is_some();
    let prompts = request
        .prompts
        .iter()
        .map(|prompt| {
            let tokens = prompt_tokens(state, prompt, request.add_special_tokens, common.truncation)?;
            fit(state, WithImages::none(tokens), common, &sampling)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let echo: Option<Vec<String>> = request.echo.then(|| {
        let texts = request.prompts.iter().zip(&prompts);
        texts.map(|(prompt, prepared)| prompt_text(state, prompt, &prepared.tokens, truncated)).collect()
    });
    check_size(state, &request, &sampling, &prompts, echo.as_deref())?;
    let id = headers.id(common.request_id.as_ref());
    let format = CompletionFormat {
        envelope: envelope(state, &model, format!("cmpl-{id}"), false),
        n: sampling.n,
        prompts: prompts.iter().map(|prompt| prompt.tokens.clone()).collect(),
        echo,
        logprobs: sampling.logprobs(),
        prompt_logprobs: common.prompt_logprobs.is_some(),
        spelling: spelling(state, common),
        return_token_ids: common.return_token_ids,
        sent: vec![None; prompts.len() * sampling.n as usize],
    };
    let submission = Submission {
        request_id: id,
        model,
        prompts,
        sampling,
        restrictions: restrictions(state, common)?,
        parsing: Parsing::default(),
        origin: headers.origin(state, common.priority, common.cache_salt.as_deref()),
        interval: stream_interval(state, common),
    };
    let stream = stream_options(state, common);
    Ok(Prepared { submission, format, stream, grammar: request.common.grammar })
}

/// Refuses a request whose response would be too large.
fn check_size(
    state: &AppState,
    request: &CompletionRequest,
    sampling: &Sampling,
    prompts: &[PreparedPrompt],
    echo: Option<&[String]>,
) -> Result<usize, ApiError> {
    let prompt_tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let generated: usize = prompts.iter().map(|prompt| prompt.max_tokens as usize).sum();
    let mut size = ResponseSize::new(sampling.n);
    if let Some(echo) = echo {
        size = size.texts("echo", echo.iter().map(String::as_str));
    }
    if let Some(top) = sampling.logprobs() {
        let echoed = if echo.is_some() { prompt_tokens } else { 0 };
        size = size.completion_logprobs("logprobs", echoed + generated, top);
    }
    if let Some(top) = sampling.prompt_logprobs().filter(|_| request.common.prompt_logprobs.is_some()) {
        size = size.prompt_logprobs(prompt_tokens, top);
    }
    if request.common.return_token_ids {
        size = size.token_ids("return_token_ids", prompt_tokens + generated);
    }
    size.check(state)
}

fn check_sequences(prompts: usize, n: u32, limit: usize) -> Result<(), ApiError> {
    let sequences = prompts.saturating_mul(n as usize);
    if sequences <= limit {
        return Ok(());
    }
    let message = format!("{prompts} prompts with n={n} make {sequences} sequences; at most {limit} are allowed.");
    Err(ApiError::invalid_value("n", n, message))
}

/// The token ids of a prompt, of a text at least those that truncation keeps.
pub(crate) fn prompt_tokens(
    state: &AppState,
    prompt: &Prompt,
    add_special_tokens: bool,
    truncation: Option<Truncation>,
) -> Result<Vec<u32>, ApiError> {
    match prompt {
        Prompt::Text(text) => tokenise(state, text, add_special_tokens, truncation),
        Prompt::Tokens(ids) => known_tokens(state, ids),
    }
}

fn known_tokens(state: &AppState, ids: &[i64]) -> Result<Vec<u32>, ApiError> {
    let vocab_size = state.config.vocab_size;
    let known = |&id: &i64| {
        u32::try_from(id).ok().filter(|&id| (id as usize) < vocab_size).ok_or_else(|| {
            let message = format!("Token id {id} is out of vocabulary: ids are 0 to {}.", vocab_size - 1);
            ApiError::bad_request(message).with_param("prompt")
        })
    };
    ids.iter().map(known).collect()
}

/// The text of a prompt that is echoed.
fn prompt_text(state: &AppState, prompt: &Prompt, tokens: &[u32], truncated: bool) -> String {
    match prompt {
        Prompt::Text(text) if !truncated => text.clone(),
        _ => state.text.tokenizer.decode(tokens, true).unwrap_or_default(),
    }
}
