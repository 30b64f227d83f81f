//! The body of POST /v1/responses, converted to a conversation.

use serde_json::{Map, Value, json};

use crate::api::chat::request::{ChatRequest, EFFORTS, joined, set_effort};
use crate::api::shared::common::{CommonFields, Side, Truncation};
use crate::api::shared::fields::{JsonFields, check_values, request_fields, words};
use crate::api::shared::places::{Place, PlacedMessages};
use crate::api::shared::structured_outputs;
use crate::api::shared::tools::{ToolChoice, ToolForm, Tools, WantedTool, definition};
use crate::api::shared::unserved;
use crate::api::shared::unserved::Route;
use crate::error::{ApiError, FieldError};

request_fields! {
    /// A well-formed responses request.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct ResponsesRequest |fields, chat: ChatRequest, kept: Kept| {
        ResponsesRequest {
            chat: ChatRequest => (chat) {
                model: Option<String> {"$ref": "#/components/schemas/Model"},
                /// A text, or messages, calls and their outputs.
                input: Option<Value> {"type": ["string", "array"], "items": {"type": "object"}},
                /// Most tokens, of the reasoning too.
                max_output_tokens: Option<i64> {"minimum": 1},
                stream: bool {"$ref": "#/components/schemas/Stream"},
                reasoning: Option<Map<String, Value>>
                    {"properties": {"effort": {"enum": words(EFFORTS)}, "summary": {"type": ["string", "null"]}}},
                text: Option<Map<String, Value>> {"properties": {"format": {"type": ["object", "null"],
                    "description": "`text`, `json_object` or `json_schema` with its schema."}}},
                /// Functions: type, name, parameters.
                tools: Option<Vec<Value>> {"items": {"type": "object"}},
                tool_choice: Option<Value> {"type": ["string", "object", "null"], "default": "auto"},
                parallel_tool_calls: bool = true,
                /// Alternatives; with `include`: `message.output_text.logprobs`.
                top_logprobs: i64 = 0 {"minimum": 0},
                include: Vec<String> [MAX_INCLUDED],
                truncation: Option<String> {"enum": ["auto", "disabled", null], "default": "disabled"},
            },
            /// Whether the response is to be stored.
            store: bool => (kept.store) {
                /// Only if the server keeps responses.
                store: bool = true,
            },
            /// Whether the response runs in the background.
            background: bool => (kept.background) {
                /// Only if the server keeps responses.
                background: bool = false,
            },
            /// The settings of the request, which the response repeats.
            settings: Map<String, Value> => (settings(fields)) {
                /// Repeated in the response.
                metadata: Option<Map<String, Value>>,
            },
            /// A stored response to go on from; an unknown one is refused with 404.
            previous_response_id: Option<String>,
            /// Whether the first message is the request's instructions, which later responses do not inherit.
            instructed: bool => (fields.raw("instructions").is_some()) {
                /// The system prompt.
                instructions: Option<String>,
            },
        }
    }
}

/// What is kept of a response, beyond the connection of its client.
pub(crate) struct Kept {
    store: bool,
    background: bool,
}

impl Kept {
    fn read(fields: &mut JsonFields<'_>) -> Self {
        let store = fields.get("store").unwrap_or(true);
        let background = fields.get("background").unwrap_or(false);
        if background && !store {
            fields.value_error("background", "background can only be used when `store` is true");
        }
        Self { store, background }
    }
}

/// The settings that the response repeats, with their defaults.
const SETTINGS: [(&str, &str); 15] = [
    ("background", "false"),
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("max_tool_calls", "null"),
    ("metadata", "null"),
    ("parallel_tool_calls", "true"),
    ("previous_response_id", "null"),
    ("prompt_cache_key", "null"),
    ("reasoning", "null"),
    ("safety_identifier", "null"),
    ("service_tier", r#""auto""#),
    ("text", r#"{"format":{"type":"text"}}"#),
    ("tools", "[]"),
    ("tool_choice", r#""auto""#),
    ("truncation", r#""disabled""#),
];

impl ResponsesRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        unserved::refuse(&mut fields, Route::Responses);
        let mut common = CommonFields::read(&mut fields);
        common.n = None;
        if common.truncation.is_none() && fields.get::<String>("truncation").as_deref() == Some("auto") {
            common.truncation = Some(Truncation { tokens: None, side: Some(Side::Left) });
        }
        if let Some(format) = text_format(&mut fields) {
            common.grammar = Some(format);
        }
        let messages = messages(&mut fields);
        let limit = ("max_output_tokens", fields.get("max_output_tokens"));
        let logprobs = includes(&mut fields, "message.output_text.logprobs");
        let top: i64 = fields.get("top_logprobs").unwrap_or(0);
        let mut chat = ChatRequest::new(common, messages, limit);
        chat.logprobs = (logprobs || top > 0).then_some(top);
        chat.tools = Tools::read(&mut fields, &TOOLS);
        chat.template_kwargs = fields.get("chat_template_kwargs").unwrap_or_default();
        reasoning(&mut fields, &mut chat.template_kwargs);
        let kept = Kept::read(&mut fields);
        let request = Self::read(&mut fields, chat, kept);
        fields.finish()?;
        Ok(request)
    }
}

/// Maximum nesting of a setting. Events nest it deeper than the request, and many JSON parsers stop at 128 levels.
const SETTING_LEVELS: usize = 100;

fn settings(fields: &mut JsonFields<'_>) -> Map<String, Value> {
    let mut value = |name: &'static str, default: &'static str| {
        let given = fields.raw(name).map(|raw| check_values(raw).map(|()| raw.get()));
        let text = given.unwrap_or(Ok(default)).unwrap_or_else(|message| {
            fields.value_error(name, format_args!("{name} {message}"));
            default
        });
        let value = serde_json::from_str(text).unwrap_or(Value::Null);
        let levels = structured_outputs::depth(&value);
        if levels > SETTING_LEVELS {
            let message = format_args!("{name} has {levels} levels, but at most {SETTING_LEVELS} are allowed.");
            fields.value_error(name, message);
        }
        value
    };
    SETTINGS.iter().map(|(name, default)| ((*name).to_owned(), value(name, default))).collect()
}

/// Maximum number of entries of `include`.
const MAX_INCLUDED: usize = 64;

fn includes(fields: &mut JsonFields<'_>, what: &str) -> bool {
    fields.list::<String, MAX_INCLUDED>("include").iter().any(|item| item == what)
}

/// `text.format`.
fn text_format(fields: &mut JsonFields<'_>) -> Option<octavo_text::GrammarSpec> {
    let raw = fields.raw("text")?;
    let read = || {
        let text = JsonFields::object(raw, vec!["text".into()])?;
        text.raw("format").map_or(Ok(None), |format| structured_outputs::format_of(format, "text.format"))
    };
    match read() {
        Ok(spec) => spec,
        Err(errors) => {
            fields.absorb(errors);
            None
        }
    }
}

fn reasoning(fields: &mut JsonFields<'_>, kwargs: &mut Map<String, Value>) {
    let Some(reasoning) = fields.get::<Map<String, Value>>("reasoning") else { return };
    match reasoning.get("effort") {
        None | Some(Value::Null) => {}
        Some(Value::String(effort)) if EFFORTS.contains(&effort.as_str()) => set_effort(kwargs, effort.clone()),
        Some(_) => {
            let message = format!("reasoning.effort must be one of '{}'.", EFFORTS.join("', '"));
            fields.value_error("reasoning", message);
        }
    }
}

/// The form of tools: definitions are flat, `{"type": "function", "name", "parameters"}`.
const TOOLS: ToolForm = ToolForm {
    definition: tool,
    choice: tool_choice,
    parallel: |fields| fields.get("parallel_tool_calls").unwrap_or(true),
    needs_tools: false,
    unknown_choice: UNKNOWN_CHOICE,
    unknown_function: UNKNOWN_CHOICE,
};

const UNKNOWN_CHOICE: &str = "`tool_choice` must be \"auto\", \"none\", \"required\" or a function of `tools`.";

fn tool(fields: &mut JsonFields<'_>, index: usize, tool: Value) -> Option<Value> {
    let (kind, name) = (tool.get("type").and_then(Value::as_str), tool.get("name").and_then(Value::as_str));
    match (kind, name) {
        (Some("function"), Some(name)) if !name.is_empty() => {
            return Some(definition(name, tool.get("description"), tool.get("parameters")));
        }
        (Some("function"), _) => fields.value_error("tools", format_args!("tools[{index}].name is required.")),
        _ => {
            let kind = kind.unwrap_or("none");
            let message = format!("tools[{index}].type is '{kind}', but this server has functions only.");
            fields.value_error("tools", message);
        }
    }
    None
}

fn tool_choice(fields: &mut JsonFields<'_>) -> WantedTool {
    let choice = match fields.get::<Value>("tool_choice") {
        None => return WantedTool::Unset,
        Some(Value::String(word)) => ToolChoice::from_word(&word),
        Some(object) => object.get("name").and_then(Value::as_str).map(|name| ToolChoice::Named(name.to_owned())),
    };
    choice.map_or(WantedTool::Unknown, WantedTool::Choice)
}

/// Converts `instructions` and `input` to messages.
fn messages(fields: &mut JsonFields<'_>) -> PlacedMessages {
    let mut placed = PlacedMessages::default();
    if let Some(instructions) = fields.get::<String>("instructions") {
        placed.push(json!({"role": "system", "content": instructions}), Place::content("instructions"));
    }
    match fields.raw("input") {
        None => fields.missing("input"),
        Some(raw) if raw.get().starts_with('"') => {
            let input: Option<String> = fields.get("input");
            placed.push(json!({"role": "user", "content": input}), Place::content("input"));
        }
        Some(_) => {
            let items: Vec<Value> = fields.get("input").unwrap_or_default();
            for (index, item) in items.iter().enumerate() {
                if let Err(message) = add_item(&mut placed.messages, item) {
                    let location = vec!["input".into(), index.to_string()];
                    let message = format!("Value error, {message}");
                    fields.absorb(FieldError::new("value_error", location, &message, &item.to_string()));
                }
                let content = if item.get("output").is_some() { "output" } else { "content" };
                placed.place_rest(&Place::new(["input", &index.to_string()], content));
            }
        }
    }
    placed
}

/// Adds an input item. Tool calls and reasoning become part of the adjacent assistant message.
pub(crate) fn add_item(messages: &mut Vec<Value>, item: &Value) -> Result<(), String> {
    let text = |name: &str| {
        item.get(name).and_then(Value::as_str).ok_or_else(|| format!("{name} is required and must be a string."))
    };
    match item.get("type").and_then(Value::as_str).unwrap_or("message") {
        "message" => {
            let (role, content) = (text("role")?, item.get("content").cloned().unwrap_or(Value::Null));
            let content = joined(role, content);
            if role == "assistant"
                && let Some(open) = open_assistant(messages)
                && open["content"].is_null()
                && open.get("tool_calls").is_none()
            {
                open["content"] = content;
            } else {
                messages.push(json!({"role": role, "content": content}));
            }
        }
        "function_call" => {
            let function = json!({"name": text("name")?, "arguments": text("arguments")?});
            let call = json!({"id": text("call_id")?, "type": "function", "function": function});
            let message = assistant(messages);
            match message.get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(calls) => calls.push(call),
                None => message["tool_calls"] = json!([call]),
            }
        }
        "function_call_output" => {
            let output = match item.get("output") {
                Some(Value::String(output)) => Value::from(output.as_str()),
                Some(output @ Value::Array(_)) => joined("tool", output.clone()),
                _ => return Err("output is required and must be a string or a list of parts.".into()),
            };
            messages.push(json!({"role": "tool", "tool_call_id": text("call_id")?, "content": output}));
        }
        "reasoning" => {
            let parts = ["content", "summary"].into_iter().filter_map(|key| item.get(key)?.as_array());
            let texts: Vec<&str> = parts.flatten().filter_map(|part| part.get("text")?.as_str()).collect();
            messages.push(json!({"role": "assistant", "content": null, "reasoning": texts.join("\n")}));
        }
        kind => return Err(format!("an item of type '{kind}' cannot be taken: this server takes text and functions.")),
    }
    Ok(())
}

/// The last message, if its role is assistant.
fn open_assistant(messages: &mut [Value]) -> Option<&mut Value> {
    messages.last_mut().filter(|message| message["role"] == "assistant")
}

/// The last message if its role is assistant, else a new one.
fn assistant(messages: &mut Vec<Value>) -> &mut Value {
    if open_assistant(messages).is_none() {
        messages.push(json!({"role": "assistant", "content": null}));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: Value) -> Result<ResponsesRequest, String> {
        ResponsesRequest::parse(body.to_string().as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn input_becomes_messages() {
        let request = parse(json!({"instructions": "be brief", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
        ]}))
        .unwrap();
        let call =
            |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        assert_eq!(
            Value::from(request.chat.messages),
            json!([
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [call("c1", "f"), call("c2", "g")]},
                {"role": "tool", "tool_call_id": "c1", "content": "4"},
                {"role": "tool", "tool_call_id": "c2", "content": "5"},
            ])
        );
    }

    #[test]
    fn settings_are_repeated_with_their_defaults() {
        let request = parse(json!({"input": "hi", "max_output_tokens": 7, "metadata": {"a": "b"}})).unwrap();
        assert_eq!(request.chat.limit, ("max_output_tokens", Some(7)));
        assert_eq!(request.settings["metadata"], json!({"a": "b"}));
        assert_eq!(request.settings["truncation"], "disabled");
        assert_eq!(request.settings["max_output_tokens"], 7);
    }

    #[test]
    fn settings_are_as_deep_as_readers_of_events_stand() {
        let nested = |levels: usize| {
            let deep = (1..levels).fold(json!([r#"text: "[[{"#]), |value, _| json!([value]));
            parse(json!({"input": "hi", "metadata": deep}))
        };
        assert!(nested(SETTING_LEVELS).is_ok());
        let error = nested(SETTING_LEVELS + 1).unwrap_err();
        assert!(error.contains("metadata has 101 levels"), "{error}");
    }

    #[test]
    fn what_cannot_be_done_is_named() {
        for (body, word) in [
            (json!({}), "input"),
            (json!({"input": [{"type": "computer_call"}]}), "computer_call"),
            (json!({"input": "hi", "background": true, "store": false}), "background can only be used when"),
            (json!({"input": "hi", "tools": [{"type": "web_search"}]}), "web_search"),
            (
                json!({"input": "hi", "tools": vec![json!({"type": "function", "name": "f"}); 1025]}),
                "at most 1024 tools",
            ),
            (json!({"input": "hi", "prompt": {"id": "x"}}), "prompt"),
            (json!({"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}}), "json_schema"),
            (json!({"input": "hi", "reasoning": {"effort": "enormous"}}), "effort"),
            (
                json!({"input": "hi", "tool_choice": "sometimes", "tools": [{"type": "function", "name": "f"}]}),
                "tool_choice",
            ),
        ] {
            let error = parse(body).unwrap_err();
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}
