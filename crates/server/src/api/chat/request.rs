//! The body of POST /v1/chat/completions.

use octavo_text::TemplateError;
use serde_json::{Map, Value};

use crate::api::shared::common::CommonFields;
use crate::api::shared::fields::{JsonFields, request_fields, words};
use crate::api::shared::places::{Place, PlacedMessages};
use crate::api::shared::tools::{ToolChoice, ToolForm, Tools, WantedTool};
use crate::api::shared::unserved;
use crate::api::shared::unserved::Route;
use crate::error::{ApiError, FieldError, FieldErrors};

/// Values of `reasoning_effort`.
pub(crate) const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

request_fields! {
    /// A well-formed chat request.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct ChatRequest |fields, messages: Vec<Value>, prompt_end: PromptEnd| {
        ChatRequest {
            common: CommonFields => (CommonFields::read(fields)),
            /// Objects with a role.
            messages: Vec<Value> => (messages) {
                /// The conversation.
                messages: Option<Vec<Value>> {"type": "array", "items": {"$ref": "#/components/schemas/ChatMessage"}},
            },
            /// The parts of the body that the messages were made from; empty if the body has the messages themselves.
            places: Vec<Place> => (vec![]),
        }
        Answer {
            /// The field that limits the output and its value.
            limit: (&'static str, Option<i64>) => (("max_completion_tokens", None)) {
                /// Most tokens of the answer; absent: what the context holds. More than the context is refused.
                max_completion_tokens: Option<i64> {"minimum": 1},
                /// The older name of `max_completion_tokens`.
                max_tokens: Option<i64> {"minimum": 1, "deprecated": true},
            },
            /// Number of alternatives, if log-probabilities are requested.
            logprobs: Option<i64> => (logprobs(fields)) {
                /// Report the log-probability of each token.
                logprobs: bool = false,
                /// With this many alternatives, up to `--max-logprobs`; needs `logprobs`.
                top_logprobs: Option<i64> {"minimum": -1, "default": 0},
            },
        }
        ChatRequest {
            /// A variable of the template.
            documents: Option<Vec<Value>> {"items": {"type": "object"}},
        }
        Template {
            add_generation_prompt: bool => (prompt_end.add_generation_prompt) {
                /// End the prompt with the start of an answer.
                add_generation_prompt: bool = true,
            },
            continue_final_message: bool => (prompt_end.continue_final_message) {
                /// Go on with the last message instead; only with `add_generation_prompt` set to false.
                continue_final_message: bool = false,
            },
            /// Special tokens that the template did not write.
            add_special_tokens: bool = false,
            /// A template in place of the model's; needs `--trust-request-chat-template`.
            chat_template: Option<String>,
            /// Additional variables of the template.
            template_kwargs: Map<String, Value> => (template_kwargs(fields)) {
                /// Further variables of the template.
                chat_template_kwargs: Option<Map<String, Value>>,
                /// A variable of the template; `none` also turns reasoning off.
                reasoning_effort: Option<String> {"enum": words(EFFORTS)},
            },
        }
        Tools {
            tools: Tools => (Tools::read(fields, &TOOLS)) {
                /// Functions that the model may call.
                tools: Option<Vec<Value>> {"minItems": 1, "items": {"$ref": "#/components/schemas/Tool"}},
                tool_choice: Option<Value> {"$ref": "#/components/schemas/ToolChoice"},
                /// False: keep only the first call.
                parallel_tool_calls: bool = true,
            },
        }
        ChatRequest {
            /// Begin with the last message if it is the assistant's.
            echo: bool = false,
        }
        Answer {
            /// Report the reasoning.
            include_reasoning: bool = true,
            /// Most tokens of reasoning; −1: no limit. Needs a model that reasons.
            thinking_token_budget: Option<u32> => thinking_token_budget {"minimum": -1},
        }
        ChatRequest {
            /// Return the rendered prompt.
            return_prompt_text: bool = false,
        }
    }
}

/// How the prompt of a conversation ends.
pub(crate) struct PromptEnd {
    /// With the start of a new message.
    add_generation_prompt: bool,
    /// Inside the last message.
    continue_final_message: bool,
}

impl PromptEnd {
    /// Reads the fields. By default, the prompt ends with the start of a new message if `starts_answer`.
    fn read(fields: &mut JsonFields<'_>, starts_answer: bool) -> Self {
        let continue_final_message = fields.get("continue_final_message").unwrap_or(false);
        let add_generation_prompt = fields.get("add_generation_prompt").unwrap_or(starts_answer);
        if continue_final_message && add_generation_prompt {
            let message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True.";
            fields.value_error("continue_final_message", message);
        }
        Self { add_generation_prompt, continue_final_message }
    }
}

impl ChatRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        Self::parse_with(body, true)
    }

    /// Reads a body whose prompt ends with the start of an answer if it says so, or else if `starts_answer`.
    pub(crate) fn parse_with(body: &[u8], starts_answer: bool) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        let messages = messages(&mut fields);
        Self::checked(fields, messages, starts_answer)
    }

    /// Reads a body whose messages are those of several conversations, and returns the request without messages, and the
    /// messages of each conversation.
    pub(crate) fn parse_batch(body: &[u8]) -> Result<(Self, Vec<Vec<Value>>), ApiError> {
        let mut fields = JsonFields::parse(body)?;
        let conversations = conversations(&mut fields);
        if fields.get("stream").unwrap_or(false) {
            fields.value_error(
                "stream",
                "Batch chat completions do not support streaming. Please set `stream` to False.",
            );
        }
        if fields.raw("tools").is_some() {
            fields.value_error("tools", "Batch chat completions do not support tool use. Please omit `tools`.");
        }
        if fields.get("n").is_some_and(|n: i64| n != 1) {
            fields.value_error("n", "Batch chat completions do not support `n > 1`. Please set `n` to 1.");
        }
        Ok((Self::checked(fields, vec![], true)?, conversations))
    }

    fn checked(mut fields: JsonFields<'_>, messages: Vec<Value>, starts_answer: bool) -> Result<Self, ApiError> {
        unserved::refuse(&mut fields, Route::Chat);
        let prompt_end = PromptEnd::read(&mut fields, starts_answer);
        let request = Self::read(&mut fields, messages, prompt_end);
        check_combinations(&request, &mut fields);
        let limit = match (fields.get("max_completion_tokens"), request.common.max_tokens) {
            (None, Some(tokens)) => ("max_tokens", Some(tokens)),
            (tokens, _) => ("max_completion_tokens", tokens),
        };
        fields.finish()?;
        Ok(Self { limit, ..request })
    }

    /// A conversation from another route of the API, with defaults for all other fields.
    pub(crate) fn new(
        common: CommonFields,
        PlacedMessages { messages, places }: PlacedMessages,
        limit: (&'static str, Option<i64>),
    ) -> Self {
        let fields = &mut JsonFields::default();
        let prompt_end = PromptEnd::read(fields, true);
        Self { common, places, limit, ..Self::read(fields, messages, prompt_end) }
    }

    /// The error of a message, which names the part of the body that the message was made from.
    pub(crate) fn refused(&self, error: &TemplateError) -> ApiError {
        if let TemplateError::Message { index, field, reason } = error
            && let Some(place) = self.places.get(*index)
        {
            return ApiError::invalid_part(place.location(field), reason);
        }
        ApiError::from_template(error)
    }
}

/// The form of tools, which other APIs are converted to.
const TOOLS: ToolForm = ToolForm {
    definition: |fields, index, tool| {
        if let Err(error) = check_tool(&tool, index) {
            fields.absorb(error);
        }
        Some(tool)
    },
    choice: tool_choice,
    parallel: |fields| fields.get("parallel_tool_calls").unwrap_or(true),
    needs_tools: true,
    unknown_choice: "`tool_choice` must either be a named tool, \"auto\", \"none\" or \"required\".",
    unknown_function: "The tool specified in `tool_choice` does not match any of the specified `tools`",
};

/// Checks a tool, which has the form already.
fn check_tool(tool: &Value, index: usize) -> Result<(), FieldError> {
    let error = |kind, message: &str, path: &[&str]| {
        let mut location = vec!["tools".to_owned(), index.to_string()];
        location.extend(path.iter().map(|part| (*part).to_owned()));
        FieldError::new(kind, location, message, &tool.to_string())
    };
    if tool.get("type").is_some_and(|kind| kind != "function") {
        return Err(error("literal_error", "Input should be 'function'", &["type"]));
    }
    let Some(function) = tool.get("function").and_then(Value::as_object) else {
        return Err(error("missing", "Field required", &["function"]));
    };
    if function.get("name").and_then(Value::as_str).is_none_or(str::is_empty) {
        return Err(error("string_type", "Input should be a valid, not empty string", &["function", "name"]));
    }
    match function.get("parameters") {
        None | Some(Value::Null | Value::Object(_)) => Ok(()),
        Some(_) => Err(error("dict_type", "Input should be a valid dictionary", &["function", "parameters"])),
    }
}

fn tool_choice(fields: &mut JsonFields<'_>) -> WantedTool {
    if fields.raw("tool_choice").is_none() {
        return WantedTool::Unset;
    }
    let value: Option<Value> = fields.get("tool_choice");
    let choice = match &value {
        Some(Value::String(word)) => ToolChoice::from_word(word),
        Some(value) => value.pointer("/function/name").and_then(Value::as_str).map(|n| ToolChoice::Named(n.to_owned())),
        None => None,
    };
    choice.map_or(WantedTool::Unknown, WantedTool::Choice)
}

fn check_combinations(request: &ChatRequest, fields: &mut JsonFields<'_>) {
    if request.logprobs.is_none() && !request.common.logprob_token_ids.is_empty() {
        fields.value_error("logprob_token_ids", "when using `logprob_token_ids`, `logprobs` must be set to true.");
    }
    if request.common.grammar.is_some() && matches!(request.tools.choice, ToolChoice::Required | ToolChoice::Named(_)) {
        let message = "a `tool_choice` that forces a call cannot be combined with another restriction of the output.";
        fields.value_error("tool_choice", message);
    }
}

fn thinking_token_budget(fields: &mut JsonFields<'_>) -> Option<u32> {
    let budget: i64 = fields.get("thinking_token_budget")?;
    if budget < -1 {
        fields.value_error("thinking_token_budget", "thinking_token_budget must be -1 or at least 0.");
    }
    u32::try_from(budget).ok()
}

fn logprobs(fields: &mut JsonFields<'_>) -> Option<i64> {
    let wanted = fields.get("logprobs").unwrap_or(false);
    let top: Option<i64> = fields.get("top_logprobs");
    if let Some(top) = top {
        if top < -1 {
            fields.value_error("top_logprobs", "`top_logprobs` must be a positive value or -1.");
        } else if top != 0 && !wanted {
            fields.value_error("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.");
        }
    }
    wanted.then(|| top.unwrap_or(0))
}

fn template_kwargs(fields: &mut JsonFields<'_>) -> Map<String, Value> {
    let mut kwargs: Map<String, Value> = fields.get("chat_template_kwargs").unwrap_or_default();
    if let Some(effort) = fields.get::<String>("reasoning_effort") {
        if !EFFORTS.contains(&effort.as_str()) {
            let message = format!("Input should be one of '{}'", EFFORTS.join("', '"));
            fields.error("reasoning_effort", "literal_error", message);
        }
        set_effort(&mut kwargs, effort);
    }
    kwargs
}

/// Sets the template's variable for the reasoning effort, unless the client sets it.
pub(crate) fn set_effort(kwargs: &mut Map<String, Value>, effort: String) {
    kwargs.entry("enable_thinking").or_insert(Value::Bool(effort != "none"));
    kwargs.entry("reasoning_effort").or_insert(Value::String(effort));
}

/// The content of a message with another role than a user's: parts that are all texts become one string. Many templates
/// take parts of users alone.
pub(crate) fn joined(role: &str, content: Value) -> Value {
    let text = |part: &Value| {
        let is_text = matches!(part.get("type")?.as_str()?, "text" | "input_text" | "output_text");
        part.get("text")?.as_str().filter(|_| is_text).map(str::to_owned)
    };
    let parts = content.as_array().filter(|parts| role != "user" && !parts.is_empty());
    let texts: Option<Vec<String>> = parts.and_then(|parts| parts.iter().map(text).collect());
    texts.map_or(content, |texts| texts.join("\n").into())
}

fn messages(fields: &mut JsonFields<'_>) -> Vec<Value> {
    if fields.raw("messages").is_none() {
        fields.missing("messages");
        return vec![];
    }
    let messages: Vec<Value> = fields.get("messages").unwrap_or_default();
    let errors = messages.iter().enumerate().filter_map(|(index, message)| check(message, &[index]).err());
    fields.absorb(errors.collect::<FieldErrors>());
    messages
}

/// The messages of each conversation of a batch. There are at least one conversation and one message in each.
fn conversations(fields: &mut JsonFields<'_>) -> Vec<Vec<Value>> {
    const EMPTY: &str = "List should have at least 1 item after validation, not 0";
    if fields.raw("messages").is_none() {
        fields.missing("messages");
        return vec![];
    }
    let listed: Vec<Value> = fields.get("messages").unwrap_or_default();
    if listed.is_empty() {
        fields.error("messages", "too_short", EMPTY);
    }
    let mut conversations = Vec::with_capacity(listed.len());
    for (index, conversation) in listed.into_iter().enumerate() {
        let location = vec!["messages".into(), index.to_string()];
        match conversation {
            Value::Array(messages) if messages.is_empty() => {
                fields.absorb(FieldError::new("too_short", location, EMPTY, "[]"));
            }
            Value::Array(messages) => {
                let errors = messages.iter().enumerate().filter_map(|(at, message)| check(message, &[index, at]).err());
                fields.absorb(errors.take(1).collect::<FieldErrors>());
                conversations.push(messages);
            }
            other => {
                let message = "Input should be a valid list";
                fields.absorb(FieldError::new("list_type", location, message, &other.to_string()));
            }
        }
        if conversations.len() <= index {
            // The first error is enough.
            break;
        }
    }
    conversations
}

/// Checks that a message is an object with a role. The template checks everything else. `place` is its index, after that of
/// its conversation if there are several.
fn check(message: &Value, place: &[usize]) -> Result<(), FieldError> {
    let mut location = vec!["messages".to_owned()];
    location.extend(place.iter().map(usize::to_string));
    let (kind, text) = match (message, message.get("role")) {
        (Value::Object(_), Some(Value::String(_))) => return Ok(()),
        (Value::Object(_), role) => {
            location.push("role".into());
            if role.is_some() {
                ("string_type", "Input should be a valid string")
            } else {
                ("missing", "Field required")
            }
        }
        _ => ("dict_type", "Input should be a valid dictionary"),
    };
    Err(FieldError::new(kind, location, text, &message.to_string()))
}
