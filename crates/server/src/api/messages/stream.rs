//! Bodies and events of POST /v1/messages.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use octavo_text::OutputDelta;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::api::shared::response::{Finish, StopReason, Usage};
use crate::api::shared::sse::{Events, Extras};
use crate::api::shared::stream::{FullResponse, ResponseFormat};
use crate::choices::Output;
use crate::error::ApiError;

/// The messages route's [`ResponseFormat`].
pub(crate) struct MessagesFormat {
    pub(crate) id: String,
    pub(crate) model: Arc<str>,
    pub(crate) prompt_tokens: usize,
    pub(crate) blocks: Blocks,
}

/// The blocks of a message under construction.
#[derive(Default)]
pub(crate) struct Blocks {
    done: Vec<Value>,
    open: Option<Block>,
    finish: Option<Finish>,
    called: bool,
}

/// An incomplete block.
struct Block {
    kind: BlockKind,
    text: String,
}

#[derive(PartialEq)]
enum BlockKind {
    Text,
    Thinking,
    Use { id: String, name: String },
}

impl Block {
    /// The block at its start in a stream.
    fn begin(&self) -> Value {
        match &self.kind {
            BlockKind::Text => json!({"type": "text", "text": ""}),
            BlockKind::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
            BlockKind::Use { id, name } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
        }
    }

    fn delta(&self, text: &str) -> Value {
        match self.kind {
            BlockKind::Text => json!({"type": "text_delta", "text": text}),
            BlockKind::Thinking => json!({"type": "thinking_delta", "thinking": text}),
            BlockKind::Use { .. } => json!({"type": "input_json_delta", "partial_json": text}),
        }
    }

    fn whole(self) -> Value {
        let text = self.text;
        match self.kind {
            BlockKind::Text => json!({"type": "text", "text": text}),
            BlockKind::Thinking => json!({"type": "thinking", "thinking": text, "signature": ""}),
            BlockKind::Use { id, name } => {
                // Arguments that are cut off are not JSON, so they are returned as text.
                let input = serde_json::from_str(&text).unwrap_or_else(|_| json!({"partial_json": text}));
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        }
    }
}

impl Blocks {
    /// Adds a part of the output, and its events to `events` if the response is streamed.
    fn push(&mut self, part: OutputDelta, mut events: Option<&mut Events>) {
        let (kind, text) = match part {
            OutputDelta::Content(text) => (BlockKind::Text, text),
            OutputDelta::Reasoning(text) => (BlockKind::Thinking, text),
            OutputDelta::ToolCall { name, .. } => {
                self.called = true;
                (BlockKind::Use { id: format!("toolu_{}", Uuid::new_v4().simple()), name }, String::new())
            }
            OutputDelta::Arguments { fragment, .. } => return self.append(&fragment, events),
        };
        if !self.open.as_ref().is_some_and(|open| open.kind == kind) {
            self.close(events.as_deref_mut());
            let block = Block { kind, text: String::new() };
            if let Some(events) = events.as_deref_mut() {
                event(events, "content_block_start", json!({"index": self.done.len(), "content_block": block.begin()}));
            }
            self.open = Some(block);
        }
        self.append(&text, events);
    }

    fn append(&mut self, text: &str, events: Option<&mut Events>) {
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        if let Some(events) = events.filter(|_| !text.is_empty()) {
            event(events, "content_block_delta", json!({"index": self.done.len(), "delta": open.delta(text)}));
        }
    }

    /// Completes the open block.
    fn close(&mut self, events: Option<&mut Events>) {
        let Some(block) = self.open.take() else { return };
        if let Some(events) = events {
            let index = self.done.len();
            if block.kind == BlockKind::Thinking {
                let delta = json!({"type": "signature_delta", "signature": ""});
                event(events, "content_block_delta", json!({"index": index, "delta": delta}));
            }
            event(events, "content_block_stop", json!({"index": index}));
        }
        self.done.push(block.whole());
    }

    /// Whether the server ended the message early. This API has no stop reason for it, so it is an error.
    fn aborted(&self) -> bool {
        self.finish == Some(Finish::Abort)
    }

    /// The stop reason and the stop sequence of the message.
    fn stop(&self) -> (&'static str, Option<&str>) {
        match &self.finish {
            Some(Finish::Length) => ("max_tokens", None),
            Some(Finish::Stop(Some(StopReason::String(stop)))) => ("stop_sequence", Some(stop)),
            _ if self.called => ("tool_use", None),
            _ => ("end_turn", None),
        }
    }
}

impl MessagesFormat {
    fn message(&self, stop: Option<(&str, Option<&str>)>, usage: Usage) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.blocks.done,
            "stop_reason": stop.map(|(reason, _)| reason),
            "stop_sequence": stop.and_then(|(_, sequence)| sequence),
            "usage": usage_body(usage),
        })
    }
}

/// The input tokens of this API exclude tokens found in the cache.
fn usage_body(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    })
}

/// An event, which begins with its type.
fn event(events: &mut Events, name: &str, body: Value) {
    let mut event = serde_json::Map::new();
    event.insert("type".into(), name.into());
    if let Value::Object(body) = body {
        event.extend(body);
    }
    events.push_named(name, &event);
}

fn error_body(error: &ApiError) -> Value {
    let kind = match error.status().as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.to_string()}})
}

impl ResponseFormat for MessagesFormat {
    fn choices(&self) -> usize {
        1
    }

    fn prompt_tokens(&self, _: u32) -> usize {
        self.prompt_tokens
    }

    fn open(&mut self, events: &mut Events, _: u32, _: Extras) {
        let usage = Usage { prompt_tokens: self.prompt_tokens, ..Usage::default() };
        event(events, "message_start", json!({"message": self.message(None, usage)}));
    }

    fn chunk(&mut self, events: &mut Events, output: Output, _: Extras) {
        self.blocks.finish = output.finish;
        for part in output.parts {
            self.blocks.push(part, Some(events));
        }
    }

    fn usage(&mut self, _: &mut Events, _: Usage) {}

    fn close(&mut self, events: &mut Events, usage: Usage) {
        self.blocks.close(Some(events));
        if self.blocks.aborted() {
            return self.fail(events, &ApiError::shutting_down());
        }
        let (reason, sequence) = self.blocks.stop();
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        event(events, "message_delta", json!({"delta": delta, "usage": usage_body(usage)}));
        event(events, "message_stop", json!({}));
    }

    fn fail(&mut self, events: &mut Events, error: &ApiError) {
        events.push_named("error", &error_body(error));
    }

    fn whole(mut self, choices: Vec<FullResponse>, usage: Usage) -> Response {
        for whole in choices {
            self.blocks.finish = whole.finish;
            for part in whole.parts {
                self.blocks.push(part, None);
            }
        }
        if self.blocks.aborted() {
            return Self::refuse(&ApiError::shutting_down());
        }
        self.blocks.close(None);
        Json(self.message(Some(self.blocks.stop()), usage)).into_response()
    }

    fn refuse(error: &ApiError) -> Response {
        error.respond(error_body(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(finish: Finish) -> (MessagesFormat, FullResponse) {
        let blocks = Blocks { finish: Some(finish.clone()), ..Blocks::default() };
        let format = MessagesFormat { id: "msg_1".into(), model: "m".into(), prompt_tokens: 3, blocks };
        let parts = vec![OutputDelta::Content("half".into())];
        (format, FullResponse { parts, finish: Some(finish), ..FullResponse::default() })
    }

    #[test]
    fn a_message_that_the_server_ends_early_is_an_error() {
        for (finish, status, end) in
            [(Finish::Abort, 503, "overloaded_error"), (Finish::Stop(None), 200, "event: message_stop")]
        {
            let (message, whole) = format(finish.clone());
            assert_eq!(message.whole(vec![whole], Usage::default()).status(), status);
            let mut events = Events::default();
            format(finish).0.close(&mut events, Usage::default());
            let text = String::from_utf8(events.into_bytes().to_vec()).unwrap();
            assert!(text.contains(end), "{text}");
            assert_eq!(text.contains("end_turn"), status == 200, "{text}");
        }
    }
}
