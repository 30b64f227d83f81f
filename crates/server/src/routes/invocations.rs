//! POST /invocations: SageMaker's route for all kinds of requests.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use crate::app::AppState;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::prepare;
use crate::routes::{embeddings, receive, run};

/// Answers a body as the route does whose fields it has.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    let received = match receive(&state, request).await {
        Ok(received) => received,
        Err(error) => return error.into_response(),
    };
    match kind(&received.0.bytes) {
        Ok(Kind::Chat) => run(state, received, prepare::chat).await,
        Ok(Kind::Completion) => run(state, received, prepare::completion).await,
        Ok(Kind::Embedding) => embeddings::answer(state, received).await,
        Err(error) => error.into_response(),
    }
}

enum Kind {
    Chat,
    Completion,
    Embedding,
}

fn kind(body: &[u8]) -> Result<Kind, ApiError> {
    let fields = Fields::parse(body)?;
    [("messages", Kind::Chat), ("prompt", Kind::Completion), ("input", Kind::Embedding)]
        .into_iter()
        .find_map(|(field, kind)| fields.raw(field).map(|_| kind))
        .ok_or_else(|| {
            let message = "Cannot find suitable handler for request. Expected one of: messages, prompt, input.";
            ApiError::bad_request(message)
        })
}
