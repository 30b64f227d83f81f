//! One request of a batch, answered by the server's routes.

use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, Request, StatusCode};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::batch::failures;
use crate::batch::input::{self, Line};

/// Maximum size of an answer in bytes.
const MAX_ANSWER: usize = 256 << 20;

/// Characters of a failure's reason.
const MAX_REASON: usize = 200;

/// Maximum number of attempts while the server is busy with other requests of the batch.
const MAX_ATTEMPTS: usize = 600;

/// A line of the output.
pub(crate) struct Answer {
    /// JSON without a line break.
    pub(crate) line: Vec<u8>,
    /// The name of the request and the reason, if it failed.
    pub(crate) failure: Option<String>,
}

#[derive(Serialize)]
struct AnswerLine<'a> {
    id: String,
    custom_id: Option<&'a str>,
    response: Response<'a>,
    /// The error of the body, repeated for readers that expect it here.
    error: Option<Value>,
}

#[derive(Serialize)]
struct Response<'a> {
    status_code: u16,
    request_id: &'a str,
    body: Box<RawValue>,
}

/// Sends a request to `router`. Any failure becomes the answer.
pub(crate) async fn answer(router: &Router, line: &Line) -> Answer {
    let request_id = uuid::Uuid::new_v4().simple().to_string();
    let (status, body) = match &line.request {
        Ok(request) => ask(router, request, &request_id).await,
        Err(why) => refusal(StatusCode::BAD_REQUEST, why),
    };
    let error = (!status.is_success()).then(|| error_of(&body));
    let failure = error.as_ref().map(|error| {
        let message: String = error["message"].as_str().unwrap_or_default().chars().take(MAX_REASON).collect();
        let name = failures::name(line.number, line.custom_id.as_deref());
        format!("{name}: {}", if message.is_empty() { format!("status {status}") } else { message })
    });
    let answer = AnswerLine {
        id: format!("batch_req_{}", uuid::Uuid::new_v4().simple()),
        custom_id: line.custom_id.as_deref(),
        error,
        response: Response { status_code: status.as_u16(), request_id: &request_id, body },
    };
    // The answer consists of texts, numbers and valid JSON, so writing it cannot fail.
    Answer { line: serde_json::to_vec(&answer).unwrap_or_default(), failure }
}

async fn ask(router: &Router, request: &input::Request, request_id: &str) -> (StatusCode, Box<RawValue>) {
    for _ in 0..MAX_ATTEMPTS {
        let mut post =
            Request::post(&request.url).header(CONTENT_TYPE, "application/json").header("x-request-id", request_id);
        for (name, value) in &request.trace {
            post = post.header(*name, value);
        }
        let request = match post.body(Body::from(request.body.get().to_owned())) {
            Ok(request) => request,
            Err(error) => return refusal(StatusCode::BAD_REQUEST, &format!("url or trace: {error}")),
        };
        let response = match router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let (head, body) = response.into_parts();
        if head.status == StatusCode::TOO_MANY_REQUESTS {
            tokio::time::sleep(pause(&head.headers)).await;
            continue;
        }
        return match to_bytes(body, MAX_ANSWER).await {
            Ok(bytes) => (head.status, one_line(&bytes)),
            Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, &format!("the answer broke off: {error}")),
        };
    }
    refusal(StatusCode::TOO_MANY_REQUESTS, "the server stayed busy for too long")
}

fn pause(headers: &HeaderMap) -> Duration {
    let seconds = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(1).clamp(1, 60))
}

/// An error answer in the form of the server's errors.
fn refusal(status: StatusCode, message: &str) -> (StatusCode, Box<RawValue>) {
    let kind = if status.is_server_error() { "InternalServerError" } else { "BadRequestError" };
    let error = json!({"error": {"message": message, "type": kind, "param": null, "code": status.as_u16()}});
    (status, raw(&error))
}

/// A body as JSON without line breaks. A body that is not JSON becomes a JSON string.
fn one_line(bytes: &[u8]) -> Box<RawValue> {
    match serde_json::from_slice::<Box<RawValue>>(bytes) {
        Ok(body) if !body.get().contains(['\n', '\r']) => body,
        // Line breaks occur only between values, where a space is equivalent.
        Ok(body) => RawValue::from_string(body.get().replace(['\n', '\r'], " ")).unwrap_or_else(|_| raw(&Value::Null)),
        Err(_) => raw(&Value::String(String::from_utf8_lossy(bytes).into_owned())),
    }
}

fn raw(value: &Value) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).unwrap_or_default()
}

/// The error in a body.
fn error_of(body: &RawValue) -> Value {
    let value: Value = serde_json::from_str(body.get()).unwrap_or_default();
    match value.get("error") {
        Some(error) => error.clone(),
        None => json!({"message": value}),
    }
}
