//! A body → prompts that fit and parameters that hold. Runs on the blocking pool: it renders and tokenises.

use std::sync::Arc;
use std::time::Instant;

use http::HeaderMap;
use octavo_text::TemplateInput;
use uuid::Uuid;

use crate::app::AppState;
use crate::choices::{PreparedPrompt, Submission};
use crate::error::ApiError;
use crate::params::{OutputLimit, Sampling};
use crate::types::chat::ChatRequest;
use crate::types::common::{CommonFields, StreamOptions};
use crate::types::completion::{CompletionRequest, Prompt};
use crate::wire::{ChatWire, CompletionWire, Envelope};

/// Tokens of a completion that does not say how many.
const DEFAULT_COMPLETION_TOKENS: i64 = 16;

/// A request that is ready to run.
pub(crate) struct Prepared<W> {
    pub(crate) submission: Submission,
    pub(crate) wire: W,
    pub(crate) stream: Option<StreamOptions>,
}

/// What headers say about a request.
#[derive(Clone, Debug)]
pub(crate) struct Headers {
    request_id: Option<String>,
    priority: Option<i64>,
    arrival: Instant,
}

impl Headers {
    /// Reads the headers of a request that arrives now.
    pub(crate) fn read(headers: &HeaderMap) -> Result<Self, ApiError> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let priority = text("x-vllm-priority").map(|value| {
            let message = "The X-Vllm-Priority header must be an integer.";
            value.trim().parse().map_err(|_| ApiError::bad_request(message).with_param("priority"))
        });
        let request_id = text("x-request-id").filter(|id| !id.is_empty()).map(str::to_owned);
        Ok(Self { request_id, priority: priority.transpose()?, arrival: Instant::now() })
    }
}

/// Prepares a chat request.
pub(crate) fn chat(state: &AppState, body: &[u8], headers: &Headers) -> Result<Prepared<ChatWire>, ApiError> {
    let request = ChatRequest::parse(body)?;
    let (common, config) = (&request.common, &state.config);
    check_model(state, common)?;
    let limit = match (request.max_completion_tokens, common.max_tokens) {
        (None, Some(max_tokens)) => OutputLimit { field: "max_tokens", max_tokens: Some(max_tokens), least: 1 },
        (max_tokens, _) => OutputLimit { field: "max_completion_tokens", max_tokens, least: 1 },
    };
    let limit = OutputLimit {
        max_tokens: limit.max_tokens.or(config.sampling_defaults.max_new_tokens.map(i64::from)),
        ..limit
    };
    let sampling = Sampling::new(common, limit, request.logprobs.map(|count| ("top_logprobs", count)), config)?;
    let text = render(state, &request)?;
    let prompt = fit(state, tokenise(state, &text, request.add_special_tokens)?, &sampling)?;
    let id = request_id(common, headers);
    let wire = ChatWire {
        envelope: envelope(state, format!("chatcmpl-{id}")),
        n: sampling.n,
        prompt_tokens: prompt.tokens.len(),
        logprobs: sampling.logprobs(),
        tokenizer: Arc::clone(&state.text.tokenizer),
    };
    let stream = common.stream;
    Ok(Prepared { submission: submission(common, headers, (id, vec![prompt], sampling)), wire, stream })
}

/// Prepares a completion request.
pub(crate) fn completion(
    state: &AppState,
    body: &[u8],
    headers: &Headers,
) -> Result<Prepared<CompletionWire>, ApiError> {
    let request = CompletionRequest::parse(body)?;
    let (common, config) = (&request.common, &state.config);
    check_model(state, common)?;
    let limit = OutputLimit {
        field: "max_tokens",
        max_tokens: common.max_tokens.or(Some(DEFAULT_COMPLETION_TOKENS.min(config.max_model_len as i64))),
        least: i64::from(!request.echo),
    };
    let sampling = Sampling::new(common, limit, request.logprobs.map(|count| ("logprobs", count)), config)?;
    check_sequences(request.prompts.len(), sampling.n, config.max_sequences)?;
    let prompts = request
        .prompts
        .iter()
        .map(|prompt| fit(state, prompt_tokens(state, prompt, request.add_special_tokens)?, &sampling))
        .collect::<Result<Vec<_>, _>>()?;
    let echo = request.echo.then(|| request.prompts.iter().map(|prompt| prompt_text(state, prompt)).collect());
    let id = request_id(common, headers);
    let wire = CompletionWire {
        envelope: envelope(state, format!("cmpl-{id}")),
        n: sampling.n,
        prompt_tokens: prompts.iter().map(|prompt| prompt.tokens.len()).collect(),
        echo,
        logprobs: sampling.logprobs(),
        tokenizer: Arc::clone(&state.text.tokenizer),
        sent: vec![0; prompts.len() * sampling.n as usize],
    };
    let stream = common.stream;
    Ok(Prepared { submission: submission(common, headers, (id, prompts, sampling)), wire, stream })
}

fn check_model(state: &AppState, common: &CommonFields) -> Result<(), ApiError> {
    let names = &state.config.served_model_names;
    match &common.model {
        Some(model) if !names.contains(model) => Err(ApiError::model_not_found(model, names)),
        _ => Ok(()),
    }
}

fn check_sequences(prompts: usize, n: u32, limit: usize) -> Result<(), ApiError> {
    let sequences = prompts.saturating_mul(n as usize);
    if sequences <= limit {
        return Ok(());
    }
    let message = format!("{prompts} prompts with n={n} make {sequences} sequences; at most {limit} are allowed.");
    Err(ApiError::invalid_value("n", n, message))
}

fn request_id(common: &CommonFields, headers: &Headers) -> String {
    let given = headers.request_id.as_ref().or(common.request_id.as_ref());
    given.cloned().unwrap_or_else(|| Uuid::new_v4().simple().to_string())
}

fn envelope(state: &AppState, id: String) -> Envelope {
    Envelope {
        id,
        created: crate::app::unix_time(),
        model: Arc::clone(&state.model),
        fingerprint: Arc::clone(&state.fingerprint),
    }
}

fn submission(
    common: &CommonFields,
    headers: &Headers,
    (request_id, prompts, sampling): (String, Vec<PreparedPrompt>, Sampling),
) -> Submission {
    Submission {
        request_id,
        prompts,
        sampling,
        priority: headers.priority.unwrap_or(common.priority),
        cache_salt: common.cache_salt.as_deref().map(Arc::from),
        arrival: headers.arrival,
    }
}

fn render(state: &AppState, request: &ChatRequest) -> Result<String, ApiError> {
    let render = || {
        let template = state.text.template.as_ref().ok_or(octavo_text::TemplateError::Missing)?;
        let messages = octavo_text::normalize_messages(&request.messages, template.content_format())?;
        template.render(&TemplateInput {
            messages: &messages,
            tools: None,
            documents: request.documents.as_deref(),
            add_generation_prompt: request.add_generation_prompt,
            continue_final_message: request.continue_final_message,
            kwargs: &request.template_kwargs,
        })
    };
    render().map_err(|error| ApiError::from_template(&error))
}

fn prompt_tokens(state: &AppState, prompt: &Prompt, add_special_tokens: bool) -> Result<Vec<u32>, ApiError> {
    match prompt {
        Prompt::Text(text) => tokenise(state, text, add_special_tokens),
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

/// Tokenises a text, unless its length alone says that it cannot fit.
fn tokenise(state: &AppState, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ApiError> {
    let max_model_len = state.config.max_model_len;
    if text.len().div_ceil(state.longest_token) > max_model_len {
        return Err(ApiError::prompt_too_long(max_model_len + 1, true, max_model_len));
    }
    state.text.tokenizer.encode(text, add_special_tokens).map_err(|error| {
        tracing::error!(%error, "a prompt could not be tokenised");
        ApiError::bad_request("The prompt could not be tokenised.").with_param("prompt")
    })
}

/// A prompt's text, to be repeated.
fn prompt_text(state: &AppState, prompt: &Prompt) -> String {
    match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(ids) => {
            let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
            state.text.tokenizer.decode(&ids, true).unwrap_or_default()
        }
    }
}

/// Compares a prompt with the context, and settles how many tokens may follow.
fn fit(state: &AppState, tokens: Vec<u32>, sampling: &Sampling) -> Result<PreparedPrompt, ApiError> {
    let max_model_len = state.config.max_model_len;
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
    Ok(PreparedPrompt { tokens: tokens.into(), max_tokens })
}
