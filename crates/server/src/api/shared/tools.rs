//! `tools` and `tool_choice`: the functions that the model may call.

use serde_json::{Map, Value, json};

use crate::api::shared::fields::Fields;
use crate::api::shared::structured::parameters;
use crate::error::{FieldError, FieldErrors};

/// Maximum number of functions in a request.
const MAX_TOOLS: usize = 1024;

/// The tool choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// None.
    #[default]
    None,
    /// The model chooses.
    Auto,
    /// The model calls at least one function.
    Required,
    /// The model calls this function.
    Named(String),
}

/// The tool settings of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tools {
    /// Definitions, `{"type": "function", "function": {"name", ...}}`; at least one.
    pub(crate) definitions: Option<Vec<Value>>,
    pub(crate) choice: ToolChoice,
    /// Whether a message may have several calls.
    pub(crate) parallel: bool,
}

impl Default for Tools {
    /// No tools.
    fn default() -> Self {
        Self { definitions: None, choice: ToolChoice::None, parallel: true }
    }
}

impl Tools {
    /// Reads the fields of a chat request.
    pub(crate) fn read(fields: &mut Fields<'_>) -> Self {
        let definitions = definitions(fields);
        let choice = choice(fields, definitions.as_deref());
        Self { definitions, choice, parallel: fields.get("parallel_tool_calls").unwrap_or(true) }
    }

    /// Names and schemas of the arguments.
    pub(crate) fn signatures(&self) -> Vec<(String, Value)> {
        functions(self.definitions.as_deref().unwrap_or_default())
            .map(|function| (name_of(function).unwrap_or_default().to_owned(), parameters(function)))
            .collect()
    }

    /// The schema of a function's arguments.
    pub(crate) fn parameters(&self, name: &str) -> Option<Value> {
        functions(self.definitions.as_deref()?).find(|function| name_of(function) == Some(name)).map(parameters)
    }
}

/// A definition in the form of the chat route.
pub(crate) fn definition(name: &str, description: Option<&Value>, parameters: Option<&Value>) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), name.into());
    for (key, value) in [("description", description), ("parameters", parameters)] {
        if let Some(value) = value.filter(|value| !value.is_null()) {
            function.insert(key.into(), value.clone());
        }
    }
    json!({"type": "function", "function": function})
}

fn functions(definitions: &[Value]) -> impl Iterator<Item = &Map<String, Value>> {
    definitions.iter().filter_map(|definition| definition.get("function")?.as_object())
}

fn name_of(function: &Map<String, Value>) -> Option<&str> {
    function.get("name")?.as_str()
}

/// Reads the list of tools, which has a maximum length.
pub(crate) fn listed(fields: &mut Fields<'_>) -> Option<Vec<Value>> {
    let listed: Vec<Value> = fields.get("tools")?;
    if listed.len() > MAX_TOOLS {
        let message = format!("tools has at most {MAX_TOOLS} tools, got {}.", listed.len());
        fields.value_error("tools", message);
        return None;
    }
    Some(listed)
}

fn definitions(fields: &mut Fields<'_>) -> Option<Vec<Value>> {
    let definitions = listed(fields)?;
    if definitions.is_empty() {
        fields.value_error("tools", format_args!("tools must be a list of 1 to {MAX_TOOLS} tools, or absent."));
        return None;
    }
    let errors = definitions.iter().enumerate().filter_map(|(index, tool)| check(tool, index).err());
    fields.absorb(errors.collect::<FieldErrors>());
    Some(definitions)
}

fn check(tool: &Value, index: usize) -> Result<(), FieldError> {
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
    if name_of(function).is_none_or(str::is_empty) {
        return Err(error("string_type", "Input should be a valid, not empty string", &["function", "name"]));
    }
    match function.get("parameters") {
        None | Some(Value::Null | Value::Object(_)) => Ok(()),
        Some(_) => Err(error("dict_type", "Input should be a valid dictionary", &["function", "parameters"])),
    }
}

fn choice(fields: &mut Fields<'_>, definitions: Option<&[Value]>) -> ToolChoice {
    if fields.raw("tool_choice").is_none() {
        return if definitions.is_some() { ToolChoice::Auto } else { ToolChoice::None };
    }
    let choice = match fields.get::<Value>("tool_choice") {
        Some(Value::String(word)) => match word.as_str() {
            "none" => return ToolChoice::None,
            "auto" => Some(ToolChoice::Auto),
            "required" => Some(ToolChoice::Required),
            _ => None,
        },
        Some(value) => value.pointer("/function/name").and_then(Value::as_str).map(|n| ToolChoice::Named(n.to_owned())),
        None => None,
    };
    let Some(choice) = choice else {
        let message = "`tool_choice` must either be a named tool, \"auto\", \"none\" or \"required\".";
        fields.value_error("tool_choice", message);
        return ToolChoice::None;
    };
    let Some(definitions) = definitions else {
        if fields.raw("tools").is_none() {
            fields.value_error("tool_choice", "When using `tool_choice`, `tools` must be set.");
        }
        return ToolChoice::None;
    };
    if let ToolChoice::Named(name) = &choice
        && !functions(definitions).any(|function| name_of(function) == Some(name))
    {
        let message = "The tool specified in `tool_choice` does not match any of the specified `tools`";
        fields.value_error("tool_choice", message);
    }
    choice
}
