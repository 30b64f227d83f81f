//! Answers in JSON that the blocking pool writes, because they may have megabytes.

use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use serde::ser::{Error, SerializeSeq};
use serde::{Serialize, Serializer};

use crate::error::ApiError;
use crate::workers::take_turns;

/// An answer as JSON.
pub(crate) fn written(answer: &impl Serialize) -> Result<Vec<u8>, ApiError> {
    serde_json::to_vec(answer).map_err(|error| {
        tracing::error!(%error, "an answer could not be written");
        ApiError::internal()
    })
}

/// The response with a body in JSON.
pub(crate) fn response(body: Vec<u8>) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

/// A list whose elements are written in turns with other requests.
pub(crate) struct InTurns<I>(pub(crate) I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for InTurns<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let elements = self.0.clone();
        let mut list = serializer.serialize_seq(None)?;
        for element in elements {
            take_turns().map_err(S::Error::custom)?;
            list.serialize_element(&element)?;
        }
        list.end()
    }
}
