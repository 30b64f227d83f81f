//! Bodies and events of POST /v1/responses.

use axum::Json;
use axum::response::{IntoResponse, Response};
use octavo_engine::ClientId;
use octavo_text::OutputDelta;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::api::responses::stored::{Recorder, Ticket};
use crate::api::shared::logprobs::Spelling;
use crate::api::shared::response::{ChatLogprobs, Envelope, Finish, Usage};
use crate::api::shared::sse::{Events, Extras};
use crate::api::shared::stream::{FullResponse, ResponseFormat};
use crate::choices::Output;
use crate::error::ApiError;

/// The responses route's [`ResponseFormat`].
pub(crate) struct ResponsesFormat {
    pub(crate) envelope: Envelope,
    pub(crate) prompt_tokens: usize,
    /// The settings of the request.
    pub(crate) settings: Map<String, Value>,
    /// Number of alternatives, if log-probabilities are requested.
    pub(crate) logprobs: Option<u32>,
    pub(crate) spelling: Spelling,
    pub(crate) items: Items,
    /// Stores the response, if it is to be stored.
    pub(crate) recorder: Option<Recorder>,
    /// Whether the response runs in the background.
    pub(crate) background: bool,
}

/// The output items of a response under construction.
#[derive(Default)]
pub(crate) struct Items {
    /// Number of events so far.
    sequence: u64,
    done: Vec<Value>,
    open: Option<Item>,
    /// Log-probabilities of tokens whose text is not sent yet.
    logprobs: Vec<Value>,
    finish: Option<Finish>,
}

/// An incomplete item.
struct Item {
    kind: ItemKind,
    id: String,
    text: String,
    logprobs: Vec<Value>,
}

#[derive(PartialEq)]
enum ItemKind {
    Message,
    Reasoning,
    Call { index: u32, call_id: String, name: String },
}

impl Item {
    fn new(kind: ItemKind) -> Self {
        let prefix = match kind {
            ItemKind::Message => "msg",
            ItemKind::Reasoning => "rs",
            ItemKind::Call { .. } => "fc",
        };
        Self { kind, id: new_id(prefix), text: String::new(), logprobs: Vec::new() }
    }

    /// The item in its output format; at its start, it has no text.
    fn body(&self, status: &str) -> Value {
        let Self { kind, id, text, .. } = self;
        let begun = status != "in_progress";
        match kind {
            ItemKind::Message => {
                let content = if begun { json!([self.part()]) } else { json!([]) };
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            ItemKind::Reasoning => {
                let content = if begun { json!([self.part()]) } else { json!([]) };
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            ItemKind::Call { call_id, name, .. } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": text,
            }),
        }
    }

    /// The content part of a message or of reasoning.
    fn part(&self) -> Value {
        match self.kind {
            ItemKind::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
            _ => json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}),
        }
    }

    /// Names of the events for a text delta and for the end of the text.
    fn event_names(&self) -> (&'static str, &'static str) {
        match self.kind {
            ItemKind::Message => ("response.output_text.delta", "response.output_text.done"),
            ItemKind::Reasoning => ("response.reasoning_text.delta", "response.reasoning_text.done"),
            ItemKind::Call { .. } => {
                ("response.function_call_arguments.delta", "response.function_call_arguments.done")
            }
        }
    }
}

impl Items {
    /// Adds a part of the output, and its events to `events` if the response is streamed.
    fn push(&mut self, part: OutputDelta, mut events: Option<&mut Events>) {
        let (kind, text) = match part {
            OutputDelta::Content(text) => (ItemKind::Message, text),
            OutputDelta::Reasoning(text) => (ItemKind::Reasoning, text),
            OutputDelta::ToolCall { index, name } => {
                (ItemKind::Call { index, call_id: new_id("call"), name }, String::new())
            }
            OutputDelta::Arguments { fragment, .. } => {
                self.append(&fragment, vec![], events);
                return;
            }
        };
        let same = self.open.as_ref().is_some_and(|open| open.kind == kind);
        if !same {
            self.close(events.as_deref_mut());
            self.begin(Item::new(kind), events.as_deref_mut());
        }
        let is_message = self.open.as_ref().is_some_and(|open| open.kind == ItemKind::Message);
        let logprobs = std::mem::take(&mut self.logprobs);
        self.append(&text, if is_message { logprobs } else { vec![] }, events);
    }

    fn begin(&mut self, item: Item, events: Option<&mut Events>) {
        if let Some(events) = events {
            let index = self.done.len();
            let body = json!({"output_index": index, "item": item.body("in_progress")});
            self.event(events, "response.output_item.added", body);
            if !matches!(item.kind, ItemKind::Call { .. }) {
                let body = json!({"output_index": index, "item_id": item.id, "content_index": 0, "part": item.part()});
                self.event(events, "response.content_part.added", body);
            }
        }
        self.open = Some(item);
    }

    fn append(&mut self, text: &str, logprobs: Vec<Value>, events: Option<&mut Events>) {
        let index = self.done.len();
        let Some(item) = &mut self.open else { return };
        item.text.push_str(text);
        item.logprobs.extend_from_slice(&logprobs);
        let (name, _) = item.event_names();
        let mut body = json!({"output_index": index, "item_id": item.id, "delta": text});
        match item.kind {
            ItemKind::Message => (body["content_index"], body["logprobs"]) = (json!(0), Value::from(logprobs)),
            ItemKind::Reasoning => body["content_index"] = json!(0),
            ItemKind::Call { .. } => {}
        }
        if let Some(events) = events.filter(|_| !text.is_empty()) {
            self.event(events, name, body);
        }
    }

    /// Completes the open item.
    fn close(&mut self, events: Option<&mut Events>) {
        let Some(item) = self.open.take() else { return };
        let cut = self.finish.as_ref().is_some_and(|finish| *finish == Finish::Length);
        let body = item.body(if cut { "incomplete" } else { "completed" });
        if let Some(events) = events {
            let index = self.done.len();
            let (_, name) = item.event_names();
            let place = json!({"output_index": index, "item_id": item.id});
            let with = |more: Value| {
                let mut body = place.clone();
                if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
                    body.extend(more);
                }
                body
            };
            match &item.kind {
                ItemKind::Call { name: function, .. } => {
                    self.event(events, name, with(json!({"name": function, "arguments": item.text})));
                }
                kind => {
                    let mut done = json!({"content_index": 0, "text": item.text});
                    if *kind == ItemKind::Message {
                        done["logprobs"] = Value::from(item.logprobs.clone());
                    }
                    self.event(events, name, with(done));
                    let part = with(json!({"content_index": 0, "part": item.part()}));
                    self.event(events, "response.content_part.done", part);
                }
            }
            self.event(events, "response.output_item.done", json!({"output_index": index, "item": body}));
        }
        self.done.push(body);
    }

    /// An event, which begins with its type and number.
    fn event(&mut self, events: &mut Events, name: &str, body: Value) {
        let mut event = Map::new();
        event.insert("type".into(), name.into());
        event.insert("sequence_number".into(), self.sequence.into());
        self.sequence += 1;
        if let Value::Object(body) = body {
            event.extend(body);
        }
        events.push_named(name, &event);
    }
}

impl ResponsesFormat {
    fn response(&self, status: &str, usage: Option<Usage>) -> Value {
        let Envelope { id, created, model, .. } = &self.envelope;
        let mut response = Map::new();
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        for (key, value) in [
            ("id", json!(id)),
            ("object", json!("response")),
            ("created_at", json!(created)),
            ("status", json!(status)),
            ("model", json!(model)),
            ("output", Value::from(self.items.done.clone())),
            ("error", Value::Null),
            ("incomplete_details", incomplete.unwrap_or(Value::Null)),
            ("usage", usage.map_or(Value::Null, usage_body)),
        ] {
            response.insert(key.into(), value);
        }
        if let Some(metrics) = usage.and_then(|usage| self.envelope.details.metrics(usage)) {
            response.insert("metrics".into(), json!(metrics));
        }
        response.extend(self.settings.clone());
        Value::Object(response)
    }

    /// The owner and the id under which the response is stored.
    pub(crate) fn stored_as(&self) -> Option<(ClientId, String)> {
        self.recorder.as_ref().map(|recorder| (recorder.owner(), self.envelope.id.clone()))
    }

    /// Stores a response that is about to run in the background, and returns its body.
    pub(crate) fn queue(&mut self, streamed: bool) -> Option<(Value, Ticket)> {
        let body = self.response("queued", None);
        let ticket = self.recorder.as_mut()?.begin(&body, streamed);
        Some((body, ticket))
    }

    fn record(&mut self, response: &Value) {
        if let Some(recorder) = &mut self.recorder {
            recorder.finish(response);
        }
    }

    fn status(&self) -> &'static str {
        match self.items.finish {
            Some(Finish::Length) => "incomplete",
            Some(Finish::Abort) | None => "failed",
            Some(Finish::Stop(_) | Finish::ToolCalls(_) | Finish::Repetition) => "completed",
        }
    }

    fn logprobs_of(&self, tokens: &[octavo_engine::TokenOutput]) -> Vec<Value> {
        let Some(top) = self.logprobs else { return vec![] };
        let ChatLogprobs { content } = self.spelling.chat(tokens, top);
        content.iter().filter_map(|entry| serde_json::to_value(entry).ok()).collect()
    }
}

fn usage_body(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens(),
    })
}

fn new_id(prefix: &str) -> String {
    format!("{prefix}_{}", Uuid::new_v4().simple())
}

impl ResponseFormat for ResponsesFormat {
    fn choices(&self) -> usize {
        1
    }

    fn prompt_tokens(&self, _: u32) -> usize {
        self.prompt_tokens
    }

    fn open(&mut self, events: &mut Events, _: u32, _: Extras) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", None);
            self.items.event(events, name, json!({"response": response}));
        }
        if let Some(recorder) = &self.recorder {
            recorder.progress(&self.response("in_progress", None));
        }
    }

    fn chunk(&mut self, events: &mut Events, output: Output, _: Extras) {
        let logprobs = self.logprobs_of(&output.tokens);
        self.items.logprobs.extend(logprobs);
        self.items.finish = output.finish;
        for part in output.parts {
            self.items.push(part, Some(events));
        }
    }

    fn usage(&mut self, _: &mut Events, _: Usage) {}

    fn close(&mut self, events: &mut Events, usage: Usage) {
        self.items.close(Some(events));
        let status = self.status();
        let response = self.response(status, Some(usage));
        self.record(&response);
        self.items.event(events, &format!("response.{status}"), json!({"response": response}));
    }

    fn fail(&mut self, events: &mut Events, error: &ApiError) {
        let mut response = self.response("failed", None);
        response["error"] = json!({"code": "server_error", "message": error.to_string()});
        self.record(&response);
        self.items.event(events, "response.failed", json!({"response": response}));
    }

    fn whole(mut self, choices: Vec<FullResponse>, usage: Usage) -> Response {
        for whole in choices {
            let mut logprobs = self.logprobs_of(&whole.tokens[whole.reasoning_tokens..]);
            self.items.finish = whole.finish;
            for part in whole.parts {
                if matches!(part, OutputDelta::Content(_)) {
                    self.items.logprobs = std::mem::take(&mut logprobs);
                }
                self.items.push(part, None);
            }
        }
        self.items.close(None);
        let response = self.response(self.status(), Some(usage));
        self.record(&response);
        Json(response).into_response()
    }
}
