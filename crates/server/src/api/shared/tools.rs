//! `tools` and `tool_choice`: the functions that the model may call.

use serde_json::{Map, Value, json};

use crate::api::shared::fields::JsonFields;

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

impl ToolChoice {
    /// The choice that a word of OpenAI's APIs stands for.
    pub(crate) fn from_word(word: &str) -> Option<Self> {
        match word {
            "none" => Some(Self::None),
            "auto" => Some(Self::Auto),
            "required" => Some(Self::Required),
            _ => None,
        }
    }
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

/// How an API spells tools and the choice among them.
pub(crate) struct ToolForm {
    /// Converts a tool to the form of the chat route; `None` if it is no function, which adds an error.
    pub(crate) definition: fn(&mut JsonFields<'_>, usize, Value) -> Option<Value>,
    /// Reads the choice.
    pub(crate) choice: fn(&mut JsonFields<'_>) -> WantedTool,
    /// Reads whether a message may have several calls.
    pub(crate) parallel: fn(&mut JsonFields<'_>) -> bool,
    /// Whether an empty list, and a choice without a list, are errors.
    pub(crate) needs_tools: bool,
    /// The error of a choice that is none.
    pub(crate) unknown_choice: &'static str,
    /// The error of a choice of a function that is not listed.
    pub(crate) unknown_function: &'static str,
}

/// The choice that a body has.
pub(crate) enum WantedTool {
    Unset,
    Choice(ToolChoice),
    /// A value that is no choice.
    Unknown,
}

impl Tools {
    /// Reads the fields of a request.
    pub(crate) fn read(fields: &mut JsonFields<'_>, form: &ToolForm) -> Self {
        let definitions = definitions(fields, form);
        let wanted = (form.choice)(fields);
        let choice = choice(fields, form, wanted, definitions.as_deref());
        Self { definitions, choice, parallel: (form.parallel)(fields) }
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
fn definitions(fields: &mut JsonFields<'_>, form: &ToolForm) -> Option<Vec<Value>> {
    let listed: Vec<Value> = fields.get("tools")?;
    if listed.len() > MAX_TOOLS {
        let message = format!("tools has at most {MAX_TOOLS} tools, got {}.", listed.len());
        fields.value_error("tools", message);
        return None;
    }
    if listed.is_empty() && form.needs_tools {
        fields.value_error("tools", format_args!("tools must be a list of 1 to {MAX_TOOLS} tools, or absent."));
    }
    let defined = listed.into_iter().enumerate();
    let definitions: Vec<Value> = defined.filter_map(|(index, tool)| (form.definition)(fields, index, tool)).collect();
    (!definitions.is_empty()).then_some(definitions)
}

/// The choice among the tools, by default the model's.
fn choice(
    fields: &mut JsonFields<'_>,
    form: &ToolForm,
    wanted: WantedTool,
    definitions: Option<&[Value]>,
) -> ToolChoice {
    if definitions.is_none() && !form.needs_tools {
        return ToolChoice::None;
    }
    let choice = match wanted {
        WantedTool::Unset if definitions.is_some() => ToolChoice::Auto,
        WantedTool::Unset | WantedTool::Choice(ToolChoice::None) => return ToolChoice::None,
        WantedTool::Choice(choice) => choice,
        WantedTool::Unknown => {
            fields.value_error("tool_choice", form.unknown_choice);
            return ToolChoice::None;
        }
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
        fields.value_error("tool_choice", form.unknown_function);
    }
    choice
}

/// The schema of a function's arguments; any object by default.
fn parameters(function: &Map<String, Value>) -> Value {
    function.get("parameters").filter(|value| !value.is_null()).cloned().unwrap_or_else(|| json!({"type": "object"}))
}
