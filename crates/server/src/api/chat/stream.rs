//! Bodies of POST /v1/chat/completions.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use octavo_text::OutputDelta;

use crate::api::chat::response::{
    ChatChoice, ChatChunkChoice, ChatDelta, ChatMessage, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta,
};
use crate::api::shared::logprobs::Spelling;
use crate::api::shared::response::{Chunk, Envelope, Finish, Null, Usage, WholeBody};
use crate::api::shared::sse::{Events, Extras};
use crate::api::shared::stream::{FullResponse, ResponseFormat, token_ids};
use crate::choices::Output;
use crate::error::ApiError;

/// The chat route's [`ResponseFormat`].
pub(crate) struct ChatFormat {
    pub(crate) envelope: Envelope,
    pub(crate) n: u32,
    pub(crate) prompt: Arc<[u32]>,
    /// The role of the answer.
    pub(crate) role: String,
    /// Text before the answer.
    pub(crate) echo: Option<String>,
    /// Number of alternatives, if log-probabilities are requested.
    pub(crate) logprobs: Option<u32>,
    pub(crate) prompt_logprobs: bool,
    pub(crate) spelling: Spelling,
    pub(crate) return_token_ids: bool,
    /// The rendered prompt, if the request asks for it.
    pub(crate) prompt_text: Option<String>,
    /// Whether text is parsed, so that an output may be empty.
    pub(crate) parses: bool,
}

impl ChatFormat {
    fn event<'a>(&'a self, choices: &'a [ChatChunkChoice<'a>], extras: Extras) -> Chunk<'a, ChatChunkChoice<'a>> {
        self.envelope.chunk("chat.completion.chunk", choices, extras)
    }

    fn choice(&self, index: usize, whole: FullResponse) -> ChatChoice<'_> {
        ChatChoice {
            index: index as u32,
            logprobs: self.logprobs.map(|top| self.spelling.chat(&whole.tokens, top)),
            finish_reason: whole.finish.as_ref().map_or("abort", Finish::reason),
            stop_reason: whole.finish.as_ref().and_then(Finish::stop_reason).cloned(),
            token_ids: self.return_token_ids.then(|| token_ids(&whole.tokens)),
            message: self.message(whole.parts),
            routed_experts: Null,
            weight_versions: Null,
        }
    }

    /// The body of a complete response, whose fields that describe its prompt are null.
    fn completion<'a>(&'a self, choices: Vec<ChatChoice<'a>>, usage: Usage) -> WholeBody<'a, ChatChoice<'a>> {
        let mut body = self.envelope.whole("chat.completion", choices, usage);
        (body.prompt_logprobs, body.prompt_token_ids, body.prompt_text) = (Some(None), Some(None), Some(None));
        body
    }

    fn message(&self, parts: Vec<OutputDelta>) -> ChatMessage<'_> {
        let (mut content, mut reasoning) = (self.echo.clone().unwrap_or_default(), String::new());
        let mut tool_calls: Vec<ToolCall> = Vec::new();
        for part in parts {
            match part {
                OutputDelta::Content(text) => content.push_str(&text),
                OutputDelta::Reasoning(text) => reasoning.push_str(&text),
                OutputDelta::ToolCall { name, .. } => {
                    let function = FunctionCall { name, arguments: String::new() };
                    tool_calls.push(ToolCall { id: call_id(), r#type: "function", function });
                }
                OutputDelta::Arguments { fragment, .. } => {
                    if let Some(call) = tool_calls.last_mut() {
                        call.function.arguments.push_str(&fragment);
                    }
                }
            }
        }
        let silent = content.is_empty() && !(tool_calls.is_empty() && reasoning.is_empty());
        ChatMessage {
            role: &self.role,
            content: (!silent).then_some(content),
            refusal: Null,
            annotations: Null,
            audio: Null,
            function_call: Null,
            tool_calls,
            reasoning: (!reasoning.is_empty()).then_some(reasoning),
        }
    }
}

/// The id of a new tool call.
fn call_id() -> String {
    format!("chatcmpl-tool-{}", uuid::Uuid::new_v4().simple())
}

/// The delta of a chunk with these parts.
fn delta(parts: &[OutputDelta]) -> ChatDelta<'_> {
    let mut delta = ChatDelta::default();
    for part in parts {
        match part {
            OutputDelta::Content(text) => join(&mut delta.content, text),
            OutputDelta::Reasoning(text) => join(&mut delta.reasoning, text),
            OutputDelta::ToolCall { index, name } => delta.tool_calls.push(ToolCallDelta {
                index: *index,
                id: Some(call_id()),
                r#type: Some("function"),
                function: FunctionDelta { name: Some(name), arguments: "" },
            }),
            OutputDelta::Arguments { index, fragment } => delta.tool_calls.push(ToolCallDelta {
                index: *index,
                id: None,
                r#type: None,
                function: FunctionDelta { name: None, arguments: fragment },
            }),
        }
    }
    delta
}

fn join<'a>(text: &mut Option<Cow<'a, str>>, more: &'a str) {
    match text {
        Some(text) => text.to_mut().push_str(more),
        None => *text = Some(Cow::Borrowed(more)),
    }
}

impl ResponseFormat for ChatFormat {
    fn choices(&self) -> usize {
        self.n as usize
    }

    fn prompt_tokens(&self, _: u32) -> usize {
        self.prompt.len()
    }

    fn open(&mut self, events: &mut Events, index: u32, extras: Extras) {
        let chunk = |delta| ChatChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
        };
        let content = Some(Cow::Borrowed(""));
        let choices = [chunk(ChatDelta { role: Some(&self.role), content, ..ChatDelta::default() })];
        let prompt = self.return_token_ids.then_some(&*self.prompt);
        let mut first = self.event(&choices, extras);
        first.prompt_token_ids = Some(prompt);
        events.push(&first);
        if let Some(echo) = &self.echo {
            let choices = [chunk(ChatDelta { content: Some(Cow::Borrowed(echo)), ..ChatDelta::default() })];
            events.push(&self.event(&choices, extras));
        }
    }

    fn chunk(&mut self, events: &mut Events, output: Output, extras: Extras) {
        let mut delta = delta(&output.parts);
        if output.parts.is_empty() {
            let mute = self.parses && output.finish.is_none() && !self.return_token_ids && self.logprobs.is_none();
            if mute {
                return;
            }
            delta.content = Some(Cow::Borrowed(""));
        }
        let choice = ChatChunkChoice {
            index: output.index,
            delta,
            logprobs: self.logprobs.map(|top| self.spelling.chat(&output.tokens, top)),
            finish_reason: output.finish.as_ref().map(Finish::reason),
            stop_reason: output.finish.as_ref().map(Finish::stop_reason),
            token_ids: Some(self.return_token_ids.then(|| token_ids(&output.tokens))),
        };
        events.push(&self.event(&[choice], extras));
    }

    fn usage(&mut self, events: &mut Events, usage: Usage) {
        events.push(&self.event(&[], Extras { usage: Some(usage), fingerprint: true }));
    }

    fn whole(self, mut choices: Vec<FullResponse>, usage: Usage) -> Response {
        let prompt_logprobs = choices.first_mut().map(|first| std::mem::take(&mut first.prompt_logprobs));
        let choices = choices.into_iter().enumerate().map(|(index, whole)| self.choice(index, whole)).collect();
        let prompt_logprobs = prompt_logprobs.filter(|_| self.prompt_logprobs);
        let mut body = self.completion(choices, usage);
        body.prompt_logprobs = Some(prompt_logprobs.map(|logprobs| self.spelling.prompt(&self.prompt, &logprobs)));
        body.prompt_token_ids = Some(self.return_token_ids.then_some(&*self.prompt));
        body.prompt_text = Some(self.prompt_text.as_deref());
        Json(body).into_response()
    }
}

/// The formats of a batch, one for each conversation.
pub(crate) struct Conversations(pub(crate) Vec<ChatFormat>);

impl Conversations {
    /// One body with a choice for each conversation. It has no fields of a single prompt.
    pub(crate) fn whole(&self, answers: Vec<(Vec<FullResponse>, Usage)>) -> Response {
        let mut total = Usage::default();
        let mut choices = Vec::with_capacity(answers.len());
        for (index, (format, (responses, usage))) in self.0.iter().zip(answers).enumerate() {
            total.prompt_tokens += usage.prompt_tokens;
            total.cached_tokens += usage.cached_tokens;
            total.completion_tokens += usage.completion_tokens;
            total.reasoning_tokens += usage.reasoning_tokens;
            choices.extend(responses.into_iter().map(|whole| format.choice(index, whole)));
        }
        match self.0.first() {
            Some(first) => Json(first.completion(choices, total)).into_response(),
            None => ApiError::internal().into_response(),
        }
    }
}
