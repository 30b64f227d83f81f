//! Embedding requests of Cohere's API.

use octavo_engine::Pooling;
use serde_json::{Value, json};

use crate::api::chat::request::ChatRequest;
use crate::api::pooling::answer::CohereEmbeddings;
use crate::api::pooling::convert::prompts::{PoolingPrompt, Prompts};
use crate::api::pooling::convert::{ITEM_BYTES, PreparedPooling, Work, prepared, tokens_of};
use crate::api::pooling::request::{CohereInput, CohereRequest, CohereType, Encoding, Format, PoolingFields};
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::size::ResponseSize;
use crate::app::{App, AppState};
use crate::error::ApiError;

/// Prepares a request of POST /v2/embed.
pub(crate) fn cohere_embeddings(
    state: &AppState,
    body: &[u8],
    headers: &RequestHeaders,
) -> Result<PreparedPooling, ApiError> {
    let request = CohereRequest::parse(body)?;
    let model = state.resolve_model(request.model.as_deref())?;
    let finish = state.vector_finish(None)?;
    let dimensions = state.dimensions(request.dimensions, "output_dimension")?;
    let width = dimensions.unwrap_or(state.config.embedding_size);
    check_bits(&request.types, width)?;
    let prefix = state.prompt_named(request.input_type.as_deref())?;
    let prompts = prompts_of(state, &request, prefix)?;
    let texts = match request.input {
        CohereInput::Texts(texts) => Some(texts),
        CohereInput::Contents(_) => None,
    };
    let elements = prompts.len().saturating_mul(width);
    let of_types = request.types.iter().map(|kind| bytes_per_eight(*kind)).sum::<usize>();
    let bytes = ResponseSize::without_choices()
        .texts("texts", texts.iter().flatten().map(String::as_str))
        .bytes("embedding_types", elements.saturating_mul(of_types) / 8 + prompts.len() * ITEM_BYTES)
        .check(state)?;
    let id = headers.id(None);
    let answer = Box::new(CohereEmbeddings {
        id: format!("embd-{id}"),
        types: request.types,
        finish,
        dimensions,
        texts,
        prompt_tokens: tokens_of(&prompts),
    });
    let common = PoolingFields { priority: request.priority, ..PoolingFields::default() };
    let work = Work { model, prompts, pooling: Pooling::Prompt, answer, bytes };
    Ok(prepared(state, &common, headers, id, work))
}

fn prompts_of(state: &AppState, request: &CohereRequest, prefix: &str) -> Result<Vec<PoolingPrompt>, ApiError> {
    let made: Vec<PoolingPrompt> = match &request.input {
        CohereInput::Texts(texts) => {
            let prompts = Prompts::new(state, request.truncation, "texts")?;
            let prompt = |text: &String| match prefix {
                "" => prompts.text(text, true),
                prefix => prompts.text(&format!("{prefix}{text}"), true),
            };
            texts.iter().map(prompt).collect::<Result<_, _>>()?
        }
        CohereInput::Contents(contents) => {
            let prompts = Prompts::new(state, request.truncation, "inputs")?;
            let prompt = |content: &Value| prompts.conversation(&mut conversation(content, prefix)?);
            contents.iter().map(prompt).collect::<Result<_, _>>()?
        }
    };
    let most = request.max_tokens.map_or(usize::MAX, |most| most as usize);
    match made.iter().map(|prompt| prompt.tokens.len()).find(|&tokens| tokens > most) {
        None => Ok(made),
        Some(tokens) => {
            let message = format!(
                "Input of {tokens} tokens exceeds max_tokens={most} with truncate=NONE. Set truncate to END or START to \
                 allow truncation."
            );
            Err(ApiError::bad_request(message).with_param("max_tokens"))
        }
    }
}

/// The conversation with this content of a message, which a prompt precedes as the system's.
fn conversation(content: &Value, prefix: &str) -> Result<ChatRequest, ApiError> {
    let system = json!({"role": "system", "content": prefix});
    let messages = [(!prefix.is_empty()).then_some(system), Some(json!({"role": "user", "content": content}))];
    let messages: Vec<Value> = messages.into_iter().flatten().collect();
    ChatRequest::parse(json!({"messages": messages, "add_generation_prompt": false}).to_string().as_bytes())
}

/// Estimated bytes of eight elements in an answer.
fn bytes_per_eight(kind: CohereType) -> usize {
    let of = |format| 8 * Encoding { format, ..Encoding::default() }.bytes_per_element();
    match kind {
        CohereType::Float => of(Format::Numbers),
        CohereType::Base64 => of(Format::Base64),
        // A number of up to three digits, a sign and a comma.
        CohereType::Binary | CohereType::UBinary => 5,
    }
}

/// Refuses bits of vectors that are no bytes.
fn check_bits(types: &[CohereType], width: usize) -> Result<(), ApiError> {
    let packs = types.iter().any(|kind| matches!(kind, CohereType::Binary | CohereType::UBinary));
    if packs && !width.is_multiple_of(8) {
        let message =
            format!("Embedding dimension must be a multiple of 8 for binary embedding types, but got {width}.");
        return Err(ApiError::bad_request(message).with_param("embedding_types"));
    }
    Ok(())
}

impl App {
    /// The prompt before the texts of this type; empty if the client names none.
    fn prompt_named(&self, input_type: Option<&str>) -> Result<&str, ApiError> {
        let Some(name) = input_type else { return Ok("") };
        let prompts = &self.pooling.prompts;
        if let Some(prompt) = prompts.get(name) {
            return Ok(prompt);
        }
        let names: Vec<&str> = prompts.keys().map(String::as_str).collect();
        let message = match &names[..] {
            [] => "This model does not define any input_type prompt prefixes.".to_owned(),
            names => format!("Supported values: {}", names.join(", ")),
        };
        Err(ApiError::unsupported("input_type", name, &message))
    }
}
