//! The error type of the HTTP API: a status and vLLM's error body.

use std::fmt::Display;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use octavo_engine::SubmitError;
use octavo_text::{GrammarError, Modality, TemplateError};
use serde::Serialize;

use crate::api::shared::places::Place;

/// Number of schema errors that a message lists; the others are counted.
const LISTED_ERRORS: usize = 10;

/// Characters of a schema error's sentence, which may quote the body.
const SENTENCE_CHARACTERS: usize = 1000;

/// Characters of an offending input that a message echoes.
const ECHOED_CHARACTERS: usize = 200;

/// The message for requests that a shutdown ends.
const INTERNAL: &str = "The server had an error while processing your request.";

/// The error that a client receives.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    retry_after: Option<Duration>,
    /// The code in the body, where it is not the status.
    code: Option<&'static str>,
}

/// A field of the body that violates the schema, described as pydantic does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FieldError {
    /// pydantic's type of the error.
    pub(crate) kind: &'static str,
    /// Keys and indices that lead from the body to the field.
    pub(crate) location: Vec<String>,
    /// A sentence about the error.
    pub(crate) message: String,
    /// The beginning of the offending JSON text.
    input: String,
}

/// The schema errors of a body: the first of them, and the number of all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FieldErrors {
    listed: Vec<FieldError>,
    count: usize,
}

impl FieldErrors {
    /// Adds the other errors.
    pub(crate) fn absorb(&mut self, other: Self) {
        let room = LISTED_ERRORS - self.listed.len();
        self.count += other.count;
        self.listed.extend(other.listed.into_iter().take(room));
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The first errors.
    #[cfg(test)]
    pub(crate) fn listed(&self) -> &[FieldError] {
        &self.listed
    }
}

impl From<FieldError> for FieldErrors {
    fn from(error: FieldError) -> Self {
        Self { listed: vec![error], count: 1 }
    }
}

impl FromIterator<FieldError> for FieldErrors {
    fn from_iter<I: IntoIterator<Item = FieldError>>(errors: I) -> Self {
        let mut all = Self::default();
        errors.into_iter().for_each(|error| all.absorb(error.into()));
        all
    }
}

#[derive(Serialize)]
struct Body<'a> {
    error: Info<'a>,
}

#[derive(Serialize)]
struct Info<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Code,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Code {
    Status(u16),
    Name(&'static str),
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, retry_after: None, code: None }
    }

    /// 400: a valid request that is refused.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequestError", message)
    }

    /// 400: a field's value is out of its range. The message ends with the field and its value.
    pub(crate) fn invalid_value(param: &str, value: impl Display, message: impl Display) -> Self {
        Self::bad_request(format!("{message} (parameter={param}, value={})", cut(&value.to_string()))).with_param(param)
    }

    /// 400: the model does not know this value of a field; `rest` says which it knows.
    pub(crate) fn unsupported(param: &str, value: &str, rest: &str) -> Self {
        Self::bad_request(format!("Unsupported {param} '{}'. {rest}", cut(value))).with_param(param)
    }

    /// 400: the body violates the schema.
    pub(crate) fn schema(errors: impl Into<FieldErrors>) -> Self {
        let FieldErrors { listed, count } = errors.into();
        let plural = if count == 1 { "" } else { "s" };
        let mut message = format!("{count} validation error{plural}:");
        for error in &listed {
            message.push_str("\n  ");
            message.push_str(&error.describe());
        }
        if count > listed.len() {
            message.push_str(&format!("\n  ... and {} more", count - listed.len()));
        }
        let param = listed.first().map(|e| e.location.join(".")).filter(|p| !p.is_empty());
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, "Bad Request", message) }
    }

    /// 400: the body is not JSON.
    pub(crate) fn media_type() -> Self {
        let message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed";
        Self::new(StatusCode::BAD_REQUEST, "Bad Request", message)
    }

    /// 400: plain HTTP on a TLS port.
    pub(crate) fn plain_http() -> Self {
        Self::bad_request("This port takes HTTPS, and the request came as plain HTTP: ask https:// instead.")
    }

    /// 404: not one of the served models.
    pub(crate) fn model_not_found(model: &str, aliases: &[String]) -> Self {
        let message = format!("The model `{}` does not exist. Valid aliases: {}.", cut(model), aliases.join(", "));
        Self::new(StatusCode::NOT_FOUND, "NotFoundError", message).with_param("model")
    }

    /// 400: a request to change the adapters that contradicts itself or what is served.
    pub(crate) fn user_input(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "InvalidUserInput", message)
    }

    /// 404: there is no such adapter.
    pub(crate) fn adapter_not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFoundError", message)
    }

    /// 500, as in vLLM: an adapter that cannot be used.
    pub(crate) fn adapter_refused(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", message)
    }

    /// 400: a request that is refused, under the type of OpenAI's API.
    pub(crate) fn invalid_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 404: no response with this id is stored for the client.
    pub(crate) fn response_not_found(id: &str) -> Self {
        let message = format!("Response with id '{}' not found.", cut(id));
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).with_param("response_id")
    }

    /// 413: the body exceeds `limit` bytes.
    pub(crate) fn body_too_large(limit: usize) -> Self {
        let message = format!("The request body is larger than the limit of {limit} bytes.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "Request Entity Too Large", message)
    }

    /// 408: the body did not arrive in time.
    pub(crate) fn body_timeout(limit: Duration) -> Self {
        let message = format!("The request body did not arrive within {} seconds.", limit.as_secs_f64());
        Self::new(StatusCode::REQUEST_TIMEOUT, "Request Timeout", message)
    }

    /// 408: the body arrived at less than `rate` bytes per second for `time`.
    pub(crate) fn body_stalled(rate: usize, time: Duration) -> Self {
        let message = format!(
            "The request body arrived at less than {rate} bytes per second for {} seconds.",
            time.as_secs_f64()
        );
        Self::new(StatusCode::REQUEST_TIMEOUT, "Request Timeout", message)
    }

    /// 408: the upload was slow, and its memory was needed.
    pub(crate) fn body_gave_way() -> Self {
        let message = "The request body arrived too slowly, and other requests needed its memory: send it again.";
        Self::new(StatusCode::REQUEST_TIMEOUT, "Request Timeout", message)
    }

    /// 429: the server is busy; the client may retry soon.
    pub(crate) fn busy(reason: impl Display) -> Self {
        let message = format!("The engine is currently busy: {reason}. Please retry later.");
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "Too Many Requests", message);
        Self { retry_after: Some(Duration::from_secs(1)), ..error }
    }

    /// 429: the client's key is over a limit, as OpenAI's API says it; `kind` is "requests" or "tokens", and a retry can
    /// succeed after `wait`.
    pub(crate) fn rate_limited(kind: &'static str, message: impl Into<String>, wait: Duration) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, kind, message);
        Self { retry_after: Some(wait), code: Some("rate_limit_exceeded"), ..error }
    }

    /// 503: the server refuses or ends requests because it is not available.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "Service Unavailable", message)
    }

    /// 501: the request is understood, but the server cannot do it.
    pub(crate) fn not_implemented(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "NotImplementedError", message)
    }

    /// 503: no further connection is allowed.
    pub(crate) fn too_many_connections() -> Self {
        let error = Self::unavailable("The server has too many open connections. Please retry later.");
        Self { retry_after: Some(Duration::from_secs(1)), ..error }
    }

    /// 503: the server is shutting down.
    pub(crate) fn shutting_down() -> Self {
        Self::unavailable("The server is shutting down.")
    }

    /// 500 without details, which are in the log.
    pub(crate) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", INTERNAL)
    }

    /// The prompt alone exceeds the context. `at_least` if it was not tokenized.
    pub(crate) fn prompt_too_long(tokens: usize, at_least: bool, max_model_len: usize) -> Self {
        let at_least = if at_least { "at least " } else { "" };
        Self::bad_request(format!(
            "This model's maximum context length is {max_model_len} tokens. However, your prompt contains \
             {at_least}{tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce \
             the length of the input prompt."
        ))
        .with_param("input_tokens")
    }

    /// The prompt fills the context and leaves no room for a token.
    pub(crate) fn no_room_for_output(tokens: usize, max_model_len: usize) -> Self {
        Self::bad_request(format!(
            "The decoder prompt (length {tokens}) plus the number of requested output tokens (at least 1) is longer \
             than the maximum model length of {max_model_len}. Make sure that `max_model_len` is no smaller than the \
             number of text tokens (prompt + requested output tokens)."
        ))
        .with_param("input_tokens")
    }

    /// The reason why the engine rejected a request.
    pub(crate) fn from_submit(error: &SubmitError, engine_failed: bool) -> Self {
        match error {
            SubmitError::TooManyRequests { .. } | SubmitError::TooManyTokens { .. } => Self::busy(error),
            SubmitError::PromptTooLong { tokens, limit } => Self::prompt_too_long(*tokens, false, *limit),
            SubmitError::EmptyPrompt => Self::bad_request("The decoder prompt cannot be empty"),
            SubmitError::NoAdapters
            | SubmitError::NoImages
            | SubmitError::ImageTooLarge { .. }
            | SubmitError::MalformedImage { .. }
            | SubmitError::ScoredImages => Self::bad_request(error.to_string()),
            SubmitError::Paused => Self::unavailable("The engine is paused and takes no requests until it is resumed."),
            SubmitError::Stopped if engine_failed => Self::internal(),
            SubmitError::Stopped => Self::unavailable("The engine is not running."),
        }
    }

    /// A prompt has more than `limit` images, videos or sounds.
    pub(crate) fn too_many(modality: Modality, limit: usize) -> Self {
        let name = modality.name();
        Self::bad_request(format!("At most {limit} {name}(s) may be provided in one prompt.")).with_param(name)
    }

    /// A prompt has more images than the operator allows; the model would take more if it `takes_images`.
    pub(crate) fn too_many_images(limit: usize, takes_images: bool) -> Self {
        let mut error = Self::too_many(Modality::Image, limit);
        if takes_images {
            error.message.push_str(" Set `--limit-mm-per-prompt` to increase this limit.");
        }
        error
    }

    /// 422: a host did not deliver what the request refers to.
    pub(crate) fn unprocessable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "UnprocessableEntityError", message)
    }

    /// 400: a part of a message, at `location` in the body, is invalid.
    pub(crate) fn invalid_part(location: Vec<String>, reason: &str) -> Self {
        Self::schema(FieldError::new("value_error", location, &format!("Value error, {reason}"), "..."))
    }

    /// Messages that the template rejects.
    pub(crate) fn from_template(error: &TemplateError) -> Self {
        match error {
            TemplateError::Message { index, field, reason } => {
                Self::invalid_part(Place::message(*index).location(field), reason)
            }
            TemplateError::Syntax(_) => {
                tracing::error!(%error, "the chat template cannot be used");
                Self::internal()
            }
            TemplateError::Modality(modality) => Self::too_many(*modality, 0),
            _ => Self::bad_request(error.to_string()).with_param("messages"),
        }
    }

    /// The reason why a grammar was not compiled.
    pub(crate) fn from_grammar(error: &GrammarError) -> Self {
        match error {
            GrammarError::Busy(_) | GrammarError::Thread(_) => {
                tracing::warn!(%error, "a grammar was not compiled");
                Self { retry_after: Some(Duration::from_secs(1)), ..Self::unavailable(error.to_string()) }
            }
            GrammarError::Panicked => {
                tracing::error!(%error, "a grammar was not compiled");
                Self::internal()
            }
            _ => Self::bad_request(error.to_string()),
        }
    }

    /// 400: no token satisfies the restrictions of a request.
    pub(crate) fn unsatisfiable() -> Self {
        Self::bad_request(
            "The restrictions of the request contradict each other: no token satisfies all of them. Relax \
             allowed_token_ids, bad_words or the structured output.",
        )
    }

    /// Sets the field that caused the error.
    pub(crate) fn with_param(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    /// The time after which a retry can succeed, if it can.
    #[cfg(test)]
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// A response with this body, and with the headers of the error.
    pub(crate) fn respond(&self, body: impl Serialize) -> Response {
        let mut response = (self.status, axum::Json(body)).into_response();
        if let Some(delay) = self.retry_after {
            // Rounded up: a client that comes a moment too early is refused again.
            let seconds = delay.as_secs() + u64::from(delay.subsec_nanos() > 0);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// The status of the response.
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// The body, which is also the content of a stream's error event.
    pub(crate) fn body(&self) -> impl Serialize + '_ {
        let (r#type, param) = (self.kind, self.param.as_deref());
        let code = self.code.map_or(Code::Status(self.status.as_u16()), Code::Name);
        Body { error: Info { message: &self.message, r#type, param, code } }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond(self.body())
    }
}

impl FieldError {
    /// An error at `location`, with the first characters of the offending JSON text `input`.
    pub(crate) fn new(kind: &'static str, location: Vec<String>, message: &str, input: &str) -> Self {
        let (message, input) = (cut_to(message, SENTENCE_CHARACTERS), cut(input));
        Self { kind, location, message, input }
    }

    /// pydantic's dictionary as Python prints it.
    fn describe(&self) -> String {
        let location: Vec<String> = std::iter::once("'body'".to_owned())
            .chain(self.location.iter().map(|part| match part.parse::<usize>() {
                Ok(index) => index.to_string(),
                Err(_) => quote(part),
            }))
            .collect();
        let comma = if location.len() == 1 { "," } else { "" };
        format!(
            "{{'type': {}, 'loc': ({}{comma}), 'msg': {}, 'input': {}}}",
            quote(self.kind),
            location.join(", "),
            quote(&self.message),
            self.input
        )
    }
}

/// A Python string literal.
fn quote(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c == quote => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// At most [`ECHOED_CHARACTERS`] of `text`.
fn cut(text: &str) -> String {
    cut_to(text, ECHOED_CHARACTERS)
}

fn cut_to(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        Self::from_template(&error)
    }
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> Self {
        Self::from_grammar(&error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(error: &ApiError) -> String {
        serde_json::to_string(&error.body()).unwrap()
    }

    #[test]
    fn a_body_has_all_four_keys_and_an_integer_code() {
        assert_eq!(
            body(&ApiError::bad_request("no")),
            r#"{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}"#
        );
        assert_eq!(
            body(&ApiError::model_not_found("x", &["a".into(), "b".into()])),
            r#"{"error":{"message":"The model `x` does not exist. Valid aliases: a, b.","type":"NotFoundError","param":"model","code":404}}"#
        );
    }

    #[test]
    fn a_value_error_ends_with_the_field_and_its_value() {
        let error = ApiError::invalid_value("temperature", -1.0, "temperature must be non-negative, got -1.0.");
        assert_eq!(error.to_string(), "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1)");
    }

    #[test]
    fn schema_errors_read_like_pydantics_and_are_bounded() {
        let location = vec!["messages".into(), "0".into(), "role".into()];
        let error = FieldError::new("int_type", location, "Input should be a valid string", &"x".repeat(1000));
        let one = ApiError::schema(error.clone());
        assert!(one.to_string().starts_with(
            "1 validation error:\n  {'type': 'int_type', 'loc': ('body', 'messages', 0, 'role'), 'msg': 'Input should be a valid string', 'input': xxx"
        ));
        assert_eq!(one.param.as_deref(), Some("messages.0.role"));
        let many = ApiError::schema(std::iter::repeat_n(error, 1000).collect::<FieldErrors>()).to_string();
        assert!(many.starts_with("1000 validation errors:"));
        assert!(many.ends_with("\n  ... and 990 more"));
        assert_eq!(many.lines().count(), 12);
        assert!(many.len() < 4000);
    }

    #[test]
    fn python_literals_are_escaped() {
        assert_eq!(quote("a'b"), r#""a'b""#);
        assert_eq!(quote("a'b\"c\\\n"), r#"'a\'b"c\\\n'"#);
    }

    #[test]
    fn faults_of_the_grammar_compiler_are_not_the_clients() {
        let status = |error: &GrammarError| {
            let response = ApiError::from_grammar(error).into_response();
            (response.status().as_u16(), response.headers().contains_key(header::RETRY_AFTER))
        };
        assert_eq!(status(&GrammarError::Busy(Duration::from_secs(1))), (503, true));
        assert_eq!(status(&GrammarError::Thread("no memory".to_owned())), (503, true));
        assert_eq!(status(&GrammarError::Panicked), (500, false));
        assert_eq!(status(&GrammarError::TooSlow(Duration::from_secs(1))), (400, false));
        assert_eq!(status(&GrammarError::Regex("it is broken".to_owned())), (400, false));
    }

    #[test]
    fn a_limit_has_openais_code_and_whole_seconds() {
        let error = ApiError::rate_limited("tokens", "no", Duration::from_millis(1001));
        assert_eq!(
            body(&error),
            r#"{"error":{"message":"no","type":"tokens","param":null,"code":"rate_limit_exceeded"}}"#
        );
        let response = error.into_response();
        assert_eq!(
            (response.status().as_u16(), &response.headers()[header::RETRY_AFTER]),
            (429, &HeaderValue::from(2))
        );
    }

    #[test]
    fn a_busy_engine_says_when_to_come_back() {
        let response = ApiError::busy("too much").into_response();
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }
}
