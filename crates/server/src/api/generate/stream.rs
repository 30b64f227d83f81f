//! Bodies of POST /generate.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::api::shared::response::Usage;
use crate::api::shared::sse::{Events, Extras};
use crate::api::shared::stream::{FullResponse, ResponseFormat, text_of};
use crate::choices::Output;
use crate::error::ApiError;

/// The [`ResponseFormat`] of POST /generate: prompt and completion are one text, which every line of a stream repeats.
pub(crate) struct GenerateFormat {
    pub(crate) prompt_tokens: usize,
    /// Prompt and completion so far of each choice.
    pub(crate) texts: Vec<String>,
}

impl ResponseFormat for GenerateFormat {
    const STREAM_TYPE: &'static str = "application/x-ndjson";
    const COMMENTS: bool = false;

    fn choices(&self) -> usize {
        self.texts.len()
    }

    fn prompt_tokens(&self, _: u32) -> usize {
        self.prompt_tokens
    }

    fn open(&mut self, _: &mut Events, _: u32, _: Extras) {}

    fn chunk(&mut self, events: &mut Events, output: Output, _: Extras) {
        self.texts[output.index as usize].push_str(&text_of(output.parts));
        events.line(&json!({"text": self.texts}));
    }

    fn usage(&mut self, _: &mut Events, _: Usage) {}

    fn close(&mut self, _: &mut Events, _: Usage) {}

    fn fail(&mut self, events: &mut Events, error: &ApiError) {
        events.line(&error.body());
    }

    fn whole(mut self, choices: Vec<FullResponse>, _: Usage) -> Response {
        for (text, whole) in self.texts.iter_mut().zip(choices) {
            text.push_str(&text_of(whole.parts));
        }
        Json(json!({"text": self.texts})).into_response()
    }
}
