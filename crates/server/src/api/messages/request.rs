//! The body of POST /v1/messages, converted to a conversation.

use serde_json::{Map, Value, json};

use crate::api::chat::request::{ChatRequest, joined};
use crate::api::shared::common::{CommonFields, MAX_STOP_STRINGS, check_stop_bytes};
use crate::api::shared::fields::{JsonFields, request_fields};
use crate::api::shared::places::{Place, PlacedMessages};
use crate::api::shared::structured_outputs;
use crate::api::shared::tools::{ToolChoice, ToolForm, Tools, WantedTool, definition};
use crate::error::{ApiError, FieldError};

/// Minimum number of tokens of a thinking budget.
const MIN_THINKING: i64 = 1024;

request_fields! {
    /// A well-formed messages request.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct MessagesRequest |_fields, chat: ChatRequest, thinking: Thinking| {
        MessagesRequest {
            chat: ChatRequest => (chat) {
                /// Most tokens of the answer.
                max_tokens: Option<i64> {"type": "integer", "minimum": 1},
                stream: bool {"$ref": "#/components/schemas/Stream"},
                /// Strings that end the text.
                stop_sequences: Vec<String> [MAX_STOP_STRINGS] {"items": {"type": "string", "minLength": 1}},
                temperature: Option<f64> {"minimum": 0, "maximum": 2},
                top_p: Option<f64> {"exclusiveMinimum": 0, "maximum": 1},
                top_k: Option<i64> {"minimum": -1},
            },
        }
        CountTokensRequest {
            /// Whether the response includes the model's reasoning.
            thinking: Thinking => (thinking) {
                model: Option<String> {"$ref": "#/components/schemas/Model"},
                messages: Option<Value> {"$ref": "#/components/schemas/Turns"},
                /// The system prompt.
                system: Option<Value> {"type": ["string", "array", "null"], "items": {"type": "object"}},
                tools: Option<Vec<Value>> {"items": {"$ref": "#/components/schemas/CustomTool"}},
                tool_choice: Option<Map<String, Value>> {"properties": {
                    "type": {"enum": ["auto", "any", "tool", "none"]}, "name": {"type": ["string", "null"]}}},
                thinking: Option<Map<String, Value>> {"properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]},
                    "budget_tokens": {"type": ["integer", "null"], "minimum": MIN_THINKING}}},
            },
        }
    }
}

/// The reasoning settings of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Thinking {
    /// Nothing.
    #[default]
    Unset,
    Disabled,
    Adaptive,
    /// Maximum number of tokens.
    Budget(u32),
}

impl MessagesRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        Self::checked(body, true)
    }

    /// Reads the body of a request to count tokens, which generates nothing.
    pub(crate) fn parse_for_count(body: &[u8]) -> Result<Self, ApiError> {
        Self::checked(body, false)
    }

    fn checked(body: &[u8], generates: bool) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        let mut common = CommonFields::read(&mut fields);
        (common.n, common.stop) = (None, stop_sequences(&mut fields));
        common.grammar = output_format(&mut fields);
        let max_tokens = common.max_tokens.take();
        if generates && fields.raw("max_tokens").is_none() {
            fields.missing("max_tokens");
        }
        let thinking = thinking(&mut fields, max_tokens);
        let messages = messages(&mut fields);
        let mut chat = ChatRequest::new(common, messages, ("max_tokens", max_tokens));
        chat.tools = Tools::read(&mut fields, &TOOLS);
        chat.template_kwargs = fields.get("chat_template_kwargs").unwrap_or_default();
        if thinking != Thinking::Unset {
            chat.template_kwargs.entry("enable_thinking").or_insert((thinking != Thinking::Disabled).into());
        }
        let request = Self::read(&mut fields, chat, thinking);
        fields.finish()?;
        Ok(request)
    }
}

fn stop_sequences(fields: &mut JsonFields<'_>) -> Vec<String> {
    let mut stop = fields.list::<String, MAX_STOP_STRINGS>("stop_sequences");
    stop.retain(|stop| !stop.is_empty());
    check_stop_bytes(fields, "stop_sequences", &stop);
    stop
}

/// Reads `output_config.format` or its former name `output_format`.
fn output_format(fields: &mut JsonFields<'_>) -> Option<octavo_text::GrammarSpec> {
    let nested = fields.raw("output_config").and_then(|raw| JsonFields::object(raw, vec!["output_config".into()]).ok());
    let format = nested.as_ref().and_then(|config| config.raw("format")).or_else(|| fields.raw("output_format"))?;
    match structured_outputs::format_of(format, "output_config.format") {
        Ok(spec) => spec,
        Err(errors) => {
            fields.absorb(errors);
            None
        }
    }
}

fn thinking(fields: &mut JsonFields<'_>, max_tokens: Option<i64>) -> Thinking {
    let Some(thinking) = fields.get::<Map<String, Value>>("thinking") else { return Thinking::Unset };
    match thinking.get("type").and_then(Value::as_str) {
        Some("disabled") => Thinking::Disabled,
        Some("adaptive") => Thinking::Adaptive,
        Some("enabled") => {
            let budget = thinking.get("budget_tokens").and_then(Value::as_i64).unwrap_or(0);
            if budget < MIN_THINKING || max_tokens.is_some_and(|most| budget >= most) {
                let message =
                    format!("thinking.budget_tokens must be at least {MIN_THINKING} and less than max_tokens.");
                fields.value_error("thinking", message);
            }
            Thinking::Budget(u32::try_from(budget).unwrap_or(u32::MAX))
        }
        _ => {
            fields.value_error("thinking", "thinking.type must be 'enabled', 'disabled' or 'adaptive'.");
            Thinking::Unset
        }
    }
}

/// The form of tools and of the choice among them, which is an object.
const TOOLS: ToolForm = ToolForm {
    definition: tool,
    choice: tool_choice,
    parallel: |fields| {
        let choice = fields.raw("tool_choice").and_then(|raw| JsonFields::object(raw, vec![]).ok());
        !choice.and_then(|mut choice| choice.get("disable_parallel_tool_use")).unwrap_or(false)
    },
    needs_tools: false,
    unknown_choice: UNKNOWN_CHOICE,
    unknown_function: UNKNOWN_CHOICE,
};

const UNKNOWN_CHOICE: &str = "tool_choice must be auto, any, none, or a tool of `tools`.";

fn tool(fields: &mut JsonFields<'_>, index: usize, tool: Value) -> Option<Value> {
    match (tool.get("type").and_then(Value::as_str), tool.get("name").and_then(Value::as_str)) {
        (None | Some("custom"), Some(name)) if !name.is_empty() => {
            return Some(definition(name, tool.get("description"), tool.get("input_schema")));
        }
        (None | Some("custom"), _) => fields.value_error("tools", format_args!("tools.{index}.name is required.")),
        (Some(kind), _) => {
            let message = format!("tools.{index}.type is '{kind}', but this server has custom tools only.");
            fields.value_error("tools", message);
        }
    }
    None
}

fn tool_choice(fields: &mut JsonFields<'_>) -> WantedTool {
    let Some(object) = fields.get::<Map<String, Value>>("tool_choice").filter(|object| !object.is_empty()) else {
        return WantedTool::Unset;
    };
    let name = || object.get("name").and_then(Value::as_str).map(|name| ToolChoice::Named(name.to_owned()));
    let choice = match object.get("type").and_then(Value::as_str) {
        Some("auto") => Some(ToolChoice::Auto),
        Some("any") => Some(ToolChoice::Required),
        Some("none") => Some(ToolChoice::None),
        Some("tool") => name(),
        _ => None,
    };
    choice.map_or(WantedTool::Unknown, WantedTool::Choice)
}

/// Converts `system` and `messages` to the chat route's messages.
fn messages(fields: &mut JsonFields<'_>) -> PlacedMessages {
    let mut out = PlacedMessages::default();
    if let Some(system) = fields.get::<Value>("system") {
        out.push(json!({"role": "system", "content": joined("system", system)}), Place::content("system"));
    }
    if fields.raw("messages").is_none() {
        fields.missing("messages");
        return out;
    }
    let messages: Vec<Value> = fields.get("messages").unwrap_or_default();
    if messages.is_empty() && fields.raw("messages").is_some() {
        fields.value_error("messages", "at least one message is required.");
    }
    for (index, message) in messages.iter().enumerate() {
        if let Err(reason) = add_message(&mut out, message, &Place::message(index)) {
            let location = vec!["messages".into(), index.to_string()];
            let reason = format!("Value error, {reason}");
            fields.absorb(FieldError::new("value_error", location, &reason, &message.to_string()));
        }
    }
    out
}

fn add_message(out: &mut PlacedMessages, message: &Value, place: &Place) -> Result<(), String> {
    let role = message.get("role").and_then(Value::as_str).ok_or("role is required.")?;
    let blocks = match message.get("content") {
        Some(Value::String(text)) => {
            out.push(json!({"role": role, "content": text}), place.clone());
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        _ => return Err("content is required and must be a string or a list of blocks.".into()),
    };
    let mut turn = Turn::default();
    for (index, block) in blocks.iter().enumerate() {
        turn.add(out, block, || place.within(["content", &index.to_string()], "content"))?;
    }
    turn.finish(out, role, place);
    Ok(())
}

/// The blocks of a message by kind. Tool results become separate messages.
#[derive(Default)]
struct Turn {
    parts: Vec<Value>,
    calls: Vec<Value>,
    reasoning: String,
}

impl Turn {
    fn add(&mut self, out: &mut PlacedMessages, block: &Value, place: impl Fn() -> Place) -> Result<(), String> {
        let text = |name: &str| {
            block.get(name).and_then(Value::as_str).ok_or_else(|| format!("{name} is required and must be a string."))
        };
        match block.get("type").and_then(Value::as_str).unwrap_or_default() {
            "text" => self.parts.push(json!({"type": "text", "text": text("text")?})),
            "image" => self.parts.push(image(block)?),
            "thinking" => self.reasoning.push_str(text("thinking")?),
            "redacted_thinking" => {}
            "tool_use" => {
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                let function = json!({"name": text("name")?, "arguments": input});
                self.calls.push(json!({"id": text("id")?, "type": "function", "function": function}));
            }
            "tool_result" => {
                let content = match block.get("content") {
                    Some(Value::Array(blocks)) => blocks.iter().map(result_part).collect::<Result<_, _>>()?,
                    content => content.cloned().unwrap_or(Value::Null),
                };
                let content = joined("tool", content);
                out.push(json!({"role": "tool", "tool_call_id": text("tool_use_id")?, "content": content}), place());
            }
            kind => {
                return Err(format!("a block of type '{kind}' cannot be taken: this server takes text and images."));
            }
        }
        Ok(())
    }

    fn finish(self, out: &mut PlacedMessages, role: &str, place: &Place) {
        let is_empty = self.parts.is_empty();
        let mut message = json!({"role": role, "content": joined(role, self.parts.into())});
        if is_empty {
            if self.calls.is_empty() && self.reasoning.is_empty() {
                return;
            }
            message["content"] = Value::Null;
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = self.calls.into();
        }
        if !self.reasoning.is_empty() {
            message["reasoning"] = self.reasoning.into();
        }
        out.push(message, place.clone());
    }
}

/// A block of a tool's result as a part. Blocks other than images have the form of parts.
fn result_part(block: &Value) -> Result<Value, String> {
    if block["type"] == "image" { image(block) } else { Ok(block.clone()) }
}

/// An image block as a part of the chat route.
fn image(block: &Value) -> Result<Value, String> {
    let field = |name: &str| {
        let value = block.pointer(&format!("/source/{name}")).and_then(Value::as_str);
        value.ok_or_else(|| format!("source.{name} is required and must be a string."))
    };
    let url = match field("type")? {
        "base64" => format!("data:{};base64,{}", field("media_type")?, field("data")?),
        "url" => field("url")?.to_owned(),
        kind => return Err(format!("an image's source.type must be 'base64' or 'url', not '{kind}'.")),
    };
    Ok(json!({"type": "image_url", "image_url": {"url": url}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: Value) -> Result<MessagesRequest, String> {
        MessagesRequest::parse(body.to_string().as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn blocks_become_messages() {
        let request = parse(json!({"max_tokens": 8, "system": [{"type": "text", "text": "be brief"}], "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content":
                    [{"type": "text", "text": "4"}, {"type": "text", "text": "5"}]},
                {"type": "text", "text": "go on"},
            ]},
        ]}))
        .unwrap();
        assert_eq!(request.chat.limit, ("max_tokens", Some(8)));
        assert_eq!(
            Value::from(request.chat.messages),
            json!([
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "let me see", "tool_calls":
                    [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
                 "reasoning": "hm"},
                {"role": "tool", "tool_call_id": "t1", "content": "4\n5"},
                {"role": "user", "content": [{"type": "text", "text": "go on"}]},
            ])
        );
    }

    #[test]
    fn images_become_parts_with_urls() {
        let block = |source: Value| json!({"type": "image", "source": source});
        let data = block(json!({"type": "base64", "media_type": "image/png", "data": "AAAA"}));
        let linked = block(json!({"type": "url", "url": "https://host/x.png"}));
        let content = json!([{"type": "text", "text": "a"}, data, {"type": "text", "text": "b"}, linked]);
        let result =
            json!({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "c"}, data]});
        let messages = json!([{"role": "user", "content": content}, {"role": "user", "content": [result]}]);
        let request = parse(json!({"max_tokens": 8, "messages": messages})).unwrap();
        let part = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        let (data, linked) = (part("data:image/png;base64,AAAA"), part("https://host/x.png"));
        assert_eq!(
            Value::from(request.chat.messages),
            json!([
                {"role": "user", "content": [{"type": "text", "text": "a"}, data, {"type": "text", "text": "b"}, linked]},
                {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "text": "c"}, data]},
            ])
        );
        for (source, word) in [
            (json!(null), "source.type"),
            (json!({"type": "file", "file_id": "f"}), "file"),
            (json!({"type": "base64", "data": "AAAA"}), "source.media_type"),
            (json!({"type": "url"}), "source.url"),
        ] {
            let messages = json!([{"role": "user", "content": [block(source)]}]);
            let error = parse(json!({"max_tokens": 8, "messages": messages})).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn the_choice_of_tools_is_translated() {
        let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
        let choice = |choice: Value| {
            let body = json!({"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], "tools": tools,
                              "tool_choice": choice});
            parse(body).map(|request| request.chat.tools.choice)
        };
        assert_eq!(choice(json!({"type": "auto"})), Ok(ToolChoice::Auto));
        assert_eq!(choice(json!({"type": "any"})), Ok(ToolChoice::Required));
        assert_eq!(choice(json!({"type": "tool", "name": "f"})), Ok(ToolChoice::Named("f".into())));
        assert!(choice(json!({"type": "tool", "name": "g"})).is_err());
    }

    #[test]
    fn what_cannot_be_done_is_named() {
        let hi = json!([{"role": "user", "content": "hi"}]);
        for (body, word) in [
            (json!({"messages": hi}), "max_tokens"),
            (json!({"max_tokens": 8}), "messages"),
            (json!({"max_tokens": 8, "messages": []}), "messages"),
            (json!({"max_tokens": 8, "messages": [{"role": "user", "content": [{"type": "document"}]}]}), "document"),
            (json!({"max_tokens": 8, "messages": hi, "thinking": {"type": "enabled", "budget_tokens": 5}}), "budget"),
            (
                json!({"max_tokens": 8, "messages": hi, "tools": [{"type": "bash_20250124", "name": "bash"}]}),
                "bash_20250124",
            ),
            (
                json!({"max_tokens": 8, "messages": hi, "tools": vec![json!({"name": "f", "input_schema": {}}); 1025]}),
                "at most 1024 tools",
            ),
        ] {
            let error = parse(body).unwrap_err();
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}
