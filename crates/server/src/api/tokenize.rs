//! POST /tokenize, POST /detokenize, GET /tokenizer_info

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use octavo_text::{Tokenizer, Wanted};
use serde::{Serialize, Serializer};

use crate::api::chat::request::ChatRequest;
use crate::api::shared::conversation::prompt_of;
use crate::api::shared::fields::{JsonFields, request_fields};
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::prompt::tokenise_in_turns;
use crate::api::shared::run::{Received, receive, staged};
use crate::api::shared::sampling::known_token;
use crate::api::shared::staged::{Staged, images_of};
use crate::app::{AppState, not_found};
use crate::error::ApiError;
use crate::json;

/// Returns the tokens of a text, or of the prompt rendered from messages.
pub(crate) async fn tokenize(State(state): State<AppState>, request: Request) -> Response {
    answer(&state, request, tokens_of).await
}

/// Returns the text of tokens.
pub(crate) async fn detokenize(State(state): State<AppState>, request: Request) -> Response {
    answer(&state, request, text_of).await
}

/// Describes the tokenizer in the terms of `tokenizer_config.json`. The operator must enable it, since a chat template
/// may be confidential.
pub(crate) async fn info(State(state): State<AppState>) -> Response {
    if !state.config.tokenizer_info {
        return not_found().await;
    }
    let tokenizer = &state.text.tokenizer;
    let special = tokenizer.special();
    Json(serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size(),
        "model_max_length": state.config.max_model_len,
        "bos_token": special.bos,
        "eos_token": special.eos,
        "unk_token": special.unk,
        "pad_token": special.pad,
        "add_bos_token": special.add_bos,
        "add_eos_token": special.add_eos,
        "chat_template": state.text.template.as_ref().map(|template| template.source()),
    }))
    .into_response()
}

/// The answer of POST /tokenize.
#[derive(Serialize)]
struct Tokens<'a> {
    count: usize,
    max_model_len: usize,
    token_strs: Option<Spellings<'a>>,
    tokens: &'a [u32],
}

/// The spellings of tokens, each of which is made when it is written.
struct Spellings<'a> {
    tokenizer: &'a Tokenizer,
    tokens: &'a [u32],
}

impl Serialize for Spellings<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().map(|&id| self.tokenizer.id_to_token(id).unwrap_or_default()))
    }
}

/// The answer of POST /detokenize.
#[derive(Serialize)]
struct Text {
    prompt: String,
}

/// The function that writes an answer as JSON.
type Answer = fn(&AppState, &[u8], &RequestHeaders) -> Result<Staged<Vec<u8>>, ApiError>;

/// The answer that `work` writes as JSON. It may have megabytes, so the blocking pool writes it.
async fn answer(state: &AppState, request: Request, work: Answer) -> Response {
    let received = async {
        let Received { body, headers } = receive(state, request).await?;
        staged(state, body, move |state, body| work(state, body, &headers)).await
    };
    match received.await {
        Ok(json) => json::response(json),
        Err(error) => error.into_response(),
    }
}

request_fields! {
    /// The body of POST /tokenize with a text.
    pub(crate) struct TokenizedText |fields| {
        TokenizeRequest {
            model: Option<String> {"$ref": "#/components/schemas/Model"},
            /// A text; then `add_special_tokens` is true by default.
            prompt: Option<String> {"type": "string"},
            add_special_tokens: bool => (fields.get("add_special_tokens").unwrap_or(true)),
        }
    }
}

fn tokens_of(state: &AppState, body: &[u8], headers: &RequestHeaders) -> Result<Staged<Vec<u8>>, ApiError> {
    let mut fields = JsonFields::parse(body)?;
    let with_text = fields.get("return_token_strs").unwrap_or(false);
    if fields.raw("messages").is_some() {
        fields.finish()?;
        let request = ChatRequest::parse(body)?;
        state.resolve_model(request.common.model.as_deref())?;
        let images = images_of(state, &request, headers)?;
        return Staged::new(state, images, move |state, images| {
            tokenized(state, &prompt_of(state, &request, &images)?.1.tokens, with_text)
        });
    }
    let request = TokenizedText::read(&mut fields);
    if fields.raw("prompt").is_none() {
        fields.missing("prompt");
    }
    fields.finish()?;
    state.resolve_model(request.model.as_deref())?;
    // A text that exceeds the context is tokenized as well; its size is limited by that of the body.
    let tokens =
        tokenise_in_turns(state, &request.prompt.unwrap_or_default(), request.add_special_tokens, Wanted::All)?;
    tokenized(state, &tokens, with_text).map(Staged::Ready)
}

/// The answer of POST /tokenize, in JSON.
fn tokenized(state: &AppState, tokens: &[u32], with_text: bool) -> Result<Vec<u8>, ApiError> {
    let tokenizer = &state.text.tokenizer;
    json::written(&Tokens {
        count: tokens.len(),
        max_model_len: state.config.max_model_len,
        token_strs: with_text.then_some(Spellings { tokenizer, tokens }),
        tokens,
    })
}

request_fields! {
    /// The body of POST /detokenize.
    pub(crate) struct DetokenizeRequest |fields| {
        DetokenizeRequest {
            model: Option<String> {"$ref": "#/components/schemas/Model"},
            /// Token ids.
            tokens: Option<Vec<i64>> {"type": "array", "items": {"type": "integer", "minimum": 0}},
        }
    }
}

fn text_of(state: &AppState, body: &[u8], _: &RequestHeaders) -> Result<Staged<Vec<u8>>, ApiError> {
    let mut fields = JsonFields::parse(body)?;
    let request = DetokenizeRequest::read(&mut fields);
    if fields.raw("tokens").is_none() {
        fields.missing("tokens");
    }
    fields.finish()?;
    state.resolve_model(request.model.as_deref())?;
    let tokens = request.tokens.unwrap_or_default();
    let ids = tokens.iter().map(|&id| known_token("tokens", id, &state.config)).collect::<Result<Vec<_>, _>>()?;
    let text = state.text.tokenizer.decode(&ids, false).map_err(|error| ApiError::bad_request(error.to_string()))?;
    json::written(&Text { prompt: text }).map(Staged::Ready)
}
