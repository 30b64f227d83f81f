//! The body of POST /v1/chat/completions.

use octavo_text::TemplateError;
use serde_json::{Map, Value};

use crate::api::shared::common::CommonFields;
use crate::api::shared::fields::JsonFields;
use crate::api::shared::places::{Place, PlacedMessages};
use crate::api::shared::tools::{ToolChoice, ToolForm, Tools, WantedTool};
use crate::api::shared::unserved;
use crate::api::shared::unserved::Route;
use crate::error::{ApiError, FieldError, FieldErrors};

/// Values of `reasoning_effort`.
pub(crate) const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// A well-formed chat request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ChatRequest {
    pub(crate) common: CommonFields,
    /// Objects with a role.
    pub(crate) messages: Vec<Value>,
    /// The parts of the body that the messages were made from; empty if the body has the messages themselves.
    pub(crate) places: Vec<Place>,
    /// The field that limits the output and its value.
    pub(crate) limit: (&'static str, Option<i64>),
    /// Number of alternatives, if log-probabilities are requested.
    pub(crate) logprobs: Option<i64>,
    pub(crate) documents: Option<Vec<Value>>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) continue_final_message: bool,
    pub(crate) add_special_tokens: bool,
    /// The template in the request.
    pub(crate) chat_template: Option<String>,
    /// Additional variables of the template.
    pub(crate) template_kwargs: Map<String, Value>,
    pub(crate) tools: Tools,
    /// Whether the last message is echoed before the answer, if it has the answer's role.
    pub(crate) echo: bool,
    pub(crate) include_reasoning: bool,
    /// Maximum number of reasoning tokens.
    pub(crate) thinking_token_budget: Option<u32>,
    pub(crate) return_prompt_text: bool,
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
        Self::read(fields, messages, starts_answer)
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
        Ok((Self::read(fields, vec![], true)?, conversations))
    }

    fn read(mut fields: JsonFields<'_>, messages: Vec<Value>, starts_answer: bool) -> Result<Self, ApiError> {
        unserved::refuse(&mut fields, Route::Chat);
        let (add_generation_prompt, continue_final_message) = prompt_end(&mut fields, starts_answer);
        let request = Self {
            common: CommonFields::read(&mut fields),
            messages,
            places: vec![],
            limit: ("max_completion_tokens", None),
            logprobs: logprobs(&mut fields),
            documents: fields.get("documents"),
            add_generation_prompt,
            continue_final_message,
            add_special_tokens: fields.get("add_special_tokens").unwrap_or(false),
            chat_template: fields.get("chat_template"),
            template_kwargs: template_kwargs(&mut fields),
            tools: Tools::read(&mut fields, &TOOLS),
            echo: fields.get("echo").unwrap_or(false),
            include_reasoning: fields.get("include_reasoning").unwrap_or(true),
            thinking_token_budget: thinking_token_budget(&mut fields),
            return_prompt_text: fields.get("return_prompt_text").unwrap_or(false),
        };
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
        Self {
            common,
            messages,
            places,
            limit,
            logprobs: None,
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            add_special_tokens: false,
            chat_template: None,
            template_kwargs: Map::new(),
            tools: Tools::default(),
            echo: false,
            include_reasoning: true,
            thinking_token_budget: None,
            return_prompt_text: false,
        }
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

/// Whether the prompt ends with the start of a new message, by default if `starts_answer`, and whether it ends inside the
/// last message.
fn prompt_end(fields: &mut JsonFields<'_>, starts_answer: bool) -> (bool, bool) {
    let continue_final = fields.get("continue_final_message").unwrap_or(false);
    let add_generation = fields.get("add_generation_prompt").unwrap_or(starts_answer);
    if continue_final && add_generation {
        let message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True.";
        fields.value_error("continue_final_message", message);
    }
    (add_generation, continue_final)
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
